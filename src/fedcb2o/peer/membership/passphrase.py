"""Passphrase of encrypted private keys: from a file, the environment or the terminal.

A service takes it from a file, such as a credential of systemd or a secret of a container.
"""

import functools
import getpass
import os
import sys
from pathlib import Path

from fedcb2o.errors import ConfigError

FILE_VARIABLE = "FEDCB2O_PASSPHRASE_FILE"
VARIABLE = "FEDCB2O_PASSPHRASE"
_MAX_BYTES = 1024


def read_passphrase(*, is_new: bool = False) -> bytes:
    """Return the passphrase of this organisation's keys.

    It is read from the file that FEDCB2O_PASSPHRASE_FILE names, from FEDCB2O_PASSPHRASE, or from
    the terminal, which is asked once per process. A new one, which will encrypt keys, is typed
    twice there. A missing or empty one is a ConfigError.
    """
    path, text = os.environ.get(FILE_VARIABLE), os.environ.get(VARIABLE)
    if path:
        try:
            # It may be a pipe, too, such as <(pass show fedcb2o).
            with Path(path).open("rb") as file:
                content = file.read(_MAX_BYTES).rstrip(b"\r\n")
        except OSError as error:
            raise ConfigError(
                f"cannot read {path} ({FILE_VARIABLE}): {error.strerror or error}"
            ) from error
    elif text:
        content = text.encode()
    else:
        content = _ask(is_new)
    if not content:
        raise ConfigError("the passphrase of the keys is empty")
    return content


@functools.cache
def _ask(is_new: bool) -> bytes:
    if not (sys.stdin and sys.stdin.isatty()):
        raise ConfigError(
            f"the keys need a passphrase: name a file with it in {FILE_VARIABLE}, or put it into "
            f"{VARIABLE}"
        )
    first = getpass.getpass("Passphrase of the keys: ")
    if is_new and getpass.getpass("The same once more: ") != first:
        raise ConfigError("the two passphrases differ")
    return first.encode()
