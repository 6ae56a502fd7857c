"""The certificates of one organisation: a small authority of its own, and the TLS certificate that this signs.

With the roots of several members in one bundle, each of these could sign for any name. So a root is tied to its member:
its name constraints permit the alternative names of this member and its host alone, and who dials a host then reaches
nobody else's certificate. The common name stays free: rustls, which checks the links, refuses every certificate under a
root whose constraints speak of it. So a link proves membership, and who somebody is is told by the signing key alone.
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
CLOCK_TOLERANCE = timedelta(days=1)
"""How long before it is made a certificate is valid, since clocks differ."""
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_endpoint(endpoint: str) -> tuple[str | _Address, int]:
    """The host, a name or an address, and the port of "HOST:PORT"; raises ConfigError."""
    host, _, port = endpoint.rpartition(":")
    if not (re.fullmatch(r"[1-9][0-9]{0,4}", port) and int(port) < 2**16):
        raise ConfigError(
            f"an endpoint is HOST:PORT, with a port from 1 to 65535, got {endpoint[:100]!r}"
        )
    try:
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        address = ipaddress.ip_address(bare)
    except ValueError:
        labels = host.split(".")
        if len(host) > 253 or not all(map(DNS_LABEL.fullmatch, labels)) or labels[-1].isdigit():
            raise ConfigError(
                f"the host of {endpoint[:100]!r} is no name in small letters, no IPv4 address and no [IPv6 address]"
            ) from None
        return host, int(port)
    usual = f"[{address}]" if address.version == 6 else str(address)
    if host != usual or "%" in host or address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"the host of {endpoint[:100]!r} must be the address of one machine, in its usual form"
        )
    return address, int(port)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key of a certificate."""
    return ec.generate_private_key(ec.SECP256R1())


def new_root(
    name: str, endpoint: str, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.Certificate:
    """The certificate of a member's own authority, which may sign for this name and host alone."""
    builder = _certificate_builder(name, _subject(name), key, now, now + timedelta(days=ROOT_DAYS))
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
    """The TLS certificate of a member, for both ends of a link."""
    builder = _certificate_builder(
        name, root.subject, key, now, min(until, root.not_valid_after_utc)
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_key_usage(sign=True), critical=True)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName(_alternative_names(name, endpoint)), critical=False
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key())
    return builder.add_extension(issuer, critical=False).sign(root_key, hashes.SHA256())


def validate_root(pem: str, name: str, endpoint: str) -> x509.Certificate:
    """The one certificate in a text that another organisation sent; raises ConfigError unless it is the root of this
    name and host, and of nothing else."""
    try:
        (root,) = x509.load_pem_x509_certificates(pem.encode())
        root.verify_directly_issued_by(root)
        key = root.public_key()
        extensions = root.extensions
        basic = extensions.get_extension_for_class(x509.BasicConstraints)
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        names = extensions.get_extension_for_class(x509.NameConstraints)
        exact = root.public_bytes(Encoding.PEM).decode() == pem
        subject = root.subject == _subject(name)
    except Exception as error:  # what another made may be wrong in any way
        raise ConfigError(
            f"`root` of {name} is no certificate, or damaged: get {name}.member.toml again"
        ) from error
    if not exact:
        raise ConfigError(f"`root` of {name} must hold its certificate as PEM, and nothing else")
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
        raise ConfigError(f"the key of `root` of {name} must be one of the curve P-256")
    if not (basic.critical and basic.value.ca and usage.key_cert_sign):
        raise ConfigError(f"`root` of {name} is not the certificate of an authority")
    if not subject:
        raise ConfigError(
            f"`root` of {name} is that of another: {root.subject.rfc4514_string()[:100]!r}"
        )
    if not names.critical or names.value != name_constraints(name, endpoint):
        raise ConfigError(
            f"`root` of {name} is not tied to this name and to the host of {endpoint}, and to these alone"
        )
    return root


def name_constraints(name: str, endpoint: str) -> x509.NameConstraints:
    """What a member's root may sign for: its name and the host of its endpoint."""
    host = parse_endpoint(endpoint)[0]
    permitted: list[x509.GeneralName] = [x509.DNSName(name)]
    excluded: list[x509.GeneralName] | None = None
    if isinstance(host, str):
        permitted += [x509.DNSName(host)] if host != name else []
        excluded = [
            x509.IPAddress(ipaddress.ip_network(all_of)) for all_of in ("0.0.0.0/0", "::/0")
        ]
    else:
        permitted += [x509.DNSName("localhost")] if host.is_loopback else []
        permitted.append(x509.IPAddress(ipaddress.ip_network(host)))
    return x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=excluded)


def _alternative_names(name: str, endpoint: str) -> Sequence[x509.GeneralName]:
    host = parse_endpoint(endpoint)[0]
    if isinstance(host, str):
        return [x509.DNSName(each) for each in dict.fromkeys((name, host))]
    local = [x509.DNSName("localhost")] if host.is_loopback else []
    return [x509.DNSName(name), *local, x509.IPAddress(host)]


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, sign: bool) -> x509.KeyUsage:
    """The usage of a TLS certificate, which signs handshakes, or of a root, which signs certificates."""
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
        .not_valid_before(now.astimezone(UTC) - CLOCK_TOLERANCE)
        .not_valid_after(until.astimezone(UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
