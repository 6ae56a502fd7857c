"""TLS ends of a link: certificates of both ends, and the member at the other end.

TLS accepts any certificate under a trusted root. The member of a link is the one whose root issued
the certificate directly. No other name in a certificate counts.
"""

import ssl
import traceback
from collections.abc import Iterable
from datetime import datetime

from cryptography import x509
from cryptography.x509.oid import NameOID

from fedcb2o.peer.membership.certificates import is_direct_issuer
from fedcb2o.peer.membership.identity import Identity, Member


def server_context(
    identity: Identity, members: Iterable[Member], *, has_clients: bool = True
) -> ssl.SSLContext:
    """Return a listening end's certificates; it accepts those of members, or asks for none."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, (member.root for member in members))
    context.verify_mode = ssl.CERT_REQUIRED if has_clients else ssl.CERT_NONE
    # Without resumption every link shows a certificate that is valid now.
    context.num_tickets = 0
    return context


def client_context(identity: Identity, member: Member) -> ssl.SSLContext:
    """Return the certificates of a dialling end, which accepts those of one member only."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity, [member.root])


def _context(protocol: int, identity: Identity, roots: Iterable[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    context.load_verify_locations(cadata="".join(roots))
    # Without a password, OpenSSL would ask for one on the terminal.
    password = identity.passphrase or b""
    context.load_cert_chain(identity.tls_certificate, identity.tls_key, password)
    return context


def remote_member(connection: ssl.SSLSocket, members: Iterable[Member]) -> tuple[Member, datetime]:
    """Return the member at the other end, and the expiry of its certificate.

    It is the first one whose root issued the certificate directly. Without one, the error is that
    of a certificate that TLS refuses.
    """
    certificate = x509.load_der_x509_certificate(connection.getpeercert(True) or b"")
    names = certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    # By the name first, because a signature takes longer to verify.
    for member in members:
        is_issuer = [name.value for name in names] == [member.name]
        if is_issuer and is_direct_issuer(member.root, certificate):
            return member, certificate.not_valid_after_utc
    error = ssl.SSLCertVerificationError()
    error.verify_message = "no root of a member issued the certificate directly"
    error.reason = "CERTIFICATE_VERIFY_FAILED"
    raise error


def close_wrapped(error: Exception) -> None:
    """Close the socket that `wrap_socket` made and leaves open where it fails (Python 3.11)."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        wrapped = frame.f_locals.get("self")
        if isinstance(wrapped, ssl.SSLSocket):
            wrapped.close()
