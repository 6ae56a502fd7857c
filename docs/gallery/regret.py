"""Regret of a grid: shortfall of each defence from the best one under each attack, in points."""

from pathlib import Path

import fedcb2o
from fedcb2o.report import read_grid, report_grid

grid = {
    "name": "regret",
    "extends": "digits-fedassay",
    "seeds": [0, 1],
    "rounds": 8,
    "attacks": {
        "Label flip": {"attack": {"name": "label_flip", "source": 9, "target": 4}},
        "Random models": {"attack": {"name": "random_model"}},
    },
    "defences": {
        "FedAssay": {},
        "FedCBO": {"algorithm": {"name": "fedcbo", "mixing_factor": 1.0}},
        "Mean": {"algorithm": {"name": "by_rule", "rule": "mean"}},
    },
}
done = fedcb2o.bench(grid, out="runs/regret", jobs=1)
report_grid(read_grid(done.folder), Path("report"))
Path("report/matrices/accuracy-regret.png").replace("regret.png")
