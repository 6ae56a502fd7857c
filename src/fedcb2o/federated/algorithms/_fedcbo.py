"""FedCBO."""

import functools

from fedcb2o.federated.algorithms._fedcb2o import fedcb2o

fedcbo = functools.partial(fedcb2o, criterion="average_loss")
"""FedCBO (Carrillo et al. 2024; eq:fedcbo_dynamic) with ProbSampling: FedCB2O with the average loss for G."""


vars(fedcbo)["__name__"] = "fedcbo"  # as errors call it
