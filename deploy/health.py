"""Health check of a container: that of /health if its program has --metrics, else that it runs."""

import re
import sys
import urllib.request
from pathlib import Path

process = Path(*sys.argv[1:]) if sys.argv[1:] else Path("/proc/1/cmdline")
command = " ".join(process.read_text().split("\0")).strip()
if not re.search(r" peer (run|relay) ", command):
    sys.exit(f"process 1 is neither `fedcb2o peer run` nor `peer relay`: {command}")
if port := re.search(r" --metrics[ =](\d+)", command):
    urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/health", timeout=5)
