"""NVFlare's server as a relay: every site receives the models of all sites."""

import json
from pathlib import Path

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.model_controller import ModelController


class Relay(ModelController):
    """Controller that passes models on and aggregates nothing; each site decides for itself.

    Args:
        rounds: Number of rounds.
        output: File that receives the accuracy of each site after the last round.
    """

    def __init__(self, rounds: int, output: str) -> None:
        super().__init__()
        self.rounds = rounds
        self.output = output

    def run(self) -> None:
        """Run the rounds, and one more in which sites take the last models."""
        bundle = {"begin": np.zeros(1)}
        samples: dict[str, int] = {}
        for n in range(self.rounds + 1):
            task = FLModel(
                params=bundle, meta={"samples": samples}, current_round=n, total_rounds=self.rounds
            )
            bundle = {}
            accuracy = {}
            for result in self.send_model_and_wait(data=task):
                site = result.meta["client_name"]
                samples[site] = result.meta["samples"]
                accuracy[site] = result.metrics["accuracy"]
                for name, values in result.params.items():
                    bundle[f"{site}/{name}"] = values
        Path(self.output).write_text(json.dumps(accuracy))
