"""Self-assessment of a node: gain over training alone, contributions of peers, and leakage.

All of it stays in the node's own records. The model that the member would have had alone starts
from the same initial model, and trains on the same mini-batches, without privacy and averaging.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fedcb2o import records
from fedcb2o.data import Shard
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.evaluation.gain import gain_record
from fedcb2o.federated.evaluation.membership import leakage, sample_losses
from fedcb2o.federated.evaluation.models import measure_samples, predicted_class
from fedcb2o.federated.local_update import train_alone_
from fedcb2o.kernels import dispatch
from fedcb2o.safe_files import check_regular

BASELINE_FILE = "baseline.safetensors"
_MAX_SHARE = 0.99  # of a model in the average, beyond which the rest says nothing


class SelfAssessment:
    """Assessment of a node's model on its own samples, every `every` rounds; 0 for none.

    `initial_model` is the agent's model before all rounds.
    """

    def __init__(
        self,
        folder: Path,
        group: AgentGroup,
        class_names: tuple[str, ...],
        initial_model: Float[Tensor, " d"],
        every: int,
    ) -> None:
        self.path = folder / BASELINE_FILE
        self.group = group
        self.class_names = class_names
        self.alone = initial_model.clone()
        self.trained = 0  # round up to which the model alone is trained or skipped
        self.skipped = 0  # skipped rounds among them
        self.every = every
        self._members = np.zeros(1, np.int64)
        self._sent: dict[str, float] = {}
        tests = list(group.data.test_sets(self._members))
        self.test = tests[0][1] if tests else Shard(group.data.test.x[:0], group.data.test.y[:0])
        # A resumed node goes on with the model that it has trained alone.
        if self.path.exists():
            check_regular(self.path)
            with safe_open(self.path, "pt") as file:
                self.alone.copy_(file.get_tensor("theta"))
                metadata = file.metadata()
                self.trained = int(metadata["rounds"])
                self.skipped = int(metadata.get("skipped", 0))

    def is_due(self, n: int) -> bool:
        """Return whether round `n`, counted from 0, is assessed."""
        if self.every == 0 or not len(self.test):
            return False
        return (n + 1) % self.every == 0 or n + 1 == self.group.spec.rounds

    def skip_rounds(self, start: int, stop: int) -> None:
        """Leave out the rounds from `start` to `stop` - 1, which this agent does not train.

        They are counted from 0.
        """
        if self.every == 0 or not len(self.test):
            return
        kernels = self.group.spec.kernels
        with dispatch.use_kernels(kernels.linear, kernels.convolution):
            self._train_alone(start - 1)
        self.skipped += max(0, stop - self.trained)
        self.trained = max(self.trained, stop)

    def before_exchange(self, n: int) -> None:
        """Measure the leakage of the model that is sent in round `n`, counted from 0."""
        if self.is_due(n):
            self._sent = self._leakage("sent", n)

    def assess(self, n: int, decisions: Decisions) -> tuple[dict[str, Any], dict[int, float]]:
        """Assess the model after round `n`, counted from 0.

        The entries of the round's record are returned with the contribution of each peer's model. A
        contribution is the loss on test samples without the model minus the loss with it.
        """
        if not self.is_due(n):
            return {}, {}
        kernels = self.group.spec.kernels
        with dispatch.use_kernels(kernels.linear, kernels.convolution):
            self._train_alone(n)
            gain = self._gain()
            if gain:
                gain["alone_rounds"] = self.trained - self.skipped
            entries = {**gain, **self._sent, **self._leakage("kept", n)}
            return entries, self._contributions(decisions)

    def _train_alone(self, n: int) -> None:
        """Train the model alone up to round `n`, and keep it."""
        while self.trained <= n:
            train_alone_(self.group, 0, self.trained, self.alone)
            self.trained += 1
        # Kept, because training it again after a restart takes as long as all rounds.
        metadata = {"rounds": str(self.trained), "skipped": str(self.skipped)}
        tensors = {"theta": self.alone}
        records.atomic_write(self.path, save(tensors, metadata))

    def _gain(self) -> dict[str, Any]:
        spec = self.group.spec
        # The gain is one of accuracy, which regressions lack.
        if spec.num_classes < 2:
            return {}
        models = torch.stack([self._own(), self.alone])
        reference = self.group.reference(0)
        references = None if reference is None else [reference, reference]
        predicted = measure_samples(
            spec.module, models, torch.arange(2), self.test, predicted_class, references=references
        ).numpy()
        labels = self.test.y.cpu().numpy()
        return gain_record(predicted[0] == labels, predicted[1] == labels, labels, self.class_names)

    def _contributions(self, decisions: Decisions) -> dict[int, float]:
        peers = decisions.received.values.tolist()
        shares = decisions.factor[0] * decisions.weights
        # A reduction over coordinates gives no model a weight.
        if decisions.reductions or not np.isfinite(shares).all():
            return {}
        theta = self._own()
        with_all = self._test_loss(theta)
        contributions = {}
        for peer, row, share in zip(peers, decisions.rows.tolist(), shares.tolist(), strict=True):
            if 0 < share < _MAX_SHARE:
                # The other models keep their proportions.
                without = (theta - share * self.group.models[row]) / (1 - share)
                contributions[peer] = self._test_loss(without) - with_all
        return {peer: value for peer, value in contributions.items() if np.isfinite(value)}

    def _leakage(self, name: str, n: int) -> dict[str, float]:
        """Return AUC and true positive rate of membership inference on the agent's model."""
        x, y = self.group.data.training_data(self._members, n)
        found = leakage(self.group, 0, self._own(), Shard(x[0], y[0]), self.test)
        return {f"{name}_{measure}": value for measure, value in found.items()}

    def _test_loss(self, theta: Float[Tensor, " d"]) -> float:
        return float(sample_losses(self.group, 0, theta, self.test).mean())

    def _own(self) -> Float[Tensor, " d"]:
        return self.group.models[int(self.group.layout.own[0])]
