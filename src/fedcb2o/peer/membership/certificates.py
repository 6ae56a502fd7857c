"""Certificates of one organisation: its own authority and its TLS certificate.

A bundle with the roots of several members would let each of them sign for any name. Name
constraints therefore bind a root to its member: it may sign only for the member's name and host. A
client that connects to a host accepts no certificate of another member. The common name stays
unconstrained, because rustls refuses every certificate under a root that constrains it. An
authority under a root could therefore carry the name of another member. So a root may sign no
authorities, and a link belongs to the member whose root issued its certificate directly.
"""

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcb2o.errors import ConfigError

ROOT_DAYS = 20 * 365
_CLOCK_TOLERANCE = timedelta(days=1)
"""Time before its creation from which a certificate is valid, because clocks differ."""
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
"""Part of a host's name. Docker names the hosts of its services with underscores."""

OUTBOUND_ONLY = ".invalid"
"""End of the host's name of a member that no other member can reach (RFC 2606)."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_endpoint(endpoint: str) -> tuple[str | _Address, int]:
    """Parse "HOST:PORT", with a name, an IPv4 address or an [IPv6 address] as host.

    The host is returned as an address, or as a name in small letters without a final dot.
    """
    if not isinstance(endpoint, str):
        raise ConfigError(f"an endpoint is a text HOST:PORT, got a {type(endpoint).__name__}")
    host, _, port = endpoint.strip().rpartition(":")
    if not (re.fullmatch(r"[1-9][0-9]{0,4}", port) and int(port) < 2**16):
        raise ConfigError(
            f"an endpoint is HOST:PORT, with a port from 1 to 65535, got {endpoint[:100]!r}"
        )

    host = host.lower().removesuffix(".")
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    except ValueError:
        _check_host_name(host, endpoint)
        return host, int(port)

    is_ipv6 = address.version == 6
    # A zone such as fe80::1%eth0 has a meaning on one machine only.
    if is_bracketed != is_ipv6 or "%" in host or address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"the host of {endpoint[:100]!r} must be the address of one machine, an IPv6 address"
            " in brackets"
        )
    return address, int(port)


def canonical_endpoint(endpoint: str) -> str:
    """Return the one way to write an endpoint.

    The host is in small letters, without a final dot, an IPv6 address in its shortest form.

    Example:
        >>> canonical_endpoint("Hospital-A.example.:7447")
        'hospital-a.example:7447'
    """
    host, port = parse_endpoint(endpoint)
    if isinstance(host, ipaddress.IPv6Address):
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def _check_host_name(host: str, endpoint: str) -> None:
    wrong = re.sub(r"[a-z0-9._-]", "", host)
    if wrong and not host.startswith("["):
        raise ConfigError(
            f"the host of {endpoint[:100]!r} has {wrong[0]!r}, and names of hosts have letters from"
            " a to z, digits, dots, hyphens and underscores (international names begin with xn--)"
        ) from None
    labels = host.split(".")
    # Programs read a name that ends in a number as an IPv4 address.
    if len(host) > 253 or not all(map(_HOST_LABEL.fullmatch, labels)) or labels[-1].isdigit():
        raise ConfigError(
            f"the host of {endpoint[:100]!r} must be a name, an IPv4 address or an [IPv6 address];"
            " between the dots of a name are 1 to 63 letters, digits, underscores and hyphens, the"
            " hyphens not at an end"
        ) from None


def new_key() -> ec.EllipticCurvePrivateKey:
    """Create the private key of a certificate, on the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def new_root(
    name: str, endpoint: str, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.Certificate:
    """Create the root certificate of a member's own authority.

    It may sign only for this name and host.
    """
    builder = _certificate_builder(name, _subject(name), key, now, now + timedelta(days=ROOT_DAYS))
    # An authority below this root could carry the name of another member.
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(sign=False), critical=True)
    builder = builder.add_extension(name_constraints(name, endpoint), critical=True)
    return builder.sign(key, hashes.SHA256())


def new_leaf(
    name: str,
    endpoint: str,
    key: ec.EllipticCurvePrivateKey,
    root: x509.Certificate,
    root_key: ec.EllipticCurvePrivateKey,
    now: datetime,
    until: datetime,
) -> x509.Certificate:
    """Create a member's TLS certificate, for both ends of a link.

    It expires at `until`, at the latest with the root.
    """
    expiry = min(until, root.not_valid_after_utc)
    builder = _certificate_builder(name, root.subject, key, now, expiry)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_key_usage(sign=True), critical=True)
    # A member listens and dials with the same certificate.
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName(_alternative_names(name, endpoint)), critical=False
    )
    # Strict verifiers, such as the default of Python 3.13, want it.
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key())
    return builder.add_extension(issuer, critical=False).sign(root_key, hashes.SHA256())


def validate_root(pem: str, name: str, endpoint: str) -> x509.Certificate:
    """Validate a root certificate that another organisation sent.

    `pem` must be the root of exactly this name and host, and nothing else.
    """
    try:
        (root,) = x509.load_pem_x509_certificates(pem.encode())
        root.verify_directly_issued_by(root)
        key = root.public_key()
        extensions = root.extensions
        basic = extensions.get_extension_for_class(x509.BasicConstraints)
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        names = extensions.get_extension_for_class(x509.NameConstraints)
        # OpenSSL could find more in the text than this parser does, and trust it.
        is_exact = root.public_bytes(Encoding.PEM).decode() == pem
        has_subject = root.subject == _subject(name)
    except Exception as error:
        # A foreign certificate can be wrong in any way.
        raise ConfigError(
            f"`root` of {name} is no certificate, or damaged: get {name}.member.toml again"
        ) from error

    if not is_exact:
        raise ConfigError(f"`root` of {name} must contain its certificate as PEM, and nothing else")
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
        raise ConfigError(f"the key of `root` of {name} must be on the curve P-256")
    if not (basic.critical and basic.value.ca and usage.key_cert_sign):
        raise ConfigError(f"`root` of {name} is not the certificate of an authority")
    if not has_subject:
        subject = root.subject.rfc4514_string()[:100]
        raise ConfigError(f"`root` of {name} is that of another member: {subject!r}")
    if not names.critical or names.value != name_constraints(name, endpoint):
        raise ConfigError(
            f"`root` of {name} is not constrained to exactly this name and the host of {endpoint}"
        )
    if basic.value.path_length != 0:
        raise ConfigError(
            f"`root` of {name} may sign authorities, which could carry any member's name (its path "
            f"length is {basic.value.path_length}, not 0): make another identity"
        )
    return root


def is_direct_issuer(pem: str, certificate: x509.Certificate) -> bool:
    """Return True if a validated root itself signed a certificate that anybody sent."""
    try:
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(pem.encode()))
    except Exception:
        # A foreign certificate can be wrong in any way.
        return False
    return True


def name_constraints(name: str, endpoint: str) -> x509.NameConstraints:
    """Return constraints that permit this name and host only."""
    host = parse_endpoint(endpoint)[0]
    permitted: list[x509.GeneralName] = [x509.DNSName(name)]
    if isinstance(host, str):
        if host != name:
            permitted.append(x509.DNSName(host))
        # A kind of name without constraint is free: without these the root could sign for any
        # address.
        networks = map(ipaddress.ip_network, ("0.0.0.0/0", "::/0"))
        return x509.NameConstraints(
            permitted_subtrees=permitted, excluded_subtrees=[*map(x509.IPAddress, networks)]
        )

    if host.is_loopback:
        permitted.append(x509.DNSName("localhost"))
    permitted.append(x509.IPAddress(ipaddress.ip_network(host)))
    return x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=None)


def _alternative_names(name: str, endpoint: str) -> Sequence[x509.GeneralName]:
    host = parse_endpoint(endpoint)[0]
    if isinstance(host, str):
        return [x509.DNSName(label) for label in dict.fromkeys((name, host))]
    local = [x509.DNSName("localhost")] if host.is_loopback else []
    return [x509.DNSName(name), *local, x509.IPAddress(host)]


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, sign: bool) -> x509.KeyUsage:
    """Return the usage of a TLS certificate (`sign`) or of a root."""
    return x509.KeyUsage(
        digital_signature=sign,
        key_cert_sign=not sign,
        crl_sign=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate_builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - _CLOCK_TOLERANCE)
        .not_valid_after(until.astimezone(UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
