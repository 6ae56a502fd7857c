"""Identities: keys and certificates of an organisation, and the checks of received member files."""

import random
import re
import socket
import ssl
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from tests.peer.members import identities
from tests.tiny import ENVIRONMENT, run_cli

from fedcb2o.errors import ConfigError
from fedcb2o.peer import Identity, Member
from fedcb2o.peer.membership import certificates
from fedcb2o.peer.membership.identity import parse_bounded_toml

ENDPOINT = "127.0.0.1:7447"


@pytest.fixture
def identity(tmp_path):
    return Identity.make(tmp_path / "a", name="hospital-a", endpoint=ENDPOINT)


def one_line_message(error_info):
    text = str(error_info.value)
    assert "\n" not in text
    assert len(text) < 1000
    return text


def test_files_of_an_identity_are_readable_by_the_owner_only(identity):
    modes = {path.name: path.stat().st_mode & 0o777 for path in identity.folder.iterdir()}
    assert identity.folder.stat().st_mode & 0o777 == 0o700
    assert modes == dict.fromkeys(
        ["signing.key", "root.key", "tls.key", "root.pem", "tls.pem", "hospital-a.member.toml"],
        0o600,
    )
    again = Identity.read(identity.folder)
    again.check_certificate()
    assert again == identity
    assert again.sign(b"x") == identity.sign(b"x")
    assert Member.read(identity.folder / "hospital-a.member.toml") == identity.member
    assert again.expires - datetime.now(UTC) > timedelta(days=396)
    assert [path.name for path in identity.folder.parent.iterdir()] == [
        "a"
    ]  # no temporary file is left


def test_a_signature_is_valid_for_one_message_and_one_key(identity, tmp_path):
    other = Identity.make(tmp_path / "b", name="hospital-b", endpoint="127.0.0.1:7448")
    signature = identity.sign(b"message")
    assert len(signature) == 64
    assert identity.member.verify(b"message", signature)
    assert not identity.member.verify(b"massage", signature)
    assert not other.member.verify(b"message", signature)
    for wrong in (
        b"",
        bytes(64),
        signature[:-1],
        signature + b"\0",
        bytes([signature[0] ^ 1]) + signature[1:],
    ):
        assert not identity.member.verify(b"message", wrong)


def test_the_neutral_point_is_refused_as_a_key(identity):
    neutral = bytes([1]) + bytes(31)  # the point 0: R = [S] B is a signature of every message
    forged_signature = neutral + bytes(32)
    with pytest.raises(ConfigError, match="anybody can sign") as raised:
        Member("hospital-a", ENDPOINT, neutral, identity.member.root)
    assert one_line_message(raised)
    Ed25519PublicKey.from_public_bytes(neutral).verify(
        forged_signature, b"whatever"
    )  # accepted by the library


def test_make_overwrites_no_file_and_removes_partial_output(identity, tmp_path):
    before = {path: path.read_bytes() for path in identity.folder.iterdir()}
    with pytest.raises(ConfigError, match="not empty"):
        Identity.make(identity.folder, name="hospital-a", endpoint=ENDPOINT)
    assert {path: path.read_bytes() for path in identity.folder.iterdir()} == before
    with pytest.raises(ConfigError, match="must be between 1 and 7300"):
        Identity.make(tmp_path / "new", name="hospital-a", endpoint=ENDPOINT, days=10**9)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make"):
        Identity.make(tmp_path / "file" / "below", name="hospital-a", endpoint=ENDPOINT)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "file"}
    (tmp_path / "empty").mkdir()
    assert (
        Identity.make(tmp_path / "empty", name="hospital-a", endpoint=ENDPOINT)
        .folder.stat()
        .st_mode
        % 512
        == 0o700
    )


@pytest.mark.parametrize("secret", ["signing.key", "root.key", "tls.key"])
def test_secret_files_readable_by_other_users_are_refused(identity, secret):
    (identity.folder / secret).chmod(0o640)
    with pytest.raises(ConfigError, match=f"others may read .*{secret}: chmod 600"):
        Identity.read(identity.folder)


def test_mismatched_files_of_an_identity_are_refused(identity, tmp_path):
    other = Identity.make(tmp_path / "b", name="hospital-b", endpoint="127.0.0.1:7448")
    for name, cure in (
        ("signing.key", "restore"),
        ("root.pem", "restore"),
        ("tls.key", "renew"),
        ("tls.pem", "renew"),
    ):
        original = (identity.folder / name).read_bytes()
        for content in (
            (other.folder / name).read_bytes(),
            b"",
            b"-----BEGIN x\n",
            b"\xff" * 70_000,
        ):
            (identity.folder / name).write_bytes(content)
            with pytest.raises(ConfigError, match=cure) as raised:
                Identity.read(identity.folder).check_certificate()
            assert name in one_line_message(raised)
        (identity.folder / name).write_bytes(original)
    Identity.read(identity.folder).check_certificate()
    (identity.folder / "root.key").unlink()  # only needed to renew the certificate
    Identity.read(identity.folder).check_certificate()
    with pytest.raises(ConfigError, match=r"root\.key"):
        identity.renew()
    with pytest.raises(ConfigError, match="holds no file NAME"):
        Identity.read(tmp_path)


def test_renewing_an_expired_certificate_leaves_the_member_file_unchanged(tmp_path):
    until = datetime.now(UTC) - timedelta(seconds=1)
    old = Identity.make(tmp_path / "a", name="hospital-a", endpoint=ENDPOINT, until=until)
    read = Identity.read(tmp_path / "a")
    assert abs(read.expires - until) < timedelta(seconds=2)
    with pytest.raises(
        ConfigError, match=f"expired at .* UTC: `fedcb2o peer renew --identity {tmp_path / 'a'}`"
    ):
        read.check_certificate()
    key = old.tls_key.read_bytes()
    read.renew(days=3)
    read.check_certificate()
    assert timedelta(days=2) < read.expires - datetime.now(UTC) < timedelta(days=4)
    assert Identity.read(tmp_path / "a").member == old.member
    assert old.tls_key.read_bytes() != key
    assert old.tls_key.stat().st_mode & 0o777 == 0o600


def test_an_expired_root_certificate_is_replaced(tmp_path):
    long_ago = datetime.now(UTC) - timedelta(days=certificates.ROOT_DAYS + 1)
    old = Identity.make(tmp_path / "a", name="hospital-a", endpoint=ENDPOINT, now=long_ago)
    read = Identity.read(tmp_path / "a")
    for action in (
        read.check_certificate,
        read.renew,
        lambda: Member.read(tmp_path / "a" / "hospital-a.member.toml"),
    ):
        with pytest.raises(
            ConfigError, match=r"expired at .* UTC: `fedcb2o peer renew --out` makes a new one"
        ):
            action()
    new = read.with_endpoint(tmp_path / "b", endpoint=ENDPOINT)
    new.check_certificate()
    assert new.member.key == old.member.key


def test_a_new_endpoint_keeps_the_signing_key(identity, tmp_path):
    moved = identity.with_endpoint(tmp_path / "moved", endpoint="192.0.2.7:7447")
    moved.check_certificate()
    assert moved.member.key == identity.member.key
    assert moved.member.root != identity.member.root
    assert moved.member.verify(b"x", identity.sign(b"x"))
    identity.check_certificate()  # the former identity stays valid


def can_link(client, server, roots, host="127.0.0.1"):
    """Check whether a client can open a TLS link to a server on loopback."""
    contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)]
    for context, files in zip(contexts, (client, server), strict=True):
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(roots)
        context.load_cert_chain(*files)

    def serve():
        raw, _ = listening.accept()
        with contexts[1].wrap_socket(raw, server_side=True) as link:
            link.sendall(b"linked")

    with socket.create_server((host, 0)) as listening, ThreadPoolExecutor(1) as pool:
        listening.settimeout(10)
        served = pool.submit(serve)
        try:
            with (
                socket.create_connection(listening.getsockname(), timeout=10) as plain,
                contexts[0].wrap_socket(plain, server_hostname=host) as link,
            ):
                return link.recv(6) == b"linked"
        except OSError:
            return False
        finally:
            served.exception()


def forge_certificate(signer, folder, name, endpoint):
    """Issue a TLS certificate for any name and endpoint, signed by the signer's root."""
    (root, root_key), key, now = certificates_of(signer), certificates.new_key(), datetime.now(UTC)
    certificate = certificates.new_leaf(
        name, endpoint, key, root, root_key, now, now + timedelta(days=1)
    )
    folder.mkdir()
    (folder / "tls.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return folder / "tls.pem", folder / "tls.key"


def certificates_of(identity):
    root = x509.load_pem_x509_certificate((identity.folder / "root.pem").read_bytes())
    return root, load_pem_private_key((identity.folder / "root.key").read_bytes(), None)


@pytest.fixture
def two_members_and_expired(tmp_path):
    """Two members, a third one with an expired certificate, and the file of their roots."""
    a, b = identities(tmp_path, 2)
    ago = datetime.now(UTC) - timedelta(seconds=2)
    late = Identity.make(tmp_path / "late", name="org-2", endpoint=ENDPOINT, until=ago)
    (tmp_path / "roots.pem").write_text("".join(each.member.root for each in (a, b, late)))
    return a, b, late, tmp_path / "roots.pem"


def tls_files(identity):
    return identity.tls_certificate, identity.tls_key


def test_links_need_a_valid_certificate_under_the_members_own_root(
    two_members_and_expired, tmp_path
):
    a, b, late, roots = two_members_and_expired
    stranger = Identity.make(tmp_path / "stranger", name="org-0", endpoint=a.member.endpoint)
    assert can_link(tls_files(a), tls_files(b), roots)
    assert can_link(tls_files(b), tls_files(a), roots)
    for wrong in (stranger, late):
        assert not can_link(tls_files(wrong), tls_files(a), roots)
        assert not can_link(tls_files(a), tls_files(wrong), roots)
    late.renew()
    assert can_link(tls_files(late), tls_files(a), roots)
    assert can_link(tls_files(a), tls_files(late), roots)


@pytest.mark.skipif(
    sys.platform == "darwin", reason="there 127.0.0.2 is no address of this machine"
)
def test_a_root_is_valid_only_for_its_members_name_and_host(two_members_and_expired, tmp_path):
    a, b, _, roots = two_members_and_expired
    assert can_link(forge_certificate(b, tmp_path / "own", "org-1", ENDPOINT), tls_files(a), roots)
    for name, host in (("org-0", "127.0.0.1"), ("org-1", "127.0.0.2")):
        forged = forge_certificate(b, tmp_path / f"{name}-{host}", name, f"{host}:7447")
        assert not can_link(forged, tls_files(a), roots)
        assert not can_link(tls_files(a), forged, roots, host)
    assert not can_link(
        tls_files(a), tls_files(b), roots, "127.0.0.2"
    )  # the certificate names another host


def member_table(identity, **changes):
    return {
        key: value
        for key, value in {**identity.member.to_table(), **changes}.items()
        if value is not None
    }


LONG = "x" * 1_000_000
WRONG = {
    "no name": {"name": None},
    "a number for a name": {"name": 7},
    "a path for a name": {"name": "../a"},
    "a long name": {"name": "a" * 64},
    "a very long name": {"name": LONG},
    "a name of digits": {"name": "127"},
    "a name of two lines": {"name": "a\nb"},
    "a name that ends in a hyphen": {"name": "a-"},
    "another's name": {"name": "hospital-b"},
    "no port": {"endpoint": "127.0.0.1"},
    "port 0": {"endpoint": "127.0.0.1:0"},
    "port 65536": {"endpoint": "127.0.0.1:65536"},
    "a port in other digits": {"endpoint": "127.0.0.1:٧"},
    "an address in an odd form": {"endpoint": "127.1:7447"},
    "everywhere": {"endpoint": "0.0.0.0:7447"},
    "a host with options": {"endpoint": "127.0.0.1:7447?x=1"},
    "another protocol": {"endpoint": "tcp/127.0.0.1:7447"},
    "another host": {"endpoint": "127.0.0.2:7447"},
    "an IPv6 address without brackets": {"endpoint": "::1:7447"},
    "a list for an endpoint": {"endpoint": ["127.0.0.1:7447"]},
    "a key of 31 bytes": {"key": "A" * 40 + "AA=="},
    "a key of hex": {"key": "ab" * 32},
    "a key with blanks": {"key": " " + "A" * 43 + "="},
    "a key beyond ASCII": {"key": "é" * 44},
    "a key of zeros": {"key": "A" * 43 + "="},
    "no root": {"root": ""},
    "a root that is text": {
        "root": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    },
    "a number more": {"age": 7},
    "a key with a line break more": {"a\nb": "x"},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_an_invalid_member_file_is_refused_with_a_one_line_error(identity, tmp_path, change):
    path = tmp_path / "x.member.toml"
    path.write_text(tomli_w.dumps(member_table(identity, **change)), encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        Member.read(path)
    assert str(path) in one_line_message(raised)


def test_a_root_certificate_of_another_form_or_member_is_refused(identity, tmp_path):
    root, key = certificates_of(identity)
    now, text = datetime.now(UTC), identity.member.root
    leaf = identity.tls_certificate.read_text()
    other = Identity.make(tmp_path / "b", name="hospital-b", endpoint=ENDPOINT)

    def build_root(
        *, ca=True, path_length=0, constrained=True, until=now + timedelta(days=9), signing_key=key
    ):
        builder = x509.CertificateBuilder().subject_name(root.subject).issuer_name(root.subject)
        builder = builder.public_key(key.public_key()).serial_number(5)
        builder = builder.not_valid_before(now - timedelta(days=20)).not_valid_after(until)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=ca, path_length=path_length if ca else None), critical=True
        )
        builder = builder.add_extension(
            root.extensions.get_extension_for_class(x509.KeyUsage).value, critical=True
        )
        if constrained:
            builder = builder.add_extension(
                certificates.name_constraints("hospital-a", ENDPOINT), critical=True
            )
        return builder.sign(signing_key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()

    path = tmp_path / "x.member.toml"
    for bad_root, message in (
        (leaf, "certificate"),
        (text + text, "certificate"),
        (text + "# more", "nothing else"),
        (text.replace("\n", "\r\n"), "nothing else"),
        (other.member.root, "another"),
        (build_root(ca=False), "authority"),
        (build_root(path_length=None), "length is None, not 0"),
        (build_root(path_length=1), "length is 1, not 0"),
        (build_root(constrained=False), "certificate"),
        (build_root(signing_key=certificates.new_key()), "certificate"),
        (build_root(until=now - timedelta(days=1)), "expired at"),
    ):
        path.write_text(tomli_w.dumps(member_table(identity, root=bad_root)), encoding="utf-8")
        with pytest.raises(ConfigError, match=message) as raised:
            Member.read(path)
        one_line_message(raised)
    path.write_text(tomli_w.dumps(member_table(identity, root=build_root())), encoding="utf-8")
    assert Member.read(path).name == "hospital-a"


def test_a_root_with_any_byte_changed_is_refused(identity):
    der, draw = ssl.PEM_cert_to_DER_cert(identity.member.root), random.Random(0)
    for _ in range(300):
        place, length = draw.randrange(len(der)), draw.choice([0, 1, 1, 1, 8])
        changed = der[:place] + draw.randbytes(length) + der[place + 1 :]
        if changed != der:
            with pytest.raises(ConfigError) as raised:
                Member.from_table(member_table(identity, root=ssl.DER_cert_to_PEM_cert(changed)))
            one_line_message(raised)


def test_an_unreadable_member_file_is_refused_with_a_one_line_error(tmp_path):
    for content in (
        b"",
        b"\xff",
        b"x = " + b"[" * 5000,
        b"x" * 10**6,
        b"name = 0x" + b"f" * 60_000,
        b"name = nan",
    ):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ConfigError) as raised:
            Member.read(tmp_path / "x")
        one_line_message(raised)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="is no member's file"):
            Member.read(path)


@pytest.mark.parametrize(
    "part",
    [b"a", b'"a b"', b"'='", b'"\\" . #"', b"a ", b'"a.a"', b"-"],
    ids=lambda part: part.decode(),
)
def test_a_key_of_more_than_20_parts_is_refused_before_it_is_parsed(part):
    """The time and the memory of the parser are quadratic in the parts."""
    for start in (b"", b"[", b"x = {", b"x = 'a.b'\n", b'x = """\n"""\n'):
        with pytest.raises(ValueError, match="a key of more than 20 parts"):
            parse_bounded_toml(start + b".".join([part] * 21) + b" = 1", 2**20)


def test_tables_with_many_dots_and_long_texts_in_base64_are_read():
    text = "/9+=" * 10_000
    content = f"""
numbers = [{", ".join(f"{n}.5" for n in range(200))}]
names = ["{'a.b.c", "d.e' * 20}"]
key = ["{text}", "{text}"]
{".".join("a" * 20)} = 1
"""
    table = parse_bounded_toml(content.encode(), 2**20)
    assert len(table["numbers"]) == 200
    assert table["key"] == [text, text]
    assert isinstance(table["a"], dict)


@pytest.mark.parametrize(
    "endpoint", ["node.example.org:7447", "[2001:db8::1]:7447", "192.0.2.7:1", "localhost:65535"]
)
def test_endpoints_may_be_host_names_or_ip_addresses(tmp_path, endpoint):
    identity = Identity.make(tmp_path / "a", name="3rd-hospital", endpoint=endpoint)
    assert Identity.read(identity.folder).member.endpoint == endpoint
    identity.check_certificate()


@pytest.mark.parametrize(
    ("endpoint", "canonical"),
    [
        ("hospital_a:7447", "hospital_a:7447"),
        ("Hospital-A.Example:7447", "hospital-a.example:7447"),
        ("a.example.:7447", "a.example:7447"),
        (" LOCALHOST:1 ", "localhost:1"),
        ("[2001:DB8:0::1]:7447", "[2001:db8::1]:7447"),
    ],
)
def test_endpoints_are_normalised(tmp_path, endpoint, canonical):
    identity = Identity.make(tmp_path / "a", name="a", endpoint=endpoint)
    assert identity.member.endpoint == canonical
    assert Identity.read(identity.folder).member == identity.member
    table = {**identity.member.to_table(), "endpoint": endpoint}
    assert Member.from_table(table) == identity.member
    identity.check_certificate()


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("b\u00fccher.example:1", "has '\u00fc', and names of hosts have letters from a to z"),
        ("a b:1", "has ' ', and names of hosts"),
        ("tcp/a:1", "has '/', and names of hosts"),
        ("a..b:1", "between the dots of a name are 1 to 63 letters"),
        ("-a:1", "the hyphens not at an end"),
        ("[127.0.0.1]:1", "an IPv6 address in brackets"),
        (("a", 1), "an endpoint is a text HOST:PORT, got a tuple"),
    ],
)
def test_the_error_for_an_invalid_host_names_the_character(tmp_path, endpoint, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Identity.make(tmp_path / "a", name="a", endpoint=endpoint)


def test_an_invalid_member_name_is_refused_before_any_file_is_written(tmp_path):
    for name in ("Hôpital", "a b", "", "-a", "x" * 64, "7", "localhost"):
        done = run_cli(
            "peer", "identity", "--name", name, "--endpoint", ENDPOINT, "--out", tmp_path / "a"
        )
        assert "a member's name has up to 63 letters from a to z" in done.one_line()
        assert not list(tmp_path.iterdir())


def test_identity_and_renew_commands_print_the_member_file_and_no_secret(tmp_path):
    folder = tmp_path / "a"
    done = run_cli(
        "peer", "identity", "--name", "hospital-a", "--endpoint", ENDPOINT, "--out", folder
    )
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[-1] == str(folder / "hospital-a.member.toml")
    assert tomllib.loads((folder / "hospital-a.member.toml").read_text())["name"] == "hospital-a"
    again = run_cli(
        "peer", "identity", "--name", "hospital-a", "--endpoint", ENDPOINT, "--out", folder
    )
    assert "not empty" in again.one_line()
    renewed = run_cli("peer", "renew", "--identity", folder, "--days", 2)
    assert renewed.status == 0
    assert Identity.read(folder).expires - datetime.now(UTC) < timedelta(days=2, seconds=1)
    moved = run_cli(
        "peer",
        "renew",
        "--identity",
        folder,
        "--out",
        tmp_path / "b",
        "--endpoint",
        "127.0.0.1:7448",
    )
    assert moved.status == 0
    assert Identity.read(tmp_path / "b").member.endpoint == "127.0.0.1:7448"
    assert (
        "give --out"
        in run_cli("peer", "renew", "--identity", folder, "--endpoint", "127.0.0.1:7448").one_line()
    )
    output = done.out + again.err + renewed.out + moved.out + repr(Identity.read(folder))
    for secret in ("signing.key", "root.key", "tls.key"):
        content = (folder / secret).read_text().splitlines()[1]
        assert content[-20:] not in output


def test_without_the_peer_extra_commands_name_it_and_help_works(tmp_path):
    program = "import sys; sys.modules['zstandard'] = None; from fedcb2o.cli import main; main()"

    def run_command(*words):
        command = [sys.executable, "-c", program, *words]
        return subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, timeout=60)

    done = run_command("peer", "sign", "f.toml", "--identity", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        "Error: real peers need the extra, of which zstandard is missing: pip install 'fedcb2o[peer]'\n"
    )
    assert "Usage: " in run_command("peer", "sign", "--help").stdout


def test_help_imports_no_large_package():
    program = (
        "import sys\nfrom fedcb2o.cli import main\ntry: main()\nfinally:\n    "
        "large = {'torch', 'cryptography', 'urllib3', 'h11', 'pydantic'} & set(sys.modules)\n"
        "    print('LOADED', *sorted(large))"
    )
    command = [sys.executable, "-c", program, "--help"]
    done = subprocess.run(command, env=ENVIRONMENT, text=True, capture_output=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "LOADED"
    assert "peer " in done.stdout


def test_member_files_are_plain_toml(identity):
    content = Path(identity.folder / "hospital-a.member.toml").read_text()
    assert content.startswith('name = "hospital-a"\nendpoint = "127.0.0.1:7447"\n')
    assert 'root = """\n-----BEGIN CERTIFICATE-----\n' in content
