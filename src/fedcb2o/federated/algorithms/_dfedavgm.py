"""DFedAvgM."""

import functools
from typing import Literal

from fedcb2o.federated import selection as _selections
from fedcb2o.federated.aggregation.sample_average import by_num_samples
from fedcb2o.federated.algorithm_spec import Algorithm
from fedcb2o.plugins import PluginChoice


def dfedavgm(
    *, selection: PluginChoice = "uniform", own_model: Literal["excluded", "judged"] = "judged"
) -> Algorithm:
    """DFedAvgM (Sun et al. 2022): the average of random peers and oneself, weighted by their numbers of samples."""
    return Algorithm(
        select=_selections.resolve_selection(selection),
        rule=functools.partial(by_num_samples, own_model=own_model),
        needs_losses=False,
        lambda1=1.0,
        mixing_factor=1.0,
    )
