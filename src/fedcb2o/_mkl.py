"""Products of Intel's MKL whose bits do not depend on where their factors are in memory."""

import os
from pathlib import Path

VARIABLE = "MKL_CBWR"
"""Environment variable of MKL's conditional numerical reproducibility."""


def set_reproducible(processors: Path = Path("/proc/cpuinfo")) -> None:
    """Ask MKL for reproducible products on processors of AMD (Linux).

    There the rounding of a product depends on the alignment of its factors, so that one agent alone
    and in a group of agents would differ. The products take up to a tenth longer.
    """
    try:
        text = processors.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    if "AuthenticAMD" in text:
        os.environ.setdefault(VARIABLE, "AUTO,STRICT")
