"""Accuracy and attack success over the rounds, by FedCBO and by FedCB2O."""

import fedcb2o
from fedcb2o.report import curves

names = ("digits-fedcbo", "digits-fedassay")
runs = [fedcb2o.run(name, out=f"runs/{name}", seeds=[0], resume=True) for name in names]
curves(runs).savefig("curves.png")
