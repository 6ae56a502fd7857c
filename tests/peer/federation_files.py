"""Changes, signatures and refusals of federation files."""

import tomllib

import pytest
import tomli_w

from fedcb2o.errors import ConfigError
from fedcb2o.peer import read_federation, sign_federation


def assert_refused(path, match=None, **options):
    """Return the error message of a refused file, which has one line."""
    with pytest.raises(ConfigError, match=match) as raised:
        read_federation(path, **options)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 1500
    return text


def edit(path, change):
    """Apply a function to the table of the file and return its path."""
    table = tomllib.loads(path.read_text())
    change(table)
    path.write_text(tomli_w.dumps(table))
    return path


def sign_and_read(path, signers):
    for identity in signers:
        sign_federation(path, identity)
    return read_federation(path)


def set_value(*keys, value):
    """Return a function that sets one value of a table."""

    def change(table):
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value

    return change
