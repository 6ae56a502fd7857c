"""Landscape of L and G, particles under attack, and decay of V, as `fedcb2o minimize` draws."""

import subprocess
import sys

settings = "--noise isotropic --sigma1 0.5 --beta 0.05 --num-particles 540 --maxiter 600"
attack = "--adversary static --num-malicious 60 --delta-q 0.01"
command = [sys.executable, "-m", "fedcb2o", "minimize", "circle"]
subprocess.run(
    [*command, *settings.split(), *attack.split(), "--out", "."], check=True, capture_output=True
)
