"""The commands for real peers: identity, renew, federation, amend, sign, check, run, report, proof, demo."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcb2o.cli import completion
from fedcb2o.errors import ConfigError

if TYPE_CHECKING:
    from fedcb2o.peer.membership.federation import Federation


class _Encoding(StrEnum):
    """How models are sent."""

    float32 = "float32"
    int8 = "int8"


_FederationArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FEDERATION.toml", help="What all members agreed on.", show_default=False
    ),
]
_IdentityOption = Annotated[
    Path,
    typer.Option("--identity", metavar="DIR", help="This organisation's keys.", show_default=False),
]
_UserFunctionsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Let this function run, which the federation names. Repeatable.",
    ),
]
_DataOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION|FILE.npz", help="This organisation's data.", show_default=False
    ),
]
_DaysOption = Annotated[
    int,
    typer.Option(
        min=1, help="How long the TLS certificate is valid; `peer renew` makes a new one."
    ),
]


def require_extra() -> None:
    """Agents of different organisations, one process each."""
    if not {"-h", "--help"} & set(sys.argv):  # help is given without the extra too
        import fedcb2o.peer  # noqa: F401


def identity(
    name: Annotated[
        str, typer.Option(help="The organisation's name, such as hospital-a.", show_default=False)
    ],
    endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where others reach it.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the keys go.", show_default=False)
    ],
    days: _DaysOption = 397,
) -> Path:
    """Make an organisation's keys and certificates, and NAME.member.toml, the public half to send to the others."""
    from fedcb2o.peer.membership.identity import Identity

    made = Identity.make(out, name=name, endpoint=endpoint, days=days)
    print(
        f"{made.folder} holds the keys of {name}: keep it to yourself. Its fingerprint, to be read to the others:"
    )
    print(made.member.fingerprint)
    print("Send them this file of it:")
    print(made.folder / f"{name}.member.toml")
    return made.folder


def renew(
    identity: _IdentityOption,
    days: _DaysOption = 397,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Make a new root too, in an identity here with the same signing key: for `peer amend`.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --out: where others reach it from now on."),
    ] = None,
) -> Path:
    """Make a new TLS certificate, which the others need not be told of; it counts when `peer run` starts again."""
    from fedcb2o.peer.membership.identity import Identity

    mine = Identity.read(identity)
    if out is None:
        if endpoint is not None:
            raise ConfigError(
                "another endpoint needs a new root, which the others have to agree to: give --out DIR"
            )
        mine.renew(days=days)
    else:
        mine = mine.with_endpoint(out, endpoint=endpoint or mine.member.endpoint, days=days)
        print(
            f"The others take {mine.folder / mine.member.name}.member.toml by `fedcb2o peer amend --replace`."
        )
    print(f"{mine.tls_certificate} is valid until {mine.expires:%Y-%m-%d %H:%M} UTC.")
    return mine.folder


def federation(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="PRESET_OR_FILE.toml",
            help="What the members train.",
            show_default=False,
            autocompletion=completion.presets,
        ),
    ],
    member: Annotated[
        list[Path],
        typer.Option(
            metavar="NAME.member.toml",
            help="A member, in the order of ids. Repeatable.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FEDERATION.toml", help="The file to write.", show_default=False)
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting, such as rounds=50. Repeatable."
        ),
    ] = None,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Wait for models of the same round.")
    ] = False,
    round_seconds: Annotated[
        float, typer.Option(min=0, help="How long a round takes at least.")
    ] = 0.0,
    deadline_seconds: Annotated[
        float, typer.Option(min=0, help="How long a round waits for answers.")
    ] = 60.0,
    lag: Annotated[int, typer.Option(min=0, help="How many rounds a model may be behind.")] = 5,
    encoding: Annotated[_Encoding, typer.Option(help="How models are sent.")] = _Encoding.float32,
    share: Annotated[
        float | None,
        typer.Option(help="The attackers' share that rules assume. Default: the experiment's."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files lie.")] = None,
) -> Path:
    """Write what all members agree on: the experiment whose agents they are, and the members.

    Who runs with the file agrees to it. It may be edited until then, and is the same file for all.
    """
    from fedcb2o.cli.runs import parse_settings
    from fedcb2o.experiments.config.datasets import load_dataset
    from fedcb2o.experiments.config.settings import load
    from fedcb2o.peer.membership.federation import make_federation, write_federation
    from fedcb2o.peer.membership.identity import Member

    if out.exists():
        raise ConfigError(f"{out} is there: choose another --out, or `fedcb2o peer amend` it")
    chosen = load(experiment, parse_settings(changes))
    made = make_federation(
        chosen,
        [Member.read(path) for path in member],
        dataset=load_dataset(chosen, data_dir),
        synchronous=synchronous,
        round_seconds=round_seconds,
        deadline_seconds=deadline_seconds,
        lag=lag,
        encoding=encoding.value,
        share=share,
    )
    write_federation(made, out)
    _print_federation(made, out)
    print(
        "Send the file to each of them; `fedcb2o peer check` shows them the run's id, to be compared by telephone."
    )
    return out


def amend(
    file: _FederationArgument,
    out: Annotated[
        Path, typer.Option(metavar="FEDERATION.toml", help="The new file.", show_default=False)
    ],
    remove: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A member to remove. Repeatable.")
    ] = None,
    replace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="NAME.member.toml",
            help="A member's new certificate, endpoint or key. Repeatable.",
        ),
    ] = None,
    add: Annotated[
        list[Path] | None,
        typer.Option(metavar="NAME.member.toml", help="A new member. Repeatable."),
    ] = None,
) -> Path:
    """Write the next version, with other members; it counts when more than half of those so far signed it."""
    from fedcb2o.peer.membership.federation import (
        amend_federation,
        read_federation,
        write_federation,
    )
    from fedcb2o.peer.membership.identity import Member

    if out.exists():
        raise ConfigError(f"{out} is there: choose another --out")
    replaced, added = ([Member.read(path) for path in paths or []] for paths in (replace, add))
    made = amend_federation(
        read_federation(file, allow_unsigned=True), remove=remove or [], replace=replaced, add=added
    )
    write_federation(made, out)
    _print_federation(made, out)
    return out


def sign(
    file: _FederationArgument,
    identity: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="This organisation's keys. Without: tell what it changes, and sign nothing.",
        ),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FEDERATION.toml",
            help="A copy that others signed: take its signatures. Repeatable.",
        ),
    ] = None,
) -> Path:
    """Agree to a new version of a federation: add this member's signature to the file, or look at it before."""
    from fedcb2o.peer.membership import federation
    from fedcb2o.peer.membership.identity import Identity

    if identity is None and merge:
        raise ConfigError("--merge changes the file: give --identity too")
    if identity is None:
        _print_federation(federation.read_federation(file, allow_unsigned=True), file)
    else:
        _print_federation(
            federation.sign_federation(file, Identity.read(identity), merge=merge or []), file
        )
    return file


def _print_federation(federation: "Federation", path: Path) -> None:
    """What a version changes, and who may still sign it."""
    print(f"{path}: {federation.verification_phrase}")
    for change in federation.describe_changes():
        print(f"- {change}")
    if federation.version == 1:
        return
    if names := [each.name for each in federation.versions[-1].signatures]:
        print(f"Signed by: {', '.join(names)}.")
    if federation.missing_signatures:
        others = ", ".join(federation.unsigned_members())
        print(
            f"It counts when {federation.missing_signatures} more of {others} have signed it: "
            f"fedcb2o peer sign {path} --identity DIR"
        )
    else:
        print(
            "It counts. Send it to all; each stops its node, and starts it again with this file and --resume."
        )


def proof(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="NAME-ROUND.proof.toml", help="A proof of equivocation.", show_default=False
        ),
    ],
    federation: Annotated[
        Path | None,
        typer.Option(
            metavar="FEDERATION.toml", help="Says whose the key is, and whether it is of this run."
        ),
    ] = None,
) -> None:
    """Check, offline, a file that shows that a member signed two different models for one round."""
    from fedcb2o.peer.membership.federation import read_federation
    from fedcb2o.peer.wire.equivocation import verify_proof

    print(verify_proof(file, None if federation is None else read_federation(federation)))


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a `peer run`.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where report.html goes. Default: into that folder.")
    ] = None,
) -> Path:
    """Write one agent's page: accuracy, whom it asked, who answered how fast, weights, what was refused, bytes."""
    from fedcb2o.peer.report.node_page import write_node_report as write_report

    path = write_report(folder, out)
    print(path)
    return path


def demo(
    out: Annotated[Path, typer.Option(help="Where all eight write to.")] = Path("runs/peers-demo"),
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds.")] = 30,
) -> Path:
    """Run eight organisations on this machine, a process each: two flip labels, one sends garbage."""
    from rich.console import Console

    from fedcb2o.peer.node.demo import TABLE_NOTE
    from fedcb2o.peer.node.demo import run_demo as run_demo
    from fedcb2o.report.table_formats import to_rich

    console = Console()
    for title, table in run_demo(out, rounds=rounds).items():
        console.print(to_rich(table, title=title, width=console.width))
    print(
        f"{TABLE_NOTE}\n\nA page of each: fedcb2o peer report {out / 'hospital-a'}; their logs are in {out / 'logs'}."
    )
    return out


def check(
    file: _FederationArgument,
    identity: _IdentityOption,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="What to bind, where it is not the endpoint: 0.0.0.0:7447."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long to wait for those who do not answer.")
    ] = 20.0,
    data: _DataOption = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files lie.")] = None,
    own: _UserFunctionsOption = None,
) -> None:
    """Can I reach everybody, and do we agree? A line a member with the cure; all may check at the same time.

    Before it, the run's id to be compared with the others, and with --data whether these data fit. Ends with exit
    status 1 where something is wrong.
    """
    from fedcb2o.peer.membership.federation import read_federation
    from fedcb2o.peer.membership.identity import Identity
    from fedcb2o.peer.node import agent
    from fedcb2o.peer.node import preflight as checking

    agreed = read_federation(file, allowed_functions=own or [])
    mine = Identity.read(identity)
    me = agreed.id_of(mine.member)
    print(f"{agreed.verification_phrase}: compare this by telephone")
    for part in agreed.user_functions:
        if part not in agreed.allowed_functions:
            print(f"names {part}, code that would run here: read it, then --own {part}")
    if data is not None:
        held = agent.agent_from_dataset(
            agreed, me, agent.load_member_dataset(data, agreed, data_dir)
        ).data
        which = "more" if agreed.experiment.agents.hold_out else "of them"
        judging = f"{held.validation.sizes[0]} {which} judge others' models"
        print(
            f"the data fit: {held.train.sizes[0]} samples train, {judging}, {len(held.test)} test"
        )
    found = checking.check_members(
        agreed, mine, seconds=seconds, listen=True if listen is None else listen
    )
    print("\n".join(checking.format_results(found)))
    if any(each.error for each in found):
        raise typer.Exit(1)


def run(
    file: _FederationArgument,
    identity: _IdentityOption,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run's folder.", show_default=False)],
    data: _DataOption = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET_OR_FILE.toml",
            help="Be an agent of a simulation instead: its data, and its attack.",
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's files lie.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    own: _UserFunctionsOption = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="What to bind, where it is not the endpoint: 0.0.0.0:7447."
        ),
    ] = None,
    gather: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the others at the start.")
    ] = 60.0,
    linger: Annotated[
        float, typer.Option(min=0, help="Seconds to serve others that are not done, at the end.")
    ] = 300.0,
) -> Path:
    """Train as one agent of a federation: serve one's model, ask, judge and mix, and write the final model.

    Example: fedcb2o peer run federation.toml --identity keys --data my_hospital:dataset --out runs/hospital-a
    """
    from fedcb2o.experiments.config.settings import load
    from fedcb2o.peer.membership.federation import read_federation
    from fedcb2o.peer.node.agent import load_member_dataset
    from fedcb2o.peer.node.node import Node
    from fedcb2o.peer.report.live_table import LiveTable
    from fedcb2o.peer.report.peer_records import PeerRecords

    if (data is None) == (simulate is None):
        raise ConfigError(
            "give this organisation's data by --data MODULE:FUNCTION or FILE.npz (or --simulate a preset)"
        )
    federation = read_federation(file, allowed_functions=own or [])
    names = {id: member.name for id, member in federation.members.items()}
    node = Node(
        federation,
        identity,
        None if data is None else load_member_dataset(data, federation, data_dir),
        simulate=None if simulate is None else load(simulate),
        data_dir=data_dir,
        out=out,
        resume=resume,
        listen=True if listen is None else listen,
        gather=gather,
        linger=linger,
    )
    with LiveTable(names, agent_id=node.agent_id, rounds=federation.rounds) as node.observer:
        node.run()
    untaken = PeerRecords.read(out).missing_models(federation.members.keys() - {node.agent_id})
    if untaken:
        told = ", ".join(f"{name} ({why})" for name, why in list(untaken.items())[:5])
        more = f" and {len(untaken) - 5} more" if len(untaken) > 5 else ""
        cure = f"fedcb2o peer check {file} --identity {identity}"
        print(f"Done, but no model was ever taken of {told}{more}: {cure}", file=sys.stderr)
    page = f"For a page: fedcb2o peer report {out}"
    print(f"{'Done: ' if not untaken else ''}{out / 'model.safetensors'}. {page}", file=sys.stderr)
    return out
