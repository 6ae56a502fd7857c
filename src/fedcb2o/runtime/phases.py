"""The phases of a round, each for some agents, in place: train, craft, aggregate, mix, evaluate (alg:FedCB2O).

Each is a function of the world and of agents: workers share these out, and what it finds for one depends on no other of
the same phase.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data.partition import rotate
from fedcb2o.data.shard import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated import ifca, lists
from fedcb2o.federated.aggregate import reduce_block
from fedcb2o.federated.evaluate import confusion, losses_of, losses_of_each
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.peers import Met, Peers
from fedcb2o.federated.round import Asking, Choices, Colluding, colluders_aggregation, idle, local_aggregation
from fedcb2o.federated.selection import forget
from fedcb2o.federated.together import local_updates_
from fedcb2o.federated.types import (
    Knowledge,
    Local,
    Losses,
    Received,
    Reduction,
    View,
)
from fedcb2o.models import row_stride
from fedcb2o.plugins import tensor_of
from fedcb2o.runtime.mixing import sparse, times
from fedcb2o.runtime.world import Setting, World, losses_seen_by, samples_of, view_of, views_of
from fedcb2o.streams import stream, streams

TILE = 2048  # columns of the models that are mixed at once: N of them stay in a core's cache
WIDE = 8192  # the same where rules work on columns, which costs some calls for each block
BROAD = 2**16  # the same on another device than the CPU, where calls cost more and caches less
COPIED = 2**19  # numbers of small models that are looked at in one call
HUGE = 1e6  # crafted models with larger numbers are not received, like those that are not finite


def train(world: World, some: Sequence[Sequence[int]], n: int) -> list[tuple[list[float], list[bool]]]:
    """LocalUpdate of some teams of agents, in place; the mean training losses of each team, and which of its models are
    finite."""
    setting, models, done = world.setting, world.models, []
    for team in some:
        for j in team:
            if setting.malicious[j] and setting.attack.crafts(n):
                world.pool[setting.published(j)[0]] = models[j]  # what it began with, until it crafts
            if (row := setting.before(j)) is not None:
                world.pool[row] = models[j]
        x, y = samples_of(setting, team, n)
        draws = streams(setting.seed, "batches", n, agents=team)
        with plugins.blamed("model", setting.model):
            if len(team) > 1:
                thetas = _in_a_row(models, team)
                found = local_updates_(thetas, setting.module, x, y, setting.training, draws)
                if not _follow(team):
                    torch._foreach_copy_([models[j] for j in team], thetas.unbind())
            else:
                found = [local_update_(models[team[0]], setting.module, Shard(x[0], y[0]), setting.training, draws[0])]
        done.append((found, are_finite(world, team)))
    return done


def _follow(agents: Sequence[int]) -> bool:
    """Whether some agents follow each other."""
    return list(agents) == list(range(agents[0], agents[0] + len(agents)))


def _in_a_row(models: Float[Tensor, "N d"], agents: Sequence[int]) -> Float[Tensor, "k d"]:
    """The models of some agents: a view where they follow each other, else a copy that lies as they do."""
    if _follow(agents):
        return models[agents[0] : agents[0] + len(agents)]
    dim = models.shape[1]
    thetas = models.new_zeros(len(agents), row_stride(dim))[:, :dim]
    torch._foreach_copy_(thetas.unbind(), [models[j] for j in agents])
    return thetas


def are_finite(world: World, agents: Sequence[int]) -> list[bool]:
    """Whether the models of some agents are finite."""
    return _finite(world.models, agents)


def _finite(models: Float[Tensor, "k d"], rows: Sequence[int], bound: float = math.inf) -> list[bool]:
    """Which of some models have finite numbers alone, and none beyond the `bound`: both ends are then, and no NaN is
    among them. One pass over large models, and from another device one transfer."""
    size = max(1, COPIED // models.shape[1])
    parts = [rows[k : k + size] for k in range(0, len(rows), size)]
    found = [_in_a_row(models, part).aminmax(dim=1) for part in parts]
    ends = torch.cat([torch.stack(pair, -1) for pair in found]).cpu()
    good: list[bool] = (ends.isfinite() & (ends.abs() <= bound)).all(1).tolist()
    return good


def craft(world: World, agents: Sequence[int], n: int, good: Bool[Tensor, " N"]) -> list[list[bool]]:
    """What some malicious agents publish, into their rows of the pool; whether each row may be received.

    `good` are the agents whose models are finite: the others are not seen, and craft nothing.
    """
    setting, population, attack = world.setting, world.setting.population, world.setting.attack
    assert attack.craft is not None

    def ids_of(whose: Knowledge, cluster: int) -> Int[Tensor, " m"]:
        members = (population.cluster == cluster) & (population.malicious == (whose == "fellows")) & good
        return members.nonzero().flatten()

    done = []
    for j in agents:
        rows, cluster = setting.published(j), int(population.cluster[j])
        benign = (population.cluster == cluster) & ~population.malicious
        if not (good[j] and (benign & good).any()):
            done.append([False] * len(rows))
            continue
        data = view_of(setting, j, population.train[j])

        def losses(models: Float[Tensor, "m d"], data: Shard = data) -> Losses:
            rows, models = torch.arange(len(models)), models.to(world.pool.device)
            classes = setting.dataset.num_classes
            return losses_of(setting.module, models, rows, data, classes, together=setting.together)

        view = View(
            n=n,
            agent=j,
            cluster=cluster,
            num_clusters=population.num_clusters,
            num_fellows=int(((population.cluster == cluster) & population.malicious).sum()),
            num_benign=int(benign.sum()),
            receivers=(~population.malicious).nonzero().flatten(),
            own=world.models[j].clone(),
            before=world.pool[rows[0]].clone(),
            data=data.to("cpu"),
            losses=losses,
            threat=attack.threat,
            _ids_of=ids_of,
            _models=world.models,
        )
        crafted = tensor_of("attack", attack.craft(view, stream(setting.seed, "craft", n, j)))
        published = world.pool[rows.start : rows.stop]
        if crafted.shape not in (published.shape, published.shape[1:]):
            wanted = f"({published.shape[1]},)" + (f" or {tuple(published.shape)}" if len(rows) > 1 else "")
            raise ConfigError(f"the attack returned models of shape {tuple(crafted.shape)}, expected {wanted}")
        published.copy_(crafted)
        done.append(_finite(published, range(len(published)), HUGE))
    return done


def aggregate(
    world: World,
    some: Sequence[Sequence[int]],
    met: Sequence[Met],
    n: int,
    mixing: Bool[np.ndarray, " N"],
    online: Bool[np.ndarray, " N"],
    good: Bool[np.ndarray, " rows"],
) -> list[tuple[Met, list[Choices]]]:
    """LocalAggregation of some teams of agents up to their weights: whom each team has met then, and what parts of it
    decided.

    Agents that are not `mixing` keep their models; peers that are not `online`, or whose model is not among the `good`
    rows of the pool, are asked in vain.
    """
    setting, done = world.setting, []
    colludes = setting.population.malicious.numpy() & setting.colluding
    for team, known in zip(map(np.array, some), met, strict=True):
        answers = functools.partial(_answers, world, n, online, good)
        honest, held = mixing[team] & ~colludes[team], setting.validation[1][team]
        parts, choices = [np.flatnonzero(~honest)], []
        after = [known.of_some(parts[0])]
        for count in np.unique(held[honest]):
            places = np.flatnonzero(honest & (held == count))
            asking = _asking(world, n, team[places], known.of_some(places), answers)
            judge, gamma = functools.partial(_judge, world), setting.training.gamma
            remembered, decided = local_aggregation(setting.algorithm, n, asking, setting.budget, gamma, judge)
            parts.append(places)
            after.append(remembered)
            choices.append(decided)
        if len(band := team[mixing[team] & colludes[team]]):
            colluding = _colluding(world, n, band, answers)
            choices.append(colluders_aggregation(colluding, setting.budget, own_model=setting.colluders_own_model))
        if len(offline := team[~mixing[team]]):
            choices.append(idle(offline))
        done.append((Met.joined(after).of_some(np.concatenate(parts).argsort()), choices))
    return done


def _answers(
    world: World,
    n: int,
    online: Bool[np.ndarray, " N"],
    good: Bool[np.ndarray, " rows"],
    agents: Int[np.ndarray, " a"],
    asked: Int[np.ndarray, " s"],
    sizes: lists.Sizes,
) -> tuple[Received, lists.Sizes]:
    """What some agents receive of those whom they asked, if these answer."""
    setting, owner = world.setting, lists.owners(sizes)
    rows = setting.rows(agents[owner], torch.from_numpy(asked), n).numpy()
    there = online[asked] & good[rows]
    if not there.all():
        asked, rows, sizes = asked[there], rows[there], np.bincount(owner[there], minlength=len(sizes))
    ids = torch.from_numpy(asked)
    return Received(ids, torch.from_numpy(rows), world.pool, setting.num_samples[ids]), sizes


def _themselves(world: World, agents: Int[np.ndarray, " a"]) -> Received:
    """The own models of some agents as if each was received [a, 1]."""
    ids = torch.from_numpy(agents).unsqueeze(1)
    return Received(ids, ids, world.pool, world.setting.num_samples[ids])


def _colluding(world: World, n: int, agents: Int[np.ndarray, " a"], answers: Callable[..., Any]) -> Colluding:
    setting, cluster = world.setting, world.setting.population.cluster.numpy()[agents]
    clusters, which = np.unique(cluster, return_inverse=True)
    fellows, benign = ([setting.sides[k, bad] for k in clusters.tolist()] for bad in (True, False))
    if setting.neighbours is not None:
        near = [setting.neighbours[j].numpy() for j in agents.tolist()]
        fellows, benign = (
            [ids[np.isin(ids, mine)] for ids, mine in zip((each[k] for k in which), near, strict=True)]
            for each in (fellows, benign)
        )
        which = np.arange(len(agents))
    draws, exchange = streams(setting.seed, "select", n, agents=agents.tolist()), functools.partial(answers, agents)
    peers = Peers.of(fellows, which, but=agents), Peers.of(benign, which)
    return Colluding(_themselves(world, agents), *peers, draws, exchange)


def _asking(world: World, n: int, agents: Int[np.ndarray, " a"], met: Met, answers: Callable[..., Any]) -> Asking:
    setting, ids = world.setting, agents.tolist()
    draws = streams(setting.seed, "select", n, agents=ids)

    def local(k: int) -> Local:
        return Local(
            losses_of=losses_seen_by(setting, ids[k]),
            share=setting.share,
            progress=n / setting.rounds,
            before=setting.before(ids[k]),
            head=setting.head,
            draw=draws[k],
        )

    if setting.attack.hides(n):
        met = forget(met, np.flatnonzero(setting.population.malicious))
    if setting.neighbours is None:
        peers = Peers.of([setting.agents.numpy()], np.zeros_like(agents), but=agents)
    else:
        peers = Peers.of([setting.neighbours[j].sort().values.numpy() for j in ids], but=agents)
    return Asking(_themselves(world, agents), met, peers, draws, functools.partial(answers, agents), local)


def _judge(world: World, received: Received, me: Received) -> Losses:
    """The losses of what some agents received and, last, of their own models, each on its own validation data."""
    setting, agents = world.setting, me.ids.flatten().tolist()
    return losses_of_each(
        setting.module,
        world.pool,
        torch.cat([received.rows, me.rows], 1),
        *views_of(setting, agents, setting.validation),
        setting.dataset.num_classes,
        average=setting.average,
        batch_size=setting.training.batch_size,
        together=setting.together,
    )


def mix_(
    world: World,
    matrix: tuple[Tensor, Tensor, Tensor],
    start: int,
    stop: int,
    reductions: Mapping[int, tuple[Reduction, float]] = MappingProxyType({}),
    *,
    copied: bool = False,
) -> None:
    """theta <- W theta in place for the columns from `start` to `stop`, a tile at a time (eq:local_agg_update); for the
    agents whose rules work on columns, theta <- (1 - f) theta + f times the `reductions`.

    With `copied` it works on a copy in memory, so that of models on a disk each page is read and written once.
    """
    device, columns = world.pool.device, world.pool[:, start:stop]
    w, tile = times(sparse(*matrix, len(world.pool)), device), WIDE if reductions else TILE
    tile = tile if device.type == "cpu" else BROAD
    if copied:
        columns = columns.new_empty(len(columns), row_stride(stop - start))[:, : stop - start].copy_(columns)
    kept = columns[: len(world.kept)]
    for a in range(0, stop - start, tile):
        block = columns[:, a : a + tile]
        mixed = w(block)
        for j, (reduction, factor) in reductions.items():
            mixed[j].lerp_(reduce_block(reduction, block), factor)
        kept[:, a : a + tile].copy_(mixed)
    if copied:
        world.kept[:, start:stop].copy_(kept)


def adopt(world: World, agents: Sequence[int]) -> list[int]:
    """Which of the coordinator's models fits each of some agents best, by its true training data; it takes a copy."""
    setting, chosen = world.setting, []
    held = torch.arange(setting.num_agents, setting.num_kept)
    for j in agents:
        shard = view_of(setting, j, setting.population.train[j])
        with plugins.blamed("model", setting.model):
            classes = setting.dataset.num_classes
            losses = losses_of(setting.module, world.pool, held, shard, classes, together=setting.together)
        chosen.append(ifca.best_fit(losses))
        world.models[j] = world.pool[held[chosen[-1]]]
    return chosen


def coordinate(
    setting: Setting, chosen: Mapping[int, int], n: int, online: Bool[np.ndarray, " N"], good: Bool[np.ndarray, " rows"]
) -> Choices:
    """What the coordinator's models become, each for those that have `chosen` it; of malicious agents it receives what
    they publish for the first benign one."""
    everybody = torch.arange(setting.num_agents)
    rows = setting.rows(int((~setting.population.malicious).nonzero()[0]), everybody, n)
    counts = setting.num_samples if setting.algorithm.by_samples else torch.ones_like(setting.num_samples)
    places, arrived = [chosen[j] for j in everybody.tolist()], torch.from_numpy(online & good[rows])
    made = Choices.of(ifca.averages(places, arrived, rows, counts, setting.algorithm.models))
    return dataclasses.replace(made, agents=made.agents + setting.num_agents)


def evaluate(world: World, agents: Sequence[int], triggered: bool = False) -> list[Int[Tensor, "C C"]]:
    """The confusion matrices of some agents' models on the test set as their cluster sees it, or with the trigger."""
    setting, population = world.setting, world.setting.population
    found: dict[int, Tensor] = {}
    for cluster in sorted({int(population.cluster[j]) for j in agents}):
        members = [j for j in agents if population.cluster[j] == cluster]
        x = rotate(setting.test.x, cluster, population.num_clusters)
        marked = setting.trigger(x.cpu()).to(x.device) if triggered and setting.trigger is not None else x
        rows, test, classes = torch.tensor(members), Shard(marked, setting.test.y), setting.dataset.num_classes
        counts = confusion(setting.module, world.models, rows, test, classes, setting.together)
        found.update(zip(members, counts, strict=True))
    return [found[j] for j in agents]
