"""Accuracy and attack success over the rounds, by FedCBO and by FedAssay, on equal samples."""

import fedcb2o
from fedcb2o.report import curves

equal = {"agents.hold_out": False, "agents.validation": 1.0}  # all samples train and validate
experiments = [fedcb2o.load(name, equal) for name in ("digits-fedcbo", "digits-fedassay")]
runs = [
    fedcb2o.run(each, out=f"runs/equal-{each.name}", seeds=[0], resume=True) for each in experiments
]
curves(runs).savefig("curves.png")
