"""Line 3 of Algorithm 2, what agents think of models on their own validation data; and how theirs do in the test."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data._dataset import Shard, features
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.inference import (
    Reference,
    Towards,
    confusion,
    gradients,
    logits,
    logits_of_own,
    losses_of,
    losses_of_each,
    mean_losses,
)
from fedcb2o.federated.metrics import Confusion, Score, Tested
from fedcb2o.federated.plugin_outputs import changed_by
from fedcb2o.federated.ragged import Places
from fedcb2o.federated.run_spec import Terms
from fedcb2o.federated.types import Change, Judged, Losses, Outputs, Received, Slope
from fedcb2o.nn.batch_norm import estimate_
from fedcb2o.nn.parameters import bind_


@dataclass(frozen=True)
class Alike:
    """Agents in places `those` of a part, who are judged at once since they received and hold equally many: what they
    look at, and `where` what they received lies in the inbox of the part."""

    those: Places
    where: Int[np.ndarray, " k"]
    judged: Judged


def judged_alike(
    block: Block, some: Places, those: Places, inbox: Inbox, n: int
) -> tuple[list[Alike], Float[np.ndarray, " m"] | None]:
    """Line 3 for `those` of a part of agents: what each looks at, and in the order of the inbox the losses of all that
    they received, where the algorithm judges; NaN of what others did."""
    found, losses = [], np.full(len(inbox.rows), np.nan)
    for alike, where, received in inbox.alike(those, block.holdings.validation.sizes[some]):
        me, both = themselves(block, some[alike], n), None
        if block.terms.algorithm.judges:
            both = judge(block, some[alike], received.with_own(me))
            losses[where] = both.mean[:, :-1].flatten().numpy()
        theirs, own = (None, None) if both is None else (both.part(slice(None, -1)), both.part(slice(-1, None)))
        losses_of = functools.partial(judge, block, some[alike])
        began = None if block.layout.before is None else torch.from_numpy(block.layout.before[some[alike]])
        judged = Judged(n, block.pool, theirs, own, received, me, losses_of, None, before=began)
        found.append(Alike(alike, where, judged))
    return found, losses if block.terms.algorithm.judges else None


def themselves(block: Block, some: Places, n: int) -> Received:
    """The own models of agents in some places as if each was received [a, 1]."""
    columns = block.agents[some], block.layout.own[some], block.holdings.train.sizes[some].astype(float)
    return Received(*(torch.from_numpy(each).unsqueeze(1) for each in (*columns, np.full(len(some), n))))


def judge(block: Block, some: Places, models: Received, change: Change | None = None) -> Losses:
    """The losses of models [a, m] on the validation data of agents in some places, which hold equally many
    (alg:localAggregation, line 3), or on these as a criterion changes them: of the models themselves or, where the
    algorithm has `judged_at` below 1, of what lies so far on the way to them from the own one."""
    terms, (x, y) = block.terms, block.holdings.judged_on(some)
    own, share = torch.from_numpy(block.layout.own[some]), terms.algorithm.judged_at
    if change is not None:
        seen = [changed_by("criterion", change, Shard(*one)) for one in zip(x, y, strict=True)]
        x = torch.stack([each.x for each in seen])
    with plugins.blamed("model", terms.model):
        return losses_of_each(
            terms.module,
            block.pool,
            models.rows,
            x,
            y,
            terms.num_classes,
            average=terms.average,
            batch_size=terms.training.batch_size,
            together=terms.primitives.together,
            references=block.references(some),
            loss=terms.training.loss,
            towards=None if share == 1 else Towards(own, share),
        )


def losses_by(
    terms: Terms, pool: Float[Tensor, "p d"], rows: Int[Tensor, " m"], data: Shard, reference: Reference | None
) -> Losses:
    """The losses of models on what an agent trains on, whole; `reference` is its own."""
    with plugins.blamed("model", terms.model):
        return losses_of(
            terms.module,
            pool,
            rows,
            data,
            terms.num_classes,
            together=terms.primitives.together,
            reference=reference,
            loss=terms.training.loss,
        )


def losses_seen_by(block: Block, k: int) -> Callable[[Received, Change | None], Losses]:
    """The losses of models [m] on the validation data of the agent in place k, or on those changed."""

    def losses(models: Received, change: Change | None) -> Losses:
        one = Received(*(each.unsqueeze(0) for each in (models.ids, models.rows, models.num_samples, models.round)))
        return judge(block, np.array([k]), one, change)[0]

    return losses


def outputs_seen_by(block: Block, k: int) -> Callable[..., Outputs]:
    """What models [m] make of the validation data of the agent in place k, or of so many of them, or of those changed,
    and their labels."""

    def outputs(models: Received, change: Change | None = None, count: int | None = None) -> Outputs:
        terms, seen, reference = block.terms, _validation(block, k, count), block.reference(k)
        if change is not None:
            seen = changed_by("criterion", change, seen)
        with plugins.blamed("model", terms.model):
            found = logits(terms.module, block.pool, models.rows, seen.x, terms.primitives.together, reference)
        return found.cpu(), seen.y.cpu()

    return outputs


def some_samples_of(block: Block, k: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """So many of the validation samples of the agent in place k, spread over all, or all; and their labels."""

    def some(count: int) -> tuple[Tensor, Tensor]:
        few = _validation(block, k, count)
        return features(few.x).cpu(), few.y.cpu()

    return some


def outputs_seen_at(block: Block, k: int) -> Callable[[Received, Tensor], Tensor]:
    """What models [m] of the agent in place k make of samples of their own."""

    def outputs(models: Received, x: Tensor) -> Tensor:
        terms, pool, reference = block.terms, block.pool, block.reference(k)
        with plugins.blamed("model", terms.model):
            together = terms.primitives.together
            return logits_of_own(terms.module, pool, models.rows, x.to(pool.device), together, reference).cpu()

    return outputs


def gradients_seen_by(block: Block, k: int) -> Callable[[Received, Tensor, Slope], Tensor]:
    """The `gradients` of models [m] of the agent in place k at samples of their own."""

    def found(models: Received, x: Tensor, of: Slope) -> Tensor:
        terms, pool, reference = block.terms, block.pool, block.reference(k)
        with plugins.blamed("model", terms.model):
            together = terms.primitives.together
            return gradients(terms.module, pool, models.rows, x.to(pool.device), of, together, reference).cpu()

    return found


def _validation(block: Block, k: int, count: int | None = None) -> Shard:
    """The validation data of the agent in place k, or so many of them, spread over all, if there are more."""
    x, y = block.holdings.judged_on(np.array([k]))
    data = Shard(x[0], y[0])
    if count is None or count >= len(data):
        return data
    return data.part(np.arange(count) * len(data) // max(1, count))


def network_of(block: Block, k: int) -> nn.Module:
    """The block's network with a copy of the model of the agent in place k, as that reads it, in evaluation mode."""
    module, reference = block.terms.module.eval(), block.reference(k)
    bind_(module, block.pool[int(block.layout.own[k])].clone())
    if reference is not None:
        estimate_(module, features(reference))
    return module


def tested(block: Block, some: Places) -> list[Tested]:
    """How the models of agents in some places do on their test samples; on these with the trigger of a backdoor; and on
    those that test everybody, where agents have their own."""
    holdings, trigger = block.holdings, block.attackers.trigger
    own, common = dict[int, Score](), dict[int, Score]()
    triggered = dict[int, Confusion | None]()
    for members, test in holdings.tested_on(some):
        own |= _scored(block, members, test)
        if trigger is not None:
            marked = changed_by(plugins.called("trigger", trigger), trigger, test)
            triggered |= _confusions(block, members, marked)
    if (everybodys := holdings.common_test()) is not None:
        common = _scored(block, some, everybodys)
    return [Tested(own[k], triggered.get(k), common.get(k)) for k in some.tolist()]


def _scored(block: Block, some: Places, test: Shard) -> dict[int, Score]:
    """How the models of agents in some places do on the same test samples, by these places."""
    terms, rows, losses = block.terms, torch.from_numpy(block.layout.own[some]), [None] * len(some)
    if (loss := terms.training.loss) is not None:
        with plugins.blamed("model", terms.model):
            losses = mean_losses(
                terms.module, block.pool, rows, test, loss, terms.primitives.together, block.references(some)
            ).tolist()
    counts = _confusions(block, some, test)
    return {k: Score(counts[k], each) for k, each in zip(some.tolist(), losses, strict=True)}


def _confusions(block: Block, some: Places, test: Shard) -> dict[int, Confusion | None]:
    """For what classes these models take the samples; None where there are no classes."""
    terms, rows = block.terms, torch.from_numpy(block.layout.own[some])
    if terms.num_classes == 1:
        return dict.fromkeys(some.tolist())
    with plugins.blamed("model", terms.model):
        counts = confusion(
            terms.module, block.pool, rows, test, terms.num_classes, terms.primitives.together, block.references(some)
        )
    return dict(zip(some.tolist(), counts, strict=True))
