"""Diagnosis of an unreachable member by one HTTPS request."""

import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.x509.oid import NameOID
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
)

from fedcb2o.errors import ConfigError
from fedcb2o.peer.membership.certificates import parse_endpoint
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.dialer import STATE_BYTES, STATE_TARGET, Pool, proxy_of, tls_error
from fedcb2o.peer.wire.protocol import MalformedError
from fedcb2o.peer.wire.tls import client_context, remote_member

_TIMEOUT_SECONDS = 5.0
# By their texts, because OpenSSL, the kernel and http.client have types of their own for it.
_CLOSED = ("EOF occurred", "reset", "Remote end closed")  # by the other end


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe.

    `error` says why no link can be made and how to repair it; it is empty if one can be made.
    `expires` is None if the member's certificate was not seen. `is_closed` says that its machine
    answers, and no program has the port.
    """

    error: str = ""
    expires: datetime | None = None
    is_refused: bool = False
    is_closed: bool = False


def probe_member(member: Member, identity: Identity) -> ProbeResult:
    """Send a member a request as a link does, trusting only its root; raise nothing."""
    if member.is_outbound_only:
        return ProbeResult(
            f"{member.name} can be reached through a relay only: give --relay, and start "
            "`fedcb2o peer run` or `peer check` there with the same one"
        )
    expiries = list[datetime]()

    def note_certificate(connection: ssl.SSLSocket) -> None:
        expiries.append(remote_member(connection, [member])[1])

    is_refused = is_closed = False
    try:
        end = time.monotonic() + _TIMEOUT_SECONDS
        with Pool(member, client_context(identity, member), 1, note_certificate) as pool:
            code, _ = pool.exchange("GET", STATE_TARGET, end=end, max_bytes=STATE_BYTES)
        error = "" if code == 200 else f"{member.endpoint} answers with {code}: another program?"
    except MalformedError:
        error = f"{member.endpoint} answers something else: another program?"
    except ConfigError as problem:
        error = str(problem)
    except (HTTPError, OSError, ValueError) as problem:
        is_refused = is_refusal(problem)
        is_closed = _is_closed_port(problem)
        error = describe_failure(member, problem, has_linked=bool(expiries))
    return ProbeResult(error, expiries[-1] if expiries else None, is_refused, is_closed)


def is_refusal(error: BaseException) -> bool:
    """Say whether the other end refused the certificate of this one."""
    failure = tls_error(error)
    return failure is not None and "ALERT" in (failure.reason or "")


def _is_closed_port(error: BaseException) -> bool:
    """Say whether the member's machine answers that no program has the port."""
    return "Connection refused" in str(error) and not isinstance(error, ProxyError)


def describe_failure(
    member: Member,
    error: Exception,
    program: str = "`fedcb2o peer run` or `peer check`",
    *,
    has_linked: bool = False,
) -> str:
    """Describe why no request reached a member or relay, whose certificate may have been seen."""
    if isinstance(error, OSError) and isinstance(error.__cause__, HTTPError):
        error = error.__cause__
    place = member.endpoint
    proxy = proxy_of(str(parse_endpoint(place)[0])).rpartition("@")[2]
    failure = tls_error(error)
    if isinstance(error, ProxyError) or "Tunnel connection failed" in str(error):
        return (
            f"the proxy {proxy} lets no connection to {place} through ({_cause(error)}): ask its "
            "operator to allow CONNECT to this host and port, check the name and password in "
            "HTTPS_PROXY, or set NO_PROXY for this host"
        )
    if isinstance(error, NameResolutionError | socket.gaierror):
        return f"the name in {place} is unknown: correct it there, or in this machine's DNS"
    if isinstance(failure, ssl.SSLCertVerificationError):
        return _certificate_error(member, failure)
    if failure is not None and not isinstance(failure, ssl.SSLEOFError):
        return _tls_error(member, failure)
    if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
        return (
            f"{place} does not answer: a firewall in between, or the machine is off; its port must "
            "be open. In a network that lets out only HTTPS through a proxy, set HTTPS_PROXY"
        )
    if _is_closed_port(error):
        return (
            f"{place} refuses connections: start {program} there, or open its port (or it has "
            "finished)"
        )
    if has_linked or any(text in str(error) for text in _CLOSED):
        kind = "does not answer" if isinstance(error, ReadTimeoutError) else "closes the connection"
        return (
            f"{place} {kind}: it is busy or ending, or has fedcb2o 0.2 or older: 0.3 speaks HTTPS, "
            "and all members must update"
        )
    return f"{place} cannot be reached: {_cause(error)}"


def _cause(error: BaseException) -> str:
    cause = error.args[1] if len(error.args) > 1 and isinstance(error, HTTPError) else error
    while isinstance(cause, HTTPError) and isinstance(cause.__cause__, OSError):
        cause = cause.__cause__
    return cause.strerror or str(cause) if isinstance(cause, OSError) else str(cause)


def _certificate_error(member: Member, error: ssl.SSLCertVerificationError) -> str:
    """Describe a certificate that the member's root does not verify."""
    if "expired" in error.verify_message:
        return (
            f"its certificate has expired: `fedcb2o peer renew` on {member.name}'s machine, and "
            "start again"
        )
    if "not yet valid" in error.verify_message:
        return "its certificate is not valid yet: the clock of one of the two machines is wrong"
    # The name of a proxy's authority says which operator can exempt this host.
    issuer = _issuer_of(member)
    if issuer and issuer != member.name:
        return (
            f"a program with a certificate by {issuer!r} answers in place of {member.name}: a "
            "proxy or virus scanner that ends TLS itself (exempt this host from inspection, or use "
            "a relay with --signatures-only, and its authority in FEDCB2O_PROXY_CA), another "
            "program, or a new identity of the member, which needs a new version of the federation"
        )
    return (
        f"the program at {member.endpoint} has no certificate of {member.name} "
        f"({error.verify_message}): another program, or a new identity, which needs a new version "
        "of the federation"
    )


def _issuer_of(member: Member) -> str:
    """Return who issued the certificate at an endpoint, as printable text; empty if unknown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Nothing is sent: only the certificate is read.
    context.verify_mode = ssl.CERT_NONE
    seen = list[bytes]()

    def note_certificate(connection: ssl.SSLSocket) -> None:
        seen.append(connection.getpeercert(True) or b"")
        # Before a request goes to a program that is not the member.
        raise ConnectionAbortedError

    end = time.monotonic() + _TIMEOUT_SECONDS
    with (
        suppress(HTTPError, OSError, ValueError),
        Pool(member, context, 1, note_certificate) as pool,
    ):
        pool.exchange("GET", STATE_TARGET, end=end, max_bytes=STATE_BYTES)
    with suppress(IndexError, ValueError):
        issuer = x509.load_der_x509_certificate(seen[0]).issuer
        names = issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
        text = str(names[0].value)[:60]
        return "".join(one for one in text if one.isascii() and one.isprintable())
    return ""


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
