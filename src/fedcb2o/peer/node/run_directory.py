"""The folder of a peer's run: one agent of one federation writes to it, and signs nowhere else."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.peer.membership.federation import Federation, read_federation, write_federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.membership.versions import parse_members
from fedcb2o.peer.node.agent import AgentSetup
from fedcb2o.peer.wire.equivocation import JOURNAL_FILE

_FEDERATION_FILE = "federation.toml"
_RUNS_FILE = "runs.toml"  # beside the keys: where they sign for which run


def open_run(
    out: Path, federation: Federation, identity: Identity, agent: AgentSetup, *, resume: bool
) -> None:
    """Write who the agent is and what was agreed on into its folder, or find the same run there; raises RunError for
    anything else."""
    me = federation.id_of(identity.member)
    there = out / _FEDERATION_FILE
    who = {
        "name": identity.member.name,
        "id": me,
        "names": {  # of those that were removed too, who stand in earlier rounds
            str(id): member.name
            for members in parse_members(federation.versions)
            for id, member in members.items()
        },
        "run": federation.run.hex(),
        "version": federation.version,
        "rounds": federation.rounds,
        "class_names": list(federation.class_names),
        "dim": agent.spec.dim,
        "precision": agent.spec.training.precision,
        "num_samples": int(agent.data.train.sizes[0]),
        "validation_samples": int(agent.data.validation.sizes[0]),
    }
    if there.exists():
        if not ((out / "agent.json").exists() or (out / JOURNAL_FILE).exists()):
            raise RunError(f"{out} is not the folder of a peer's run: choose another --out")
        known = records.read_json(out / "agent.json")
        if (known.get("run"), known.get("id")) != (who["run"], who["id"]):
            raise RunError(
                f"{out} holds the run of another federation or agent: choose another --out"
            )
        if not resume and (out / JOURNAL_FILE).exists():
            raise RunError(
                f"{out} already holds this run: --resume goes on with it. Begun anew elsewhere it would sign "
                "second models for its rounds, which the others take for fraud"
            )
        held = read_federation(
            there, allowed_functions=federation.allowed_functions, allow_unsigned=True
        )
        if not federation.is_successor_of(held):
            raise RunError(
                f"{out} went on with version {held.version} of the federation, and the one given is version "
                f"{federation.version}, which did not come of it: give the newer file"
            )
    elif {inside.name for inside in out.iterdir()} - {
        f"{_FEDERATION_FILE}.tmp",
        "agent.json",
        "agent.json.tmp",
    }:
        raise RunError(f"{out} is not empty and holds no peer's run: choose another --out")
    if (asked := federation.experiment.training.precision) != who["precision"]:
        print(
            f"Note: {who['name']} trains in {who['precision']}: {asked} is far slower here.",
            file=sys.stderr,
        )
    _claim_run(out, federation, identity)
    records.remove_temporaries(out)
    records.write_json(out / "agent.json", who)
    write_federation(federation, there)


def _claim_run(out: Path, federation: Federation, identity: Identity) -> None:
    """Note beside the keys in which folder they sign for this run; raises RunError where it is another one, which
    would sign second models for its rounds."""
    path = identity.folder / _RUNS_FILE
    run = federation.run.hex()
    here = str(out.resolve())
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # nothing was noted yet, or it is damaged
        known = records.read_toml(path)
    there = known.get(run, here)
    if isinstance(there, str) and there != here and (Path(there) / JOURNAL_FILE).exists():
        raise RunError(
            f"{identity.member.name} already signs for this run in {there}: give that --out and --resume (or, "
            "if it is a copy of that folder, remove the other one). Two folders would sign two models for one "
            "round, which the others take for fraud"
        )
    with contextlib.suppress(OSError, RunError):  # keys may be where nothing can be written
        records.write_toml(path, {**known, run: here})
