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
