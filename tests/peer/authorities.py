"""Hostile members: certificates under their own root that name somebody else."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedcb2o.peer import Identity, Member
from fedcb2o.peer.membership import certificates
from fedcb2o.peer.wire.tls import client_context


def root_of(identity: Identity) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the root of an identity and its private key."""
    root = x509.load_pem_x509_certificate((identity.folder / "root.pem").read_bytes())
    key = load_pem_private_key((identity.folder / "root.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return root, key


def root_with_path_length(identity: Identity, path_length: int | None) -> str:
    """Return the root of an identity with another path length, as PEM."""
    root, key = root_of(identity)
    builder = x509.CertificateBuilder().subject_name(root.subject).issuer_name(root.subject)
    builder = builder.public_key(key.public_key()).serial_number(5)
    builder = builder.not_valid_before(root.not_valid_before_utc)
    builder = builder.not_valid_after(root.not_valid_after_utc)
    for extension in root.extensions:
        value = extension.value
        if isinstance(value, x509.BasicConstraints):
            value = x509.BasicConstraints(ca=True, path_length=path_length)
        builder = builder.add_extension(value, critical=extension.critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def use_root(identity: Identity, root: str) -> Identity:
    """Replace the root in the folder of an identity, and return the identity with it."""
    (identity.folder / "root.pem").write_text(root)
    path = identity.folder / f"{identity.member.name}.member.toml"
    path.write_text(path.read_text().replace(identity.member.root, root))
    return Identity.read(identity.folder)


def impostor_context(
    identity: Identity, name: str, target: Member, folder: Path, *, is_authority: bool = False
) -> ssl.SSLContext:
    """Return TLS certificates issued by an authority of any name under a member's own root.

    With `is_authority` the certificate is that of the authority itself, which the root issued.
    """
    (root, root_key), now = root_of(identity), datetime.now(UTC)
    key, leaf_key = certificates.new_key(), certificates.new_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(root.subject)
    builder = builder.public_key(key.public_key()).serial_number(7)
    builder = builder.not_valid_before(now - timedelta(days=1))
    builder = builder.not_valid_after(now + timedelta(days=1))
    for extension in (
        x509.BasicConstraints(ca=True, path_length=None),
        x509.KeyUsage(True, False, False, False, False, True, True, False, False),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
    ):
        builder = builder.add_extension(extension, critical=False)
    authority = builder.sign(root_key, hashes.SHA256())
    member = identity.member
    leaf = certificates.new_leaf(
        member.name, member.endpoint, leaf_key, authority, key, now, now + timedelta(days=1)
    )
    if is_authority:
        leaf, leaf_key = authority, key
    folder.mkdir(exist_ok=True)
    chain = b"".join(one.public_bytes(Encoding.PEM) for one in (leaf, authority, root))
    (folder / "tls.pem").write_bytes(chain)
    (folder / "tls.key").write_bytes(
        leaf_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    context = client_context(identity, target)
    context.load_cert_chain(folder / "tls.pem", folder / "tls.key")
    return context


def is_closed_by_remote(stream: ssl.SSLSocket) -> bool:
    """Wait until the other end closes a connection; False if it does not."""
    try:
        return stream.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
