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

    Attributes:
        error: Why no link can be made and how to repair it; empty if a link can be made.
        expires: Expiry of the member's certificate, if it was seen.
        is_refused: The member refuses our certificate.
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

    Args:
        member: The member.
        identity: This organisation.
        is_linked: A link exists, so that only the certificate's expiry is of interest.
        program: The command that listens there, for the remedy.

    Returns:
        The result; an unreachable member raises nothing.
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
