"""FedCBO: FedCB2O with the average loss as criterion.

Carrillo et al. (2024); the discretisation of eq:fedcbo_dynamic with ProbSampling.
"""

import functools
import inspect

from fedcb2o.federated.algorithms._fedcb2o import RELEASED, fedcb2o, with_variants

_RELEASED = {
    **RELEASED,
    "criterion": "average_loss",
    "alpha": 10.0,
    "own_model": "judged",  # a loss evaluates the agent's own model, unlike a gap to it
}

_fedcb2o = functools.partial(inspect.unwrap(fedcb2o), criterion="average_loss")
fedcbo = with_variants(text={}, released=_RELEASED)(_fedcb2o)
fedcbo.__name__ = "fedcbo"  # the name in error messages
fedcbo.__module__ = __name__
fedcbo.__doc__ = inspect.getdoc(fedcb2o)
