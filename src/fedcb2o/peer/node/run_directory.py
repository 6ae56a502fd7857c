"""Run directory of a node, the only signer for its run."""

import logging
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.peer.membership.federation import Federation, read_federation, write_federation
from fedcb2o.peer.membership.identity import RUNS_FILE, Identity
from fedcb2o.peer.membership.versions import parse_members
from fedcb2o.peer.node.agent import AgentSetup
from fedcb2o.peer.wire.equivocation import JOURNAL_FILE

_LOGGER = logging.getLogger(__name__)

_FEDERATION_FILE = "federation.toml"
_GUARD = "it keeps two folders from signing two models for one round"


def open_run(
    out: Path, federation: Federation, identity: Identity, agent: AgentSetup, *, resume: bool
) -> None:
    """Create the run directory, or check that it holds the same run.

    A directory with something else, or another directory that signs for this run, is a RunError.
    """
    info = _node_info(federation, identity, agent)
    records.check_parts(out, [out / "proofs"])
    if (out / _FEDERATION_FILE).exists():
        _check_same_run(out, federation, info, resume=resume)
    else:
        # A start that was killed leaves these files.
        partial = {f"{_FEDERATION_FILE}.tmp", "agent.json", "agent.json.tmp"}
        if {path.name for path in out.iterdir()} - partial:
            raise RunError(f"{out} is not empty and holds no peer's run: choose another --out")

    records.make_private(out)
    requested = federation.experiment.training.precision
    if requested != info["precision"]:
        _LOGGER.warning(
            "%s trains in %s: %s is far slower here.", info["name"], info["precision"], requested
        )
    _claim_run(out, federation, identity)
    records.remove_temporaries(out)
    records.write_json(out / "agent.json", info)
    # The last file of a new directory, by which a complete one is recognised.
    write_federation(federation, out / _FEDERATION_FILE)


def _node_info(federation: Federation, identity: Identity, agent: AgentSetup) -> dict[str, Any]:
    """Return the content of agent.json."""
    # With removed members, which are in earlier rounds.
    names = {
        str(id): member.name
        for members in parse_members(federation.versions)
        for id, member in members.items()
    }
    return {
        "name": identity.member.name,
        "id": federation.id_of(identity.member),
        "names": names,
        "removed": [int(id) for id in names if int(id) not in federation.members],
        "run": federation.run.hex(),
        "version": federation.version,
        "rounds": federation.rounds,
        "class_names": list(federation.class_names),
        "dim": agent.spec.dim,
        "precision": agent.spec.training.precision,
        "num_samples": int(agent.data.train.sizes[0]),
        "validation_samples": int(agent.data.validation.sizes[0]),
    }


def _check_same_run(
    out: Path, federation: Federation, info: dict[str, Any], *, resume: bool
) -> None:
    has_journal = (out / JOURNAL_FILE).exists()
    if not ((out / "agent.json").exists() or has_journal):
        raise RunError(f"{out} is not the folder of a peer's run: choose another --out")
    written = records.read_json(out / "agent.json")
    if (written.get("run"), written.get("id")) != (info["run"], info["id"]):
        raise RunError(f"{out} holds the run of another federation or agent: choose another --out")
    if not resume and has_journal:
        raise RunError(
            f"{out} already holds this run: --resume goes on with it. Begun anew elsewhere it "
            "would sign second models for its rounds, which the others take for fraud"
        )
    previous = read_federation(
        out / _FEDERATION_FILE, allowed_functions=federation.allowed_functions, allow_unsigned=True
    )
    if not federation.is_successor_of(previous):
        raise RunError(
            f"{out} went on with version {previous.version} of the federation, and the one given "
            f"is version {federation.version}, which does not follow it: give the newer file"
        )


def _claim_run(out: Path, federation: Federation, identity: Identity) -> None:
    """Note next to the keys which directory signs for this run."""
    path = identity.folder / RUNS_FILE
    run = federation.run.hex()
    directory = str(out.resolve())
    noted: dict[str, Any] = {}
    try:
        noted = records.read_toml(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}), and {_GUARD}: restore it") from error
    other = noted.get(run, directory)
    # A directory without a journal signed nothing, or is gone.
    if isinstance(other, str) and other != directory and (Path(other) / JOURNAL_FILE).exists():
        raise RunError(
            f"{identity.member.name} already signs for this run in {other}: give that --out and "
            "--resume (or, if it is a copy of that folder, remove the other one). Two folders "
            "would sign two models for one round, which the others take for fraud"
        )
    # After the first start, the folder of the keys may be read-only.
    if other == directory and run in noted:
        return
    try:
        records.write_toml(path, {**noted, run: directory})
    except RunError as error:
        raise RunError(
            f"{path} cannot be written, and {_GUARD}: let this program write to "
            f"{identity.folder} at the start of a run ({error})"
        ) from error
