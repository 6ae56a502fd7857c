"""The commands for real peers: identity, renew, federation, sign, check, run, report, proof, demo."""

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[
    Path, typer.Argument(metavar="FEDERATION.toml", help="What all members agreed on.", show_default=False)
]
Mine = Annotated[Path, typer.Option("--identity", metavar="DIR", help="This organisation's keys.", show_default=False)]


def identity(
    name: Annotated[str, typer.Option(help="The organisation's name, such as hospital-a.", show_default=False)],
    endpoint: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where others reach it.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the keys go.", show_default=False)],
    days: Annotated[
        int, typer.Option(min=1, help="How long the TLS certificate is valid; `peer renew` makes a new one.")
    ] = 397,
) -> Path:
    """Make an organisation's keys and certificates, and NAME.member.toml, the public half to send to the others."""
    from fedcb2o.peer.identity import Identity

    made = Identity.make(out, name=name, endpoint=endpoint, days=days)
    print(made.folder / f"{name}.member.toml")
    return made.folder


def proof(
    file: Annotated[
        Path, typer.Argument(metavar="NAME-ROUND.proof.toml", help="A proof of equivocation.", show_default=False)
    ],
    federation: Annotated[
        Path | None,
        typer.Option(metavar="FEDERATION.toml", help="Says whose the key is, and whether it is of this run."),
    ] = None,
) -> str:
    """Check, offline, a file that shows that a member signed two different models for one round."""
    from fedcb2o.peer.federation import read
    from fedcb2o.peer.ledger import check_proof

    found = check_proof(file, None if federation is None else read(federation))
    print(found)
    return found
