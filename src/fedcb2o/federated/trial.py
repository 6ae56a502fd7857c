"""Trial of training alone, the guard `exit_test`: does cooperation harm an agent (docs/method.md)?

    p = (1 + #{b : sum_i s_i^b D_i >= sum_i D_i}) / (1 + B),    s_i^b = -1 or 1 at random

D_i is the loss of the averaged model on held-out sample i minus that of a model trained alone,
within one nat, summed over the rounds of the second half of the trial. The test is exact if D_i is
symmetric about 0.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.data import Shard
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.aggregation.robust_rule import as_reduction
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.inference import model_losses
from fedcb2o.federated.local_update import held_out, train_alone_, trial_rounds
from fedcb2o.federated.types import RuleState
from fedcb2o.rng import stream

_MODEL, _SUM, _ROUNDS, _LEFT = (f"trial_{part}" for part in ("model", "sum", "rounds", "left"))
_CLIP = 1.0  # nats
_FLIPS = 1999


def has_left(state: RuleState) -> bool:
    """Return whether an agent left after its trial."""
    return _LEFT in state and bool(state[_LEFT])


def advance(group: AgentGroup, k: int, n: int, state: RuleState) -> RuleState:
    """Return the state of the agent at index k in the trial, after LocalUpdate of round n."""
    spec = group.spec
    last = trial_rounds(spec)
    if _LEFT in state or (_MODEL not in state and n >= last):
        return state
    own = group.models[int(group.layout.own[k])]
    data = group.data.clean_training_data(k)
    held, _ = held_out(spec, int(group.agents[k]), len(data))
    if _MODEL not in state:
        begun = {_MODEL: own.cpu().clone(), _SUM: torch.zeros(len(held), dtype=torch.float64)}
        return {**state, **begun, _ROUNDS: torch.tensor([n + 1])}

    alone, total = state[_MODEL].to(own.device, copy=True), state[_SUM]
    if n > last // 2:
        # The model before LocalUpdate is the average of the round before.
        previous = group.previous_rows(np.array(k))
        assert previous is not None
        average = group.models[int(previous)]
        total = total + _differences(group, k, torch.stack([average, alone]), data.part(held))
    # Rounds in which the agent was offline are trained now.
    for trained in range(int(state[_ROUNDS]), n + 1):
        train_alone_(group, k, trained, alone)
    if n < last:
        return {**state, _MODEL: alone.cpu(), _SUM: total, _ROUNDS: torch.tensor([n + 1])}

    p = sign_flip(total.numpy(), stream(spec.seed, "trial test", int(group.agents[k])))
    leaves = p <= spec.algorithm.guards.exit_test
    kept = {name: tensor for name, tensor in state.items() if name not in (_MODEL, _SUM, _ROUNDS)}
    adopted = {_MODEL: alone.cpu()} if leaves else {}
    return {**kept, _LEFT: torch.tensor([leaves]), **adopted}


def stay_alone_(decisions: Decisions, k: int, own_row: int, state: RuleState) -> RuleState:
    """Let an agent that left keep its model, in place of eq:local_agg_update.

    In its first round alone it takes the model that trained alone.
    """
    decisions.own_weight[k] = 1.0
    if _MODEL not in state:
        return state
    kept = as_reduction(torch.tensor([own_row]), state[_MODEL], torch.ones(1))
    decisions.reductions[int(decisions.agents[k])] = kept
    return {name: tensor for name, tensor in state.items() if name != _MODEL}


def _differences(
    group: AgentGroup, k: int, models: Float[Tensor, "2 d"], held: Shard
) -> Float[Tensor, " n"]:
    """Compute the loss of the first model minus that of the second one, sample by sample."""
    spec = group.spec
    losses = model_losses(
        spec.module,
        models,
        torch.arange(2),
        held,
        spec.num_classes,
        models_per_batch=spec.kernels.models_per_batch,
        reference=group.reference(k),
        loss=spec.training.loss,
    ).per_sample
    difference = (losses[0] - losses[1]).nan_to_num(0.0, _CLIP, -_CLIP)
    if spec.num_classes == 1:
        return difference
    absent = 0.0
    if group.data.own_tests is None:
        num_present = len(np.unique(group.data.clean_training_data(k).y.cpu().numpy()))
        absent = _CLIP * (spec.num_classes - num_present) / num_present
    return difference.clamp(-_CLIP, _CLIP) - absent


def sign_flip(differences: Float[np.ndarray, " n"], draw: np.random.Generator) -> float:
    """Return the p-value of a mean of 0 or less, against a positive one; 1 without samples."""
    if not len(differences):
        return 1.0
    signs = draw.choice([-1.0, 1.0], (_FLIPS, len(differences)))
    # A margin for rounding: sums of the same numbers are equal.
    reached = signs @ differences >= differences.sum() - 1e-9
    return float(1 + reached.sum()) / (1 + _FLIPS)
