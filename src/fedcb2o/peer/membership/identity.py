"""Identity of an organisation: signing key, certificates, and their public half.

The signing key is the identity: it signs every manifest and every new version of a federation.
Certificates only allow a link. The federation contains the root of each member's own authority, so
that a member renews its TLS certificate without other members.
"""

import base64
import binascii
import contextlib
import hashlib
import re
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
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedcb2o import records
from fedcb2o.errors import ConfigError
from fedcb2o.peer.membership import certificates
from fedcb2o.peer.membership.passphrase import read_passphrase
from fedcb2o.safe_files import open_regular

_PrivateKey = Ed25519PrivateKey | ec.EllipticCurvePrivateKey

_MAX_MEMBER_FILE_BYTES = 2**16
MAX_LINE_BYTES = 2000
"""Length of the longest line, texts in base64 apart."""
_MAX_KEY_PARTS = 20
"""Parts of the longest key: time and memory to parse TOML are quadratic in them."""
_BASE64_TEXT = re.compile(rb'"[A-Za-z0-9+/=]*+"')
_KEY_PART = rb"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(
    rb"(?<![A-Za-z0-9_-])%b(?:[ \t]*+\.[ \t]*+%b){%d}" % (_KEY_PART, _KEY_PART, _MAX_KEY_PARTS)
)
RUNS_FILE = "runs.toml"
"""Run directory that signs for each run, next to the keys."""
SIGNED_VERSIONS_FILE = "signed-versions.toml"
"""Versions of federations that this organisation signed, see `version_journal`."""
_SIGNING_KEY = "signing.key"
_SECRET_FILES = (_SIGNING_KEY, "root.key", "tls.key")
_ENCRYPTED = b"ENCRYPTED PRIVATE KEY"
_P = 2**255 - 19
_Y8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER_Y = frozenset({0, 1, _P - 1, _P, _P + 1, _Y8, _P - _Y8})
"""y coordinates of Ed25519 points of small order: anybody can forge signatures under such a key."""


def is_signed(key: bytes, message: bytes, signature: bytes) -> bool:
    """Check an Ed25519 signature by a public key of 32 bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def read_bounded_toml(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a TOML file that another organisation sent.

    Content that is no TOML, too large, or has a line that takes long to parse, is a ValueError.
    """
    with open_regular(path, follow_links=True) as file:
        return parse_bounded_toml(file.read(max_bytes + 1), max_bytes)


def parse_bounded_toml(content: bytes, max_bytes: int) -> dict[str, Any]:
    """Parse TOML that another organisation sent.

    Content that is no TOML, too large, or has a line that takes long to parse, is a ValueError.
    """
    if len(content) > max_bytes:
        raise ValueError(f"it is longer than {max_bytes} bytes")
    for line in _BASE64_TEXT.sub(b'""', content).splitlines():
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"it has a line of more than {MAX_LINE_BYTES} bytes")
        # An escape could hide the end of a quoted part.
        if line.count(b".") >= _MAX_KEY_PARTS and (b"\\" in line or _LONG_KEY.search(line)):
            raise ValueError(f"it has a key of more than {_MAX_KEY_PARTS} parts")
    return records.parse_toml(content)


def spelled_hex(content: bytes) -> str:
    """Format bytes for reading aloud.

    Example:
        >>> spelled_hex(bytes(range(4)))
        '0001 0203'
    """
    return content.hex(" ", 2)


def _check_name(name: str) -> None:
    if not certificates.DNS_LABEL.fullmatch(name) or name.isdigit() or name == "localhost":
        raise ConfigError(
            "a member's name has up to 63 letters from a to z, digits, and hyphens between them, "
            f"such as hospital-a, got {name[:100]!r}"
        )


@dataclass(frozen=True)
class Member:
    """Public half of an organisation.

    Attributes:
        name: The member's name, a DNS label.
        endpoint: "HOST:PORT" at which others reach it.
        key: Public Ed25519 key, 32 bytes.
        root: Root certificate as PEM.

    Raises:
        ConfigError: The values cannot be those of a member.
    """

    name: str
    endpoint: str
    key: bytes
    root: str

    def __post_init__(self) -> None:
        _check_name(self.name)
        endpoint = certificates.canonical_endpoint(self.endpoint)
        object.__setattr__(self, "endpoint", endpoint)
        if len(self.key) != 32:
            raise ConfigError(f"`key` of {self.name} must have 32 bytes, got {len(self.key)}")
        # The highest bit is the sign of x, on which the order does not depend.
        if int.from_bytes(self.key, "little") % 2**255 in _SMALL_ORDER_Y:
            raise ConfigError(
                f"`key` of {self.name} is one under which anybody can sign: make another identity"
            )
        certificates.validate_root(self.root, self.name, self.endpoint)

    @property
    def is_outbound_only(self) -> bool:
        """True if no other member can connect to it, as its endpoint says."""
        return self.endpoint.rpartition(":")[0].endswith(certificates.OUTBOUND_ONLY)

    @property
    def fingerprint(self) -> str:
        """First half of the key's SHA-256, by which people compare keys."""
        return spelled_hex(hashlib.sha256(self.key).digest()[:16])

    @property
    def expires(self) -> datetime:
        """Expiry of the root; a new version must replace it before."""
        return x509.load_pem_x509_certificate(self.root.encode()).not_valid_after_utc

    def check_not_expired(self, now: datetime | None = None) -> None:
        """Raise ConfigError if the root has expired."""
        if (now or datetime.now(UTC)) >= self.expires:
            raise ConfigError(
                f"`root` of {self.name} expired at {_format_time(self.expires)}: `fedcb2o peer "
                "renew --out` makes a new one, and the other members sign a version of the "
                "federation with it"
            )

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Check an Ed25519 signature of this member."""
        return is_signed(self.key, message, signature)

    @classmethod
    def read(cls, path: Path, *, allow_expired: bool = False) -> "Member":
        """Read a file NAME.member.toml.

        Args:
            path: The file.
            allow_expired: Accept a root that has expired, so that it can be replaced.

        Returns:
            The member.

        Raises:
            ConfigError: The file is no member's file, or the root has expired.
        """
        try:
            table = read_bounded_toml(path, _MAX_MEMBER_FILE_BYTES)
            member = cls.from_table(table)
            if not allow_expired:
                member.check_not_expired()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{path} is no member's file: {reason}") from error
        return member

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Member":
        """Parse a table of four texts: `name`, `endpoint`, `key` (base64) and `root` (PEM).

        Any other table is a ConfigError.
        """
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
                kind = type(table[key]).__name__
                raise ConfigError(f"`{key}` of a member must be a text, got one of type {kind}")

        try:
            public = base64.b64decode(table["key"].encode(), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"`key` of a member is no base64: {error}") from error
        # With two texts of one key, two members could have it: versions compare the texts.
        if base64.b64encode(public).decode() != table["key"]:
            raise ConfigError("`key` of a member must be base64 in canonical form")
        name, endpoint, root = table["name"], table["endpoint"], table["root"]
        return cls(name, endpoint, public, root)

    def to_table(self) -> dict[str, str]:
        """Return this member as the table that `from_table` parses."""
        key = base64.b64encode(self.key).decode()
        return {"name": self.name, "endpoint": self.endpoint, "key": key, "root": self.root}

    def write(self, path: Path) -> None:
        """Write the member file that is sent to other members."""
        content = tomli_w.dumps(self.to_table(), multiline_strings=True)
        records.atomic_write(path, content.encode())


@dataclass(frozen=True)
class Identity:
    """Keys and certificates of one organisation, in a private folder.

    Attributes:
        folder: The folder.
        member: The public half.
        passphrase: Passphrase of the private keys; None if they are not encrypted.
    """

    folder: Path
    member: Member
    _key: Ed25519PrivateKey = field(repr=False, compare=False)
    passphrase: bytes | None = field(default=None, repr=False, compare=False)

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
        passphrase: bytes | None = None,
    ) -> "Identity":
        """Create keys, a root and a TLS certificate, all or none.

        Args:
            folder: An empty or missing folder.
            name: The member's name.
            endpoint: "HOST:PORT" at which others reach it.
            days: Validity of the TLS certificate.
            now: Time of creation; by default the current time.
            until: Expiry of the TLS certificate, in place of `days`.
            passphrase: Passphrase that encrypts the private keys.

        Returns:
            The identity.

        Raises:
            ConfigError: The folder is not empty, or a value is invalid.
        """
        key = Ed25519PrivateKey.generate()
        return cls._make(Path(folder), name, endpoint, key, days, now, until, passphrase)

    def with_endpoint(self, folder: Path | str, *, endpoint: str, days: int = 397) -> "Identity":
        """Create an identity with the same signing key and another endpoint.

        The other members must sign a version of the federation with it. Until they run with that
        version, the old identity continues to open links. The new one knows the versions that the
        old one signed so far, and signs from now on.

        Args:
            folder: An empty or missing folder.
            endpoint: The new "HOST:PORT".
            days: Validity of the TLS certificate.

        Returns:
            The identity, with a new root.

        Raises:
            ConfigError: The folder is not empty, or a value is invalid.
        """
        name = self.member.name
        folder = Path(folder)
        journal = self.folder / SIGNED_VERSIONS_FILE
        return self._make(
            folder, name, endpoint, self._key, days, None, None, self.passphrase, journal
        )

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
        passphrase: bytes | None,
        journal: Path | None = None,
    ) -> "Identity":
        # Before the name enters a certificate.
        _check_name(name)
        now = now or datetime.now(UTC)
        root_key = certificates.new_key()
        root = certificates.new_root(name, endpoint, root_key, now)
        member = Member(name, endpoint, key.public_key().public_bytes_raw(), _to_pem(root))

        temporary = None
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError(
                    f"{folder} is not empty, and keys are never overwritten: choose another --out "
                    "(`fedcb2o peer renew` makes a new TLS certificate for an existing identity)"
                )
            folder.parent.mkdir(parents=True, exist_ok=True)
            # `mkdtemp` sets mode 0700.
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            records.atomic_write(temporary / _SIGNING_KEY, _private_key_pem(key, passphrase))
            records.atomic_write(temporary / "root.key", _private_key_pem(root_key, passphrase))
            records.atomic_write(temporary / "root.pem", member.root.encode())
            member.write(temporary / f"{name}.member.toml")
            # The signing key stays the same, so it still may not sign two successors of one
            # version.
            if journal is not None and journal.exists():
                records.atomic_write(temporary / journal.name, journal.read_bytes())
            cls(temporary, member, key, passphrase).renew(days=days, now=now, until=until)
            # A rename shows all files at once. After a failure the folder is as before.
            temporary.rename(folder)
        except OSError as error:
            raise ConfigError(f"cannot make {folder}: {error.strerror or error}") from error
        finally:
            if temporary is not None:
                # After a success it was renamed, and is gone.
                shutil.rmtree(temporary, ignore_errors=True)
        return cls(folder, member, key, passphrase)

    @classmethod
    def read(cls, folder: Path | str) -> "Identity":
        """Read the identity in a folder.

        An expired TLS certificate is accepted; see `expires`.

        Args:
            folder: Private folder that `make` or `with_endpoint` filled.

        Returns:
            The identity.

        Raises:
            ConfigError: The identity is incomplete, or others may read its secrets.
        """
        folder = Path(folder)
        # Like ssh: a key that others can read is no secret.
        for path in (folder / name for name in _SECRET_FILES):
            if path.exists() and path.stat().st_mode & 0o077:
                raise ConfigError(
                    f"others may read {path}: chmod 600 it; if somebody did, make a new identity"
                )

        files = list(folder.glob("*.member.toml"))
        if len(files) != 1:
            count = f"{len(files)} files" if files else "no file"
            raise ConfigError(
                f"{folder} holds {count} NAME.member.toml: `fedcb2o peer identity` makes an "
                "identity"
            )
        # `peer renew --out` replaces an expired root, and needs this identity.
        member = Member.read(files[0], allow_expired=True)

        path = folder / _SIGNING_KEY
        passphrase = read_passphrase() if _ENCRYPTED in _read_file(path) else None
        identity = cls(folder, member, _read_key(path, passphrase, Ed25519PrivateKey), passphrase)
        if identity._key.public_key().public_bytes_raw() != member.key:
            raise ConfigError(
                f"{folder / 'signing.key'} is not the key in {files[0].name}: restore one of them"
            )
        # Otherwise the others refuse all links, and this side does not know why.
        if _to_pem(_read_certificate(folder / "root.pem")) != member.root:
            raise ConfigError(
                f"{folder / 'root.pem'} is not the root in {files[0].name}: restore one of them"
            )
        return identity

    def check_certificate(self) -> None:
        """Raise ConfigError if the TLS key and certificate do not fit root and clock."""
        path = self.tls_certificate
        certificate = _read_certificate(path)
        remedy = _remedy(path)
        key = _read_key(self.tls_key, self.passphrase, ec.EllipticCurvePrivateKey)
        if key.public_key() != certificate.public_key():
            raise ConfigError(f"{path} is not that of the key in tls.key: {remedy}")
        try:
            certificate.verify_directly_issued_by(_read_certificate(self.folder / "root.pem"))
        except (InvalidSignature, ValueError, TypeError) as error:
            raise ConfigError(f"{path} is not signed by root.pem: {remedy}") from error

        now = datetime.now(UTC)
        self.member.check_not_expired(now)
        if now >= certificate.not_valid_after_utc:
            expiry = _format_time(certificate.not_valid_after_utc)
            raise ConfigError(f"{path} expired at {expiry}: {remedy}")
        if now < certificate.not_valid_before_utc:
            start = _format_time(certificate.not_valid_before_utc)
            raise ConfigError(f"{path} is valid from {start}: set this clock")

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature of a message, 64 bytes."""
        return self._key.sign(message)

    def renew(
        self, *, days: int = 397, now: datetime | None = None, until: datetime | None = None
    ) -> None:
        """Replace the TLS key and certificate, under the same root.

        Other members need not know.

        Args:
            days: Validity of the certificate.
            now: Time of creation; by default the current time.
            until: Expiry, in place of `days`.

        Raises:
            ConfigError: `days` is out of range, or the root has expired.
        """
        if not 1 <= days <= certificates.ROOT_DAYS:
            raise ConfigError(f"`days` must be between 1 and {certificates.ROOT_DAYS}, got {days}")
        now = now or datetime.now(UTC)
        self.member.check_not_expired(now)

        leaf_key = certificates.new_key()
        leaf = certificates.new_leaf(
            self.member.name,
            self.member.endpoint,
            leaf_key,
            _read_certificate(self.folder / "root.pem"),
            _read_key(self.folder / "root.key", self.passphrase, ec.EllipticCurvePrivateKey),
            now,
            until or now + timedelta(days=days),
        )
        # After a crash in between, `check_certificate` reports a key without its certificate.
        records.atomic_write(self.tls_key, _private_key_pem(leaf_key, self.passphrase))
        records.atomic_write(self.tls_certificate, _to_pem(leaf).encode())

    def encrypt(self, passphrase: bytes) -> "Identity":
        """Encrypt the private keys in the folder.

        Args:
            passphrase: The new passphrase.

        Returns:
            The identity.
        """
        for name in _SECRET_FILES:
            path = self.folder / name
            key = _read_key(path, self.passphrase, _PrivateKey)
            records.atomic_write(path, _private_key_pem(key, passphrase))
        return Identity(self.folder, self.member, self._key, passphrase)

    @property
    def tls_key(self) -> Path:
        """File of the TLS key."""
        return self.folder / "tls.key"

    @property
    def tls_certificate(self) -> Path:
        """File of the TLS certificate."""
        return self.folder / "tls.pem"

    @property
    def expires(self) -> datetime:
        """Expiry of the TLS certificate."""
        return _read_certificate(self.tls_certificate).not_valid_after_utc


def _format_time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _private_key_pem(key: _PrivateKey, passphrase: bytes | None) -> bytes:
    encryption: KeySerializationEncryption = NoEncryption()
    if passphrase is not None:
        encryption = BestAvailableEncryption(passphrase)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def _read_file(path: Path) -> bytes:
    try:
        # Secrets of a container are links.
        with open_regular(path, follow_links=True) as file:
            return file.read(_MAX_MEMBER_FILE_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot read {path}: {reason}; {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    if path.name.startswith("tls."):
        return f"`fedcb2o peer renew --identity {path.parent}` makes a new one"
    return "restore it"


def _read_certificate(path: Path) -> x509.Certificate:
    content = _read_file(path)
    with contextlib.suppress(ValueError):
        return x509.load_pem_x509_certificate(content)
    raise ConfigError(f"{path} holds no certificate: {_remedy(path)}")


def _read_key(path: Path, passphrase: bytes | None, kind: Any) -> Any:
    """Return a private key of a kind; any other content is a ConfigError."""
    content = _read_file(path)
    lock = "without a passphrase" if passphrase is None else "with this passphrase"
    try:
        key = load_pem_private_key(content, passphrase)
    except Exception:
        # Any damage is possible, and an error must not show the content of a key.
        raise ConfigError(f"{path} holds no key {lock}: {_remedy(path)}") from None
    if isinstance(key, kind):
        return key
    raise ConfigError(f"{path} holds another kind of key: {_remedy(path)}")
