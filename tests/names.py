"""Names of cases that are the same in every process, so that processes can share the tests."""

import re


def steady(value: object) -> str:
    """What a value prints as, without the addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", value if isinstance(value, str) else repr(value))
