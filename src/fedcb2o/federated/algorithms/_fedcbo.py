"""FedCBO: FedCB2O with the average loss as criterion.

Carrillo et al. (2024); the discretisation of eq:fedcbo_dynamic with ProbSampling.
"""

import functools

from fedcb2o.federated.algorithms._fedcb2o import fedcb2o

fedcbo = functools.partial(fedcb2o, criterion="average_loss")
vars(fedcbo)["__name__"] = "fedcbo"  # the name in error messages
