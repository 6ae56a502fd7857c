"""Diagnosis of an unreachable member by one plain TLS connection."""

import socket
import ssl
import time
from dataclasses import dataclass
from datetime import datetime

from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire._link import TlsStream
from fedcb2o.peer.wire._tls import dial

_TIMEOUT_SECONDS = 5.0
"""Time for a connection, and for a handshake."""
_REFUSAL_SECONDS = 0.5


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe.

    `error` says why no link can be made and how to repair it; it is empty if one can be made.
    `expires` is None if the member's certificate was not seen.
    """

    error: str = ""
    expires: datetime | None = None
    is_refused: bool = False


def _await_refusal(stream: TlsStream) -> None:
    """Wait for the alert of a member that refuses our certificate; TimeoutError without one."""
    try:
        stream.read_exactly(1, time.monotonic() + _REFUSAL_SECONDS)
    except ConnectionResetError:
        raise
    except ConnectionError:
        return  # the member closed the connection


def probe_member(
    member: Member,
    identity: Identity,
    *,
    is_linked: bool = False,
    program: str = "`fedcb2o peer run` or `peer check`",
) -> ProbeResult:
    """Connect to a member as a link does, trusting only its root.

    An unreachable member raises nothing. If a link exists (`is_linked`), only the certificate's
    expiry is of interest. The remedy names `program` as the command that listens there.
    """
    if member.is_outbound_only:
        return ProbeResult(
            f"{member.name} can be reached through a relay only: give --relay, and start "
            "`fedcb2o peer run` or `peer check` there with the same one"
        )
    expires = None
    try:
        stream, expires = dial(identity, member, _TIMEOUT_SECONDS)
        try:
            if not is_linked:
                # In TLS 1.3 the dialling end completes its handshake before the other one has
                # checked it.
                _await_refusal(stream)
        finally:
            stream.release()
    except TimeoutError:
        return ProbeResult("" if expires else _timeout_error(member), expires)
    except socket.gaierror:
        return ProbeResult(
            f"the name in {member.endpoint} is unknown: correct it there, or in this machine's DNS"
        )
    except ConnectionRefusedError:
        return ProbeResult(
            f"{member.endpoint} refuses connections: start {program} there, or open its port (or "
            "it has finished)"
        )
    except ssl.SSLCertVerificationError as error:
        return ProbeResult(_certificate_error(member, error))
    except ssl.SSLError as error:
        is_refused = "ALERT" in (error.reason or "")
        return ProbeResult(_tls_error(member, error), expires, is_refused)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return ProbeResult(f"{member.endpoint} cannot be reached: {reason}", expires)
    return ProbeResult("", expires)


def _timeout_error(member: Member) -> str:
    return (
        f"{member.endpoint} does not answer: a firewall in between, or the machine is off; its "
        "port must be open"
    )


def _certificate_error(member: Member, error: ssl.SSLCertVerificationError) -> str:
    """Describe a certificate that the member's root does not verify."""
    if "expired" in error.verify_message:
        return (
            f"its certificate has expired: `fedcb2o peer renew` on {member.name}'s machine, and "
            "start again"
        )
    if "not yet valid" in error.verify_message:
        return "its certificate is not valid yet: the clock of one of the two machines is wrong"
    return (
        f"the program at {member.endpoint} has no certificate of {member.name} "
        f"({error.verify_message}): another program, or a new identity, which needs a new version "
        "of the federation"
    )


def _tls_error(member: Member, error: ssl.SSLError) -> str:
    """Describe a refused or failed handshake."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason:
        return (
            f"{member.name} refuses our certificate ({reason}): it may hold a newer version of the "
            "federation, in which we are changed or removed (ask for its file), or one from before "
            "we joined; or a clock is wrong"
        )
    return f"the program at {member.endpoint} speaks no TLS ({reason}): another program?"
