"""The folder of a peer's run: one agent of one federation writes to it, and signs nowhere else."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.peer.membership.federation import Federation, read, write
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.membership.versions import members_of
from fedcb2o.peer.node.agent import Agent
from fedcb2o.peer.wire.equivocation import SIGNED

FEDERATION = "federation.toml"
RUNS = "runs.toml"  # beside the keys: where they sign for which run


def begin(out: Path, federation: Federation, identity: Identity, agent: Agent, *, resume: bool) -> None:
    """Write who the agent is and what was agreed on into its folder, or find the same run there; raises RunError for
    anything else."""
    me = federation.id_of(identity.member)
    there = out / FEDERATION
    who = {
        "name": identity.member.name,
        "id": me,
        "names": {  # of those that were removed too, who stand in earlier rounds
            str(id): member.name for members in members_of(federation.versions) for id, member in members.items()
        },
        "run": federation.run.hex(),
        "version": federation.version,
        "rounds": federation.rounds,
        "class_names": list(federation.class_names),
        "dim": agent.terms.dim,
        "precision": agent.terms.training.precision,
        "num_samples": int(agent.holdings.train.sizes[0]),
        "validation_samples": int(agent.holdings.validation.sizes[0]),
    }
    if there.exists():
        if not ((out / "agent.json").exists() or (out / SIGNED).exists()):
            raise RunError(f"{out} is not the folder of a peer's run: choose another --out")
        known = records.read_json(out / "agent.json")
        if (known.get("run"), known.get("id")) != (who["run"], who["id"]):
            raise RunError(f"{out} holds the run of another federation or agent: choose another --out")
        if not resume and (out / SIGNED).exists():
            raise RunError(
                f"{out} already holds this run: --resume goes on with it. Begun anew elsewhere it would sign "
                "second models for its rounds, which the others take for fraud"
            )
        held = read(there, own=federation.own, unsigned=True)
        if not federation.follows(held):
            raise RunError(
                f"{out} went on with version {held.version} of the federation, and the one given is version "
                f"{federation.version}, which did not come of it: give the newer file"
            )
    elif {inside.name for inside in out.iterdir()} - {f"{FEDERATION}.tmp", "agent.json", "agent.json.tmp"}:
        raise RunError(f"{out} is not empty and holds no peer's run: choose another --out")
    if (asked := federation.experiment.training.precision) != who["precision"]:
        print(f"Note: {who['name']} trains in {who['precision']}: {asked} is far slower here.", file=sys.stderr)
    _claim(out, federation, identity)
    records.sweep(out)
    records.write_json(out / "agent.json", who)
    write(federation, there)


def _claim(out: Path, federation: Federation, identity: Identity) -> None:
    """Note beside the keys in which folder they sign for this run; raises RunError where it is another one, which
    would sign second models for its rounds."""
    path, run, here = identity.folder / RUNS, federation.run.hex(), str(out.resolve())
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # nothing was noted yet, or it is damaged
        known = records.read_toml(path)
    there = known.get(run, here)
    if isinstance(there, str) and there != here and (Path(there) / SIGNED).exists():
        raise RunError(
            f"{identity.member.name} already signs for this run in {there}: give that --out and --resume (or, "
            "if it is a copy of that folder, remove the other one). Two folders would sign two models for one "
            "round, which the others take for fraud"
        )
    with contextlib.suppress(OSError, RunError):  # keys may be where nothing can be written
        records.write_toml(path, {**known, run: here})
