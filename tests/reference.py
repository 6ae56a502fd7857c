"""The oracle: the paper's algorithms and particle systems as plain, slow loops, to be read line by
line beside it.

García Trillos, Akash, Li, Riedl, Zhu, "Defending Against Diverse Attacks in Federated Learning
Through Consensus-Based Bi-Level Optimization" (arXiv 2412.02535): Algorithm 1 (alg:FedCB2O),
Algorithm 2 (alg:localAggregation) with ProbSampling, the exact consensus point (eq:clustered_csp),
and the attackers' and DFedAvgM's mixing (Section sec:experiments). Of the project it imports
nothing but the named random streams, so that the fast code can be held equal to it. Every agent has
an `nn.Module` and is known by its place in the list. Below them, particles on R^d: CB2O
(eq:dyn_micro2) with malicious particles (eq:dyn_macro), FedCBO (eq:fedcbo_dynamic) and FedCB2O
(eq:fedcb2o_dynamics)."""

import copy
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

CANDIDATES = 12  # classes that perturbations are sought for after the first step
MEASURED = 256  # validation samples, at most, on which it is measured what they do


@dataclass(frozen=True)
class Training:
    """LocalUpdate's settings; `local_steps`, where given, replaces `local_epochs`."""

    gamma: float = 0.004
    lambda2: float = 1.0
    momentum: float = 0.9
    batch_size: int = 64
    local_epochs: int = 5
    local_steps: int | None = None


@dataclass(frozen=True)
class Options:
    """What one agent does in LocalAggregation; the defaults are the paper's FedCB2O."""

    selection: Literal["prob_sampling", "uniform", "everyone", "colluding"] = "prob_sampling"
    budget: int = 20  # M
    own_candidate: bool = False  # released code: j may sample itself
    kappa: float = 2.0
    zeta: float = 0.5
    first_contact: Literal["average", "whole"] = "average"  # released code: whole
    own_likelihood: Literal["every_round"] | None = None  # released code: every round
    validation_loss: Literal["samples", "batches"] = "samples"  # released code: batches
    criterion: Literal["class_loss_gap", "perturbation_gap", "average_loss", "num_samples"] = (
        "class_loss_gap"
    )
    criterion_from_round: int = 0  # T_G
    absent: Literal["masked", "zero"] = "masked"  # released code: zero
    alpha: float = 10.0
    beta: float | None = None  # None: no sub-level set, as in Algorithm 2
    delta_q: float = 0.0
    quantile: Literal["plain", "averaged"] = "plain"  # averaged: the level of eq:Q_beta
    label_coverage: float = 0.0  # share of classes for full confidence; beyond the paper
    own_model: Literal["excluded", "judged", "trusted"] = "excluded"  # released code: trusted
    lambda1: float = 10.0
    mixing_factor: float | None = None  # None: lambda1 * gamma; released code: 1
    # Guards, beyond the paper: of every algorithm.
    newcomer_share: float | None = None  # of M, for peers never asked; None: as in Algorithm 2
    max_distance: float | None = None  # from the agent's own model, in units of its norm
    min_distance: float | None = None  # the same, in units of its movement in LocalUpdate
    max_sensitivity: float | None = None  # rise of a class's sensitivity to noise, in movements
    interpolation: float = 1.0  # fraction of the way to a peer's model at which losses are computed
    loss_tolerance: float | None = None  # standard errors above the own loss that count, too
    # Criteria beyond the paper.
    z: float = 0.0  # so many standard errors, of a class loss or of a rise, are no gap
    pixels: int = 6  # that the perturbation worst for a model paints
    samples: int = 4  # on which it is sought
    steps: int = 1  # in which it is sought
    blend: float = 0.0  # the share of noise in these samples
    against: Literal["own", "majority"] = (
        "own"  # majority: or the median over Q, where that is more
    )


FEDCB2O = Options()
FEDCBO = Options(criterion="average_loss")
# eq:clustered_csp: all N models, the agent's own among them, no sampling (beta is the user's).
EXACT = Options(selection="everyone", own_model="judged", beta=0.5)
DFEDAVGM = Options(
    selection="uniform", criterion="num_samples", own_model="judged", mixing_factor=1.0
)
# With own_model="judged": the released code, where an attacker's own model is averaged too.
COLLUDER = Options(selection="colluding", criterion="num_samples", mixing_factor=1.0)


@dataclass
class Agent:
    """Agent j: its data, its model theta^j, and what it remembers of its peers."""

    module: nn.Module
    train_x: Tensor
    train_y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    malicious: bool = False
    cluster: int = 0
    algorithm: Options = FEDCB2O
    statistics: Literal["shared", "local", "dropped"] = "shared"  # of batch norms
    met: set[int] = field(default_factory=set)  # whom it has asked so far, answered or not
    P: dict[int, float] = field(default_factory=dict)  # P^{j,i} of those who have answered
    before: nn.Module | None = None  # the model that it began the round with


@dataclass(frozen=True)
class Loss:
    """L_j(theta) and, for each class c that agent j holds, L_{j,c}(theta), and the loss of each
    sample by itself."""

    mean: float
    by_class: dict[int, float]
    errors: list[float] = field(default_factory=list, compare=False)
    labels: list[int] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Info:
    """What agent j did in a round. `weights` are those of m_j, by id, its own under j; they sum to
    1."""

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
    """Algorithm 1, lines 3 and 4: everybody trains, then everybody aggregates."""
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
    """Algorithm 1, line 3, for j in [N]; malicious agents do the same on their poisoned data
    (eq:MaliAgentObj)."""
    return [
        local_update(agent, stream(seed, "batches", n, j), training)
        for j, agent in enumerate(agents)
    ]


def local_update(agent: Agent, draw: np.random.Generator, training: Training) -> list[float]:
    """tau epochs (or steps) of mini-batch SGD; the loss of each step."""
    agent.before = copy.deepcopy(agent.module)
    # A fresh optimiser: no momentum is carried over from the last round.
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
    for batch in batches(len(agent.train_y), draw, training):
        optimiser.zero_grad()
        loss = F.cross_entropy(agent.module(agent.train_x[batch]), agent.train_y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()  # theta <- theta - lambda2 gamma grad L_j(theta)
        step_losses.append(loss.item())
    return step_losses


def batches(num_samples: int, draw: np.random.Generator, training: Training) -> list[Tensor]:
    """The mini-batches of one LocalUpdate; the last of an epoch may be smaller."""
    found: list[Tensor] = []
    epoch = 0
    while (
        epoch < training.local_epochs
        if training.local_steps is None
        else len(found) < training.local_steps
    ):
        order = torch.from_numpy(draw.permutation(num_samples))
        for start in range(0, num_samples, training.batch_size):
            found.append(order[start : start + training.batch_size])
        epoch += 1
    return found if training.local_steps is None else found[: training.local_steps]


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
    """Algorithm 1, line 4, for j in [N]: synchronous, on the models as they are after everybody's
    LocalUpdate."""
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
        asked = select(agents, j, stream(seed, "select", n, j))  # line 1: A_n
        agent.met |= set(asked)
        received = [i for i in asked if answers[i]]  # line 2
        # Guards: a peer's model that is too far or too near is neither evaluated nor weighed.
        noise = noise_images(agent.train_x.shape[1:], stream(seed, "noise", n, j))
        refused = {}
        for i in received:
            loss = refused_loss(published[i], published[j], agent, num_classes, noise)
            if i != j and loss:
                refused[i] = loss
        admitted = [i for i in received if i not in refused]
        # The models that m_j may hold; j is among them once, whether it sampled itself or is always
        # counted.
        at_hand = sorted({*admitted, j}) if options.own_model != "excluded" else admitted

        sure = confidence(agent, num_classes)
        losses: dict[int, Loss] = {}
        if options.criterion != "num_samples" or options.loss_tolerance is not None:
            for i in sorted({*admitted, j}):  # line 3
                there = on_the_way(published[j], published[i], agent, options.interpolation)
                losses[i] = evaluate(there, agent, training)
        if options.criterion == "num_samples":
            counted = sublevel_set(losses, at_hand, j, options, sure)
            values = {i: float(len(agents[i].train_y)) for i in counted}
            weights = normalised(values)
        else:
            gap = options.criterion.endswith("_gap") and n >= options.criterion_from_round
            Q = sublevel_set(losses, at_hand, j, options, sure)
            G = {}
            rises = {}
            if gap and options.criterion == "perturbation_gap":
                rises = worst_rises(published, {*Q, j}, agent, stream(seed, "rule", n, j))
            for i in sorted({*admitted, j}):  # line 5
                if rises:
                    G[i] = perturbation_gap(rises, i, j, options) if i in Q and i != j else 0.0
                else:
                    G[i] = (
                        class_loss_gap(losses, i, j, num_classes, options)
                        if gap
                        else losses[i].mean
                    )
            G = {i: sure * value for i, value in G.items()}
            for i in received:  # line 4
                update_likelihood(agent, i, refused.get(i) or losses[i].mean)
            if options.own_likelihood == "every_round" and j not in received:
                update_likelihood(agent, j, losses[j].mean)
            values = {i: G[i] for i in at_hand}
            weights = consensus_weights(
                values, Q, j, options, trusted=gap and options.own_model == "trusted"
            )

        if weights:
            factor = (
                training.gamma * options.lambda1
                if options.mixing_factor is None
                else options.mixing_factor
            )
            mix(agent, j, published, weights, factor)  # lines 6 and 7
            weights = {i: weights.get(i, 0.0) for i in sorted({*received, j})}
        else:  # nobody answered, or nobody is worth anything: the model is kept
            weights = {i: float(i == j) for i in sorted({*received, j})}
        infos.append(Info(asked, received, weights, losses, values))
    return infos


def is_finite(module: nn.Module) -> bool:
    """Whether all parameters are numbers: 0 * NaN = NaN, so others are dropped where they are
    received."""
    return all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())


# ---- line 1: who is asked ----


def select(agents: Sequence[Agent], j: int, draw: np.random.Generator) -> list[int]:
    """A_n of agent j, ascending."""
    agent, M = agents[j], agents[j].algorithm.budget
    candidates = [i for i in range(len(agents)) if i != j or agent.algorithm.own_candidate]
    if agent.algorithm.selection == "prob_sampling":
        chosen = prob_sampling(agent, candidates, M, draw)
    elif agent.algorithm.selection == "uniform":
        if agent.algorithm.newcomer_share is None:
            chosen = pick(candidates, min(M, len(candidates)), draw)
        else:
            chosen = prob_sampling(agent, candidates, M, draw)
    elif agent.algorithm.selection == "everyone":
        chosen = candidates
    else:
        chosen = colluding(agents, j, M, draw)
    return sorted(chosen)


def pick(ids: list[int], size: int, draw: np.random.Generator) -> list[int]:
    """`size` of the ids, uniformly, without replacement."""
    return [int(i) for i in draw.choice(ids, size=size, replace=False)]


def prob_sampling(
    agent: Agent, candidates: list[int], M: int, draw: np.random.Generator
) -> list[int]:
    """ProbSampling(P_n^j, M)."""
    # Line 1: P = 0 means "never selected" (rem:sampling_likelihood_init). The record is kept apart
    # from P, which underflows to 0 for a garbage model and stays unknown for a peer that never
    # answers.
    S = [i for i in candidates if i not in agent.met]
    if agent.algorithm.newcomer_share is not None:
        return with_newcomers(agent, S, [i for i in candidates if i in agent.met], M, draw)
    if S:
        return pick(S, M, draw) if len(S) > M else S  # line 2: no top-up
    # Line 4
    return likely(agent, candidates, M, draw)


def likely(agent: Agent, candidates: list[int], M: int, draw: np.random.Generator) -> list[int]:
    """M of those who were met, by their likelihood."""
    p = np.array(likelihoods(agent, candidates))
    if p.sum() == 0:
        return []
    p = p / p.sum()
    k = sum(float(value) > 0 for value in p)  # no more than k different ones can be drawn
    return [int(i) for i in draw.choice(candidates, size=min(M, k), replace=False, p=p)]


def likelihoods(agent: Agent, candidates: list[int]) -> list[float]:
    """P^{j,i}; peers that were asked and never answered are as good as the mean of those who
    did."""
    if agent.algorithm.selection == "uniform":
        return [1.0] * len(candidates)
    known = [agent.P[i] for i in candidates if i in agent.P]
    unknown = sum(known) / len(known) if known else 1.0
    return [agent.P.get(i, unknown) for i in candidates]


def with_newcomers(
    agent: Agent, S: list[int], met: list[int], M: int, draw: np.random.Generator
) -> list[int]:
    """At most `newcomer_share` of M for S, who were never asked, and more where those who were
    met leave room."""
    assert agent.algorithm.newcomer_share is not None
    share = math.ceil(agent.algorithm.newcomer_share * M - 1e-9)
    can_be_drawn = sum(P > 0 for P in likelihoods(agent, met))
    size = max(share, M - can_be_drawn)
    fresh = pick(S, size, draw) if len(S) > size else S
    return fresh + likely(agent, met, M - len(fresh), draw)


def colluding(agents: Sequence[Agent], j: int, M: int, draw: np.random.Generator) -> list[int]:
    """An attacker's choice: attackers of its cluster first, then benign agents of it
    (sec:experiments)."""
    neighbours = [
        i for i in range(len(agents)) if i != j and agents[i].cluster == agents[j].cluster
    ]
    fellows = [i for i in neighbours if agents[i].malicious]
    benign = [i for i in neighbours if not agents[i].malicious]
    if len(fellows) > M:
        return pick(fellows, M, draw)
    return fellows + pick(benign, min(M - len(fellows), len(benign)), draw)


# ---- lines 3 to 5: what agent j thinks of a model ----


def evaluate(model: nn.Module, agent: Agent, training: Training) -> Loss:
    """L_j and L_{j,c} of a model on agent j's validation data; what is no number counts as
    infinite."""
    model.eval()
    if agent.statistics == "local":
        for norm in [norm for norm in batch_norms(model) if not is_frozen(norm)]:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over batches, of which there is one
            norm.train()
        with torch.no_grad():
            model(agent.train_x)
        model.eval()
    with torch.no_grad():
        logits = model(agent.validation_x).double()
    # `errors`: one number for each sample.
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


def on_the_way(own: nn.Module, peer: nn.Module, agent: Agent, share: float) -> nn.Module:
    """A network that lies so far on the way from the own model to a peer's."""
    there = copy.deepcopy(peer)
    with torch.no_grad():
        for tensor, start in zip(exchanged(there, agent), exchanged(own, agent), strict=True):
            tensor.copy_(start + share * (tensor - start))
    return there


def refused_loss(
    peer: nn.Module, own: nn.Module, agent: Agent, num_classes: int, noise: Tensor
) -> float:
    """The loss that a refused model counts as: infinity if too far from the agent's own or too
    sensitive, log C if almost identical to it; 0 for a model that is admitted."""
    options = agent.algorithm
    apart = distance(peer, own, agent)
    with torch.no_grad():
        norm = math.sqrt(sum(float(b.double().square().sum()) for b in exchanged(own, agent)))
    if options.max_distance is not None and apart > options.max_distance * norm:
        return math.inf
    if options.min_distance is not None:
        assert agent.before is not None
        if apart < options.min_distance * distance(agent.before, own, agent):
            return math.log(num_classes)
    if options.max_sensitivity is not None:
        assert agent.before is not None
        r_own, r_before, r_peer = (sensitivities(m, noise) for m in (own, agent.before, peer))
        changes = [(a - b) ** 2 for a, b in zip(r_own, r_before, strict=True)]
        movement = max(0.05, math.sqrt(sum(changes) / len(changes)))
        known = [max(a, b) for a, b in zip(r_own, r_before, strict=True)]
        rise = max(r - k for r, k in zip(r_peer, known, strict=True))
        if rise > options.max_sensitivity * movement:
            return math.inf
    return 0.0


def noise_images(shape: Sequence[int], draw: np.random.Generator) -> Tensor:
    """64 images of black and white pixels; the last 32 consist of 4 x 4 blocks."""
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
    """Of each class: how much its output varies over noise, in units of the median class."""
    with torch.no_grad():
        outputs = module.eval()(noise).double()
    outputs -= outputs.mean(1, keepdim=True)
    spread = [float(outputs[:32, c].std() + outputs[32:, c].std()) for c in range(outputs.shape[1])]
    median = sorted(spread)[(len(spread) - 1) // 2]
    return [math.log(s / median) for s in spread]


def is_tolerated(losses: dict[int, Loss], i: int, j: int, options: Options) -> bool:
    """Whether a loss exceeds that of the agent's own model by no more standard errors than that."""
    assert options.loss_tolerance is not None
    bound = losses[j].mean + options.loss_tolerance * standard_error(losses, i, j)
    return losses[i].mean <= bound


def distance(one: nn.Module, other: nn.Module, agent: Agent) -> float:
    """Between two models, as agents exchange them."""
    with torch.no_grad():
        pairs = zip(exchanged(one, agent), exchanged(other, agent), strict=True)
        return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))


def standard_error(losses: dict[int, Loss], i: int, j: int) -> float:
    """Of L_i - L_j over the same samples."""
    differences = [a - b for a, b in zip(losses[i].errors, losses[j].errors, strict=True)]
    n = len(differences)
    if n == 1:
        return 0.0
    mean = sum(differences) / n
    return math.sqrt(sum((each - mean) ** 2 for each in differences) / (n - 1) / n)


def mean_of(numbers: list[float]) -> float:
    """Their mean, or infinity where it is no number."""
    mean = sum(numbers) / len(numbers)
    return mean if math.isfinite(mean) else math.inf


def update_likelihood(agent: Agent, i: int, loss: float) -> None:
    """eq:update_sampling_likelihood, from P_0 = 0."""
    zeta = agent.algorithm.zeta
    benefit = math.exp(-agent.algorithm.kappa * loss) if math.isfinite(loss) else 0.0
    if agent.algorithm.first_contact == "whole" and i not in agent.P:
        agent.P[i] = benefit
    else:
        agent.P[i] = (1 - zeta) * agent.P.get(i, 0.0) + zeta * benefit


MOST = (
    2 - 2**-23
) * 2.0**127  # what a float32 can be: better than a model that is broken by this is any other


def class_loss_gap(
    losses: dict[int, Loss], i: int, j: int, num_classes: int, options: Options
) -> float:
    """G_j(theta^i; theta^j) = max_c (L_{j,c}(theta^i) - L_{j,c}(theta^j))
    (eq:robust_criterion_G_LF)."""
    if i == j:
        return 0.0 if all(math.isfinite(loss) for loss in losses[j].by_class.values()) else math.inf
    theirs, own = losses[i].by_class, losses[j].by_class
    differences = []
    for c in range(num_classes):
        if c not in own:
            if options.absent == "zero":
                differences.append(0.0)
        elif theirs[c] == math.inf:  # whatever its own loss is: inf - inf is no number
            differences.append(math.inf)
        else:
            differences.append(theirs[c] - min(own[c], MOST))
    return max(differences)


def perturbation_gap(rises: dict[int, list[float]], i: int, j: int, options: Options) -> float:
    """How much more the loss rises under the perturbation worst for a peer's model than the own
    one's under its own, or against the majority than the median model's, where that rises more."""
    expected = rises[j]
    if options.against == "majority":
        middle = sorted(rises.values(), key=mean_of)[(len(rises) - 1) // 2]
        expected = max(expected, middle, key=mean_of)
    differences = [a - b for a, b in zip(rises[i], expected, strict=True)]
    n, mean = len(differences), mean_of(differences)
    error = math.sqrt(sum((each - mean) ** 2 for each in differences) / max(1, n - 1) / n)
    return max(0.0, mean - options.z * error)


def worst_rises(
    published: list[nn.Module], models: set[int], agent: Agent, draw: np.random.Generator
) -> dict[int, list[float]]:
    """Return by how much the loss of each validation sample, or of `MEASURED` of them, rises
    where the pixels worst for a model are painted. They are sought on some samples."""
    options = agent.algorithm
    places = spread(options.samples, len(agent.validation_y))
    some, labels = agent.validation_x[places], agent.validation_y[places]
    if options.blend > 0:
        noise = torch.from_numpy(draw.random(tuple(some.shape))).float()
        some = (1 - options.blend) * some + options.blend * noise
    measured = spread(MEASURED, len(agent.validation_y))
    x, y = agent.validation_x[measured], agent.validation_y[measured]
    rises = {}
    for i in models:
        painted = x.clone()
        for channel, row, column, colour in worst_pixels(published[i], options, some, labels):
            painted[:, channel, row, column] = colour
        published[i].eval()
        with torch.no_grad():
            before, after = (
                F.cross_entropy(published[i](each).double(), y, reduction="none").tolist()
                for each in (x, painted)
            )
        rises[i] = [b - a for a, b in zip(before, after, strict=True)]
    return rises


def spread(count: int, n: int) -> list[int]:
    """So many places spread over n, or all."""
    count = min(count, n)
    return [k * n // count for k in range(count)]


def worst_pixels(
    model: nn.Module, options: Options, x: Tensor, y: Tensor
) -> list[tuple[int, int, int, float]]:
    """The pixels (with their channels) that, painted black (0) or white (1), to first order raise
    the output of one class most above that of the label: a part of them in each step, with those
    before painted, and after the first step for the `CANDIDATES` classes only for which that was
    most. Of the classes the one for which that is most, or with several steps the one whose
    pixels raise the loss most of these samples."""
    model.eval()
    classes = list(range(model(x[:1]).shape[1]))
    seen, worth = {c: x.clone() for c in classes}, dict[int, float]()
    chosen: dict[int, list[tuple[int, int, int, float]]] = {c: [] for c in classes}
    for step in range(1, options.steps + 1):
        if step == 2:
            classes = sorted(sorted(classes, key=lambda c: -worth[c])[:CANDIDATES])
        pixels = min(options.pixels, x[0, 0].numel())
        so_far = [math.ceil(pixels * s / options.steps) for s in (step - 1, step)]
        for c in classes:
            gain, colours = gains_of_pixels(model, seen[c], y, c)
            painted = {(row, column) for _, row, column, _ in chosen[c]}
            by_gain = sorted(
                (pixel for pixel in gain if pixel not in painted), key=lambda pixel: -gain[pixel]
            )
            most = [pixel for pixel in by_gain[: so_far[1] - so_far[0]] if gain[pixel] > 0]
            chosen[c] += [each for pixel in most for each in colours[pixel]]
            for channel, row, column, colour in chosen[c]:
                seen[c][:, channel, row, column] = colour
            worth[c] = sum(gain[pixel] for pixel in most)
    if options.steps > 1:
        with torch.no_grad():
            worth = {c: F.cross_entropy(model(seen[c]).double(), y).item() for c in classes}
    return chosen[max(classes, key=lambda c: worth[c])]


def gains_of_pixels(
    model: nn.Module, x: Tensor, y: Tensor, c: int
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], list[tuple[int, int, int, float]]]]:
    """By how much to first order each pixel, painted in all these images, raises the output of
    class c above that of the label, and what colours its channels get for that."""
    gain: dict[tuple[int, int], float] = {}
    colours: dict[tuple[int, int], list[tuple[int, int, int, float]]] = {}
    slope = []
    for k in range(len(x)):
        image = x[k : k + 1].clone().requires_grad_()
        outputs = model(image)[0]
        slope.append(torch.autograd.grad(outputs[c] - outputs[y[k]], image)[0][0].tolist())
    channels, height, width = x.shape[1:]
    for row in range(height):
        for column in range(width):
            gain[row, column], colours[row, column] = 0.0, []
            for channel in range(channels):
                by_colour = {
                    colour: mean_of(
                        [
                            s[channel][row][column] * (colour - float(image[channel, row, column]))
                            for s, image in zip(slope, x, strict=True)
                        ]
                    )
                    for colour in (1.0, 0.0)
                }
                colour = max(by_colour, key=lambda each: by_colour[each])
                if by_colour[colour] > 0:
                    gain[row, column] += by_colour[colour]
                    colours[row, column].append((channel, row, column, colour))
    return gain, colours


# ---- lines 6 and 7: the consensus point ----


def sublevel_set(
    losses: dict[int, Loss], at_hand: list[int], j: int, options: Options, sure: float = 1.0
) -> list[int]:
    """Q_beta of eq:clustered_csp, where there is a beta, of the models at hand; or all of them.
    With a loss tolerance, models that it tolerates are in Q_beta, too, or alone without a beta. An
    agent that is not sure of its losses adds a part of the other models."""
    tolerated = at_hand
    if options.loss_tolerance is not None:
        tolerated = [i for i in at_hand if is_tolerated(losses, i, j, options)]
    if options.beta is None or not at_hand:
        return tolerated
    if options.loss_tolerance is None:
        tolerated = []
    L = [losses[i].mean for i in at_hand]
    if options.quantile == "averaged":
        q_beta = averaged_level(options.beta, L, [1.0] * len(L))
    else:
        q_beta = quantile(L, options.beta)
    Q = [i for i in at_hand if losses[i].mean <= q_beta + options.delta_q]
    others = sorted((i for i in at_hand if i not in Q), key=lambda i: losses[i].mean)
    added = round((1 - sure**2) * len(others))
    return [i for i in at_hand if i in {*Q, *others[:added], *tolerated}]


def confidence(agent: Agent, num_classes: int) -> float:
    """How far an agent of few classes relies on its losses; 1 if its labels cover enough."""
    labels = [int(y) for y in agent.validation_y]
    shares = [labels.count(c) / len(labels) for c in set(labels)]
    effective = math.exp(-sum(p * math.log(p) for p in shares))
    required = agent.algorithm.label_coverage * num_classes
    return 1.0 if effective >= required else effective / required


def consensus_weights(
    G: dict[int, float], counted: list[int], j: int, options: Options, *, trusted: bool
) -> dict[int, float]:
    """mu_j^i / sum_i mu_j^i of eq:comp_csp or, of those in Q_beta, of eq:clustered_csp; empty where
    there are none."""
    # exp(-alpha G) underflows for all at once when all are bad; a common factor cancels.
    judged = [i for i in counted if i != j] if trusted else counted
    lowest = min((G[i] for i in judged if math.isfinite(G[i])), default=math.inf)
    mu = {}
    for i in judged:
        if not math.isfinite(G[i]):  # NaN and both infinities speak for nobody
            mu[i] = 0.0
        elif G[i] == lowest:
            mu[i] = 1.0
        else:
            mu[i] = math.exp(-options.alpha * (G[i] - lowest))
    if trusted and j in counted:
        mu[j] = max(mu.values(), default=0.0)
    return normalised(mu)


def quantile(losses: list[float], beta: float) -> float:
    """q_beta, the least q that at least beta of the m losses do not exceed (eq:q_beta): the
    ceil(beta m)-th."""
    rank = max(1, math.ceil(beta * len(losses) - 1e-9))  # 0.07 * 100 is 7.000000000000001
    return sorted(losses)[rank - 1]


def normalised(mu: dict[int, float]) -> dict[int, float]:
    """The weights divided by their sum; empty where it is 0."""
    total = sum(mu.values())
    return {i: value / total for i, value in mu.items()} if total > 0 else {}


def mix(
    agent: Agent, j: int, published: Sequence[nn.Module], weights: dict[int, float], factor: float
) -> None:
    """theta^j <- theta^j - factor (theta^j - m_j), m_j = sum_i w_i theta^i (eq:comp_csp,
    eq:local_agg_update)."""
    models = [exchanged(module, agent) for module in published]
    with torch.no_grad():
        for k, parameter in enumerate(exchanged(agent.module, agent)):
            theta = models[j][k].double()
            m = torch.zeros_like(theta)
            for i, weight in weights.items():
                m += weight * models[i][k].double()
            parameter.copy_(theta - factor * (theta - m))


BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d


def exchanged(module: nn.Module, agent: Agent) -> list[Tensor]:
    """What of a network is its theta: all parameters that are trained and, where agents share them,
    statistics."""
    found: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    for norm in batch_norms(module):
        if agent.statistics == "shared" and not is_frozen(norm):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            found += [norm.running_mean, norm.running_var]
    return found


def is_frozen(norm: BatchNorm) -> bool:
    """Whether its own parameters are not trained: then it is left as it is."""
    return bool(norm.affine) and not norm.weight.requires_grad


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """Its batch norms."""
    return [part for part in module.modules() if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d)]


# ---- Particles on R^d: eq:dyn_micro2, eq:dyn_macro, eq:fedcbo_dynamic, eq:fedcb2o_dynamics ----

Point = list[float]


@dataclass(frozen=True)
class Cluster:
    """What a cluster's particles are after: L_k and its gradient, and G; without G it is FedCBO."""

    L: Callable[[Point], float]
    grad: Callable[[Point], Point]
    G: Callable[[Point], float] | None


@dataclass(frozen=True)
class SDE:
    """The parameters of the system; `averaged` is the level of eq:Q_beta, without it the practical
    q_beta."""

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
    """A benign particle of a cluster, or a malicious one that moves by its own (a_t, A_t) of
    (theta, all m)."""

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
    """One Euler-Maruyama step, B and B_tilde standard normals for each particle; the consensus
    points it moved to.

    They are those of the particles in `batch` (None: all), and of the benign particles those in
    `moving` move."""
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
        away = [theta[k] - m[particle.cluster][k] for k in range(d)]
        D = away if sde.D == "anisotropic" else [norm(away)] * d
        new = [
            theta[k] - sde.lambda1 * away[k] * sde.dt + sde.sigma1 * D[k] * B[i][k] * root
            for k in range(d)
        ]
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
    """m_{alpha,beta} of eq:consensus_point and eq:clustered_csp, or m_alpha^L of
    eq:fedcbo_ConsensusPoint.

    A particle where L or G is no finite number has an infinite L and no weight."""
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
    """q_a, the least q with a <= rho(L <= q) (eq:q_beta)."""
    for q in sorted(L):
        if below(q, L, mass) >= a - 1e-9:  # sums of shares are rounded
            return q
    return max(L)


def averaged_level(beta: float, L: Sequence[float], mass: Sequence[float]) -> float:
    """2/beta times the integral of q_a over [beta/2, beta] (eq:Q_beta): between its jumps, q_a is
    constant."""
    jumps = [a for a in (below(q, L, mass) for q in L) if beta / 2 + 1e-9 < a < beta - 1e-9]
    ends = [beta / 2, *sorted(set(jumps)), beta]
    average = (
        2
        / beta
        * sum((b - a) * level_at((a + b) / 2, L, mass) for a, b in itertools.pairwise(ends))
    )
    return min(
        max(average, level_at(beta / 2, L, mass)), level_at(beta, L, mass)
    )  # so it is, but for rounding


def below(q: float, L: Sequence[float], mass: Sequence[float]) -> float:
    """rho(L <= q)."""
    return sum(w for low, w in zip(L, mass, strict=True) if low <= q) / sum(mass)


def norm(x: Point) -> float:
    """|x|_2."""
    return math.sqrt(sum(each * each for each in x))


def caf(x: Tensor, f: int) -> Tensor:
    """The mean by the covariance bound-agnostic filter, with the covariance matrix itself."""
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
