"""The paper's Figure 6: frequency and weight of each kind of received peer."""

import fedcb2o
from fedcb2o.report import figure6

names = ("digits-fedcbo", "digits-fedassay")
runs = [fedcb2o.run(name, out=f"runs/{name}", seeds=[0], resume=True) for name in names]
figure6(*runs).savefig("figure6.png")
