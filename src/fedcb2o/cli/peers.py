"""The commands for peers, from identity and federation to run and report."""

import contextlib
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedcb2o.cli import completion
from fedcb2o.cli.log_output import has_log_file, has_log_settings
from fedcb2o.cli.operation import FederationArgument, IdentityOption, ListenOption, MetricsOption
from fedcb2o.errors import ConfigError

if TYPE_CHECKING:
    from fedcb2o.peer.membership.federation import Federation

_LOGGER = logging.getLogger(__name__)
_MAX_LISTED_NAMES = 5


class _Encoding(StrEnum):
    """Encoding of models on the wire."""

    float32 = "float32"
    int8 = "int8"
    top_k = "top_k"


_UserFunctionsOption = Annotated[
    list[str] | None, Option(metavar="MODULE:FUNCTION", help="Allow this function or base model.")
]
_DataOption = Annotated[
    str | None, Option(metavar="FUNCTION|FILE", help="This organisation's data.")
]
_DataDirOption = Annotated[Path | None, Option(help="Folder of the data set.")]
_DaysOption = Annotated[
    int,
    Option(min=1, help="Days of validity of the TLS certificate; `peer renew` makes a new one."),
]
_EncryptOption = Annotated[
    bool,
    Option(
        "--encrypt",
        help="Encrypt the private keys with a passphrase, of the file that FEDCB2O_PASSPHRASE_FILE "
        "names, of FEDCB2O_PASSPHRASE, or from the terminal.",
    ),
]
_RelayOption = Annotated[
    Path | None,
    Option(metavar="DIR|RELAY.member.toml", help="Folder or relay for members without a link."),
]


def require_extra() -> None:
    """Import the extra `peer`, except for help."""
    if not {"-h", "--help"} & set(sys.argv):
        import fedcb2o.peer  # noqa: F401


def identity(
    name: Annotated[str, Option(help="Name of the organisation, such as hospital-a.")],
    out: Annotated[Path, Option(metavar="DIR", help="Folder for the keys.")],
    endpoint: Annotated[
        str | None,
        Option(
            metavar="HOST:PORT",
            help="Address for other members. Without it, they reach this one through a relay only.",
        ),
    ] = None,
    days: _DaysOption = 397,
    encrypt: _EncryptOption = False,
) -> Path:
    """Make an organisation's keys, certificates and their public half, NAME.member.toml."""
    from fedcb2o.peer.membership.identity import Identity
    from fedcb2o.peer.membership.passphrase import read_passphrase

    # A name that never exists (RFC 2606) marks a member that only connects to others.
    place = endpoint or f"{name}.invalid:1"
    passphrase = read_passphrase(is_new=True) if encrypt else None
    made = Identity.make(out, name=name, endpoint=place, days=days, passphrase=passphrase)
    print(
        f"{made.folder} has the keys of {name}: keep it secret. Read the fingerprint to the others:"
    )
    print(made.member.fingerprint)
    print("Send them its public half:")
    print(made.folder / f"{name}.member.toml")
    return made.folder


def renew(
    identity: IdentityOption,
    days: _DaysOption = 397,
    out: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Also make a new root, in a new identity with the same signing key, for "
            "`peer amend`.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None, Option(metavar="HOST:PORT", help="With --out: new address for other members.")
    ] = None,
    encrypt: _EncryptOption = False,
) -> Path:
    """Make a new TLS certificate, which the next `peer run` uses."""
    from fedcb2o.peer.membership.identity import Identity
    from fedcb2o.peer.membership.passphrase import read_passphrase

    own_identity = Identity.read(identity)
    if encrypt and own_identity.passphrase is None:
        own_identity = own_identity.encrypt(read_passphrase(is_new=True))
    if out is None:
        if endpoint is not None:
            raise ConfigError(
                "another endpoint needs a new root, and the others have to agree to it: "
                "give --out DIR"
            )
        own_identity.renew(days=days)
    else:
        new_endpoint = endpoint or own_identity.member.endpoint
        own_identity = own_identity.with_endpoint(out, endpoint=new_endpoint, days=days)
        path = own_identity.folder / own_identity.member.name
        print(f"The others take {path}.member.toml by `fedcb2o peer amend --replace`.")
        print(f"Sign versions of federations with {out} from now on, not with {identity}.")
    expiry = f"{own_identity.expires:%Y-%m-%d %H:%M} UTC"
    print(f"{own_identity.tls_certificate} is valid until {expiry}.")
    if out is None:
        print(
            "A running node uses the former certificate until it is started again: stop it, and "
            "start it with --resume (a relay with its own command)."
        )
    return own_identity.folder


def federation(
    experiment: Annotated[
        str,
        Argument(
            metavar="PRESET_OR_FILE.toml",
            help="Experiment of the federation.",
            autocompletion=completion.presets,
        ),
    ],
    member: Annotated[
        list[Path],
        Option(metavar="NAME.member.toml", help="A member, in the order of ids. Repeatable."),
    ],
    out: Annotated[Path, Option(metavar="FEDERATION.toml", help="File to write.")],
    changes: Annotated[
        list[str] | None,
        Option(
            "--set", metavar="KEY=VALUE", help="Change a setting, such as rounds=50. Repeatable."
        ),
    ] = None,
    synchronous: Annotated[
        bool, Option("--synchronous", help="Wait for models of the same round.")
    ] = False,
    round_seconds: Annotated[
        float, Option(min=0, help="Shortest duration of a round in seconds.")
    ] = 0.0,
    deadline_seconds: Annotated[
        float, Option(min=0, help="Seconds that a round waits for answers.")
    ] = 60.0,
    lag: Annotated[int, Option(min=0, help="Number of rounds that a model may be behind.")] = 5,
    encoding: Annotated[
        _Encoding | None,
        Option(help="Encoding of models on the wire. Default: that of the experiment."),
    ] = None,
    share: Annotated[
        float | None,
        Option(help="Share of attackers that rules assume. Default: that of the experiment."),
    ] = None,
    data_dir: _DataDirOption = None,
) -> Path:
    """Write the agreement of all members on one experiment.

    A member that runs with the file agrees to it. Until then it may be edited; all members need
    the same file.
    """
    from fedcb2o.cli.runs import parse_settings
    from fedcb2o.experiments.config.datasets import load_dataset, load_for_data
    from fedcb2o.peer.membership._agreement import make_federation
    from fedcb2o.peer.membership.federation import write_federation
    from fedcb2o.peer.membership.identity import Member

    if out.exists():
        raise ConfigError(f"{out} exists: choose another --out, or `fedcb2o peer amend` it")
    # The members are the agents.
    chosen, _ = load_for_data(experiment, parse_settings(changes), data_dir, len(member))
    made = make_federation(
        chosen,
        [Member.read(path) for path in member],
        dataset=load_dataset(chosen, data_dir),
        synchronous=synchronous,
        round_seconds=round_seconds,
        deadline_seconds=deadline_seconds,
        lag=lag,
        share=share,
        encoding=chosen.agents.encoding if encoding is None else encoding.value,
    )
    write_federation(made, out)
    _print_federation(made, out)
    print(
        "Send the file to each member. The first line of `fedcb2o peer check` is for comparing it "
        "by telephone."
    )
    return out


def amend(
    file: FederationArgument,
    out: Annotated[Path, Option(metavar="FEDERATION.toml", help="New file.")],
    remove: Annotated[
        list[str] | None, Option(metavar="NAME", help="A member to remove. Repeatable.")
    ] = None,
    replace: Annotated[
        list[Path] | None,
        Option(metavar="NAME.member.toml", help="A member's new endpoint or key. Repeatable."),
    ] = None,
    add: Annotated[
        list[Path] | None, Option(metavar="NAME.member.toml", help="A new member. Repeatable.")
    ] = None,
) -> Path:
    """Write the next version, which most present members must sign."""
    from fedcb2o.peer.membership.federation import (
        amend_federation,
        read_federation,
        write_federation,
    )
    from fedcb2o.peer.membership.identity import Member

    if out.exists():
        raise ConfigError(f"{out} exists: choose another --out")
    made = amend_federation(
        read_federation(file, allow_unsigned=True, check_experiment=False),
        remove=remove or [],
        replace=[Member.read(path) for path in replace or []],
        add=[Member.read(path) for path in add or []],
    )
    write_federation(made, out)
    _print_federation(made, out)
    return out


def sign(
    file: FederationArgument,
    identity: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="This organisation's keys. Without it: print the changes and sign nothing.",
        ),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        Option(
            metavar="FEDERATION.toml",
            help="A copy signed by other members, whose signatures are added. Repeatable.",
        ),
    ] = None,
) -> Path:
    """Sign a new version of a federation, or print its changes."""
    from fedcb2o.peer.membership.federation import read_federation, sign_federation
    from fedcb2o.peer.membership.identity import Identity

    if identity is None:
        if merge:
            raise ConfigError("--merge changes the file: give --identity too")
        federation = read_federation(file, allow_unsigned=True, check_experiment=False)
        _print_federation(federation, file)
    else:
        signed = sign_federation(file, Identity.read(identity), merge=merge or [])
        _print_federation(signed, file)
    return file


def _print_federation(federation: "Federation", path: Path) -> None:
    """Print the changes of a version and its missing signatures."""
    print(f"{path}: {federation.verification_phrase}")
    for change in federation.describe_changes():
        print(f"- {change}")
    if federation.version == 1:
        return
    names = [signature.name for signature in federation.versions[-1].signatures]
    if names:
        print(f"Signed by: {', '.join(names)}.")
    if federation.missing_signatures:
        others = ", ".join(federation.unsigned_members())
        print(
            f"It counts when {federation.missing_signatures} more of {others} have signed it. They "
            f"run: fedcb2o peer sign {path} --identity DIR"
        )
    else:
        print(
            "It counts. Send it to all members of this version and the relay's operator; a removed "
            "member needs no file. The relay starts again with it first. Then each member stops "
            "its node, and starts it with this file, --resume and --gather 0."
        )


def proof(
    file: Annotated[
        Path, Argument(metavar="NAME-ROUND.proof.toml", help="A proof of equivocation.")
    ],
    federation: Annotated[
        Path | None,
        Option(
            metavar="FEDERATION.toml",
            help="Federation with the owner of the key; its run must be that of the proof.",
        ),
    ] = None,
) -> None:
    """Verify a proof that a member signed two models for one round."""
    from fedcb2o.peer.membership.federation import read_federation
    from fedcb2o.peer.wire.equivocation import verify_proof

    known = None
    if federation is not None:
        known = read_federation(federation, check_experiment=False)
    print(verify_proof(file, known))


def report(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder of a `peer run`.")],
    out: Annotated[
        Path | None, Option(help="Folder for report.html. Default: the folder of the run.")
    ] = None,
    membership: Annotated[
        bool, Option("--membership", help="Show membership inference against this agent.")
    ] = False,
) -> Path:
    """Write one agent's page: accuracy, gain, peers, weights, refused models, bytes."""
    from fedcb2o.peer.report.node_page import write_node_report

    path = write_node_report(folder, out, membership=membership)
    print(path)
    return path


def demo(
    experiment: Annotated[
        str | None,
        Argument(
            help="Preset or file of an experiment; by default eight organisations with digits, of "
            "which two flip labels and one sends garbage."
        ),
    ] = None,
    out: Annotated[Path, Option(help="Folder for the organisations.")] = Path("runs/peers-demo"),
    rounds: Annotated[
        int | None, Option(min=1, help="Number of rounds; by default 30, or the experiment's.")
    ] = None,
) -> Path:
    """Run organisations on this machine, some of them hostile: one process per agent."""
    from rich.console import Console

    from fedcb2o.peer.node.demo import TABLE_NOTE, run_demo
    from fedcb2o.report import to_rich

    console = Console()
    for title, table in run_demo(out, rounds=rounds, experiment=experiment).items():
        if len(table):
            console.print(to_rich(table, title=title, width=console.width))
    page = f"fedcb2o peer report {out / 'hospital-a'}"
    print(f"{TABLE_NOTE}\n\nA page of each: {page}; their logs are in {out / 'logs'}.")
    return out


def check(
    file: FederationArgument,
    identity: IdentityOption,
    listen: ListenOption = None,
    relay: _RelayOption = None,
    seconds: Annotated[
        float, Option(min=0, help="Seconds to wait for members that do not answer.")
    ] = 20.0,
    data: _DataOption = None,
    data_dir: _DataDirOption = None,
    own: _UserFunctionsOption = None,
) -> None:
    """Check that all members are reachable and agree.

    All members may check at the same time. The first line covers all settings and keys: members
    compare it by telephone. With --data, the data are checked too. The exit status is 0 if all
    members answer and agree, else 1, also while a member is not running yet.
    """
    from fedcb2o import plugins
    from fedcb2o.peer.membership.federation import read_federation
    from fedcb2o.peer.membership.identity import Identity
    from fedcb2o.peer.node import preflight

    plugins.find_modules_beside(file)
    federation = read_federation(file, allowed_functions=own or [])
    own_identity = Identity.read(identity)
    agent_id = federation.id_of(own_identity.member)
    print(f"{federation.verification_phrase}: compare the whole line by telephone")
    for name in federation.user_functions:
        if name not in federation.allowed_functions:
            print(f"names {name}, {plugins.describe_effect(name)}, then --own {name}")
    if data is not None:
        _print_data_sizes(federation, agent_id, data, data_dir)
    results = preflight.check_members(
        federation,
        own_identity,
        seconds=seconds,
        listen=True if listen is None else listen,
        relay=relay,
    )
    print("\n".join(preflight.format_results(results)))
    if any(result.error for result in results):
        raise typer.Exit(1)


def _print_data_sizes(
    federation: "Federation", agent_id: int, data: str, data_dir: Path | None
) -> None:
    """Print the numbers of samples of a member's data."""
    from fedcb2o.peer.node.agent import agent_from_dataset, load_member_dataset

    dataset = load_member_dataset(data, federation, data_dir)
    samples = agent_from_dataset(federation, agent_id, dataset).data
    relation = "more" if federation.experiment.agents.hold_out else "of them"
    print(
        f"the data fit: {samples.train.sizes[0]} samples train, {samples.validation.sizes[0]} "
        f"{relation} judge others' models, {len(samples.test)} test"
    )


def run(
    file: FederationArgument,
    identity: IdentityOption,
    out: Annotated[Path, Option(metavar="DIR", help="Folder of the run.")],
    data: _DataOption = None,
    simulate: Annotated[
        str | None,
        Option(metavar="PRESET_OR_FILE.toml", help="Be an agent of a simulation instead."),
    ] = None,
    data_dir: _DataDirOption = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the last checkpoint.")] = False,
    own: _UserFunctionsOption = None,
    listen: ListenOption = None,
    relay: _RelayOption = None,
    gather: Annotated[
        float, Option(min=0, metavar="SECONDS", help="Wait for others first; 0: no.")
    ] = 60.0,
    linger: Annotated[
        float, Option(min=0, metavar="SECONDS", help="Serve others at the end.")
    ] = 300.0,
    metrics: MetricsOption = None,
    measure: Annotated[
        list[str] | None,
        Option(metavar="METRIC", help="Record this metric, too."),
    ] = None,
    assess_every: Annotated[
        int, Option(min=0, metavar="ROUNDS", help="Measure the gain; 0: no.")
    ] = 1,
) -> Path:
    """Train as one agent of a federation and write its final model.

    Example: fedcb2o peer run federation.toml --identity keys --data my_hospital:dataset
    --out runs/hospital-a
    """
    from fedcb2o import plugins
    from fedcb2o.experiments.config.datasets import load_for_data
    from fedcb2o.peer.membership.federation import read_federation
    from fedcb2o.peer.node.agent import load_member_dataset
    from fedcb2o.peer.node.metrics import NodeMetrics
    from fedcb2o.peer.node.node import Node
    from fedcb2o.peer.report.live_table import LiveTable
    from fedcb2o.peer.report.peer_records import PeerRecords
    from fedcb2o.peer.report.round_log import RoundLog

    if (data is None) == (simulate is None):
        raise ConfigError(
            "give this organisation's data by --data MODULE:FUNCTION or FILE.npz (or --simulate a "
            "preset)"
        )
    plugins.find_modules_beside(file)
    federation = read_federation(file, allowed_functions=own or [])
    names = {id: member.name for id, member in federation.members.items()}
    dataset = None if data is None else load_member_dataset(data, federation, data_dir)
    simulation = None
    if simulate is not None:
        simulation, _ = load_for_data(simulate, None, data_dir, federation.num_agents)
    node = Node(
        federation,
        identity,
        dataset,
        simulate=simulation,
        data_dir=data_dir,
        out=out,
        resume=resume,
        listen=True if listen is None else listen,
        relay=relay,
        gather=gather,
        linger=linger,
        assess_every=assess_every,
        metrics=measure or (),
    )
    table = LiveTable(names, agent_id=node.agent_id, rounds=federation.rounds)
    if has_log_settings():
        table = RoundLog(
            names, agent_id=node.agent_id, rounds=federation.rounds, has_table=has_log_file()
        )
    with contextlib.ExitStack() as stack:
        node.observer = stack.enter_context(table)
        if metrics is not None:
            node.observer = stack.enter_context(
                NodeMetrics(
                    table,
                    metrics,
                    name=names[node.agent_id],
                    rounds=federation.rounds,
                    round_seconds=federation.round_seconds + federation.deadline_seconds,
                    expires=node.identity.expires,
                )
            )
        node.run()

    peers = federation.members.keys() - {node.agent_id}
    missing = PeerRecords.read(out).missing_models(peers)
    files = f"{out / 'model.safetensors'}. For a page: fedcb2o peer report {out}"
    if not missing:
        _LOGGER.info("Done: %s", files)
        return out
    reasons = [f"{name} ({reason})" for name, reason in missing.items()]
    listed = ", ".join(reasons[:_MAX_LISTED_NAMES])
    if len(reasons) > _MAX_LISTED_NAMES:
        listed += f" and {len(reasons) - _MAX_LISTED_NAMES} more"
    remedy = f"fedcb2o peer check {file} --identity {identity}"
    _LOGGER.warning("Done, but no model was ever used of %s: %s", listed, remedy)
    _LOGGER.info("%s", files)
    return out
