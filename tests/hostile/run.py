"""Run all attacks against four nodes, one after the other, and check their effects.

`python -m tests.hostile.run SECONDS` runs each attack for SECONDS: 2 in the tests, 40 in `make
hostile`. Rounds under attack are compared with undisturbed rounds at the start.
"""

import json
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.hostile.attacks import ATTACKS, INVALID, STRANGER, Attacker
from tests.peer.nodes import nodes

from fedcb2o.nn import parameters
from fedcb2o.peer import read_federation
from fedcb2o.peer.node.agent import build_network

HONEST = 4
CHANGES = {"rounds": 10**6, "agents": {"benign": 5, "malicious": 0, "budget": 3}}
TIMES = {"lag": 5, "deadline_seconds": 3.0, "round_seconds": 0.5}
EQUIVOCATION = "answers: equivocation"
MAX_PACE = 1.3
MAX_PACE_OF_STRANGERS = 2.0


def memory(peers):
    """Return the resident bytes of each node."""
    sizes = []
    for j in range(HONEST):
        with suppress(OSError, IndexError):  # of a node that has ended
            status = Path(f"/proc/{peers.processes[j].pid}/status").read_text()
            sizes.append(1024 * int(status.split("VmRSS:")[1].split()[0]))
    return sizes


def progress(peers):
    """Return the finished rounds of each node, without parsing, which would take seconds."""
    paths = [peers.out(j) / "rounds.jsonl" for j in range(HONEST)]
    return [path.read_bytes().count(b"\n") if path.exists() else 0 for path in paths]


def observe(peers, work, seconds):
    """Return seconds per round, fewest rounds, hostile models received, and memory of one period.

    A model is a pair of its round and the round in which it was received.
    """
    before, start = progress(peers), time.monotonic()
    work()
    time.sleep(max(0.0, start + seconds - time.monotonic()))
    elapsed, after = time.monotonic() - start, progress(peers)
    rounds = [count - previous for count, previous in zip(after, before, strict=True)]
    received = [
        (message["round"] - 1, line["round"] - 1)
        for j in range(HONEST)
        for line in peers.lines(j)[before[j] + 1 : after[j]]
        for message in line["received"]
        if message["id"] == HONEST
    ]
    return elapsed * HONEST / max(1, sum(rounds)), min(rounds), received, memory(peers)


def run_all(folder, seconds, out=sys.stdout):
    """Return the failures under all attacks.

    The author of an equivocation is banned, so that this attack has a separate federation.
    """
    attacks = dict(ATTACKS)
    equivocation = {EQUIVOCATION: attacks.pop(EQUIVOCATION)}
    is_full = seconds > 10
    messages = failures(*run(folder / "all", seconds, attacks, out), is_full=is_full)

    records, final = run(folder / "equivocation", max(seconds, 6.0), equivocation, out)
    messages += failures(records, final, is_full=is_full)
    if final["guilty"] != [f"org-{HONEST}"]:
        messages.append("an equivocation was not found")
    return messages


def run(folder, seconds, attacks, out=sys.stdout):
    """Return one record per attack, after one of undisturbed rounds, and the final state."""
    records = []
    folder.mkdir()
    with nodes(folder, HONEST + 1, changes=CHANGES, **TIMES) as peers, ExitStack() as stack:
        peers.start(*range(HONEST), gather=5.0)
        dim = len(parameters.flatten(build_network(read_federation(peers.federation))))
        attacker = Attacker(peers.federation, peers.identities[HONEST], dim)
        stack.callback(attacker.close)
        peers.until(0, 4)
        for name, (kind, function) in [("none", ("none", lambda attacker: None)), *attacks.items()]:
            length = max(seconds, 8.0) if kind == "none" else seconds
            attacker.asked = 0
            attacker.end = time.monotonic() + length
            pace, fewest, received, sizes = observe(
                peers, lambda function=function: function(attacker), length
            )
            records.append(
                {
                    "attack": name,
                    "kind": kind,
                    "seconds_a_round": round(pace, 3),
                    "fewest_rounds": fewest,
                    "asked": attacker.asked,
                    "wrong_models": sum(is_wrong(attacker, *rounds) for rounds in received),
                    "memory": max(sizes, default=0) >> 20,
                    "running": sum(peers.processes[j].is_alive() for j in range(HONEST)),
                }
            )
            print(json.dumps(records[-1]), file=out, flush=True)
        stack.close()
        time.sleep(2.0)
        proofs = {path.name for j in range(HONEST) for path in peers.out(j).glob("proofs/*")}
        guilty = sorted({name.rsplit("-", 1)[0] for name in proofs})
        final = {
            "guilty": guilty,
            "memory": max(memory(peers), default=0) >> 20,
            "running": sum(peers.processes[j].is_alive() for j in range(HONEST)),
            "logs": [peers.log(j)[-500:] for j in range(HONEST)],
        }
        print(json.dumps(final), file=out, flush=True)
    return records, final


def is_wrong(attacker, round, received):
    """Return whether a model that a node received was invalid or too old.

    Nodes may be in different rounds, so that a node may receive a model of the last period.
    """
    modes = attacker.offered.get(round, set())
    return modes <= set(INVALID) or received - round > TIMES["lag"]


def mean_pace(records, kinds):
    """Return seconds per round over all attacks of some kinds; 0 without such attacks.

    The pace of a single short attack is inaccurate, because it may end within one round.
    """
    paces = [record["seconds_a_round"] for record in records if record["kind"] in kinds]
    if not paces:
        return 0.0
    return len(paces) / sum(1 / pace for pace in paces)  # all attacks take equally long


def failures(records, final, *, is_full):
    """Return the failures as messages."""
    undisturbed = records[0]
    messages = []
    for record in records[1:]:
        limit = MAX_PACE_OF_STRANGERS if record["kind"] == STRANGER else MAX_PACE
        if is_full and record["seconds_a_round"] > limit * undisturbed["seconds_a_round"]:
            messages.append(f"{record['attack']}: {record['seconds_a_round']} s a round")
        if record["wrong_models"]:
            messages.append(f"{record['attack']}: a wrong model was accepted")
        if record["running"] < HONEST:
            messages.append(f"{record['attack']}: a node ended")
        if record["memory"] > undisturbed["memory"] + 100:
            messages.append(f"{record['attack']}: {record['memory']} MB")
    members = {record["kind"] for record in records} - {"none", STRANGER}
    if mean_pace(records, members) > MAX_PACE * undisturbed["seconds_a_round"]:
        messages.append("rounds under attacks of a member are too slow")
    if mean_pace(records, {STRANGER}) > MAX_PACE_OF_STRANGERS * undisturbed["seconds_a_round"]:
        messages.append("rounds under attacks of strangers are too slow")
    if set(final["guilty"]) - {f"org-{HONEST}"}:
        messages.append(f"{final['guilty']} were found guilty")
    if final["running"] < HONEST:
        messages.append(f"a node ended: {final['logs']}")
    return messages


if __name__ == "__main__":
    length = float(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        wrong = run_all(Path(name), length)
    print("\n".join(wrong) or f"{len(ATTACKS)} attacks: nothing went wrong")
    sys.exit(bool(wrong))
