"""DFedAvgM: averages of random peers' models (Sun et al. 2022)."""

import functools
from typing import Literal

from fedcb2o.federated import selection as _selections
from fedcb2o.federated.aggregation.sample_average import by_num_samples
from fedcb2o.federated.algorithm2 import RuleWeighing
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.plugins import PluginChoice


def dfedavgm(
    *, selection: PluginChoice = "uniform", own_model: Literal["excluded", "judged"] = "judged"
) -> Algorithm:
    """Average the models of random peers, weighted by numbers of samples.

    Sun et al. (2022).

    Args:
        own_model: "excluded" leaves the agent's own model out of the average.
    """
    return Algorithm(
        select=_selections.resolve_selection(selection),
        weigh=RuleWeighing(functools.partial(by_num_samples, own_model=own_model)),
        needs_losses=False,
        lambda1=1.0,
        mixing_factor=1.0,
    )
