"""Count of a node's private training rounds, of which its epsilon is a function.

Noise comes from a secret seed of each process, so that a repeated round spends epsilon again. After
a restore or the loss of a run directory, all rounds count that this agent may have published since.
"""

from pathlib import Path

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.federated.privacy import spent_epsilon
from fedcb2o.peer.node.agent import AgentSetup

LEDGER_FILE = "privacy.json"
_MARGIN = 1.001  # of a target epsilon, for rounding


class PrivacyLedger:
    """Ledger of the rounds in which a node trained, repeated ones included.

    `restored_rounds` are the rounds of a restored checkpoint until lost rounds are counted, else
    None.
    """

    def __init__(self, folder: Path, agent: AgentSetup) -> None:
        self.path = folder / LEDGER_FILE
        self.training = agent.spec.training
        self.rounds = agent.spec.rounds
        self.num_samples = int(agent.data.train.sizes[0])
        self.trained = 0
        self.restored_rounds: int | None = None
        if self.training.privacy is not None and self.path.exists():
            content = records.read_json(self.path)
            self.trained = int(content["trained"])
            self.restored_rounds = content.get("restored_rounds")

    def before_training(self) -> None:
        """Count a round before it trains, or raise RunError at the target epsilon."""
        privacy = self.training.privacy
        if privacy is None:
            return
        epsilon = self._epsilon(self.trained + 1)
        if privacy.epsilon is not None and epsilon > _MARGIN * privacy.epsilon:
            raise RunError(
                f"the privacy budget of epsilon {privacy.epsilon:g} is used up by {self.trained} "
                "rounds of training, repeated and possibly lost ones included: the model of the "
                "last round is in the checkpoint, and this node trains no more"
            )
        # A crash after this counts a round too many, but never one too few.
        self.trained += 1
        self._write()

    def begin_recovery(self, rounds_done: int) -> None:
        """Note which rounds the ledger covers, because later ones may have been lost.

        `rounds_done` are those of the checkpoint. Later calls before `end_recovery` change nothing.
        """
        if self.training.privacy is not None and self.restored_rounds is None:
            self.restored_rounds = rounds_done
            self._write()

    def end_recovery(self, possible_rounds: int) -> None:
        """Count the rounds that may have been trained and lost.

        `possible_rounds` counts from the first round that this agent may have published.
        """
        if self.restored_rounds is None:
            return
        self.trained += max(0, possible_rounds - self.restored_rounds)
        self.restored_rounds = None
        self._write()

    def _write(self) -> None:
        content = {"trained": self.trained}
        if self.restored_rounds is not None:
            content["restored_rounds"] = self.restored_rounds
        records.write_json(self.path, content)

    def record(self) -> dict[str, float]:
        """Return the entry of a round's record: the epsilon so far, if training is private."""
        if self.training.privacy is None:
            return {}
        return {"epsilon": self._epsilon(self.trained)}

    def _epsilon(self, trained: int) -> float:
        return spent_epsilon(self.training, self.num_samples, self.rounds, trained)
