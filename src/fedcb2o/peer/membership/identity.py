"""Who an organisation is: a signing key, certificates, and the public half of these, which the others get.

The signing key is the identity: it signs every manifest and every new version of a federation. Certificates let a link
be made at all; the root of one's own small authority stands in the federation, so that TLS certificates are renewed
without asking anybody.
"""

import base64
import binascii
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedcb2o import records
from fedcb2o.errors import ConfigError
from fedcb2o.peer.membership import certificates

_MAX_MEMBER_FILE_BYTES = 2**16
"""The bytes of the largest file of an organisation."""
MAX_LINE_BYTES = 2000
"""The bytes of the longest line: TOML is read in a time that is quadratic in the parts of a key."""
_SECRET_FILES = ("signing.key", "root.key", "tls.key")
_P = 2**255 - 19
_Y8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER_Y = frozenset({0, 1, _P - 1, _P, _P + 1, _Y8, _P - _Y8})
"""The y of the points of Ed25519 of small order: under a key that is one, anybody can make signatures."""


def read_bounded_toml(path: Path, max_bytes: int) -> dict[str, Any]:
    """The table in a file that another organisation sent; raises ValueError for what is none, or takes long to read."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is longer than {max_bytes} bytes")
    if max(map(len, content.splitlines()), default=0) > MAX_LINE_BYTES:
        raise ValueError(f"it has a line of more than {MAX_LINE_BYTES} bytes")
    return records.parse_toml(content)


def spelled_hex(content: bytes) -> str:
    """Bytes as they are read to somebody over the telephone: hex digits in groups of four."""
    return content.hex(" ", 2)


def _check_name(name: str) -> None:
    """Raises ConfigError for what is no member's name."""
    if not certificates.DNS_LABEL.fullmatch(name) or name.isdigit() or name == "localhost":
        raise ConfigError(
            "a member's name has up to 63 small letters from a to z, digits, and hyphens between them, such as "
            f"hospital-a, got {name[:100]!r}"
        )


@dataclass(frozen=True)
class Member:
    """The public half of an organisation; raises ConfigError for what cannot be one."""

    name: str
    endpoint: str
    key: bytes
    root: str

    def __post_init__(self) -> None:
        _check_name(self.name)
        certificates.parse_endpoint(self.endpoint)
        if len(self.key) != 32:
            raise ConfigError(f"`key` of {self.name} must have 32 bytes, got {len(self.key)}")
        if int.from_bytes(self.key, "little") % 2**255 in _SMALL_ORDER_Y:
            raise ConfigError(
                f"`key` of {self.name} is one under which anybody can sign: make another identity"
            )
        certificates.validate_root(self.root, self.name, self.endpoint)

    @property
    def fingerprint(self) -> str:
        """The first half of the key's SHA-256, by which people compare it."""
        return spelled_hex(hashlib.sha256(self.key).digest()[:16])

    @property
    def expires(self) -> datetime:
        """When its root ends, which then has to be replaced by a new version of the federation."""
        return x509.load_pem_x509_certificate(self.root.encode()).not_valid_after_utc

    def check_not_expired(self, now: datetime | None = None) -> None:
        """Raises ConfigError where its root has ended."""
        if (now or datetime.now(UTC)) >= self.expires:
            raise ConfigError(
                f"`root` of {self.name} expired at {_format_time(self.expires)}: `fedcb2o peer renew --out` makes a new one, "
                "and the others sign a version of the federation with it"
            )

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether this member signed this message."""
        try:
            Ed25519PublicKey.from_public_bytes(self.key).verify(signature, message)
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True

    @classmethod
    def read(cls, path: Path, *, allow_expired: bool = False) -> "Member":
        """The member in a file NAME.member.toml; raises ConfigError for anything else, and unless `expired` is true
        where its root has ended."""
        try:
            member = cls.from_table(read_bounded_toml(path, _MAX_MEMBER_FILE_BYTES))
            if not allow_expired:
                member.check_not_expired()
        except (OSError, ValueError) as error:
            told = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{path} is no member's file: {told}") from error
        return member

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Member":
        """The member in a table of four texts; raises ConfigError for anything else."""
        keys = ("name", "endpoint", "key", "root")
        for key in table:
            if key not in keys:
                raise ConfigError(
                    f"there is no key {key[:100]!r} of a member: its keys are {', '.join(keys)}"
                )
        for key in keys:
            if key not in table:
                raise ConfigError(f"the key `{key}` of a member is missing")
            if not isinstance(table[key], str):
                raise ConfigError(
                    f"`{key}` of a member must be a text, got one of type {type(table[key]).__name__}"
                )
        try:
            public = base64.b64decode(table["key"].encode(), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"`key` of a member is no base64: {error}") from error
        if base64.b64encode(public).decode() != table["key"]:
            raise ConfigError("`key` of a member must be base64 in its usual form")
        return cls(table["name"], table["endpoint"], public, table["root"])

    def to_table(self) -> dict[str, str]:
        """This member as texts."""
        key = base64.b64encode(self.key).decode()
        return {"name": self.name, "endpoint": self.endpoint, "key": key, "root": self.root}

    def write(self, path: Path) -> None:
        """Write NAME.member.toml, the file to send to the others."""
        records.atomic_write(path, tomli_w.dumps(self.to_table(), multiline_strings=True).encode())


@dataclass(frozen=True)
class Identity:
    """An organisation's own keys and certificates, in a folder that nobody else may read."""

    folder: Path
    member: Member
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def make(
        cls,
        folder: Path | str,
        *,
        name: str,
        endpoint: str,
        days: int = 397,
        now: datetime | None = None,
        until: datetime | None = None,
    ) -> "Identity":
        """New keys, a root, and a TLS certificate that ends after `days` or at `until`: all files are made, or none.

        Raises ConfigError where the folder holds anything.
        """
        return cls._make(
            Path(folder), name, endpoint, Ed25519PrivateKey.generate(), days, now, until
        )

    def with_endpoint(self, folder: Path | str, *, endpoint: str, days: int = 397) -> "Identity":
        """The same signing key with another endpoint and a new root, in another folder. The others have to sign a
        version of the federation with it; until they run with this, the old one goes on to work."""
        return self._make(Path(folder), self.member.name, endpoint, self._key, days, None, None)

    @classmethod
    def _make(
        cls,
        folder: Path,
        name: str,
        endpoint: str,
        key: Ed25519PrivateKey,
        days: int,
        now: datetime | None,
        until: datetime | None,
    ) -> "Identity":
        _check_name(name)  # before a certificate is made of it
        now = now or datetime.now(UTC)
        root_key = certificates.new_key()
        root = certificates.new_root(name, endpoint, root_key, now)
        member = Member(name, endpoint, key.public_key().public_bytes_raw(), _to_pem(root))
        made = None
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError(
                    f"{folder} is not empty, and keys are never overwritten: choose another --out (`fedcb2o peer renew`"
                    " makes a new TLS certificate for the identity in one)"
                )
            folder.parent.mkdir(parents=True, exist_ok=True)
            made = Path(
                tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
            )  # of mode 0700
            _write_secret(made / "signing.key", _private_key_pem(key))
            _write_secret(made / "root.key", _private_key_pem(root_key))
            records.atomic_write(made / "root.pem", member.root.encode())
            member.write(made / f"{name}.member.toml")
            cls(made, member, key).renew(days=days, now=now, until=until)
            made.rename(folder)
        except OSError as error:
            raise ConfigError(f"cannot make {folder}: {error.strerror or error}") from error
        finally:
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)  # where it was not renamed
        return cls(folder, member, key)

    @classmethod
    def read(cls, folder: Path | str) -> "Identity":
        """The identity in a folder; raises ConfigError where it is not whole, or others may read its secrets.

        One whose TLS certificate has expired is read: `expires` tells it.
        """
        folder = Path(folder)
        for path in (folder / name for name in _SECRET_FILES):
            if path.exists() and path.stat().st_mode & 0o077:
                raise ConfigError(
                    f"others may read {path}: chmod 600 it and, if any did, make a new identity"
                )
        files = list(folder.glob("*.member.toml"))
        if len(files) != 1:
            found = "no file" if not files else f"{len(files)} files"
            raise ConfigError(
                f"{folder} holds {found} NAME.member.toml: `fedcb2o peer identity` makes an identity"
            )
        member = Member.read(files[0], allow_expired=True)
        identity = cls(folder, member, _read_ed25519_key(folder / "signing.key"))
        if identity._key.public_key().public_bytes_raw() != member.key:
            raise ConfigError(
                f"{folder / 'signing.key'} is not the key in {files[0].name}: restore one of them"
            )
        root = _read_certificate(folder / "root.pem")
        if _to_pem(root) != member.root:
            raise ConfigError(
                f"{folder / 'root.pem'} is not the root in {files[0].name}: restore one of them"
            )
        return identity

    def check_certificate(self) -> None:
        """Raises ConfigError unless the TLS key and certificate fit each other, the root and the clock."""
        certificate = _read_certificate(self.tls_certificate)
        again = _remedy(self.tls_certificate)
        if _read_p256_key(self.tls_key).public_key() != certificate.public_key():
            raise ConfigError(f"{self.tls_certificate} is not that of the key in tls.key: {again}")
        try:
            certificate.verify_directly_issued_by(_read_certificate(self.folder / "root.pem"))
        except (InvalidSignature, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.tls_certificate} is not signed by root.pem: {again}"
            ) from error
        now = datetime.now(UTC)
        self.member.check_not_expired(now)
        if now >= certificate.not_valid_after_utc:
            raise ConfigError(
                f"{self.tls_certificate} expired at {_format_time(certificate.not_valid_after_utc)}: {again}"
            )
        if now < certificate.not_valid_before_utc:
            raise ConfigError(
                f"{self.tls_certificate} is valid from {_format_time(certificate.not_valid_before_utc)}: set this clock"
            )

    def sign(self, message: bytes) -> bytes:
        """The 64 bytes of the Ed25519 signature."""
        return self._key.sign(message)

    def renew(
        self, *, days: int = 397, now: datetime | None = None, until: datetime | None = None
    ) -> None:
        """A new TLS key and certificate by the same root, which the others need not be told of."""
        if not 1 <= days <= certificates.ROOT_DAYS:
            raise ConfigError(f"`days` must be between 1 and {certificates.ROOT_DAYS}, got {days}")
        now = now or datetime.now(UTC)
        self.member.check_not_expired(now)
        root = _read_certificate(self.folder / "root.pem")
        root_key = _read_p256_key(self.folder / "root.key")
        key = certificates.new_key()
        until = until or now + timedelta(days=days)
        leaf = certificates.new_leaf(
            self.member.name, self.member.endpoint, key, root, root_key, now, until
        )
        _write_secret(self.tls_key, _private_key_pem(key))
        records.atomic_write(self.tls_certificate, _to_pem(leaf).encode())

    @property
    def tls_key(self) -> Path:
        """The file of the TLS key."""
        return self.folder / "tls.key"

    @property
    def tls_certificate(self) -> Path:
        """The file of the TLS certificate."""
        return self.folder / "tls.pem"

    @property
    def expires(self) -> datetime:
        """When the TLS certificate ends."""
        return _read_certificate(self.tls_certificate).not_valid_after_utc


def _format_time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _private_key_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_secret(path: Path, content: bytes) -> None:
    def write(temporary: Path) -> None:
        temporary.unlink(missing_ok=True)
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as file:
            file.write(content)

    records.atomic_write(path, write)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_MEMBER_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}; {_remedy(path)}"
        ) from error


def _remedy(path: Path) -> str:
    made = f"`fedcb2o peer renew --identity {path.parent}` makes a new one"
    return made if path.name.startswith("tls.") else "restore it"


def _read_certificate(path: Path) -> x509.Certificate:
    content = _read_file(path)
    with contextlib.suppress(ValueError):
        return x509.load_pem_x509_certificate(content)
    raise ConfigError(f"{path} holds no certificate: {_remedy(path)}")


def _read_ed25519_key(path: Path) -> Ed25519PrivateKey:
    key = _read_key(path)
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds no Ed25519 key: {_remedy(path)}")
    return key


def _read_p256_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = _read_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds no key of the curve P-256: {_remedy(path)}")
    return key


def _read_key(path: Path) -> object:
    content = _read_file(path)
    try:
        return load_pem_private_key(content, password=None)
    except Exception:  # it may be damaged in any way, and what is in it must not be told
        raise ConfigError(f"{path} holds no key without a passphrase: {_remedy(path)}") from None
