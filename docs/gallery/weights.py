"""Weights by agent (row) and peer (column), sorted by cluster, benign agents first."""

import fedcb2o
from fedcb2o.report import weight_matrix

run = fedcb2o.run("digits-fedassay", out="runs/digits-fedassay", seeds=[0], resume=True)
weight_matrix(run).savefig("weights.png")
