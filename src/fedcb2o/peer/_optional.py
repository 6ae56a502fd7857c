"""Modules of the optional extra `peer`, which may not be installed.

Example:
    >>> require_peer_extra()
"""

from importlib.util import find_spec

from fedcb2o.errors import ConfigError

_MODULES = ("cryptography", "h11", "urllib3", "zstandard")


def require_peer_extra() -> None:
    """Check that the modules of the extra are installed."""
    for name in _MODULES:
        if find_spec(name) is None:
            raise ConfigError(
                f"real peers need the extra, of which {name} is missing: "
                "pip install 'fedcb2o[peer]'"
            )
