"""FedAssay: the method that this project recommends (docs/method.md).

FedAssay is Algorithm 2 (alg:localAggregation) with the sub-level set of eq:clustered_csp and the
agent's own model as one of the particles, and with `DEFAULT_GUARDS`. An assay is a test of a metal
on a sample: each agent tests received models on its own data.
"""

from typing import Literal

from fedcb2o.federated.algorithms._fedcb2o import fedcb2o
from fedcb2o.federated.guards.checks import Guards
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.plugins import PluginChoice

DEFAULT_GUARDS = Guards(
    newcomer_share=0.33, max_distance=1.3, min_distance=0.75, interpolation=0.5, loss_tolerance=2.0
)
"""Guards of FedAssay; the section `algorithm.guards` changes them."""


def fedassay(
    *,
    criterion: PluginChoice = "class_loss_excess",
    criterion_from_round: int = 0,
    alpha: float = 1.0,
    beta: float = 0.5,
    label_coverage: float = 1.0,
    rank_tolerance: float | Literal[False] = 0.1,
    selection: PluginChoice = "prob_sampling",
    kappa: float = 2.0,
    zeta: float = 0.5,
    mixing_factor: float = 1.0,
) -> Algorithm:
    """Aggregate as Algorithm 2 does, with the project's guards (FedAssay, recommended).

    The agent's own model is evaluated like a peer's. All samples of an agent train its model and
    validate those of its peers, unless `agents.hold_out` says otherwise.

    Args:
        criterion_from_round: T_G, the first round with criterion G, counted from 0; the average
            loss is used before.
        beta: Share of the models in the sub-level set Q_beta, above 0 and at most 1.
        label_coverage: Share of the classes that an agent's labels must cover for full confidence
            in its losses, in [0, 1]; 0 for full confidence always. See
            `_fedcb2o.label_confidence`.
        rank_tolerance: Share of the agent's own knowledge, 0 or more, that a model in Q_beta may
            lack if it is there by its rank alone; false for no bound. See `_fedcb2o.rank_bound`.
        mixing_factor: Share of the consensus point in the new model, above 0 and at most 1.
    """
    algorithm = fedcb2o(
        criterion=criterion,
        criterion_from_round=criterion_from_round,
        alpha=alpha,
        beta=beta,
        label_coverage=label_coverage,
        rank_tolerance=rank_tolerance,
        own_model="judged",
        selection=selection,
        kappa=kappa,
        zeta=zeta,
        mixing_factor=mixing_factor,
    )
    return algorithm.with_guards(DEFAULT_GUARDS)
