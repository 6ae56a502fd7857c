"""Oracle: the paper's algorithms and particle systems as plain, slow loops.

García Trillos, Akash, Li, Riedl, Zhu, "Defending Against Diverse Attacks in Federated Learning
Through Consensus-Based Bi-Level Optimization" (arXiv 2412.02535). Tests compare the library with
these functions, which import only its named random streams. Agents are numbered from 0.

    Algorithm 1, FedCB2O (alg:FedCB2O)
      line 3  LocalUpdate, j in [N]: tau steps of SGD           local_updates
      line 4  LocalAggregation, j in [N]                        local_aggregations

    Algorithm 2, LocalAggregation of agent j (alg:localAggregation)
      line 1  A_n <- ProbSampling(P_n^j, M)                     select, prob_sampling
      line 2  download theta_n^i, i in A_n                      local_aggregations
      line 3  L_j^i, i in A_n: losses on agent j's data         evaluate
      line 4  P_{n+1}^{j,i}, i in A_n                           update_likelihood
      line 5  G^i, i in A_n: robustness criterion               class_loss_gap
      line 6  mu_j^i = exp(-alpha G^i), m_j                     consensus_weights, mix
      line 7  theta_{n+1}^j <- theta_n^j - lambda1 gamma (theta_n^j - m_j)    mix

    Also: Q_beta of the exact consensus point (eq:clustered_csp)              sublevel_set
          peers of attackers, mixing by numbers of samples (sec:experiments)  colluding, COLLUDER

    Particles on R^d: CB2O (eq:dyn_micro2) with malicious particles (eq:dyn_macro), FedCBO
    (eq:fedcbo_dynamic), FedCB2O (eq:fedcb2o_dynamics)          particle_step, consensus_point

Options beyond the paper are marked as such. The options of the authors' released code are marked
"released code".
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcb2o.rng import stream


@dataclass(frozen=True)
class Training:
    """Settings of LocalUpdate; `local_steps` replaces `local_epochs` unless it is None."""

    gamma: float = 0.004
    lambda2: float = 1.0
    momentum: float = 0.9
    batch_size: int = 64
    local_epochs: int = 5
    local_steps: int | None = None


@dataclass(frozen=True)
class Options:
    """Settings of one agent in LocalAggregation; the defaults are the paper's FedCB2O."""

    selection: Literal["prob_sampling", "uniform", "everyone", "colluding"] = "prob_sampling"
    budget: int = 20  # M
    own_candidate: bool = False  # released code: j may sample itself
    kappa: float = 2.0
    zeta: float = 0.5
    first_contact: Literal["average", "whole"] = "average"  # released code: whole
    own_likelihood: Literal["every_round"] | None = None  # released code: every round
    validation_loss: Literal["samples", "batches"] = "samples"  # released code: batches
    criterion: Literal[
        "class_loss_gap", "class_loss_excess", "last_layer_excess", "average_loss", "num_samples"
    ] = "class_loss_gap"
    criterion_from_round: int = 0  # T_G
    absent: Literal["masked", "zero"] = "masked"  # released code: zero
    alpha: float = 10.0
    beta: float | None = None  # None: no sub-level set, as in Algorithm 2
    delta_q: float = 0.0
    quantile: Literal["plain", "averaged"] = "plain"  # averaged: the level of eq:Q_beta
    label_coverage: float = 0.0  # share of classes for full confidence; beyond the paper
    rank_tolerance: float = math.inf  # share of knowledge that members lack; beyond the paper
    own_model: Literal["excluded", "judged", "trusted"] = "excluded"  # released code: trusted
    lambda1: float = 10.0
    mixing_factor: float | None = None  # None: lambda1 * gamma; released code: 1
    # Guards of every algorithm, beyond the paper.
    newcomer_share: float | None = None  # of M, for peers never asked; None: Algorithm 2
    max_distance: float | None = None  # from the agent's own model, in norms of that model
    min_distance: float | None = None  # the same, in movements of that model in LocalUpdate
    max_sensitivity: float | None = None  # rise of a class's sensitivity to noise, in changes
    interpolation: float = 1.0  # losses at own + interpolation * (peer - own)
    loss_tolerance: float | None = None  # standard errors above the loss of the agent's model
    exit_test: float | None = None  # error rate of the test after which an agent trains alone
    trial_rounds: int = 2  # a quarter of the rounds
    # Criteria beyond the paper.
    least_deviation: float = 0.8  # class_loss_excess: least nats of a standard deviation
    slack: float = 2.0  # class_loss_excess: standard errors above sqrt(2 log C)


FEDCB2O = Options()
FEDCBO = Options(criterion="average_loss")
# eq:clustered_csp: all N models with the agent's own, no sampling (the paper has no value of beta).
EXACT = Options(selection="everyone", own_model="judged", beta=0.5)
DFEDAVGM = Options(
    selection="uniform", criterion="num_samples", own_model="judged", mixing_factor=1.0
)
# In the released code attackers average their own model too: own_model="judged".
COLLUDER = Options(selection="colluding", criterion="num_samples", mixing_factor=1.0)


@dataclass
class Agent:
    """Agent j: its data, its model theta^j, and its record of its peers."""

    module: nn.Module
    train_x: Tensor
    train_y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    malicious: bool = False
    cluster: int = 0
    algorithm: Options = FEDCB2O
    statistics: Literal["shared", "local", "dropped"] = "shared"  # of batch norm layers
    met: set[int] = field(default_factory=set)  # peers asked so far, answered or not
    P: dict[int, float] = field(default_factory=dict)  # P^{j,i} of the peers i that answered
    before: nn.Module | None = None  # theta^j before the round's LocalUpdate
    alone: nn.Module | None = None  # the second model of the trial
    alone_trained: int = 0  # rounds that it has trained
    gaps: list[float] = field(default_factory=list)  # sums of D_i over rounds
    has_left: bool | None = None  # None before the end of the trial


@dataclass(frozen=True)
class Loss:
    """Losses of a model on agent j's validation data.

    `mean` is L_j(theta), `by_class` has L_{j,c}(theta) for each class c in the data, and `errors`
    are the losses of the samples.
    """

    mean: float
    by_class: dict[int, float]
    errors: list[float] = field(default_factory=list, compare=False)
    labels: list[int] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Info:
    """Decisions of agent j in a round.

    `weights` are the normalised mu_j^i of m_j by id i, with its own model under j; they sum to 1.
    """

    asked: list[int]
    received: list[int]
    weights: dict[int, float]
    losses: dict[int, Loss]
    values: dict[int, float]


def run_round(
    agents: Sequence[Agent],
    n: int,
    *,
    seed: int,
    training: Training,
    num_classes: int,
    participation: float = 1.0,
) -> list[Info]:
    """Run one round of Algorithm 1, lines 3 and 4: all agents train, then all aggregate."""
    local_updates(agents, n, seed=seed, training=training)
    return local_aggregations(
        agents,
        n,
        seed=seed,
        training=training,
        num_classes=num_classes,
        participation=participation,
    )


# ---- Algorithm 1: LocalUpdate ----


def local_updates(
    agents: Sequence[Agent], n: int, *, seed: int, training: Training
) -> list[list[float]]:
    """Run LocalUpdate for j in [N] (Algorithm 1, line 3); return the losses of their steps.

    Malicious agents train in the same way, on poisoned data (eq:MaliAgentObj).
    """
    trials = [agent.algorithm for agent in agents if agent.algorithm.exit_test is not None]
    is_trial = bool(trials) and n < trials[0].trial_rounds
    return [
        local_update(
            agent,
            stream(seed, "batches", n, j),
            training,
            held_out(len(agent.train_y), j, seed)[1] if is_trial else None,
        )
        for j, agent in enumerate(agents)
    ]


def held_out(count: int, j: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the samples that agent j holds out, and the sample in the place of each in training.

    Others, which it trains on twice or more, replace three tenths of its samples.
    """
    draw = stream(seed, "trial", j)
    order = [int(i) for i in draw.permutation(count)]
    size = int(0.3 * count)
    held, kept = sorted(order[:size]), order[size:]
    replaced = list(range(count))
    for i in held:
        replaced[i] = -1
    for i, choice in zip(held, draw.integers(len(kept), size=size), strict=True):
        replaced[i] = kept[choice]
    return held, replaced


def local_update(
    agent: Agent,
    draw: np.random.Generator,
    training: Training,
    samples: list[int] | None = None,
) -> list[float]:
    """Train for tau epochs (or steps) of mini-batch SGD; return the loss of each step."""
    agent.before = copy.deepcopy(agent.module)
    x, y = agent.train_x, agent.train_y
    if samples is not None:
        x, y = x[samples], y[samples]
    # A new optimiser: the momentum starts at 0 in every round.
    learning_rate = training.lambda2 * training.gamma
    optimiser = torch.optim.SGD(
        agent.module.parameters(), lr=learning_rate, momentum=training.momentum
    )
    agent.module.train()
    for norm in batch_norms(agent.module):
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.zero_()
        norm.train(agent.statistics != "dropped" and not is_frozen(norm))
    step_losses = []
    for batch in batches(len(y), draw, training):
        optimiser.zero_grad()
        loss = F.cross_entropy(agent.module(x[batch]), y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()  # theta <- theta - lambda2 gamma grad L_j(theta)
        step_losses.append(loss.item())
    return step_losses


def batches(num_samples: int, draw: np.random.Generator, training: Training) -> list[Tensor]:
    """Return the mini-batches of one LocalUpdate; the last one of an epoch may be smaller."""
    slices: list[Tensor] = []
    epoch = 0
    while (
        epoch < training.local_epochs
        if training.local_steps is None
        else len(slices) < training.local_steps
    ):
        order = torch.from_numpy(draw.permutation(num_samples))
        for start in range(0, num_samples, training.batch_size):
            slices.append(order[start : start + training.batch_size])
        epoch += 1
    return slices if training.local_steps is None else slices[: training.local_steps]


# ---- Algorithm 2: LocalAggregation ----


def local_aggregations(
    agents: Sequence[Agent],
    n: int,
    *,
    seed: int,
    training: Training,
    num_classes: int,
    participation: float = 1.0,
) -> list[Info]:
    """Run LocalAggregation for j in [N] (Algorithm 1, line 4).

    It is synchronous: all agents receive the models of the same moment, after LocalUpdate.
    """
    published = [copy.deepcopy(agent.module) for agent in agents]
    online = [True] * len(agents)
    if participation < 1:
        online = [bool(u < participation) for u in stream(seed, "online", n).random(len(agents))]
    answers = [online[i] and is_finite(published[i]) for i in range(len(agents))]

    infos = []
    for j, agent in enumerate(agents):
        if not online[j]:
            infos.append(Info([], [], {j: 1.0}, {}, {}))
            continue
        options = agent.algorithm
        # Algorithm 2, line 1: A_n <- ProbSampling(P_n^j, M)
        asked = select(agents, j, stream(seed, "select", n, j))
        met = set(agent.met)
        agent.met |= set(asked)
        # Line 2: download theta_n^i, i in A_n
        received = [i for i in asked if answers[i]]
        # Trial (beyond the paper): an agent that left keeps its model.
        if options.exit_test is not None and is_alone(agent, j, n, seed, training, num_classes):
            agent.met = met
            weights = {i: float(i == j) for i in sorted({*received, j})}
            infos.append(Info(asked, received, weights, {}, {}))
            continue
        # Guards (beyond the paper): refused models are neither evaluated nor weighed.
        noise = noise_images(agent.train_x.shape[1:], stream(seed, "noise", n, j))
        refused_losses = {}
        peers = [published[i] for i in received]
        for i in received:
            loss = loss_if_refused(published[i], published[j], agent, num_classes, noise, peers)
            if i != j and loss:
                refused_losses[i] = loss
        admitted = [i for i in received if i not in refused_losses]
        # The models that m_j may average. Agent j is one of them at most once, also if it sampled
        # itself.
        candidates = sorted({*admitted, j}) if options.own_model != "excluded" else admitted

        label_confidence = confidence(agent, num_classes)
        entropy = label_entropy(agent)
        losses: dict[int, Loss] = {}
        if options.criterion != "num_samples" or options.loss_tolerance is not None:
            # Line 3: L_j^i <- loss of theta_n^i on agent j's data
            for i in sorted({*admitted, j}):
                evaluated = interpolate(published[j], published[i], agent, options.interpolation)
                losses[i] = evaluate(evaluated, agent, training)
        if options.criterion == "num_samples":
            members = sublevel_set(losses, candidates, j, options, label_confidence, entropy)
            values = {i: float(len(agents[i].train_y)) for i in members}
            weights = normalised(values)
        else:
            uses_gap = options.criterion != "average_loss" and n >= options.criterion_from_round
            Q = sublevel_set(losses, candidates, j, options, label_confidence, entropy)
            G = {}
            # Line 5: G^i <- G_j(theta_n^i; theta_n^j), or L_j^i before round T_G
            for i in sorted({*admitted, j}):
                if not uses_gap:
                    G[i] = losses[i].mean
                elif options.criterion == "class_loss_excess":
                    G[i] = class_loss_excess(losses, i, j, admitted, options)
                elif options.criterion == "last_layer_excess":
                    G[i] = last_layer_excess(published, i, j, admitted)
                else:
                    G[i] = class_loss_gap(losses, i, j, num_classes, options)
            G = {i: label_confidence * value for i, value in G.items()}
            # Line 4, independent of line 5: eq:update_sampling_likelihood
            for i in received:
                update_likelihood(agent, i, refused_losses.get(i) or losses[i].mean)
            if options.own_likelihood == "every_round" and j not in received:
                update_likelihood(agent, j, losses[j].mean)
            values = {i: G[i] for i in candidates}
            # Line 6: mu_j^i = exp(-alpha G^i) over their sum
            weights = consensus_weights(
                values, Q, j, options, trusted=uses_gap and options.own_model == "trusted"
            )

        if weights:
            factor = (
                training.gamma * options.lambda1
                if options.mixing_factor is None
                else options.mixing_factor
            )
            # Lines 6 and 7: m_j, and theta_{n+1}^j <- theta_n^j - lambda1 gamma (theta_n^j - m_j)
            mix(agent, j, published, weights, factor)
            weights = {i: weights.get(i, 0.0) for i in sorted({*received, j})}
        else:  # no model has a weight: agent j keeps its own
            weights = {i: float(i == j) for i in sorted({*received, j})}
        infos.append(Info(asked, received, weights, losses, values))
    return infos


def is_alone(agent: Agent, j: int, n: int, seed: int, training: Training, num_classes: int) -> bool:
    """Advance the trial of agent j after its LocalUpdate; return whether it trains alone."""
    options = agent.algorithm
    assert options.exit_test is not None
    last = options.trial_rounds
    if agent.has_left is not None or (agent.alone is None and n >= last):
        return bool(agent.has_left)
    held, replaced = held_out(len(agent.train_y), j, seed)
    if agent.alone is None:
        agent.alone, agent.alone_trained = copy.deepcopy(agent.module), n + 1
        agent.gaps = [0.0] * len(held)
        return False
    if n > last // 2:
        # The model before LocalUpdate is the average of the round before.
        num_present = len(set(agent.train_y.tolist()))
        absent = (num_classes - num_present) / num_present
        assert agent.before is not None
        for k, i in enumerate(held):
            x, y = agent.train_x[i : i + 1], agent.train_y[i : i + 1]
            agent.before.eval()
            agent.alone.eval()
            with torch.no_grad():
                average = F.cross_entropy(agent.before(x), y)
                D = float(average - F.cross_entropy(agent.alone(x), y))
            agent.gaps[k] += min(max(D, -1.0), 1.0) - absent
    while agent.alone_trained <= n:
        # The second model is trained as the agent's own.
        copied = dataclasses.replace(agent, module=agent.alone)
        draw = stream(seed, "batches", agent.alone_trained, j)
        local_update(copied, draw, training, replaced if agent.alone_trained < last else None)
        agent.alone_trained += 1
    if n >= last:
        flips = stream(seed, "trial test", j).choice([-1.0, 1.0], (1999, len(held)))
        total = sum(agent.gaps) - 1e-9
        reached = sum(
            sum(s * D for s, D in zip(signs, agent.gaps, strict=True)) >= total for signs in flips
        )
        agent.has_left = (1 + reached) / 2000 <= options.exit_test
        if agent.has_left:
            agent.module = agent.alone
    return bool(agent.has_left)


def is_finite(module: nn.Module) -> bool:
    """Return whether all parameters are finite.

    Other models are dropped at the receiver, because 0 * NaN = NaN.
    """
    return all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())


# ---- Algorithm 2, line 1: the peers that agent j asks ----


def select(agents: Sequence[Agent], j: int, draw: np.random.Generator) -> list[int]:
    """Return A_n of agent j, ascending."""
    agent, M = agents[j], agents[j].algorithm.budget
    candidates = [i for i in range(len(agents)) if i != j or agent.algorithm.own_candidate]
    if agent.algorithm.selection == "prob_sampling":
        chosen = prob_sampling(agent, candidates, M, draw)
    elif agent.algorithm.selection == "uniform":
        if agent.algorithm.newcomer_share is None:
            chosen = sample_uniformly(candidates, min(M, len(candidates)), draw)
        else:
            chosen = prob_sampling(agent, candidates, M, draw)
    elif agent.algorithm.selection == "everyone":
        chosen = candidates
    else:
        chosen = colluding(agents, j, M, draw)
    return sorted(chosen)


def sample_uniformly(ids: list[int], size: int, draw: np.random.Generator) -> list[int]:
    """Draw `size` of the ids uniformly, without replacement."""
    return [int(i) for i in draw.choice(ids, size=size, replace=False)]


def prob_sampling(
    agent: Agent, candidates: list[int], M: int, draw: np.random.Generator
) -> list[int]:
    """Draw A_n <- ProbSampling(P_n^j, M) (alg:localAggregation)."""
    # Line 1: S holds the peers with P = 0, which means "never selected"
    # (rem:sampling_likelihood_init). `met` is a separate record, because P of a garbage model
    # underflows to 0, and a peer that never answers has no P.
    S = [i for i in candidates if i not in agent.met]
    if agent.algorithm.newcomer_share is not None:
        return sample_with_newcomers(agent, S, [i for i in candidates if i in agent.met], M, draw)
    if S:
        # Line 2: M agents of S if |S| > M, otherwise S. Known peers do not fill it up.
        return sample_uniformly(S, M, draw) if len(S) > M else S
    # Line 4: M agents with probability P_n^j, normalised
    return sample_by_likelihood(agent, candidates, M, draw)


def sample_by_likelihood(
    agent: Agent, candidates: list[int], M: int, draw: np.random.Generator
) -> list[int]:
    """Draw M peers without replacement, with probability proportional to P^{j,i}."""
    p = np.array(likelihoods(agent, candidates))
    if p.sum() == 0:
        return []
    p = p / p.sum()
    k = sum(float(value) > 0 for value in p)  # at most k different peers can be drawn
    return [int(i) for i in draw.choice(candidates, size=min(M, k), replace=False, p=p)]


def likelihoods(agent: Agent, candidates: list[int]) -> list[float]:
    """Return P^{j,i} of the candidates i.

    A peer that was asked and never answered has the mean of the peers that answered.
    """
    if agent.algorithm.selection == "uniform":
        return [1.0] * len(candidates)
    answered = [agent.P[i] for i in candidates if i in agent.P]
    unknown = sum(answered) / len(answered) if answered else 1.0
    return [agent.P.get(i, unknown) for i in candidates]


def sample_with_newcomers(
    agent: Agent, S: list[int], met: list[int], M: int, draw: np.random.Generator
) -> list[int]:
    """Draw A_n with at most `newcomer_share` of M for S, the peers that were never asked.

    Their number is larger where too few of the peers in `met` can be drawn.
    """
    assert agent.algorithm.newcomer_share is not None
    reserved = math.ceil(agent.algorithm.newcomer_share * M - 1e-9)
    num_drawable = sum(P > 0 for P in likelihoods(agent, met))
    size = max(reserved, M - num_drawable)
    newcomers = sample_uniformly(S, size, draw) if len(S) > size else S
    return newcomers + sample_by_likelihood(agent, met, M - len(newcomers), draw)


def colluding(agents: Sequence[Agent], j: int, M: int, draw: np.random.Generator) -> list[int]:
    """Draw the peers of an attacker (sec:experiments).

    Fellow attackers of its cluster come first, then random benign agents of its cluster.
    """
    neighbours = [
        i for i in range(len(agents)) if i != j and agents[i].cluster == agents[j].cluster
    ]
    colluders = [i for i in neighbours if agents[i].malicious]
    benign = [i for i in neighbours if not agents[i].malicious]
    if len(colluders) > M:
        return sample_uniformly(colluders, M, draw)
    return colluders + sample_uniformly(benign, min(M - len(colluders), len(benign)), draw)


# ---- Algorithm 2, lines 3 to 5: losses, likelihoods and the robustness criterion ----


def evaluate(model: nn.Module, agent: Agent, training: Training) -> Loss:
    """Compute L_j and L_{j,c} of a model on agent j's validation data (line 3).

    A loss that is not a finite number counts as infinite.
    """
    model.eval()
    if agent.statistics == "local":
        for norm in [norm for norm in batch_norms(model) if not is_frozen(norm)]:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over batches; here one batch
            norm.train()
        with torch.no_grad():
            model(agent.train_x)
        model.eval()
    with torch.no_grad():
        logits = model(agent.validation_x).double()
    # The loss of each sample.
    errors = [float(e) for e in F.cross_entropy(logits, agent.validation_y, reduction="none")]
    if agent.algorithm.validation_loss == "samples":
        mean = mean_of(errors)
    else:
        size = training.batch_size
        mean = mean_of(
            [mean_of(errors[start : start + size]) for start in range(0, len(errors), size)]
        )
    labels = [int(y) for y in agent.validation_y]
    by_class = {
        c: mean_of([e for e, y in zip(errors, labels, strict=True) if y == c])
        for c in sorted(set(labels))
    }
    return Loss(mean, by_class, errors, labels)


def interpolate(own: nn.Module, peer: nn.Module, agent: Agent, share: float) -> nn.Module:
    """Return the network own + share * (peer - own)."""
    point = copy.deepcopy(peer)
    with torch.no_grad():
        for tensor, start in zip(
            exchanged_tensors(point, agent), exchanged_tensors(own, agent), strict=True
        ):
            tensor.copy_(start + share * (tensor - start))
    return point


def loss_if_refused(
    peer: nn.Module,
    own: nn.Module,
    agent: Agent,
    num_classes: int,
    noise: Tensor,
    peers: list[nn.Module],
) -> float:
    """Return the loss that a model refused by a guard counts as; 0 for an admitted model.

    Infinity: too far from the agent's own model, or too sensitive. log C: almost identical to it.
    """
    options = agent.algorithm
    distance_to_own = distance(peer, own, agent)
    with torch.no_grad():
        norm = math.sqrt(
            sum(float(b.double().square().sum()) for b in exchanged_tensors(own, agent))
        )
    if options.max_distance is not None and distance_to_own > options.max_distance * norm:
        return math.inf
    if options.min_distance is not None:
        assert agent.before is not None
        largest = math.inf if options.max_distance is None else options.max_distance * norm
        distances = [distance(other, own, agent) for other in peers]
        farthest = max(d for d in distances if d <= largest)
        movement = distance(agent.before, own, agent)
        if distance_to_own < min(options.min_distance * movement, farthest / 3):
            return math.log(num_classes)
    if options.max_sensitivity is not None:
        assert agent.before is not None
        r_own, r_before, r_peer = (sensitivities(m, noise) for m in (own, agent.before, peer))
        changes = [(a - b) ** 2 for a, b in zip(r_own, r_before, strict=True)]
        movement = max(0.05, math.sqrt(sum(changes) / len(changes)))
        baseline = [max(a, b) for a, b in zip(r_own, r_before, strict=True)]
        rise = max(r - k for r, k in zip(r_peer, baseline, strict=True))
        if rise > options.max_sensitivity * movement:
            return math.inf
    return 0.0


def noise_images(shape: Sequence[int], draw: np.random.Generator) -> Tensor:
    """Draw 64 images of black and white pixels; the last 32 consist of 4 x 4 blocks."""
    pixels = torch.from_numpy(draw.random((64, *shape)) < 0.5).float()
    images = pixels.clone()
    if len(shape) < 2:
        return images
    height, width = shape[-2:]
    for row, column in itertools.product(range(height), range(width)):
        block = pixels[32:, ..., row * 4 // height, column * 4 // width]
        images[32:, ..., row, column] = block
    return images


def sensitivities(module: nn.Module, noise: Tensor) -> list[float]:
    """Return the log variation of each class's output over noise, relative to the median class."""
    with torch.no_grad():
        outputs = module.eval()(noise).double()
    outputs -= outputs.mean(1, keepdim=True)
    deviations = [
        float(outputs[:32, c].std() + outputs[32:, c].std()) for c in range(outputs.shape[1])
    ]
    median = sorted(deviations)[(len(deviations) - 1) // 2]
    return [math.log(s / median) for s in deviations]


def is_tolerated(losses: dict[int, Loss], i: int, j: int, options: Options) -> bool:
    """Return whether L_j^i is at most `loss_tolerance` standard errors above L_j^j."""
    assert options.loss_tolerance is not None
    bound = losses[j].mean + options.loss_tolerance * standard_error(losses, i, j)
    return losses[i].mean <= bound


def distance(one: nn.Module, other: nn.Module, agent: Agent) -> float:
    """Return the Euclidean distance of two models in the tensors that agents exchange."""
    with torch.no_grad():
        pairs = zip(exchanged_tensors(one, agent), exchanged_tensors(other, agent), strict=True)
        return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))


def standard_error(losses: dict[int, Loss], i: int, j: int) -> float:
    """Return the standard error of the mean of L_i - L_j over the same samples."""
    differences = [a - b for a, b in zip(losses[i].errors, losses[j].errors, strict=True)]
    n = len(differences)
    if n == 1:
        return 0.0
    mean = sum(differences) / n
    return math.sqrt(sum((difference - mean) ** 2 for difference in differences) / (n - 1) / n)


def mean_of(numbers: list[float]) -> float:
    """Return the mean, or infinity where it is not finite."""
    mean = sum(numbers) / len(numbers)
    return mean if math.isfinite(mean) else math.inf


def update_likelihood(agent: Agent, i: int, loss: float) -> None:
    """Update P^{j,i} by eq:update_sampling_likelihood, from P_0 = 0 (line 4)."""
    zeta = agent.algorithm.zeta
    benefit = math.exp(-agent.algorithm.kappa * loss) if math.isfinite(loss) else 0.0
    if agent.algorithm.first_contact == "whole" and i not in agent.P:
        agent.P[i] = benefit
    else:
        agent.P[i] = (1 - zeta) * agent.P.get(i, 0.0) + zeta * benefit


MOST = (
    2 - 2**-23
) * 2.0**127  # the largest float32: an infinite class loss of the agent's own model counts as this


def class_loss_gap(
    losses: dict[int, Loss], i: int, j: int, num_classes: int, options: Options
) -> float:
    """Compute G_j(theta^i; theta^j) = max_c (L_{j,c}(theta^i) - L_{j,c}(theta^j)) (line 5).

    It is eq:robust_criterion_G_LF, over the classes in agent j's validation data.
    """
    if i == j:
        return 0.0 if all(math.isfinite(loss) for loss in losses[j].by_class.values()) else math.inf
    peer_losses, own_losses = losses[i].by_class, losses[j].by_class
    differences = []
    for c in range(num_classes):
        if c not in own_losses:
            if options.absent == "zero":
                differences.append(0.0)
        elif peer_losses[c] == math.inf:  # for any own_losses[c]: inf - inf is NaN
            differences.append(math.inf)
        else:
            differences.append(peer_losses[c] - min(own_losses[c], MOST))
    return max(differences)


def class_loss_excess(
    losses: dict[int, Loss], i: int, j: int, received: list[int], options: Options
) -> float:
    """Compute max_c max(0, (d_c - b) / e_c - m) max(e_c, least_deviation / sqrt(n_c)) (not in the paper).

    d_c is the mean over agent j's samples of class c of L(theta^i) - L(theta^j). b and the spread of
    d_c over classes are the model's own, at most those of the typical peer, from half to one of the
    largest sigma / sqrt(n_c). The typical peer has medians over the better half of the received.
    """
    if i == j:
        return 0.0 if all(math.isfinite(loss) for loss in losses[j].by_class.values()) else math.inf
    classes = sorted(set(losses[j].labels))
    counts = {c: losses[j].labels.count(c) for c in classes}
    own = [min(error, MOST) for error in losses[j].errors]

    differences = {
        k: [a - b for a, b in zip(losses[k].errors, own, strict=True)] for k in [*received, i]
    }
    gaps = {
        k: {
            c: sum(d for d, y in zip(ds, losses[j].labels, strict=True) if y == c) / counts[c]
            for c in classes
        }
        for k, ds in differences.items()
    }

    median_loss = lower_median([losses[k].mean for k in received])
    better = [k for k in received if losses[k].mean <= median_loss]
    freedom = sum(n - 1 for n in counts.values())
    variances = []
    for k in better:
        ds = differences[k]
        if freedom:
            squares = [(d - gaps[k][y]) ** 2 for d, y in zip(ds, losses[j].labels, strict=True)]
            variances.append(sum(squares) / freedom)
        else:
            mean = sum(ds) / len(ds)
            variances.append(sum((d - mean) ** 2 for d in ds) / max(1, len(ds) - 1))
    finite = [variance for variance in variances if math.isfinite(variance)]
    sigma = max(1e-3, math.sqrt(lower_median(finite))) if finite else 1e-3

    shared, spread = {}, {}
    for k in {*better, i}:
        values = [gap for gap in gaps[k].values() if math.isfinite(gap)]
        shared[k] = spread[k] = 0.0
        if len(classes) > 1 and values:
            median = lower_median(values)
            shared[k] = max(0.0, median)
            spread[k] = 1.4826 * lower_median([abs(gap - median) for gap in values])
    most = sigma / math.sqrt(min(counts.values()))
    for each in (shared, spread):
        typical = min(max(lower_median([each[k] for k in better]), most / 2), most)
        each.update({k: min(value, typical) for k, value in each.items()})
    errors = {
        k: {c: math.sqrt(sigma**2 / counts[c] + spread[k] ** 2) for c in classes} for k in spread
    }

    scores = {
        k: {c: (gaps[k][c] - shared[k]) / errors[k][c] for c in classes} for k in {*better, i}
    }
    finite = [largest for k in better if math.isfinite(largest := max(scores[k].values()))]
    bound = math.sqrt(2 * math.log(len(classes))) + options.slack
    m = min(bound, max(0.0, lower_median(finite))) if finite else 0.0
    return max(
        max(0.0, scores[i][c] - m)
        * max(errors[i][c], options.least_deviation / math.sqrt(counts[c]))
        for c in classes
    )


def last_layer_excess(published: Sequence[nn.Module], i: int, j: int, received: list[int]) -> float:
    """Compute max(0, g_i - min(m, log 8)), m the lower median of g over received (not in the paper).

    g is log r_1 / r_2 - log(1 - max_c u_c^2), where r are distances of the rows of the last layer
    from those of agent j, less the mean of the rows, and u the leading left singular vector.
    """

    def head(module: nn.Module) -> list[list[float]]:
        return [part for part in module.modules() if isinstance(part, nn.Linear)][
            -1
        ].weight.tolist()

    def ahead(k: int) -> float:
        changes = [
            [a - b for a, b in zip(row, own, strict=True)]
            for row, own in zip(head(published[k]), head(published[j]), strict=True)
        ]
        means = [sum(column) / len(changes) for column in zip(*changes, strict=True)]
        centred = [[a - mean for a, mean in zip(row, means, strict=True)] for row in changes]
        norms = sorted(math.sqrt(sum(a * a for a in row)) for row in centred)
        if norms[-1] == 0:
            return 0.0
        # Power iteration: v <- D^T D v, from the largest row; u = D v.
        v = max(centred, key=lambda row: sum(a * a for a in row))
        for _ in range(500):
            u = [sum(a * b for a, b in zip(row, v, strict=True)) for row in centred]
            v = [sum(row[k] * u[c] for c, row in enumerate(centred)) for k in range(len(v))]
            length = math.sqrt(sum(a * a for a in v))
            v = [a / length for a in v]
        share = max(a * a for a in u) / sum(a * a for a in u)
        return math.log(norms[-1] / norms[-2]) - math.log(1 - share)

    if i == j:
        return 0.0
    return max(0.0, ahead(i) - min(math.log(8), lower_median([ahead(k) for k in received])))


def lower_median(values: list[float]) -> float:
    """Return the median, of an even number of values the lower one."""
    return sorted(values)[(len(values) - 1) // 2]


def sublevel_set(
    losses: dict[int, Loss],
    models: list[int],
    j: int,
    options: Options,
    label_confidence: float = 1.0,
    entropy: float = math.inf,
) -> list[int]:
    """Return the members of Q_beta (eq:clustered_csp); without beta, all models.

    Beyond the paper, tolerated models are members too; without beta they are the only members. An
    agent of few classes adds a part of the other models, best first. A member by rank alone knows
    nearly as much as the agent's own model: `entropy` is the loss of a model that knows nothing.
    """
    tolerated = models
    if options.loss_tolerance is not None:
        tolerated = [i for i in models if is_tolerated(losses, i, j, options)]
    if options.beta is None or not models:
        return tolerated
    if options.loss_tolerance is None:
        tolerated = []
    L = [losses[i].mean for i in models]
    if options.quantile == "averaged":
        q_beta = averaged_level(options.beta, L, [1.0] * len(L))
    else:
        q_beta = quantile(L, options.beta)
    Q = [i for i in models if losses[i].mean <= q_beta + options.delta_q]
    others = sorted((i for i in models if i not in Q), key=lambda i: losses[i].mean)
    added = round((1 - label_confidence) * len(others))
    if entropy < math.inf and options.rank_tolerance < math.inf:
        known = max(0.0, entropy - losses[j].mean)
        bound = losses[j].mean + options.rank_tolerance / label_confidence * known
        Q = [i for i in Q if losses[i].mean <= bound]
    return [i for i in models if i in {*Q, *others[:added], *tolerated}]


def confidence(agent: Agent, num_classes: int) -> float:
    """Return an agent's confidence in its losses, at most 1 (beyond the paper).

    It is the square of the effective number of classes in its validation data over the required
    number.
    """
    effective = math.exp(label_entropy(agent))
    required = agent.algorithm.label_coverage * num_classes
    return 1.0 if effective >= required else (effective / required) ** 2


def label_entropy(agent: Agent) -> float:
    """Return the entropy of an agent's validation labels."""
    labels = [int(y) for y in agent.validation_y]
    shares = [labels.count(c) / len(labels) for c in set(labels)]
    return -sum(p * math.log(p) for p in shares)


def consensus_weights(
    G: dict[int, float], members: list[int], j: int, options: Options, *, trusted: bool
) -> dict[int, float]:
    """Return mu_j^i / sum_k mu_j^k with mu_j^i = exp(-alpha G^i) (line 6, eq:comp_csp).

    i runs over Q_beta (eq:clustered_csp), without beta over all models. Empty if the sum is 0.
    """
    # exp(-alpha G) may underflow for all models at once. A common factor cancels.
    voters = [i for i in members if i != j] if trusted else members
    lowest = min((G[i] for i in voters if math.isfinite(G[i])), default=math.inf)
    mu = {}
    for i in voters:
        if not math.isfinite(G[i]):  # a model with G = NaN or +-infinity has no weight
            mu[i] = 0.0
        elif G[i] == lowest:
            mu[i] = 1.0
        else:
            mu[i] = math.exp(-options.alpha * (G[i] - lowest))
    if trusted and j in members:
        mu[j] = max(mu.values(), default=0.0)
    return normalised(mu)


def quantile(losses: list[float], beta: float) -> float:
    """Return q_beta = min {q : beta <= share of losses <= q}, the ceil(beta m)-th (eq:q_beta)."""
    rank = max(1, math.ceil(beta * len(losses) - 1e-9))  # 0.07 * 100 is 7.000000000000001
    return sorted(losses)[rank - 1]


def normalised(mu: dict[int, float]) -> dict[int, float]:
    """Return the weights divided by their sum; empty where it is 0."""
    total = sum(mu.values())
    return {i: value / total for i, value in mu.items()} if total > 0 else {}


def mix(
    agent: Agent, j: int, published: Sequence[nn.Module], weights: dict[int, float], factor: float
) -> None:
    """Compute m_j = sum_i w_i theta^i, and theta^j <- theta^j - factor (theta^j - m_j).

    Lines 6 and 7: eq:comp_csp and eq:local_agg_update with factor = lambda1 gamma.
    """
    models = [exchanged_tensors(module, agent) for module in published]
    with torch.no_grad():
        for k, parameter in enumerate(exchanged_tensors(agent.module, agent)):
            theta = models[j][k].double()
            m = torch.zeros_like(theta)
            for i, weight in weights.items():
                m += weight * models[i][k].double()
            parameter.copy_(theta - factor * (theta - m))


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


def exchanged_tensors(module: nn.Module, agent: Agent) -> list[Tensor]:
    """Return the tensors of theta: trained parameters and, if shared, batch norm statistics."""
    tensors: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    for norm in batch_norms(module):
        if agent.statistics == "shared" and not is_frozen(norm):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            tensors += [norm.running_mean, norm.running_var]
    return tensors


def is_frozen(norm: BatchNorm) -> bool:
    """Return whether the layer's parameters are not trained; then its statistics stay, too."""
    return bool(norm.affine) and not norm.weight.requires_grad


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """Return the batch norm layers of a network."""
    return [part for part in module.modules() if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d)]


# ---- Particles on R^d: eq:dyn_micro2, eq:dyn_macro, eq:fedcbo_dynamic, eq:fedcb2o_dynamics ----

Point = list[float]


@dataclass(frozen=True)
class Cluster:
    """Objectives of cluster k: L_k, its gradient, and G; without G the system is FedCBO."""

    L: Callable[[Point], float]
    grad: Callable[[Point], Point]
    G: Callable[[Point], float] | None


@dataclass(frozen=True)
class SDE:
    """Parameters of the particle system.

    The level of Q_beta is the average of eq:Q_beta if `averaged`, otherwise q_beta.
    """

    lambda1: float = 1.0
    sigma1: float = 1.0
    lambda2: float = 0.0
    sigma2: float = 0.0
    dt: float = 0.01
    D: str = "anisotropic"
    alpha: float = 30.0
    beta: float = 0.1
    delta_q: float = 0.0
    R: float = math.inf
    averaged: bool = False
    box: tuple[Point, Point] | None = None


@dataclass
class Particle:
    """Benign particle of a cluster, or a malicious one.

    `attack` is (theta, all m) -> (a_t, A_t), the drift and diffusion of eq:dyn_macro_m.
    """

    theta: Point
    mass: float  # its share in rho = w_b rho^b + w_m rho^m
    cluster: int = 0
    attack: Callable[[Point, list[Point]], tuple[Point, list[Point]]] | None = None


def particle_step(
    particles: Sequence[Particle],
    clusters: Sequence[Cluster],
    sde: SDE,
    B: Sequence[Point],
    B_tilde: Sequence[Point],
    batch: Sequence[int] | None = None,
    moving: Sequence[int] | None = None,
) -> list[Point]:
    """Take one Euler-Maruyama step; return the consensus points m of the clusters.

    B and B_tilde are standard normals of each particle. m averages the particles in `batch`, and
    the benign particles in `moving` move; None stands for all.
    """
    m = [consensus_point(particles, cluster, sde, batch) for cluster in clusters]
    moved = []
    for i, particle in enumerate(particles):
        theta, d = particle.theta, len(particle.theta)
        root = math.sqrt(sde.dt)
        if particle.attack is not None:  # eq:dyn_macro_m
            a, A = particle.attack(theta, m)
            noise = [sum(A[k][j] * B[i][j] for j in range(d)) for k in range(d)]
            moved.append([theta[k] + a[k] * sde.dt + noise[k] * root for k in range(d)])
            continue
        if moving is not None and i not in moving:
            moved.append(list(theta))
            continue
        # eq:dyn_micro2, eq:fedcb2o_dynamics: drift and noise of the consensus point
        offset = [theta[k] - m[particle.cluster][k] for k in range(d)]
        D = offset if sde.D == "anisotropic" else [norm(offset)] * d
        new = [
            theta[k] - sde.lambda1 * offset[k] * sde.dt + sde.sigma1 * D[k] * B[i][k] * root
            for k in range(d)
        ]
        # eq:fedcb2o_dynamics: drift and noise of the gradient
        if sde.lambda2 or sde.sigma2:
            slope = clusters[particle.cluster].grad(theta)
            for k in range(d):
                new[k] += (
                    -sde.lambda2 * slope[k] * sde.dt
                    + sde.sigma2 * norm(slope) * B_tilde[i][k] * root
                )
        if sde.box is not None:
            new = [min(max(new[k], sde.box[0][k]), sde.box[1][k]) for k in range(d)]
        moved.append(new)
    for particle, new in zip(particles, moved, strict=True):
        particle.theta = new
    return m


def consensus_point(
    particles: Sequence[Particle], cluster: Cluster, sde: SDE, batch: Sequence[int] | None = None
) -> Point:
    """Compute m_{alpha,beta} (eq:consensus_point, eq:clustered_csp).

    Without G it is m_alpha^L (eq:fedcbo_ConsensusPoint). A particle whose L or G is not finite has
    an infinite L and no weight.
    """
    counted = [particles[i] for i in (range(len(particles)) if batch is None else batch)]
    L = [cluster.L(p.theta) for p in counted]
    G = list(L) if cluster.G is None else [cluster.G(p.theta) for p in counted]
    finite = [math.isfinite(low) and math.isfinite(up) for low, up in zip(L, G, strict=True)]
    L = [low if ok else math.inf for low, ok in zip(L, finite, strict=True)]
    mass = [p.mass for p in counted]
    level = math.inf
    if cluster.G is not None:
        level = averaged_level(sde.beta, L, mass) if sde.averaged else level_at(sde.beta, L, mass)
    Q = [
        i
        for i, p in enumerate(counted)
        if finite[i] and norm(p.theta) <= sde.R and L[i] <= level + sde.delta_q  # eq:Q_beta
    ]
    lowest = min(G[i] for i in Q)  # a common factor cancels
    omega = {i: mass[i] * math.exp(-sde.alpha * (G[i] - lowest)) for i in Q}
    total = sum(omega.values())
    d = len(counted[0].theta)
    return [sum(omega[i] / total * counted[i].theta[k] for i in Q) for k in range(d)]


def level_at(a: float, L: Sequence[float], mass: Sequence[float]) -> float:
    """Return q_a, the least q with a <= rho(L <= q) (eq:q_beta)."""
    for q in sorted(L):
        if below(q, L, mass) >= a - 1e-9:  # sums of shares are rounded
            return q
    return max(L)


def averaged_level(beta: float, L: Sequence[float], mass: Sequence[float]) -> float:
    """Return 2/beta times the integral of q_a over [beta/2, beta] (eq:Q_beta).

    The integral is a sum, because q_a is constant between its jumps.
    """
    jumps = [a for a in (below(q, L, mass) for q in L) if beta / 2 + 1e-9 < a < beta - 1e-9]
    ends = [beta / 2, *sorted(set(jumps)), beta]
    average = (
        2
        / beta
        * sum((b - a) * level_at((a + b) / 2, L, mass) for a, b in itertools.pairwise(ends))
    )
    return min(
        max(average, level_at(beta / 2, L, mass)), level_at(beta, L, mass)
    )  # the bounds hold exactly; rounding may violate them


def below(q: float, L: Sequence[float], mass: Sequence[float]) -> float:
    """Return rho(L <= q)."""
    return sum(w for low, w in zip(L, mass, strict=True) if low <= q) / sum(mass)


def norm(x: Point) -> float:
    """Return |x|_2."""
    return math.sqrt(sum(coordinate * coordinate for coordinate in x))


def caf(x: Tensor, f: int) -> Tensor:
    """Return the mean by the covariance bound-agnostic filter, from the whole covariance matrix."""
    m = len(x)
    c = [1.0] * m
    best = x.mean(0)
    least = math.inf
    while sum(c) > m - 2 * f:
        mu = sum((c[i] * x[i] for i in range(m)), torch.zeros_like(x[0])) / sum(c)
        covariance = sum(
            (c[i] * torch.outer(x[i] - mu, x[i] - mu) for i in range(m)), torch.zeros_like(x.T @ x)
        ) / sum(c)
        values, vectors = torch.linalg.eigh(covariance)
        if float(values[-1]) < least:
            least = float(values[-1])
            best = mu
        tau = [float((x[i] - mu) @ vectors[:, -1]) ** 2 for i in range(m)]
        largest = max(tau[i] for i in range(m) if c[i] > 0)
        if largest == 0:
            break
        c = [c[i] * (1 - tau[i] / largest) if c[i] > 0 else 0.0 for i in range(m)]
    return best
