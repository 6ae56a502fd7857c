"""Text as tokens: prompts with answers, or next tokens.

A sample is a row of tokens, see `fedcb2o.pretrained.encode`. Its label is its group: a topic, a
language, or a band of frequency.
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from fedcb2o import pretrained
from fedcb2o.data import input_validation
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.input_arrays import as_table
from fedcb2o.data.inputs import build_dataset, check_parts
from fedcb2o.data.sources import Part
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
        bands: Number of groups by the frequency of a sample's tokens, in place of "group".
        data_dir: A folder; None for the working directory.

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
        DataError: A column or a value is missing, or there are no samples or no two groups.

    Example:
        >>> rows = [{"prompt": f"{n}", "answer": "a", "group": "xy"[n % 2]} for n in range(8)]
        >>> tokenise(rows, base="tiny", prompt=2, answer=2).pool
        Shard(6 samples of shape (4,))
    """
    for name, value, least in (("prompt", prompt, 1), ("answer", answer, 1), ("bands", bands, 2)):
        if value is not None and value < least:
            raise ConfigError(f"`data.{name}` must be at least {least}, got {value}")
    tokens = pretrained.tokenizer(base, vocabulary)
    table = pd.DataFrame(passages) if isinstance(passages, Mapping) else as_table(passages)
    entries: Iterable[Any] = passages if table is None else table.to_dict("records")
    read = [
        entry if isinstance(entry, Passage) else _passage(entry, f"row {number}")
        for number, entry in enumerate(entries)
    ]
    rows: list[list[int]] = []
    groups: list[str] = []
    owners: list[str] = []
    num_cut = 0
    num_begun = 0
    num_short = 0
    for passage in read:
        written = tokens.encode(passage.answer)
        if passage.prompt is None:
            encoded = list(_consecutive_rows(written, tokens, (prompt, answer)))
        else:
            prompted = tokens.encode_prompt(passage.prompt)
            encoded = [_row(prompted, pretrained.pad_answer(tokens, written, answer), prompt)]
            num_cut += len(written) > answer
            num_begun += len(prompted) > prompt
        num_short += not encoded
        rows += encoded
        groups += [passage.group] * len(encoded)
        owners += [passage.owner] * len(encoded)
    if not rows:
        raise DataError("the text has no samples")
    if any(owners) and not all(owners):
        raise DataError(
            f"{sum(not owner for owner in owners)} of {len(owners)} samples have no owner, and the"
            " others have: name the owner of each (`owner`)"
        )
    for count, fault in (
        (num_cut, f"answers are longer than `answer` = {answer} tokens: their ends are cut"),
        (num_begun, f"prompts are longer than `prompt` = {prompt} tokens: their starts are cut"),
        (num_short, f"texts are shorter than `answer` = {answer} tokens: they give no sample"),
    ):
        if count:
            warnings.warn(f"{count} of {len(read)} {fault}; set another number", stacklevel=2)

    x = torch.tensor(rows, dtype=torch.int32)
    labels: Any = groups
    class_names = None
    if bands is not None:
        labels = _frequency_bands(x[:, -answer:].numpy(), bands)
        class_names = [f"band {band}" for band in range(bands)]
    elif len(set(groups)) < 2:
        raise DataError(
            f"the text has the only group {groups[0]!r}: name two groups or more, or set "
            "`bands` for groups by frequency"
        )
    part = Part("the text", "x", "group", x, labels, owners if any(owners) else None)
    checked = check_parts([part], class_names, numbers=False, tokens=True)
    found = None if part.owner is None else input_validation.check_owners([part], [len(x)])
    # Owners may have topics and languages of their own.
    shard, classes = checked.shards[0], checked.classes
    return build_dataset(shard, None, classes, found, test_share, compare_owners=False)


def _row(read: Sequence[int], written: Sequence[int], width: int) -> list[int]:
    """Return a sample: the last tokens that are read, padded on the left, and those to learn."""
    return [*[pretrained.PAD] * (width - len(read)), *read[-width:], *written]


def _consecutive_rows(
    ids: Sequence[int], tokens: pretrained.Tokenizer, places: tuple[int, int]
) -> Iterator[list[int]]:
    """Yield the samples of a text without a prompt: each part follows the part before it."""
    width, length = places
    ids = [tokens.end, *ids]
    for start in range(1, len(ids) - length + 1, length):
        yield _row(ids[max(0, start - width) : start], ids[start : start + length], width)


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
    try:
        # Not `splitlines`, which also ends lines at characters that JSON has inside of texts.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not in UTF-8 ({error.reason}): convert it") from error
    for number, line in enumerate(lines, 1):
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
        got = sorted(map(str, keys)) if keys else f"a {type(entry).__name__}"
        raise DataError(
            f"{where}: it needs `prompt` and `answer`, or `text`, and may have `owner` and "
            f"`group`, got {got}"
        )
    for key, value in entry.items():
        fault = ""
        if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
            fault = "missing"
        elif not isinstance(value, str | Real):
            fault = f"a {type(value).__name__}"
        elif key != "prompt" and not str(value).strip():
            fault = "empty"
        if fault:
            raise DataError(f"{where}: `{key}` is {fault}: fill it in, or leave the row out")
    values = {key: str(value) for key, value in entry.items()}
    return Passage(
        answer=values.get("answer", values.get("text", "")),
        prompt=values.get("prompt"),
        group=values.get("group", ""),
        owner=values.get("owner", ""),
    )


def _read_folder(folder: Path) -> list[Passage]:
    files = sorted(filter(Path.is_file, folder.rglob("*.txt")))
    if not files:
        raise DataError(f"the folder {folder} has no .txt files")
    passages = []
    for file in files:
        try:
            content = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not in UTF-8 ({error.reason}): convert it") from error
        owner = str(file.relative_to(folder).with_suffix(""))
        passages.append(Passage(content, group=file.parent.name, owner=owner))
    return passages
