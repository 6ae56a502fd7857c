"""NVFlare's simulator with nine hospitals: `python job.py --method fedassay --attack none`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from hospitals import ATTACKERS, ATTACKS, CASES, METHODS, ROUNDS, SHARES
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from relay import Relay


def run(method: str, attack: str, case: str, seed: int, rounds: int) -> list[float]:
    """Run a job in the simulator and return the accuracy of each honest hospital."""
    folder = Path(__file__).parent
    options = {"method": method, "attack": attack, "case": case, "seed": str(seed)}
    arguments = " ".join(f"--{name} {value}" for name, value in options.items())
    with tempfile.TemporaryDirectory() as workspace:
        output = Path(workspace) / "accuracy.json"
        job = FedJob(name="hospitals")
        job.to_server(Relay(rounds, str(output)))
        for j in range(len(SHARES)):
            job.to(ScriptRunner(str(folder / "client.py"), arguments), f"site-{j + 1}")
            job.to(str(folder / "hospitals.py"), f"site-{j + 1}")
        job.simulator_run(workspace)
        accuracy = json.loads(output.read_text())
    return [accuracy[f"site-{j + 1}"] for j in range(len(SHARES)) if j not in ATTACKERS]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=METHODS, default="fedassay")
    parser.add_argument("--attack", choices=ATTACKS, default="none")
    parser.add_argument("--case", choices=CASES, default="alike")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    result = run(**vars(parser.parse_args()))
    sys.stdout.write(f"mean {np.mean(result):.2f}, worst {min(result):.2f}\n")
