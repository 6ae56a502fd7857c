"""The phases of a round, each for some agents, in place: train, craft, aggregate, mix, evaluate (alg:FedCB2O).

Each is a function of the world and of agents: workers share these out, and what it finds for one depends on no other of
the same phase.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data.partition import rotate
from fedcb2o.data.shard import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated import ifca
from fedcb2o.federated.aggregate import reduce_block
from fedcb2o.federated.evaluate import confusion, losses_of, losses_of_each
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.round import Asking, Colluder, Mixed, colluders_aggregation, local_aggregation, stay
from fedcb2o.federated.rules import tensor_of
from fedcb2o.federated.selection import forget
from fedcb2o.federated.together import local_updates_
from fedcb2o.federated.types import (
    Contacts,
    Knowledge,
    Local,
    Losses,
    Peers,
    Received,
    Reduction,
    View,
)
from fedcb2o.models import row_stride
from fedcb2o.runtime.mixing import sparse, times
from fedcb2o.runtime.world import Setting, World, losses_seen_by, shards_of, view_of, views_of
from fedcb2o.streams import stream

TILE = 2048  # columns of the models that are mixed at once: N of them stay in a core's cache
WIDE = 8192  # the same where rules work on columns, which costs some calls for each block
BROAD = 2**16  # the same on another device than the CPU, where calls cost more and caches less
COPIED = 2**19  # numbers of small models that are looked at in one call
HUGE = 1e6  # crafted models with larger numbers are not received, like those that are not finite


def train(world: World, some: Sequence[Sequence[int]], n: int) -> dict[int, tuple[float, bool]]:
    """LocalUpdate of some teams of agents, in place; the mean training loss of each, and if its model is finite."""
    setting, models = world.setting, world.models
    done: dict[int, tuple[float, bool]] = {}
    for team in some:
        for j in team:
            if setting.malicious[j] and setting.attack.crafts(n):
                world.pool[setting.published(j)[0]] = models[j]  # what it began with, until it crafts
            if (row := setting.before(j)) is not None:
                world.pool[row] = models[j]
        shards = shards_of(setting, team, n)
        draws = [stream(setting.seed, "batches", n, j) for j in team]
        with plugins.blamed("model", setting.model):
            if len(team) > 1:
                found = local_updates_([models[j] for j in team], setting.module, shards, setting.training, draws)
            else:
                found = [local_update_(models[team[0]], setting.module, shards[0], setting.training, draws[0])]
        done |= zip(team, zip(found, are_finite(world, team), strict=True), strict=True)
    return done


def are_finite(world: World, agents: Sequence[int]) -> list[bool]:
    """Whether the models of some agents are finite."""
    return _finite(world.models, agents)


def _finite(models: Float[Tensor, "k d"], rows: Sequence[int], bound: float = math.inf) -> list[bool]:
    """Which of some models have finite numbers alone, and none beyond the `bound`: both ends are then, and no NaN is
    among them. One pass over large models, and from another device one transfer."""
    if not rows:
        return []
    size = max(1, COPIED // models.shape[1])
    parts = [rows[k : k + size] for k in range(0, len(rows), size)]
    found = [
        (models[part[0]].unsqueeze(0) if len(part) == 1 else models[torch.tensor(part)]).aminmax(dim=1)
        for part in parts
    ]
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
    contacts: Mapping[int, Contacts],
    n: int,
    mixing: Bool[Tensor, " N"],
    online: Bool[Tensor, " N"],
    good: Bool[Tensor, " rows"],
) -> dict[int, Mixed]:
    """LocalAggregation of some teams of agents up to their weights.

    Agents that are not `mixing` keep their models; peers that are not `online`, or whose model is not among the `good`
    rows of the pool, are asked in vain.
    """
    setting, done = world.setting, dict[int, Mixed]()
    mixes, answers = mixing.tolist(), (online.numpy(), good.numpy())
    for team in some:
        colluders = [j for j in team if mixes[j] and setting.colluding and setting.malicious[j]]
        alike: dict[int, list[int]] = {}
        for j in set(team).difference(colluders):
            if mixes[j]:
                alike.setdefault(len(setting.population.validation[j]), []).append(j)
            else:
                done[j] = stay(contacts[j])
        for agents in map(sorted, alike.values()):
            asking = [_asking(world, n, j, contacts[j], answers) for j in agents]
            judge, gamma = functools.partial(_judge, world), setting.training.gamma
            found = local_aggregation(setting.algorithm, n, asking, setting.budget, gamma, judge)
            done |= zip(agents, found, strict=True)
        band = [_colluder(world, n, j, contacts[j], answers) for j in colluders]
        found = colluders_aggregation(band, setting.budget, own_model=setting.colluders_own_model)
        done |= zip(colluders, found, strict=True)
    return done


Answers = tuple[Bool[np.ndarray, " N"], Bool[np.ndarray, " rows"]]
"""Which agents are online, and which rows of the pool may be received."""


def _received(world: World, n: int, j: int, ids: Int[Tensor, " s"], answers: Answers | None = None) -> Received:
    """What agent j receives of some agents: of those that answer."""
    setting = world.setting
    rows = setting.rows(j, ids, n)
    if answers is not None:
        online, good = answers
        there = online[ids.numpy()] & good[rows.numpy()]
        if not there.all():
            ids, rows = ids[torch.from_numpy(there)], rows[torch.from_numpy(there)]
    return Received(ids, rows, world.pool, setting.num_samples[ids])


def _itself(world: World, j: int) -> Received:
    """Agent j's own model as if it was received."""
    own, setting = slice(j, j + 1), world.setting
    return Received(setting.agents[own], setting.agents[own], world.pool, setting.num_samples[own])


def _colluder(world: World, n: int, j: int, contacts: Contacts, answers: Answers) -> Colluder:
    setting = world.setting
    cluster = int(setting.population.cluster[j])
    near = {bad: setting.sides[cluster, bad] for bad in (True, False)}
    if setting.neighbours is not None:
        near = {bad: ids[np.isin(ids, setting.neighbours[j].numpy())] for bad, ids in near.items()}
    draw, exchange = stream(setting.seed, "select", n, j), functools.partial(_received, world, n, j, answers=answers)
    return Colluder(_itself(world, j), contacts, Peers.but(near[True], j), Peers(near[False]), exchange, draw)


def _asking(world: World, n: int, j: int, contacts: Contacts, answers: Answers) -> Asking:
    setting = world.setting
    if setting.attack.hides(n):
        contacts = forget(contacts, setting.population.malicious.nonzero().flatten())
    if setting.neighbours is None:
        candidates = Peers(setting.agents.numpy(), without=j)
    else:
        candidates = Peers.but(setting.neighbours[j].sort().values.numpy(), j)
    local = Local(
        losses_of=losses_seen_by(setting, j),
        share=setting.share,
        progress=n / setting.rounds,
        before=setting.before(j),
        head=setting.head,
        draw=stream(setting.seed, "select", n, j),
    )
    exchange = functools.partial(_received, world, n, j, answers=answers)
    return Asking(_itself(world, j), contacts, candidates, exchange, local)


def _judge(world: World, received: Received, me: Received) -> Losses:
    """The losses of what some agents received and, last, of their own models, each on its own validation data."""
    setting, agents = world.setting, me.ids.flatten().tolist()
    return losses_of_each(
        setting.module,
        world.pool,
        torch.cat([received.rows, me.rows], 1),
        *views_of(setting, agents, [setting.population.validation[j] for j in agents]),
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
    setting: Setting, chosen: Mapping[int, int], n: int, online: Bool[Tensor, " N"], good: Bool[Tensor, " rows"]
) -> list[Mixed]:
    """What the coordinator's models become, each for those that have `chosen` it; of malicious agents it receives what
    they publish for the first benign one."""
    everybody = torch.arange(setting.num_agents)
    rows = setting.rows(int((~setting.population.malicious).nonzero()[0]), everybody, n)
    samples = torch.tensor([len(train) for train in setting.population.train], dtype=torch.float64)
    counts = samples if setting.algorithm.by_samples else torch.ones_like(samples)
    places = [chosen[j] for j in everybody.tolist()]
    return ifca.averages(places, online & good[rows], rows, counts, setting.algorithm.models)


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
