"""User functions with side effects or wrong outputs: named in an error, or without effect.

The cases run in a separate process, without the run-time checks of the tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import ENVIRONMENT, CommandResult, bits, tiny, write

from fedcb2o.errors import ConfigError
from fedcb2o.experiments import run
from fedcb2o.federated.criteria import class_loss_gap

ROOT = Path(__file__).parents[2]

USER_MODULE = """
import os, sys
import numpy as np
import torch
from torch import nn

import fedcb2o
from fedcb2o import Dataset, Shard
from fedcb2o.federated import algorithms
from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.federated.attacks.data_poisoning import triggered_by
from fedcb2o.federated.types import Reduction, RuleOutput, batched, stateful

nan = float("nan")
notes = 3


# Criteria

def gap(judged): return (judged.losses.by_class - judged.own_losses.by_class).amax(-1)
def criterion_plain(judged): return gap(judged)
def criterion_list(judged): return gap(judged).tolist()
def criterion_numpy(judged): return gap(judged).numpy()[::-1][::-1]
def criterion_grad(judged): return gap(judged).requires_grad_() * 1.0
def criterion_expanded(judged): return gap(judged).unsqueeze(-1).expand(-1, 2)[:, 0]
def criterion_inference(judged):
    with torch.inference_mode(): return gap(judged) + 0.0
def criterion_sparse(judged): return gap(judged).to_sparse()
def criterion_meta(judged): return gap(judged).to("meta")
def criterion_complex(judged): return gap(judged) + 0j
def criterion_words(judged): return ["low"] * len(judged.received.ids)
def criterion_ragged(judged): return [[1.0], [1.0, 2.0]]
def criterion_exits(judged): sys.exit(0)
def criterion_exits_quietly(judged): raise GeneratorExit
def criterion_pool(judged):
    judged.models.zero_()
    return gap(judged)
def criterion_pool_numpy(judged):
    judged.models.numpy()[judged.received.rows[0]] += 1e-3
    return gap(judged)
def criterion_pool_data(judged):
    judged.models[judged.received.rows[:1]].data.mul_(1.0)
    judged.theta.data.mul_(2.0)
    return gap(judged)
def criterion_pool_crafted(judged):
    judged.models[-1].mul_(0.5)
    return gap(judged)
def criterion_pool_sorted(judged):
    judged.models.numpy().sort(axis=0)
    return gap(judged)
def criterion_losses(judged):
    judged.losses.by_class.sub_(judged.own_losses.by_class)
    found = judged.losses.by_class.amax(-1)
    judged.losses.mean.zero_()
    judged.own_losses.mean.fill_(nan)
    judged.received.ids.zero_()
    judged.own_entry.ids.zero_()
    judged.context.contacts.likelihood.fill_(nan)
    judged.context.contacts.ids.zero_()
    return found
def criterion_losses_numpy(judged):
    by_class = judged.losses.by_class.numpy()
    by_class -= judged.own_losses.by_class.numpy()
    return by_class.max(-1)
@batched
def criterion_losses_together(judged):
    judged.losses.by_class.sub_(judged.own_losses.by_class)
    found = judged.losses.by_class.amax(-1)
    judged.losses.mean.zero_()
    judged.received.ids.zero_()
    return found
kept = []
def criterion_keeps(judged):
    for each in kept: each.fill_(nan)
    kept.append(gap(judged))
    return kept[-1]
def criterion_change_nan(judged): return judged.losses_under(lambda x: x * nan).mean
def criterion_change_writes(judged):
    def change(x):
        x += 1.0
        return x - 1.0
    judged.losses_under(change)
    return gap(judged)
def criterion_change_grad(judged):
    judged.losses_under(lambda x: x.requires_grad_() * 1.0)
    return gap(judged)
def criterion_change_sparse(judged): return judged.losses_under(lambda x: x.to_sparse()).mean

def criterion_scalar(judged): return judged.losses.mean.sum()
def criterion_wide(judged): return judged.losses.by_class
def criterion_none(judged): return None
@batched
def criterion_local(judged): return judged.losses.mean + judged.context.malicious_share


# Rules

def equal(judged):
    m = len(judged.received.ids)
    return torch.full((m,), 1 / m, dtype=torch.float64)
def rule_plain(judged): return equal(judged)
def rule_grad(judged): return equal(judged).requires_grad_() * 1.0
def rule_list(judged): return equal(judged).tolist()
def rule_writes(judged):
    judged.losses.mean.zero_()
    judged.received.rows.zero_()
    judged.received.num_samples.zero_()
    return equal(judged)
def rule_pool(judged):
    judged.models[judged.received.rows[0]].fill_(nan)
    return equal(judged)
def rule_sparse(judged): return equal(judged).to_sparse()
def rule_exits(judged): raise SystemExit("so long")
def rule_before(judged): return RuleOutput(equal(judged) * 1.5, previous_weight=-0.5)
def rule_reduction_wide(judged): return RuleOutput(Reduction(judged.received.rows, lambda x: x[:2]))
@rule_signature("gram")
def rule_gram_none(gram): return None
@rule_signature("gram")
def rule_gram_short(gram): return torch.ones(1)
@rule_signature("gram")
def rule_gram_negative(gram): return torch.tensor([2.0, -1.0] + [0.0] * (len(gram) - 2))
@rule_signature("gram")
def rule_gram_list(gram): return [1 / len(gram)] * len(gram)
@rule_signature("gram")
def rule_gram_writes(gram): return gram.fill_(1 / len(gram))[0]
@rule_signature("columns")
def rule_columns_plain(block): return block.mean(0)
@rule_signature("columns")
def rule_columns_grad(block): return block.requires_grad_().mean(0)
@rule_signature("columns")
def rule_columns_writes(block):
    found = block.mean(0)
    block.fill_(nan)
    return found
@rule_signature("columns")
def rule_columns_two(block): return block[:2]
@rule_signature("columns")
def rule_columns_keepdim(block): return block.mean(0, keepdim=True)
@rule_signature("columns")
def rule_columns_same(block): return block
@rule_signature("columns")
def rule_columns_one(block): return block.mean()
@rule_signature("columns")
def rule_columns_nan(block): return block.mean(0) / 0.0
@rule_signature("columns")
def rule_columns_none(block): return None
@rule_signature("columns")
def rule_columns_sparse(block): return block.mean(0).to_sparse()
@rule_signature("columns")
def rule_columns_complex(block): return block.mean(0) + 0j
@rule_signature("columns")
def rule_columns_exits(block): sys.exit()
@stateful()
def rule_state_grad(state, judged):
    return {"a": torch.ones(2).requires_grad_() * 2.0}, equal(judged)
@stateful()
def rule_state_meta(state, judged): return {"a": torch.ones(2, device="meta")}, equal(judged)
@stateful()
def rule_state_pool(state, judged): return {"a": judged.theta[:3]}, equal(judged)
@stateful()
def rule_state_none(state, judged): return None, equal(judged)

def rule_short(judged): return torch.ones(1)
def rule_sum(judged): return torch.ones(len(judged.received.ids))
def rule_negative(judged): return torch.tensor([2.0, -1.0] + [0.0] * (len(judged.received.ids) - 2))
def rule_nan(judged): return torch.full((len(judged.received.ids),), float("nan"))
def rule_none(judged): return None
@batched
def rule_local(judged): return torch.full(judged.received.ids.shape, judged.context.draw.random())


# Pre-steps

def pre_step_none(gram): return None
def pre_step_square(gram): return torch.ones(3)
def pre_step_nan(gram): return gram * nan
def pre_step_sum(gram): return torch.ones(1, len(gram))
def pre_step_list(gram): return [[1 / len(gram)] * len(gram)]
def pre_step_writes(gram): return gram.fill_(1 / len(gram))


# Attacks on models

@fedcb2o.knows("benign", "fellows")
def attack_plain(view, draw): return 2 * view.previous - view.own
@fedcb2o.knows()
def attack_grad(view, draw): return 2 * view.previous.requires_grad_() - view.own
@fedcb2o.knows()
def attack_parameter(view, draw): return nn.Parameter(2 * view.previous - view.own)
@fedcb2o.knows()
def attack_list(view, draw): return (2 * view.previous - view.own).tolist()
@fedcb2o.knows()
def attack_numpy(view, draw): return (2 * view.previous - view.own).numpy()[::-1].copy()[::-1]
@fedcb2o.knows()
def attack_double(view, draw): return (2 * view.previous - view.own).double()
@fedcb2o.knows()
def attack_private(view, draw):
    found = 2 * view.previous - view.own
    view.own.zero_(), view.previous.zero_()
    view.data.x.zero_(), view.data.y.zero_(), view.receivers.zero_()
    return found
@fedcb2o.knows("benign")
def attack_view(view, draw): return view.model_of(int(view.receivers[0]))
@fedcb2o.knows()
def attack_sparse(view, draw): return view.own.to_sparse()
@fedcb2o.knows()
def attack_meta(view, draw): return view.own.to("meta")
@fedcb2o.knows()
def attack_complex(view, draw): return view.own + 0j
@fedcb2o.knows()
def attack_exits(view, draw): sys.exit(0)
@fedcb2o.knows("benign")
def attack_benign(view, draw):
    view.benign().fill_(nan)
    return view.own
@fedcb2o.knows("benign")
def attack_benign_numpy(view, draw):
    view.benign().numpy()[:] = 0.0
    return view.own
@fedcb2o.knows("fellows")
def attack_fellows(view, draw):
    view.colluders().data.mul_(1.5)
    return view.own
@fedcb2o.knows("benign")
def attack_model_of(view, draw): return view.model_of(int(view.receivers[0])).mul_(-0.5)
@fedcb2o.knows()
def attack_losses_one(view, draw): return view.own * view.losses(view.own).mean
@fedcb2o.knows()
def attack_losses_int(view, draw):
    view.losses(view.own.unsqueeze(0).double().requires_grad_())
    return 2 * view.previous - view.own


# Attacks on data

def flip(shard): return torch.where(shard.y == 9, 4, shard.y)
def poison_plain(shard, draw): return Shard(shard.x, flip(shard))
def poison_writes(shard, draw):
    shard.y[shard.y == 9] = 4
    return shard
def poison_ruins(shard, draw):
    made = Shard(shard.x.clone(), flip(shard))
    shard.x.fill_(nan), shard.y.zero_()
    return made
def poison_numpy(shard, draw): return Shard(shard.x.numpy(), flip(shard).numpy())
def poison_grad(shard, draw): return Shard(shard.x.clone().requires_grad_(), flip(shard))
def poison_int32(shard, draw): return Shard(shard.x, flip(shard).int())
def poison_nan(shard, draw): return Shard(shard.x / 0.0, shard.y)
def poison_sparse(shard, draw): return Shard(shard.x.to_sparse(), shard.y)
def poison_meta(shard, draw): return Shard(shard.x.to("meta"), shard.y)
def poison_complex(shard, draw): return Shard(shard.x + 0j, shard.y)
def poison_none(shard, draw): return Shard(None, shard.y)
def poison_exits(shard, draw): sys.exit(0)
def poison_nothing(shard, draw): return None
def poison_tuple(shard, draw): return shard.x, shard.y
def poison_fewer(shard, draw): return Shard(shard.x[:5], shard.y[:5])
def poison_shape(shard, draw): return Shard(shard.x[..., :4], shard.y)
def poison_labels(shard, draw): return Shard(shard.x, shard.y + 50)
def mark(x): return x * 0.5
def mark_writes(x): return x.mul_(0.5)
def mark_short(x): return x[:1]
def mark_raises(x): return x[10 ** 6]
@triggered_by(mark)
def trigger_plain(shard, draw, *, target=4): return shard
@triggered_by(mark_writes)
def trigger_writes(shard, draw, *, target=4): return shard
@triggered_by(mark_short)
def trigger_short(shard, draw, *, target=4): return shard
@triggered_by(mark_raises)
def trigger_raises(shard, draw, *, target=4): return shard


# Selections and graphs

def selection_plain(contacts, candidates, budget, draw): return candidates[:budget]
def selection_int32(contacts, candidates, budget, draw): return candidates[:budget].int()
def selection_numpy(contacts, candidates, budget, draw): return candidates.numpy()[:budget]
def selection_list(contacts, candidates, budget, draw): return candidates.tolist()[:budget]
def selection_writes(contacts, candidates, budget, draw):
    found = candidates[:budget].clone()
    contacts.likelihood.fill_(nan), contacts.ids.zero_(), candidates.zero_()
    return found
def selection_mask(contacts, candidates, budget, draw): return candidates <= 3
def selection_sparse(contacts, candidates, budget, draw): return candidates.to_sparse()
def selection_exits(contacts, candidates, budget, draw): sys.exit(0)
def selection_strangers(contacts, candidates, budget, draw): return candidates + 100
def selection_twice(contacts, candidates, budget, draw): return candidates[[0, 0]]
def selection_many(contacts, candidates, budget, draw): return candidates[:budget + 1]
def selection_none(contacts, candidates, budget, draw): return None
def selection_floats(contacts, candidates, budget, draw): return candidates[:2] + 0.5

import networkx as nx
def graph_plain(cluster, draw): return nx.complete_graph(len(cluster))
def graph_writes(cluster, draw):
    n = len(cluster)
    cluster.zero_()
    return nx.complete_graph(n)
def graph_exits(cluster, draw): sys.exit(0)


# Models, data sets, algorithms

class Shifts(nn.Sequential):
    def forward(self, x):
        x -= 0.5
        return super().forward(x)
class Clamps(nn.Sequential):
    def forward(self, x):
        if not self.training: self[1].weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)
class Late(nn.Sequential):  # the first weights are smaller
    def forward(self, x):
        if not self.training: self[1].weight.data.clamp_(-0.126, 0.126)
        return super().forward(x)
class Leaves(nn.Sequential):
    calls = 0
    def forward(self, x):
        if not self.training: Leaves.calls += 1
        if Leaves.calls > 6: sys.exit(0)
        return super().forward(x)
def model_shifts(shape, classes): return Shifts(nn.Flatten(), nn.Linear(64, classes))
def model_clamps(shape, classes): return Clamps(nn.Flatten(), nn.Linear(64, classes))
def model_late(shape, classes): return Late(nn.Flatten(), nn.Linear(64, classes))
def model_leaves(shape, classes): return Leaves(nn.Flatten(), nn.Linear(64, classes))
def model_exits(shape, classes): sys.exit(0)

def dense(outputs, inputs=64): return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))
def model_none(shape, classes): return None
def model_raises(shape, classes): raise KeyError("boom")
def model_no_arguments(): return dense(10)
def model_outputs(shape, classes): return dense(classes - 1)
def model_inputs(shape, classes): return dense(classes, 63)
def model_batch_norm(shape, classes):
    norm = nn.BatchNorm1d(64, track_running_stats=False)
    return nn.Sequential(nn.Flatten(), norm, nn.Linear(64, classes))
def model_lazy(shape, classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
class Masked(nn.Sequential):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.register_buffer("mask", torch.ones(64))

    def forward(self, x):
        if self.training: self.mask *= 0.9
        return super().forward(x * self.mask.view(x.shape[1:]))

def model_buffer(shape, classes): return Masked(nn.Flatten(), nn.Linear(64, classes))
def model_double(shape, classes): return dense(classes).double()
def model_nothing(shape, classes): return nn.Flatten()

class Trains(nn.Sequential):
    def forward(self, x):
        if self.training: raise KeyError("boom")
        return super().forward(x)

class Detached(nn.Sequential):
    def forward(self, x): return super().forward(x).detach()

def model_train_raises(shape, classes): return Trains(nn.Flatten(), nn.Linear(64, classes))
def model_train_detached(shape, classes): return Detached(nn.Flatten(), nn.Linear(64, classes))
def model_train_one(shape, classes):  # mini-batches of one sample
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))

def made(change_x=lambda x: x, change_y=lambda y: y, names=tuple("0123456789")):
    from fedcb2o.data import digits
    d = digits()
    return Dataset(Shard(change_x(d.pool.x), change_y(d.pool.y)), d.test, names)

def data_none(): return None
def data_high(): return made(change_y=lambda y: y + 1)
def data_negative(): return made(change_y=lambda y: y - 1)
def data_short(): return made(change_y=lambda y: y[:-1])
def data_int32(): return made(change_y=lambda y: y.int())
def data_numpy(): return made(lambda x: x.numpy(), lambda y: y.numpy())
def data_nan(): return made(lambda x: x * float("nan"))
def data_empty(): return made(lambda x: x[:0], lambda y: y[:0])
def data_other(): return made(lambda x: x[..., :4])
def flat(s): return Shard(s.x.flatten(1), s.y)
def data_flat(): return Dataset(flat(made().pool), flat(made().test), tuple("0123456789"))
def data_names(): return made(names=10)
def data_one_class():
    d = made()
    return Dataset(Shard(d.pool.x, d.pool.y * 0), Shard(d.test.x, d.test.y * 0), ("all",))
def data_plain(): return made(lambda x: x)
def data_grad(): return made(lambda x: x.clone().requires_grad_() * 1.0)
def data_sparse(): return made(lambda x: x.to_sparse())
def data_meta(): return made(lambda x: x.to("meta"))
def data_exits(): sys.exit(0)

uniform = algorithms.dfedavgm().select
COMMON = {"needs_losses": True, "lambda1": 1.0, "mixing_factor": 1.0}
def algorithm_fails():
    def weigh(judged): return judged.no_such_thing
    return algorithms.Algorithm(select=uniform, weigh=algorithms.RuleWeighing(weigh), **COMMON)
def algorithm_none(): return None
def algorithm_exits():
    def select(contacts, candidates, budget, draw): sys.exit(0)
    return algorithms.Algorithm(select=select, weigh=algorithms.RuleWeighing(equal), **COMMON)
"""

WROTE = "{part} wrote into models that all agents share: let it "
EXITS = "{part} failed at line {line} of {folder}/own.py: SystemExit:"
NOT_SUM = "{part} returned weights that are not positive with sum 1"

# The message of the error; or, in a tuple, the case with the same bits; or None for any bits. The
# slow test runs these cases in two processes, and not those of `WRONG`.
CASES = {
    **dict.fromkeys(
        [
            *(
                "criterion_list",
                "criterion_numpy",
                "criterion_grad",
                "criterion_expanded",
                "criterion_inference",
            ),
            *(
                "criterion_losses",
                "criterion_losses_numpy",
                "criterion_losses_together",
                "criterion_keeps",
            ),
            *("criterion_change_writes", "criterion_change_grad"),
        ],
        ("criterion_plain",),
    ),
    "criterion_sparse": "{part} returned a sparse tensor, expected a dense one of real numbers",
    "criterion_meta": "{part} returned a meta tensor, expected a dense one",
    "criterion_complex": "{part} returned a complex tensor, expected a dense one",
    "criterion_words": "{part} returned words; expected real numbers",
    "criterion_ragged": "{part} returned a list, expected an array of numbers",
    "criterion_exits": EXITS,
    "criterion_exits_quietly": "{part} failed at line {line} of {folder}/own.py: GeneratorExit:",
    "criterion_pool": WROTE,
    "criterion_pool_numpy": WROTE,
    "criterion_pool_data": WROTE,
    "criterion_pool_sorted": WROTE,
    "criterion_pool_crafted": WROTE,
    "criterion_change_nan": "the criterion returned samples that are not finite",
    "criterion_change_sparse": "the criterion returned a sparse tensor",
    **dict.fromkeys(["rule_grad", "rule_writes"], ("rule_plain",)),
    "rule_list": None,
    "rule_pool": WROTE,
    "rule_sparse": "{part} returned a sparse tensor",
    "rule_exits": EXITS + " so long",
    "rule_before": "gave weight to the model before the round, and did not declare to use it",
    "rule_reduction_wide": "{part} returned shape (2, ",
    "rule_gram_none": "{part} returned None, expected numbers: is a `return` missing?",
    "rule_gram_short": "{part} returned weights of shape (1,), expected (4,)",
    "rule_gram_negative": NOT_SUM,
    **dict.fromkeys(["rule_gram_list", "rule_gram_writes"], ("rule_gram_mean",)),
    **dict.fromkeys(["rule_columns_grad", "rule_columns_writes"], ("rule_columns_plain",)),
    "rule_columns_two": "{part} returned shape (2, ",
    "rule_columns_keepdim": "{part} returned shape (1, ",
    "rule_columns_same": "{part} returned shape (4, ",
    "rule_columns_one": "{part} returned shape () for columns of shape (4, ",
    "rule_columns_nan": "{part} returned numbers that are not finite, of models that are",
    "rule_columns_none": "{part} returned None, expected numbers: is a `return` missing?",
    "rule_columns_sparse": "{part} returned a sparse tensor",
    "rule_columns_complex": "{part} returned a complex tensor",
    "rule_columns_exits": EXITS,
    "rule_state_grad": None,
    "rule_state_meta": "{part} keeps `a`, a Tensor, in its state: expected dense tensors",
    "rule_state_pool": None,
    "rule_state_none": "{part}, which declares a memory, returned a tuple, expected (state, weights)",
    "pre_step_none": "{part} returned None, expected numbers: is a `return` missing?",
    "pre_step_square": "{part} returned shape (3,), expected a matrix of 4 columns",
    "pre_step_nan": "{part} returned a matrix whose rows do not each sum to 1: [nan, ",
    "pre_step_sum": "{part} returned a matrix whose rows do not each sum to 1: [4.0]",
    "pre_step_list": None,
    "pre_step_writes": None,
    **dict.fromkeys(
        [
            *(
                "attack_grad",
                "attack_parameter",
                "attack_list",
                "attack_numpy",
                "attack_double",
                "attack_private",
            ),
            "attack_losses_int",
        ],
        ("attack_plain",),
    ),
    "attack_view": None,
    "attack_sparse": "{part} returned a sparse tensor",
    "attack_meta": "{part} returned a meta tensor",
    "attack_complex": "{part} returned a complex tensor",
    "attack_exits": EXITS,
    "attack_benign": WROTE,
    "attack_benign_numpy": WROTE,
    "attack_fellows": WROTE,
    "attack_model_of": WROTE,
    "attack_losses_one": "{part} asks the losses of models of shape (610,), expected (m, 610)",
    **dict.fromkeys(
        ["poison_writes", "poison_ruins", "poison_numpy", "poison_grad", "poison_int32"],
        ("poison_plain",),
    ),
    "poison_nan": "{part} returned samples that are not finite",
    "poison_sparse": "{part} returned a sparse tensor",
    "poison_meta": "{part} returned a meta tensor",
    "poison_complex": "{part} returned a complex tensor",
    "poison_none": "{part} returned None, expected numbers: is a `return` missing?",
    "poison_exits": EXITS,
    "trigger_writes": ("trigger_plain",),
    "trigger_short": "the trigger `own:mark_short` returned samples of shape (",
    "trigger_raises": "the trigger `own:mark_raises` failed at line ",
    **dict.fromkeys(
        ["selection_int32", "selection_numpy", "selection_list", "selection_writes"],
        ("selection_plain",),
    ),
    "selection_mask": "{part} chose [True, ",
    "selection_sparse": "{part} returned a sparse tensor",
    "selection_exits": EXITS,
    "graph_writes": ("graph_plain",),
    "graph_exits": EXITS,
    "model_shifts": "{part} writes into the samples that it reads, or into its parameters, in evaluation",
    "model_clamps": "{part} writes into the samples that it reads, or into its parameters, in evaluation",
    "model_late": WROTE,
    "model_leaves": "{part} failed at line ",
    "model_exits": EXITS,
    "data_grad": ("data_plain",),
    "data_sparse": "in its pool, must hold dense tensors on the CPU",
    "data_meta": "in its pool, must hold dense tensors on the CPU",
    "data_exits": EXITS,
    "algorithm_fails": "{part} failed at line {line+1} of {folder}/own.py: AttributeError: ",
    "algorithm_exits": "{part} failed at line {line+1} of {folder}/own.py: SystemExit: 0",
}
SEVERAL = (
    "TypeError: `inputs.context` is one agent's, and a function declared `batched` gets "
    "several agents: "
)

WRONG = {
    "data_none": "{part} returned None, expected a fedcb2o.Dataset",
    "data_high": "has labels outside 0 to 9: 1 to 10",
    "data_negative": "has labels outside 0 to 9: -1 to 8",
    "data_short": "holds 1557 samples and 1556 labels",
    "data_int32": "must hold dense tensors on the CPU, its labels of type int64",
    "data_numpy": "must hold dense tensors on the CPU, its labels of type int64",
    "data_nan": "must hold samples of pixels (uint8), tokens (int32 or int64) or finite floating-point features",
    "data_empty": "in its pool, holds 0 samples and 0 labels",
    "data_other": (
        "the samples of the pool of {part} have shape (1, 8, 4), and those"
        " of its test set (1, 8, 8)"
    ),
    "data_flat": "`num_clusters` = 2 turns square images, and the samples have shape (64,); set `num_clusters` = 1",
    "data_one_class": "{part} has 1 class name: it needs two or more",
    "data_names": "has class names that are not a tuple of strings: 10",
    "model_none": "{part} returned None, expected a torch.nn.Module",
    "model_raises": "{part} failed at line {line} of {folder}/own.py: KeyError: 'boom'",
    "model_no_arguments": "takes 0 positional arguments but 2 were given",
    "model_outputs": "returned (2, 9) for 2 samples, expected shape (2, 10)",
    "model_inputs": "{part} cannot read samples of shape (1, 8, 8): ",
    "model_batch_norm": "the model's norm `1` keeps no statistics (track_running_stats=False), so its output for a sample ",
    "model_lazy": "the model has a lazy layer, which has no parameters yet: give its size",
    "model_buffer": "{part} changes its buffer `mask` in training, which is neither a ",
    "model_double": "the model needs parameters to train, all of type float32",
    "model_nothing": "the model needs parameters to train (requires_grad): it has none",
    "model_train_raises": "{part} failed at line ",
    "model_train_detached": "{part} has outputs without a gradient in training, so ",
    "model_train_one": "`training.batch_size` must be 2 or more, got 1: the model's batch norms refuse a single ",
    "poison_nothing": "{part} returned None, expected a fedcb2o.Shard",
    "poison_tuple": "{part} returned a tuple, expected a fedcb2o.Shard",
    "poison_fewer": "{part} returned samples of shape (5, 1, 8, 8) and type torch.float32, expected (30, ",
    "poison_shape": "{part} returned samples of shape (30, 1, 8, 4)",
    "poison_labels": "{part} returned labels outside 0 to 9",
    "criterion_scalar": "{part} returned shape (), expected (3,): a value for each received model",
    "criterion_wide": "{part} returned shape (3, 10), expected (3,): a value for each received model",
    "criterion_none": "{part} returned None, expected numbers: is a `return` missing?",
    "criterion_local": "{part} failed at line {line} of {folder}/own.py: " + SEVERAL,
    "selection_strangers": "{part} chose [101, 102, 103, 104, 105], expected different ones of [1, ",
    "selection_twice": "{part} chose [1, 1], expected different ones of [1, 2, 3, 4, 5]",
    "selection_many": "{part} chose 4 peers, more than `budget` = 3: [1, 2, 3, 4]",
    "selection_none": "{part} returned None, expected numbers: is a `return` missing?",
    "selection_floats": "{part} chose [1.5, 2.5], expected different ones of [1, 2, 3, 4, 5]",
    "rule_short": "{part} returned weights of shape (1,), expected (3,) or (4,)",
    "rule_sum": "{part} returned weights that are not positive with sum 1: [1.0, 1.0, 1.0]",
    "rule_negative": "{part} returned weights that are not positive with sum 1: [2.0, -1.0, 0.0]",
    "rule_nan": "{part} returned weights that are not positive with sum 1: [nan, nan, nan]",
    "rule_none": "{part} returned None, expected numbers: is a `return` missing?",
    "rule_local": "{part} failed at line {line} of {folder}/own.py: " + SEVERAL,
    "algorithm_none": "the algorithm returned None, expected an Algorithm",
    "notes": "the model `own:notes` is of type int, not a function",
    "nothing": "the model `own:nothing` cannot be imported: module 'own' has no attribute",
    "no_module:f": "the model `no_module:f` cannot be imported: ModuleNotFoundError: No module named 'no_module'",
    "raises:f": "the model `raises:f` cannot be imported: RuntimeError: at import",
    "leaves:f": "the model `leaves:f` cannot be imported: SystemExit: 3",
    "syntax:f": "the model `syntax:f` cannot be imported: SyntaxError: ",
    ":f": "the model `:f` cannot be imported: ValueError: Empty module name",
}
PLAIN = sorted({case[0] for case in CASES.values() if isinstance(case, tuple)})


def change_for(name: str) -> dict[str, Any]:
    """Return the changes of the tiny experiment that use a function."""
    function_name, kind = name if ":" in name else f"own:{name}", name.split("_")[0]
    by_rule = {"name": "by_rule", "rule": function_name, "needs_losses": True}
    match kind:
        case "criterion" if name in WRONG:
            return {"algorithm": {"criterion": function_name}}
        case "rule" if name in WRONG:
            return {"algorithm": {"name": "by_rule", "rule": function_name}}
        case "model" if name == "model_train_one":
            return {"model": {"name": function_name}, "training": {"batch_size": 1}}
        case "data" | "algorithm":
            return {kind: {"name": function_name}}
        case "criterion":  # a side effect would show in the sub-level set and in the second call
            both = {"name": "weighted_sum", "of": [function_name, "average_loss", function_name]}
            attack = {"attack": {"name": "alie"}} if name.endswith("crafted") else {}
            return {"algorithm": {"criterion": both, "beta": 0.3, "own_model": "judged"}, **attack}
        case "rule" if name == "rule_gram_mean":
            return {"algorithm": {"name": "by_rule", "rule": "mean"}}
        case "rule" if name.startswith(("rule_gram", "rule_columns")):
            return {"algorithm": {"name": "by_rule", "rule": function_name}}
        case "rule":
            return {"algorithm": by_rule}
        case "pre":
            return {
                "algorithm": {
                    "name": "by_rule",
                    "rule": "coordinate_median",
                    "pre_step": function_name,
                }
            }
        case "poison" | "trigger" | "attack":
            return {"attack": {"name": function_name}}
        case "selection":
            return {"algorithm": {"selection": function_name}}
        case "graph":
            return {"agents": {"graph": function_name}}
    return {"model": {"name": function_name}}


MODULES = {
    "own": USER_MODULE,
    "raises": 'raise RuntimeError("at import")',
    "leaves": "import sys\nsys.exit(3)",
    "syntax": "def f(:",
}
DRIVER = """
import json, sys, traceback
from pathlib import Path
from tests.tiny import bits, run_cli, save_time
save_time()
found, workers = {}, int(sys.argv[1])
for name in sys.argv[2:]:
    out = f"run-{workers}-{name}"
    try:
        done = run_cli("run", name + ".toml", "--out", out, "--workers", workers)
        found[name] = [done.status, done.out, done.err]
        if done.status == 0:
            kept = bits(Path(out))
            del kept["config.toml"]
            found[name].append(repr(sorted(kept.items())))
    except BaseException:
        found[name] = [-1, "", traceback.format_exc()]
json.dump(found, open(f"found-{workers}.json", "w"))
"""


def run_cases(folder: Path, workers: int, names: list[str]) -> dict[str, list[Any]]:
    """Run the cases with `workers` processes; return status, output and bits by name."""
    for module, text in MODULES.items():
        (folder / f"{module}.py").write_text(text)
    for name in names:
        write(folder / f"{name}.toml", **{"rounds": 2, **change_for(name)})
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "src"))),
    }
    subprocess.run(
        [sys.executable, "-c", DRIVER, str(workers), *names],
        cwd=folder,
        env=environment,
        check=True,
        timeout=1500,
    )
    return json.loads((folder / f"found-{workers}.json").read_text())


def assert_outcome(name: str, folder: Path, outcomes: dict[str, list[Any]]) -> None:
    """Assert that a case has its expected outcome."""
    status, out, err, *run_bits = outcomes[name]
    expected = (CASES | WRONG)[name]
    if expected is None or isinstance(expected, tuple):
        assert status == 0, err
        if expected:
            assert outcomes[expected[0]][0] == 0, outcomes[expected[0]]
            assert run_bits == outcomes[expected[0]][3:]
        return
    assert out == ""
    lines = USER_MODULE.splitlines()
    line = next((i for i, text in enumerate(lines, 1) if text.startswith(f"def {name}(")), 0)
    kind = {"pre": "pre-step", "poison": "attack", "data": "data set"}.get(
        name.split("_")[0], name.split("_")[0]
    )
    message = expected.replace("{line+1}", str(line + 1)).format(
        folder=folder, line=line, part=f"the {kind} `own:{name}`"
    )
    assert message in CommandResult(status, out, err).one_line()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return folder, run_cases(folder, 1, [*PLAIN, *CASES, *WRONG])


@pytest.mark.parametrize("name", [*CASES, *WRONG])
def test_user_functions_in_one_process(one_process, name):
    assert_outcome(name, *one_process)


@pytest.mark.slow
def test_a_write_through_numpy_is_reported_in_two_processes(tmp_path):
    assert_outcome(
        "criterion_pool_numpy", tmp_path, run_cases(tmp_path, 2, ["criterion_pool_numpy"])
    )


writes = [False]


def gap_that_may_write(inputs):
    if inputs.n == 1 and writes[0]:
        inputs.models.zero_()
    return class_loss_gap(inputs)


def test_a_run_continues_after_a_user_function_overwrote_models(tmp_path):
    """The overwritten models are not saved; the run continues from its checkpoint."""
    experiment = tiny(algorithm={"criterion": gap_that_may_write})
    writes[0] = True
    message = r"the criterion `.*:gap_that_may_write` wrote into models that all agents share"
    with pytest.raises(ConfigError, match=message):
        run(experiment, out=tmp_path / "mended", workers=1)
    writes[0] = False
    lines = (tmp_path / "mended/seed-1000/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1]
    run(experiment, out=tmp_path / "mended", workers=1, resume=True)
    run(experiment, out=tmp_path / "whole", workers=1)
    assert bits(tmp_path / "mended") == bits(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # most cases end their workers
def test_user_functions_in_two_processes(tmp_path):
    outcomes = run_cases(tmp_path, 2, [*PLAIN, *CASES])
    for name in CASES:
        assert_outcome(name, tmp_path, outcomes)
