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


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a `peer run`.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Where report.html goes. Default: into that folder.")] = None,
) -> Path:
    """Write one agent's page: accuracy, whom it asked, who answered how fast, weights, what was refused, bytes."""
    from fedcb2o.peer.report import report as write_report

    path = write_report(folder, out)
    print(path)
    return path


def demo(
    out: Annotated[Path, typer.Option(help="Where all eight write to.")] = Path("runs/peers-demo"),
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds.")] = 30,
) -> Path:
    """Run eight organisations on this machine, a process each: two flip labels, one sends garbage."""
    from rich.console import Console

    from fedcb2o.peer.demo import demo as run_demo
    from fedcb2o.report.render import to_rich

    console = Console()
    for title, table in run_demo(out, rounds=rounds).items():
        console.print(to_rich(table, title=title, width=console.width))
    print(f"\nA page of each: fedcb2o peer report {out / 'hospital-a'}; their logs are in {out / 'logs'}.")
    return out
