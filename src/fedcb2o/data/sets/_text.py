"""Text as tokens: prompts with answers, or next tokens.

A sample is a row of tokens, see `fedcb2o.pretrained.encode`. Its label is its group: a topic, a
language, or a band of frequency.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedcb2o import pretrained
from fedcb2o.data._dataset import Dataset, Owners, Shard
from fedcb2o.data.array_dataset import build_dataset
from fedcb2o.errors import ConfigError, DataError

_COLUMNS = ("prompt", "answer", "text", "owner", "group")


class Passage(NamedTuple):
    """A text of an owner.

    `answer` is the text to learn, and `prompt` that before it; None where each part of the text
    follows the part before it. `group` is a topic or language. `owner` is empty where agents share
    out the samples.
    """

    answer: str
    prompt: str | None = None
    group: str = ""
    owner: str = ""


def text(
    *,
    path: str,
    base: str = "smollm2",
    prompt: int = 24,
    answer: int = 8,
    vocabulary: int | None = None,
    bands: int | None = None,
    test_share: float = 0.25,
    data_dir: Path | None = None,
) -> Dataset:
    """Read text from a file of JSON lines, or from a folder of text files.

    A line has the columns "prompt" and "answer", or "text", and optionally "owner" and "group". In
    a folder every `.txt` file is one owner's, and its folder names its group.

    Args:
        path: The file or folder; a relative path starts in `data_dir`.
        base: Pretrained model whose tokens are used, see `fedcb2o.pretrained`.
        prompt: Number of tokens that the model reads.
        answer: Number of tokens that it learns.
        vocabulary: Number of tokens of answers, the most frequent ones; None for all.
        bands: Number of groups by the frequency of a sample's tokens, in place of "group".
        test_share: Share of each owner's, or of each group's samples that tests.
        data_dir: A folder; None for the working directory.

    Returns:
        The data set.

    Raises:
        DataError: The file is missing or damaged, or has no two groups.
        ConfigError: A parameter is out of range, or the extra is missing.
    """
    place = Path(data_dir or ".").expanduser() / Path(path).expanduser()
    if place.is_dir():
        passages = _read_folder(place)
    elif place.is_file():
        passages = _read_lines(place)
    else:
        raise DataError(f"there is no file or folder {place} (`data.path`)")
    return tokenise(
        passages,
        base=base,
        prompt=prompt,
        answer=answer,
        vocabulary=vocabulary,
        bands=bands,
        test_share=test_share,
    )


def tokenise(
    passages: Iterable[Passage | Mapping[str, Any]],
    *,
    base: str = "smollm2",
    prompt: int = 24,
    answer: int = 8,
    vocabulary: int | None = None,
    bands: int | None = None,
    test_share: float = 0.25,
) -> Dataset:
    """Make a data set of texts, such as the rows of a data set of Hugging Face.

    Args:
        passages: Passages, or mappings with the columns of `text`.
        base: Pretrained model whose tokens are used.
        prompt: Number of tokens that the model reads.
        answer: Number of tokens that it learns.
        vocabulary: Number of tokens of answers; None for all.
        bands: Number of groups by frequency; None for the groups of the passages.
        test_share: Share of samples that tests.

    Returns:
        The data set.

    Raises:
        ConfigError: A number is out of range.
        DataError: A column is missing, or there are no samples or no two groups.

    Example:
        >>> rows = [{"prompt": f"{n}", "answer": "a", "group": "xy"[n % 2]} for n in range(8)]
        >>> tokenise(rows, base="tiny", prompt=2, answer=2).pool
        Shard(6 samples of shape (4,))
    """
    for name, value, least in (("prompt", prompt, 1), ("answer", answer, 1), ("bands", bands, 2)):
        if value is not None and value < least:
            raise ConfigError(f"`data.{name}` must be at least {least}, got {value}")
    tokens = pretrained.tokenizer(base, vocabulary)
    places = (prompt, answer)
    rows = []
    groups = []
    owners = []
    for number, entry in enumerate(passages):
        passage = entry
        if not isinstance(passage, Passage):
            passage = _passage(passage, f"row {number}")
        for row in _rows(passage, tokens, places):
            rows.append(row)
            groups.append(passage.group)
            owners.append(passage.owner)
    if not rows:
        raise DataError("the text has no samples")

    x = torch.tensor(rows, dtype=torch.int32)
    if bands is None:
        names, labels = np.unique(groups, return_inverse=True)
        class_names = tuple(map(str, names))
    else:
        labels = _frequency_bands(x[:, -answer:].numpy(), bands)
        class_names = tuple(f"band {band}" for band in range(bands))
    if len(class_names) < 2:
        raise DataError(
            f"the text has the only group {class_names[0]!r}: name two groups or more, or set "
            "`bands` for groups by frequency"
        )
    found = None
    if any(owners):
        owner_names, owner_ids = np.unique(owners, return_inverse=True)
        found = Owners(
            tuple(map(str, owner_names)),
            torch.from_numpy(owner_ids),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(len(x), dtype=torch.bool),
        )
    pool = Shard(x, torch.from_numpy(labels.astype(np.int64)))
    return build_dataset(pool, None, class_names, found, test_share, False)


def _rows(
    passage: Passage, tokens: pretrained.Tokenizer, places: tuple[int, int]
) -> list[list[int]]:
    """Return the samples of a passage."""
    if passage.prompt is not None:
        return [pretrained.encode(tokens, passage.prompt, passage.answer, places)]
    # Each part of a text without a prompt follows the part before it.
    width, length = places
    ids = [tokens.end, *tokens.encode(passage.answer)]
    rows = []
    for start in range(1, len(ids) - length + 1, length):
        read = ids[max(0, start - width) : start]
        padding = [pretrained.PAD] * (width - len(read))
        rows.append([*padding, *read, *ids[start : start + length]])
    return rows


def _frequency_bands(answers: np.ndarray, bands: int) -> np.ndarray:
    """Return the band of each answer by the mean logarithm of its tokens' counts; 0 is rare."""
    counts = np.bincount(answers[answers >= 0])
    logs = np.log(np.maximum(counts, 1))[np.maximum(answers, 0)]
    means = np.ma.masked_array(logs, answers < 0).mean(1).filled(0.0)
    # By rank, so that all bands are about equally large.
    ranks = np.argsort(np.argsort(means, kind="stable"), kind="stable")
    return np.asarray(ranks * bands // len(means))


def _read_lines(file: Path) -> list[Passage]:
    passages = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}, line {number}: it is no JSON ({error})") from error
        passages.append(_passage(entry, f"{file}, line {number}"))
    return passages


def _passage(entry: Mapping[str, Any], where: str) -> Passage:
    """Return the passage of a line or of a row of a data set."""
    keys = set(entry) if isinstance(entry, Mapping) else set()
    has_text = ("text" in keys) != ({"prompt", "answer"} <= keys)
    if not has_text or not keys <= set(_COLUMNS):
        raise DataError(
            f"{where}: it needs `prompt` and `answer`, or `text`, and may have `owner` and "
            f"`group`, got {list(entry)}"
        )
    values = {key: str(value) for key, value in entry.items()}
    return Passage(
        answer=values.get("answer", values.get("text", "")),
        prompt=values.get("prompt"),
        group=values.get("group", ""),
        owner=values.get("owner", ""),
    )


def _read_folder(folder: Path) -> list[Passage]:
    files: Sequence[Path] = sorted(filter(Path.is_file, folder.rglob("*.txt")))
    if not files:
        raise DataError(f"the folder {folder} has no .txt files")
    return [
        Passage(
            file.read_text(encoding="utf-8", errors="replace"),
            group=file.parent.name,
            owner=str(file.relative_to(folder).with_suffix("")),
        )
        for file in files
    ]
