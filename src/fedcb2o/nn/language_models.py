"""Language models with low-rank adapters on a frozen base.

A sample is a row of whole numbers [P + A]: the tokens of a prompt, padded on the left, and of its
answer, padded on the right. theta contains the adapters alone (Hu et al., "LoRA", 2022). They are
in the last blocks, so that the activations of the blocks before are the same for all agents and
rounds: they are computed once per sample, and kept.
"""

import copy
import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedcb2o import pretrained
from fedcb2o.errors import ConfigError
from fedcb2o.pretrained import PAD

MAX_KEPT_BYTES = 2**30
"""Bytes of the activations that a process keeps."""


def language_model(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    base: str = "smollm2",
    answer: int,
    blocks: int = 2,
    rank: int = 8,
    alpha: int = 16,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    reads: Literal["answer", "all"] = "answer",
    vocabulary: int | None = None,
    checksum: str | None = None,
) -> nn.Module:
    """Build a pretrained language model with low-rank adapters.

    Args:
        input_shape: Number P + A of tokens of a sample.
        num_classes: Number of groups of samples, which the model does not predict.
        base: Pretrained model, see `fedcb2o.pretrained`.
        answer: Number A of places of the answer.
        blocks: Number of blocks with adapters, the last ones.
        rank: Rank of the adapters.
        alpha: Scale of the adapters: a weight W becomes W + alpha / rank * B A.
        targets: Names of the layers with adapters.
        reads: Tokens that the adapters act on. "answer" leaves the prompt to the base, whose keys
            and values are kept too (Greenewald et al., "Activated LoRA", 2025); "all" is the usual
            LoRA.
        vocabulary: Number of tokens of the softmax, the first ones; None for all. It is that of the
            data, whose answers consist of these tokens.
        checksum: SHA-256 that the base must have, `pretrained.base_checksum`.

    Returns:
        The network.

    Raises:
        ConfigError: The extra or the base is missing, or a parameter is out of range.
    """
    if len(input_shape) != 1 or not 1 <= answer < input_shape[0]:
        raise ConfigError(
            "the model `language_model` reads rows of tokens, the last `answer` of which are the "
            f"answer, got samples of shape {list(input_shape)} and `answer` = {answer}"
        )
    found = pretrained.base_checksum(base) if checksum is not None else None
    if checksum != found:
        raise ConfigError(
            f"the base {base!r} has the SHA-256 {found}, and `checksum` names {checksum}: take the "
            "weights that the others have"
        )
    model: Any = pretrained.base_model(base)
    num_blocks = len(_decoder(model).layers)
    limits = {"blocks": (blocks, num_blocks), "rank": (rank, model.config.hidden_size)}
    limits["vocabulary"] = (vocabulary or 1, model.config.vocab_size)
    for name, (value, largest) in limits.items():
        if not 1 <= value <= largest:
            raise ConfigError(
                f"model `language_model`: `{name}` must be at least 1 and at most {largest}, "
                f"got {value}"
            )
    head = model.get_output_embeddings().weight[:vocabulary]
    network = AdaptedModel(_decoder(model), head, blocks, answer, reads)
    folder = pretrained.activation_folder(base)
    if folder is not None:
        network.kept = KeptActivations(folder / f"{blocks}-{answer}-{reads}")
    network.add_adapters_(rank, alpha, targets)
    return network


class Activations(NamedTuple):
    """Activations of the frozen base that the adapted blocks read.

    `hidden` is the input of the first adapted block, at the places that the adapters act on. Keys
    and values are those of the places before, one row per adapted block.
    """

    hidden: Float[Tensor, "*n a h"]
    keys: Float[Tensor, "*n b heads p k"]
    values: Float[Tensor, "*n b heads p k"]


class AdaptedModel(nn.Module):
    """Log-probabilities of answers, by a frozen base with adapters in its last blocks.

    `head` has the embeddings of the tokens of the softmax. `answer` is the number of places of the
    answer. `reads` is that of `language_model`.
    """

    head: Tensor

    def __init__(
        self, decoder: Any, head: Float[Tensor, "V h"], blocks: int, answer: int, reads: str
    ) -> None:
        super().__init__()
        self.base = decoder
        self.register_buffer("head", head, persistent=False)
        self.first_block = len(decoder.layers) - blocks
        self.answer = answer
        self.reads = reads
        self.kept = KeptActivations()

        # The adapted blocks are modules of their own, on the same weights.
        upper = copy.copy(decoder)
        upper._modules = {**decoder._modules, "embed_tokens": None}
        upper.layers = decoder.layers[self.first_block :]
        shared = {id(p): p for p in decoder.parameters()}
        self.adapted = copy.deepcopy(upper, shared)
        for index, layer in enumerate(self.adapted.layers):
            layer.self_attn.layer_idx = index

    def add_adapters_(self, rank: int, alpha: int, targets: Sequence[str]) -> None:
        """Add adapters to the layers `targets` of the last blocks.

        ConfigError is raised if the base has no layer of a name.
        """
        from peft import LoraConfig, inject_adapter_in_model

        names = {name.rpartition(".")[2] for name, _ in self.adapted.layers.named_modules()}
        for name in targets:
            if name not in names:
                raise ConfigError(f"the base has no layer called {name!r} (`targets`)")
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=list(targets), lora_dropout=0.0, bias="none"
        )
        inject_adapter_in_model(config, self.adapted.layers)

    def forward(self, x: Int[Tensor, "n t"]) -> Float[Tensor, "n 2"]:
        """Return how probable the answers of samples are.

        The first number is the mean log-probability of the answer's tokens. The second one is 1
        where each of them is the most probable one, so that greedy decoding gives the answer; else
        0.
        """
        tokens = x.long()
        targets = tokens[:, -self.answer :]
        is_target = targets != PAD
        states = self._states(tokens)[:, -self.answer :][is_target]
        wanted = targets[is_target]
        logits = states @ self.head.T
        log_p = logits.log_softmax(-1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1)

        counts = is_target.sum(1)
        row = torch.arange(len(tokens), device=x.device).repeat_interleave(counts)
        means = log_p.new_zeros(len(tokens)).index_add(0, row, log_p) / counts.clamp(min=1)
        with torch.no_grad():
            is_missed = (logits.argmax(-1) != wanted).to(log_p.dtype)
            misses = log_p.new_zeros(len(tokens)).index_add(0, row, is_missed)
        return torch.stack([means, (misses == 0).to(means.dtype)], 1)

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the `count` most probable tokens after each prompt, one after the other."""
        written = []
        with torch.no_grad():
            for prompt in prompts:
                tokens = torch.tensor([list(prompt)], device=self.head.device)
                for _ in range(count):
                    padded = torch.cat([tokens, tokens.new_zeros(1, 1)], 1)
                    # The first written token follows the prompt, which the adapters do not read.
                    start = len(prompt) - 1 if self.reads == "answer" else 0
                    found = self._compute(tokens[0], start)
                    states = self._adapted_states(
                        Activations(*(part.unsqueeze(0) for part in found)), padded
                    )
                    last = (states[:, -1] @ self.head.T).argmax(-1, keepdim=True)
                    tokens = torch.cat([tokens, last], 1)
                written.append(tokens[0, len(prompt) :].tolist())
        return written

    def _states(self, tokens: Int[Tensor, "n t"]) -> Float[Tensor, "n a h"]:
        """Return the last hidden states at the places that the adapters act on."""
        start = tokens.shape[1] - self.answer - 1 if self.reads == "answer" else 0
        # The last token is not read: samples that differ in it alone share activations.
        rows = self.kept.rows(tokens[:, :-1], lambda row: self._compute(row, start))
        stacked = Activations(*map(torch.stack, zip(*rows, strict=True)))
        return self._adapted_states(stacked, tokens)

    def _adapted_states(
        self, inputs: Activations, tokens: Int[Tensor, "n t"]
    ) -> Float[Tensor, "n a h"]:
        """Run the adapted blocks; the last token of a sample is not read."""
        from transformers import DynamicCache

        mask = tokens[:, :-1] != PAD
        count = inputs.hidden.shape[1]
        # Padding has no position: tokens count from the first one of the prompt.
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]
        options = {}
        if inputs.keys.shape[-2]:
            cache = DynamicCache()
            for block in range(inputs.keys.shape[1]):
                cache.update(inputs.keys[:, block], inputs.values[:, block], block)
            options[_cache_argument(self.adapted)] = cache
        states: Tensor = self.adapted(
            inputs_embeds=inputs.hidden,
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=False,
            **options,
        ).last_hidden_state
        return states

    def _compute(self, read: Int[Tensor, " t"], start: int) -> Activations:
        """Compute the base's activations at the tokens of one sample, padded with zeros."""
        # Samples are computed one by one, so that the numbers do not depend on other samples.
        real = read != PAD
        with torch.no_grad():
            found = self.base(
                input_ids=read[real].unsqueeze(0), use_cache=True, output_hidden_states=True
            )
        cache = getattr(found, _cache_argument(self.base))
        layers = cache.layers[self.first_block :]

        def spread(part: Tensor, places: slice) -> Tensor:
            whole = part.new_zeros(len(read), *part.shape[1:])
            whole[real] = part
            return whole[places]

        hidden = spread(found.hidden_states[self.first_block][0], slice(start, None))
        before = slice(0, start)
        keys = [spread(layer.keys[0].transpose(0, 1), before).transpose(0, 1) for layer in layers]
        values = [
            spread(layer.values[0].transpose(0, 1), before).transpose(0, 1) for layer in layers
        ]
        return Activations(hidden, torch.stack(keys), torch.stack(values))


class KeptActivations:
    """Activations by sample, in memory and, for a base with a folder, in files.

    Processes and runs share the files, which they map. Copies of a network share the activations,
    and a pickle has none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._rows: dict[bytes, Activations] = {}

    def __deepcopy__(self, memo: Any) -> "KeptActivations":
        return self

    def __reduce__(self) -> Any:
        return (KeptActivations, (self._folder,))

    def rows(
        self, tokens: Int[Tensor, "n t"], compute: Callable[[Tensor], Activations]
    ) -> list[Activations]:
        """Return and keep the activations of samples, by their read tokens.

        `compute` is a function of these tokens of one sample.
        """
        found = []
        for key, row in zip(map(bytes, tokens.cpu().numpy()), tokens, strict=True):
            activations = self._rows.get(key)
            if activations is None:
                activations = self._read_or_compute(key, row, compute)
                size = sum(part.numel() * part.element_size() for part in activations)
                # The oldest sample makes room.
                if (len(self._rows) + 1) * size > MAX_KEPT_BYTES:
                    self._rows.pop(next(iter(self._rows)), None)
                self._rows[key] = activations
            found.append(activations)
        return found

    def _read_or_compute(
        self, key: bytes, row: Tensor, compute: Callable[[Tensor], Activations]
    ) -> Activations:
        """Return the activations of one sample from its file, or compute and write them."""
        if self._folder is None:
            return compute(row)
        file = self._folder / f"{hashlib.sha256(key).hexdigest()[:32]}.safetensors"
        if file.is_file():
            return Activations(**load_file(file, device=str(row.device)))
        activations = compute(row)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Other processes may write the same file: each writes its own and renames it.
        staging = file.with_suffix(f".{os.getpid()}")
        save_file(
            {name: part.contiguous() for name, part in activations._asdict().items()}, staging
        )
        staging.replace(file)
        return activations


def _decoder(model: Any) -> Any:
    """Return the blocks of a causal language model."""
    decoder = getattr(model, "model", None)
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise ConfigError(
            f"the base is a {type(model).__name__}, and adapters need `model.layers` and "
            "`model.norm`, as Llama, Mistral, Qwen and SmolLM have"
        )
    return decoder


def _cache_argument(decoder: Any) -> str:
    """Return the name of the argument for keys and values, which depends on the version."""
    parameters = inspect.signature(inspect.unwrap(type(decoder).forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"
