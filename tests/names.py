"""Names of test cases that are equal in all processes, so that processes can share the tests."""

import re


def steady(value: object) -> str:
    """Return the text of a value without addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", value if isinstance(value, str) else repr(value))
