"""Bytes, accuracy and regret of encodings under attacks: digits with FedAssay, tuning seeds.

    python benchmarks/wire_bytes.py [--table]

Adds the runs that `wire_bytes.csv` lacks. `--table` writes the means over seeds to `docs/peers.md`;
the regret is the largest loss of accuracy next to float32 under one attack. The bytes of an agent
and round are counted from who received whose model in which round: a receiver downloads the
differences since the last model of the peer, or the whole model, and crafted models whole.
Manifests, 300 bytes each, are not counted.
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from page_table import replace_table
from paper.distil import ATTACKS, DIGITS

import fedcb2o
from fedcb2o.federated import publishing, top_k
from fedcb2o.peer.wire.compression import Int8Codec

FILE = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).parents[1] / "docs" / "peers.md"
MARKS = ("<!-- begin: encodings -->", "<!-- end -->")
COLUMNS = ("encoding", "attack", "seed", "accuracy", "success", "kilobytes")
SEEDS = (1000, 1001, 1002)
CHOSEN = ("none", "label flip", "ALIE", "dissensus", "gossip attack")
ENCODINGS = ("float32", "int8", "top_k", "top_k, 64 of 4096")


def int8(sizes: list[int]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function in place of `top_k.advance_` that publishes by `Int8Codec`.

    Args:
        sizes: Receives the bytes of each model.

    Returns:
        A function of the published model, which it changes, and the agent's model.
    """
    codecs: dict[int, Int8Codec] = {}

    def advance_(sent: torch.Tensor, theta: torch.Tensor) -> None:
        codec = codecs.setdefault(sent.data_ptr(), Int8Codec(sent))
        content = codec.encode(theta)
        sizes.append(len(content))
        assert codec.decode_(content, sent) == ""

    return advance_


def downloaded(folder: Path, dim: int, size: float | None, crafts: bool, malicious: Any) -> float:
    """Return the mean bytes that a benign agent downloads in a round.

    Args:
        folder: Folder of a seed.
        dim: Number of parameters of a model.
        size: Bytes of a model; None for those of top-k differences.
        crafts: Whether malicious agents send crafted models, which are whole.
        malicious: Whether each agent is malicious.

    Returns:
        Bytes of models, without manifests.
    """
    last: dict[tuple[int, int], int] = {}
    total, rounds = 0.0, 0
    for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines():
        n = rounds
        rounds += 1
        for j, senders in enumerate(json.loads(line)["ids"]):
            for i in senders:
                behind = n - last.get((i, j), -1)
                last[i, j] = n
                if malicious[j]:
                    continue
                whole = 4.0 * dim if size is None else size
                is_followed = size is None and not (crafts and malicious[i])
                total += top_k.download_bytes(dim, behind) if is_followed else whole
    return total / rounds / (len(malicious) - sum(malicious))


def measure(encoding: str, attack: str, seed: int) -> tuple[float, float, float]:
    """Return accuracy and success in percent after the last round, and kilobytes.

    Args:
        encoding: One of `ENCODINGS`.
        attack: One of `CHOSEN`.
        seed: Seed of the run.

    Returns:
        Means over benign agents.
    """
    former, sizes = publishing.advance_, list[int]()
    changes = {**DIGITS, **ATTACKS[attack], "evaluate_on": "tuning", "evaluate_every": 25}
    if encoding != "float32":
        changes["agents.encoding"] = "top_k"
    top_k._SHARE = 64 if encoding.endswith("64 of 4096") else 16
    experiment = fedcb2o.load("digits-fedassay", {**changes, "seeds": [seed]})
    if encoding == "int8":
        publishing.advance_ = int8(sizes)  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = fedcb2o.run(experiment, out=folder, workers=1)
            last = run.records.query("round == round.max()")
            malicious = last.sort_values("agent").malicious.tolist()
            dim = sum(x.numel() for x in run.model(0).state_dict().values())
            size = {"float32": 4.0 * dim, "int8": sum(sizes) / max(1, len(sizes))}.get(encoding)
            crafts = experiment.active_attack.deceives
            count = downloaded(Path(folder) / f"seed-{seed}", dim, size, crafts, malicious)
    finally:
        publishing.advance_ = former
    benign = last.query("not malicious")
    return (
        100 * float(benign.accuracy.mean()),
        100 * float(benign.attack_success_rate.mean()),
        count / 1000,
    )


def main() -> None:
    """Measure the missing runs, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    if not FILE.exists():
        FILE.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    table = pd.read_csv(FILE)
    if parser.parse_args().table:
        means = table.groupby(["encoding", "attack"])[list(COLUMNS[3:])].mean().unstack("attack")
        accuracy = means["accuracy"][list(CHOSEN)].loc[list(ENCODINGS)]
        regret = (accuracy.loc["float32"] - accuracy).max(axis=1)
        rows = [["", *CHOSEN, "regret", "kilobytes", "a flip succeeds"]]
        for name, values in accuracy.iterrows():
            sizes, success = means["kilobytes"]["none"][name], means["success"]["label flip"][name]
            numbers = [*values, regret[name], sizes, success]
            rows.append([str(name), *(f"{number:.1f}" for number in numbers)])
        replace_table(PAGE, MARKS, rows, 1)
        return
    done = set(table[list(COLUMNS[:3])].itertuples(index=False, name=None))
    for seed in SEEDS:
        for attack in CHOSEN:
            for encoding in ENCODINGS:
                if (encoding, attack, seed) not in done:
                    row = [f"{value:.2f}" for value in measure(encoding, attack, seed)]
                    with FILE.open("a", encoding="utf-8", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerow(
                            [encoding, attack, seed, *row]
                        )


if __name__ == "__main__":
    main()
