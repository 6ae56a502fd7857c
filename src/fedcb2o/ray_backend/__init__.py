"""Agents on several machines of one owner: Ray actors, each of which computes a group of agents.

Ray is an optional extra that only this package imports: `pip install 'fedcb2o[cluster]'`. A cluster
trusts everyone who can reach it.
"""

import os
import sys
from pathlib import Path


def _has_token() -> bool:
    """Return True if this user has the token of a cluster."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    return (Path.home() / ".ray" / "auth_token").is_file()


# Ray reads this only when it is imported. `ray start` uses the user's token, `ray.init` does not.
if "ray" not in sys.modules and _has_token():
    os.environ.setdefault("RAY_AUTH_MODE", "token")
