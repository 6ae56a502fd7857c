"""The commands that operate a peer: backup and restore."""

from pathlib import Path
from typing import Annotated

import typer

_KeysOption = Annotated[
    Path,
    typer.Option("--identity", metavar="DIR", help="This organisation's keys.", show_default=False),
]
_RunOption = Annotated[
    Path, typer.Option("--run", metavar="DIR", help="Folder of the run.", show_default=False)
]


def backup(
    identity: _KeysOption,
    run: _RunOption,
    out: Annotated[
        Path, typer.Option(metavar="FILE.tar.gz", help="File to write.", show_default=False)
    ],
) -> Path:
    """Write keys and run of a node to one file; the node may run."""
    from fedcb2o.peer.node._backup import back_up

    back_up(identity, run, out)
    print(f"{out} holds the private keys: keep it as secret as {identity}.")
    return out


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", show_default=False)],
    identity: _KeysOption,
    run: _RunOption,
) -> Path:
    """Restore keys and run from a backup; the node of the backup must not run any more."""
    from fedcb2o.peer.node import _backup

    _backup.restore(file, identity, run)
    print(
        f"Go on with: fedcb2o peer run {run / 'federation.toml'} --identity {identity} --out {run} "
        "--resume and the options of before."
    )
    return run
