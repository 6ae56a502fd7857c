"""Docstrings of installed libraries: real text that needs no download.

The libraries are those that fedcb2o itself needs. Their source is read and not executed.
"""

import ast
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.sets._text import Passage, tokenise
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.rng import stream

LIBRARIES = ("matplotlib", "networkx", "numpy", "pandas", "scipy", "sklearn", "torch")
_WORDS = (4, 24)  # in a sentence
_IS_TEST = re.compile(r"/(_*tests?|_*testing)/|/(conftest|test_)")


class _Docstring(NamedTuple):
    """First sentence of a function's or class's docstring."""

    name: str
    sentence: str


def docstrings(
    *,
    task: Literal["summary", "library"] = "summary",
    libraries: Sequence[str] = LIBRARIES,
    samples: int = 300,
    base: str = "smollm2",
    prompt: int = 24,
    answer: int = 12,
    vocabulary: int | None = None,
    test_share: float = 0.25,
) -> Dataset:
    """Read the first sentences of docstrings, with libraries as groups.

    Samples depend on the installed versions of the libraries.

    Args:
        task: "summary": a function's name is the prompt, and its sentence the answer. "library": a
            sentence is the prompt, and the name of its library the answer.
        libraries: Packages whose docstrings are read, at least two.
        samples: Largest number of samples of a library.
    """
    if task not in ("summary", "library"):
        raise ConfigError(f"`task` must be summary or library, got {task!r}")
    passages = []
    for library in libraries:
        for name, sentence in _docstrings(library, samples):
            if task == "summary":
                passages.append(Passage(f" {sentence}", f"{library}, {name}:", library))
            else:
                passages.append(Passage(f" {library}", f"{sentence}\nLibrary:", library))
    with warnings.catch_warnings():
        # Sentences are cut on purpose, and short parts of them may be equal.
        warnings.simplefilter("ignore", UserWarning)
        return tokenise(
            passages,
            base=base,
            prompt=prompt,
            answer=answer,
            vocabulary=vocabulary,
            test_share=test_share,
        )


def _docstrings(library: str, count: int) -> list[_Docstring]:
    """Return docstrings of a library's public functions and classes, each sentence once."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        raise DataError(f"the library {library!r} is not installed (`data.libraries`)")
    root = Path(spec.origin).parent
    files = [file for file in sorted(root.rglob("*.py")) if not _IS_TEST.search(file.as_posix())]
    found: dict[str, _Docstring] = {}
    # Files are read in a random order, until they have enough.
    for index in stream(0, "docstrings", library).permutation(len(files)).tolist():
        for name, sentence in _sentences(files[index]):
            found.setdefault(sentence, _Docstring(name, sentence))
        if len(found) >= count:
            break
    return list(found.values())[:count]


def _sentences(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name and first sentence of each documented function and class of a file."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
        sentence = re.split(r"(?<=\.)\s", " ".join(paragraph.split()))[0]
        if sentence.isascii() and _WORDS[0] <= len(sentence.split()) <= _WORDS[1]:
            yield node.name.replace("_", " "), sentence
