"""Images as the agents of each cluster see them."""

import fedcb2o
from fedcb2o.report import sample_images

run = fedcb2o.run("digits-fedassay", out="runs/digits-fedassay", seeds=[0], resume=True)
sample_images(run).savefig("samples.png")
