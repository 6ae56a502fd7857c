"""The paper's Figure 6: frequency and weight of each kind of received peer."""

import fedcb2o
from fedcb2o.report import figure6

equal = {"agents.hold_out": False, "agents.validation": 1.0}  # all samples train and validate
experiments = [fedcb2o.load(name, equal) for name in ("digits-fedcbo", "digits-fedassay")]
runs = [
    fedcb2o.run(each, out=f"runs/equal-{each.name}", seeds=[0], resume=True) for each in experiments
]
figure6(*runs).savefig("figure6.png")
