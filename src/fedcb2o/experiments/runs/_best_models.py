"""Models after the evaluated round with the lowest validation loss: the key `keep_best`."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from fedcb2o.records import BEST_FILE, atomic_write
from fedcb2o.safe_files import check_regular
from fedcb2o.simulation.rounds import Round


class BestModels:
    """Best models of the agents of a seed, with their rounds from 1 and validation losses."""

    def __init__(self, folder: Path, count: int, dim: int, *, resume: bool) -> None:
        self.path = folder / BEST_FILE
        self._tensors = {
            "models": torch.zeros(count, dim),
            "rounds": torch.zeros(count, dtype=torch.int64),
            "losses": torch.full((count,), torch.inf, dtype=torch.float64),
        }
        if resume and self.path.exists():
            check_regular(self.path)
            self._tensors = load_file(self.path)

    def update(self, result: Round, models: Iterable[Tensor]) -> None:
        """Keep the models of agents whose validation loss is lower than before.

        `models` has those of all agents in their order, in parts of shape [k, stride].
        """
        rounds, losses = self._tensors["rounds"], self._tensors["losses"]
        tested = result.test_results
        if tested is None or tested.validation is None:
            return
        # NaN, of an agent without validation samples, is not lower.
        is_lower = tested.validation < losses[tested.agents].numpy()
        values = tested.validation[is_lower].tolist()
        improved = dict(zip(tested.agents[is_lower].tolist(), values, strict=True))
        if not improved:
            return
        start = 0
        kept = self._tensors["models"]
        for part in models:
            for j in improved:
                if start <= j < start + len(part):
                    kept[j] = part[j - start, : kept.shape[1]]
            start += len(part)
        for j, loss in improved.items():
            rounds[j] = result.n + 1
            losses[j] = loss

    def save(self) -> None:
        """Write the file, as a whole."""
        atomic_write(self.path, save(self._tensors))
