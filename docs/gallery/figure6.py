"""The paper's Figure 6: how often each kind of peer is received, and with what weight."""

import fedcb2o
from fedcb2o.report import figure6

names = ("digits-fedcbo", "digits-fedcb2o")
runs = [fedcb2o.run(name, out=f"runs/{name}", seeds=[0], resume=True) for name in names]
figure6(*runs).savefig("figure6.png")
