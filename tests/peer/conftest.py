"""Organisations that several files of tests share, and their federations."""

import contextlib

import pytest
from tests.peer import relays
from tests.peer.members import federated, forget_signed_versions, identities

from fedcb2o.peer import write_federation


@pytest.fixture
def exit_stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def identity_folder(tmp_path_factory):
    """Return a folder for the identities of eight organisations."""
    return tmp_path_factory.mktemp("organisations")


@pytest.fixture(scope="module")
def organisations(identity_folder):
    return identities(identity_folder, 8)


@pytest.fixture(scope="module")
def federation_bytes(identity_folder, organisations):
    """Return the content of a federation file of the first four organisations."""
    federated(organisations[:4], path=identity_folder / "federation.toml")
    return (identity_folder / "federation.toml").read_bytes()


@pytest.fixture
def federation_file(tmp_path, federation_bytes, organisations):
    """Return the federation file of the first four organisations, which signed no version."""
    forget_signed_versions(organisations)
    (tmp_path / "federation.toml").write_bytes(federation_bytes)
    return tmp_path / "federation.toml"


@pytest.fixture(scope="module")
def federation_of_three(tmp_path_factory):
    """Return three organisations without a reachable endpoint, and their federation."""
    orgs = relays.behind_nat(tmp_path_factory.mktemp("three"), 3)
    return orgs, federated(orgs)


@pytest.fixture
def removal(federation_of_three, tmp_path):
    """Return three organisations, their federation, that without org-0, and the keys of a relay."""
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    second = relays.next_version(path, orgs[1:], remove=["org-0"])
    return orgs, first, second, relays.relay_identity(tmp_path)
