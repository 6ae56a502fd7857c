"""The commands that operate peers: relay, backup and restore."""

import contextlib
import logging
import threading
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedcb2o.cli.signals import ServiceEndedError

_LOGGER = logging.getLogger(__name__)

_RunOption = Annotated[Path, Option("--run", metavar="DIR", help="Folder of the run.")]
FederationArgument = Annotated[
    Path, Argument(metavar="FEDERATION.toml", help="Agreement of all members.")
]
IdentityOption = Annotated[
    Path, Option("--identity", metavar="DIR", help="This organisation's keys.")
]
ListenOption = Annotated[
    str | None,
    Option(
        metavar="HOST:PORT", help="Address to bind instead of the endpoint, such as 0.0.0.0:7447."
    ),
]
MetricsOption = Annotated[
    int | None, Option(metavar="PORT", min=0, max=65535, help="Port of /metrics and /health.")
]


def relay(
    file: FederationArgument,
    identity: Annotated[
        Path, Option(metavar="DIR", help="The relay's own keys, of `peer identity`.")
    ],
    listen: ListenOption = None,
    folder: Annotated[
        Path | None, Option(help="Folder of waiting messages. Default: a temporary one.")
    ] = None,
    metrics: MetricsOption = None,
    signatures_only: Annotated[
        bool,
        Option("--signatures-only", help="Ask for no certificate: for members behind inspection."),
    ] = False,
) -> None:
    """Pass encrypted messages on between members that accept no connections.

    The relay is no member. It cannot read or change what it passes on.
    """
    from fedcb2o.peer.membership.federation import read_federation
    from fedcb2o.peer.membership.identity import Identity
    from fedcb2o.peer.wire.relay import Relay, release_freed_memory
    from fedcb2o.peer.wire.relay_metrics import RelayMetrics

    federation = read_federation(file, check_experiment=False)
    keys = Identity.read(identity)
    release_freed_memory()
    try:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(
                Relay(
                    federation,
                    keys,
                    listen=listen,
                    folder=folder,
                    signatures_only=signatures_only,
                )
            )
            if metrics is not None:
                stack.enter_context(RelayMetrics(server, metrics, expires=keys.expires))
            endpoint = keys.member.endpoint
            _LOGGER.info("Relays for %s at %s.", federation.verification_phrase, endpoint)
            # The event is never set: a signal ends the relay.
            server.run(threading.Event())
    except KeyboardInterrupt as error:
        raise ServiceEndedError(
            "The nodes connect again by themselves when the relay runs again."
        ) from error


def backup(
    identity: IdentityOption,
    run: _RunOption,
    out: Annotated[Path, Option(metavar="FILE.tar.gz", help="File to write.")],
) -> Path:
    """Write keys and run of a node to one file; the node may run."""
    from fedcb2o.peer._backup import back_up

    back_up(identity, run, out)
    print(f"{out} holds the private keys: keep it as secret as {identity}.")
    return out


def restore(
    file: Annotated[Path, Argument(metavar="FILE.tar.gz")],
    identity: IdentityOption,
    run: _RunOption,
) -> Path:
    """Restore keys and run from a backup; the node of the backup must not run any more."""
    from fedcb2o.peer import _backup

    version = _backup.restore(file, identity, run)
    print(f"{identity} has the keys, and {run} the run, both as they were in the backup.")
    print(
        f"The backup is from version {version} of the federation. If the members signed a later "
        "one since, that one is in force: take its file."
    )
    print(
        f"Go on with: fedcb2o peer run federation.toml --identity {identity} --out {run} --resume "
        "and the options of before, where federation.toml is the file of the version in force "
        f"({run / 'federation.toml'} is that of the backup)."
    )
    return run
