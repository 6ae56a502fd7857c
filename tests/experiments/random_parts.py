"""Random inputs of aggregators, agents, sources, images and `minimize` against plain references.

`python -m tests.experiments.random_parts 1000` tries as many cases of each kind in turn. A case
follows from its number. A case that is invalid on purpose must be refused or warned of by name.
"""

import collections
import contextlib
import copy
import itertools
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from scipy.optimize import NonlinearConstraint
from tests.experiments.plain_loop import estimate
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Subset, TensorDataset

import fedcb2o
from fedcb2o import aggregators
from fedcb2o.errors import FedCB2OError

Array = np.ndarray[Any, Any]
Draw = np.random.Generator


class FaultError(Exception):
    """A result that differs from that of the reference."""


def pick(draw: Draw, values: Any) -> Any:
    values = list(values)
    return values[int(draw.integers(len(values)))]


def shuffled(draw: Draw, state: dict[str, Any]) -> dict[str, Any]:
    names = list(state)
    return {names[k]: state[names[k]] for k in draw.permutation(len(names))}


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """Collect the warnings of a block, and what the library logs."""
    texts = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedcb2o")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with mock.patch("warnings.showwarning", lambda text, *_: texts.append(str(text))):
                yield texts
    finally:
        logger.removeHandler(handler)


def require_message(what: str, call: Callable[[], Any]) -> str:
    """Return "refused" or "warned" for inputs that are invalid on purpose."""
    with messages() as texts:
        try:
            call()
        except FedCB2OError as error:
            if "\n" in str(error).strip():
                raise FaultError(f"{what}: a message of several lines: {error}") from error
            return "refused"
    if not texts:
        raise FaultError(f"{what}: taken without a word")
    return "warned"


def require_close(what: str, actual: Any, expected: Any, tol: float = 1e-5) -> None:
    a = torch.as_tensor(np.asarray(actual, dtype="f8"))
    b = torch.as_tensor(np.asarray(expected, dtype="f8"))
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    if a.shape != b.shape or not torch.allclose(a / scale, b / scale, rtol=tol, atol=tol):
        raise FaultError(f"{what}: {a.flatten()[:4].tolist()}, right {b.flatten()[:4].tolist()}")


# ---- Aggregators: ten-line references by name ----


def clip(x: Array, centre: Array, radius: float) -> Array:
    distance = np.linalg.norm(x - centre, axis=1, keepdims=True)
    return np.minimum(1, radius / np.maximum(distance, 1e-300)) * (x - centre)


def centred(x: Array, start: Array, radius: float, steps: int) -> Array:
    for _ in range(steps):
        start = start + clip(x, start, radius).mean(0)
    return start


def krum_scores(x: Array, f: int) -> Array:
    squares = ((x[:, None] - x) ** 2).sum(-1)
    return np.sort(squares, 1)[:, 1 : max(1, len(x) - f - 2) + 1].sum(1)


def weiszfeld(x: Array, nu: float, steps: int) -> Array:
    z = np.zeros(x.shape[1])
    for _ in range(steps):
        b = 1 / np.maximum(nu, np.linalg.norm(x - z, axis=1))
        z = b @ x / b.sum()
    return z


def trusted(x: Array, own: Array, before: Array) -> Array:
    g, g0 = x - before, own - before
    norms = np.linalg.norm(g, axis=1)
    trust = np.maximum(0, g @ g0 / (norms * np.linalg.norm(g0)))
    scaled = (np.linalg.norm(g0) / norms)[:, None] * g
    return before + trust @ scaled / trust.sum() if trust.sum() > 0 else own


def near_mean(x: Array, own: Array, near: Array, alpha: float) -> Array:
    return alpha * own + (1 - alpha) * x[near].mean(0) if near.any() else own


def ubar(x: Array, own: Array, losses: Array, f: int) -> Array:
    near = np.argsort(np.linalg.norm(x - own, axis=1))[: len(x) - f]
    low = near[losses[near] <= losses[-1]]
    chosen = low if len(low) else near[[losses[near].argmin()]]
    return near_mean(x, own, np.isin(np.arange(len(x)), chosen), 0.5)


def nearest_mixed(x: Array, f: int) -> Array:
    order = np.argsort(((x[:, None] - x) ** 2).sum(-1), axis=1)[:, : len(x) - f]
    return x[order].mean(1)


def meamed(x: Array, f: int) -> Array:
    order = np.argsort(abs(x - np.median(x, 0)), axis=0)[: len(x) - f]
    return np.take_along_axis(x, order, 0).mean(0)


# name -> (call of models, own, before, losses, f; the same of rows in float64)
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Array]]] = {
    "mean": (lambda m, o, b, w, f: aggregators.mean(m), lambda x, o, b, w, f: x.mean(0)),
    "median": (lambda m, o, b, w, f: aggregators.coordinate_median(m), lambda x, o, b, w, f: np.median(x, 0)),
    "trimmed_mean": (lambda m, o, b, w, f: aggregators.trimmed_mean(m, f=f), lambda x, o, b, w, f: np.sort(x, 0)[f : len(x) - f].mean(0)),
    "meamed": (lambda m, o, b, w, f: aggregators.meamed(m, f=f), lambda x, o, b, w, f: meamed(x, f)),
    "krum": (lambda m, o, b, w, f: aggregators.krum(m, f=f), lambda x, o, b, w, f: x[krum_scores(x, f).argmin()]),
    "multi_krum": (lambda m, o, b, w, f: aggregators.multi_krum(m, f=f), lambda x, o, b, w, f: x[np.argsort(krum_scores(x, f))[: len(x) - f]].mean(0)),
    "geometric_median": (lambda m, o, b, w, f: aggregators.geometric_median(m, nu=1e-3, T=5), lambda x, o, b, w, f: weiszfeld(x, 1e-3, 5)),
    "centred_clipping": (lambda m, o, b, w, f: aggregators.centred_clipping(m, m=o, L=2, tau=1.5), lambda x, o, b, w, f: centred(x, o, 1.5, 2)),
    "centred_clipping about 0": (lambda m, o, b, w, f: aggregators.centred_clipping(m, tau=1.5), lambda x, o, b, w, f: centred(x, 0 * o, 1.5, 1)),
    "clipped_gossip": (lambda m, o, b, w, f: aggregators.clipped_gossip(m, o, f=f, radius=1.5), lambda x, o, b, w, f: o + clip(x, o, 1.5).sum(0) / (len(x) + 1)),
    "norm_clipping": (lambda m, o, b, w, f: aggregators.norm_clipping(m, b, radius=1.5), lambda x, o, b, w, f: centred(x, b, 1.5, 1)),
    "fltrust": (lambda m, o, b, w, f: aggregators.fltrust(m, o, b), lambda x, o, b, w, f: trusted(x, o, b)),
    "balance": (lambda m, o, b, w, f: aggregators.balance(m, o, 0.5, gamma=2.0), lambda x, o, b, w, f: near_mean(x, o, np.linalg.norm(x - o, axis=1) <= 2 * np.exp(-0.5) * np.linalg.norm(o), 0.5)),
    "ubar": (lambda m, o, b, w, f: aggregators.ubar(m, o, w, f=f), lambda x, o, b, w, f: ubar(x, o, w, f)),
    "by_num_samples": (lambda m, o, b, w, f: aggregators.by_num_samples(m, w[:-1]), lambda x, o, b, w, f: w[:-1] @ x / w[:-1].sum()),
    "lpe_tsr": (lambda m, o, b, w, f: aggregators.lpe_tsr(m, w[:-1]), lambda x, o, b, w, f: np.exp(-w[:-1]) @ x / np.exp(-w[:-1]).sum()),
    "nnm": (lambda m, o, b, w, f: aggregators.mean(aggregators.nnm(m, f=f)), lambda x, o, b, w, f: nearest_mixed(x, f).mean(0)),
    "clipping": (lambda m, o, b, w, f: aggregators.mean(aggregators.clipping(m, c=1.5)), lambda x, o, b, w, f: clip(x, 0 * o, 1.5).mean(0)),
}  # fmt: skip
FAULTS = ["a name", "a name too many", "a shape", "NaN", "masked", "a type"]


def try_aggregator(draw: Draw) -> str:
    # 1. State dicts of one network with tensors of random names, shapes and types.
    m = int(draw.integers(5, 9))
    f = int(draw.integers(0, (m - 3) // 2 + 1))
    shapes = {f"{name}.weight": tuple(draw.integers(1, 4, draw.integers(0, 4))) for name in "cab"}
    kinds = {name: pick(draw, [torch.float32, torch.float64]) for name in shapes}
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    x = draw.normal(size=(m + 2, sum(sizes))) + draw.normal()
    x[:f] *= pick(draw, [1, 10, 100])
    is_numpy = draw.random() < 0.3

    def state(row: Array) -> dict[str, Any]:
        parts = np.split(row, np.cumsum(sizes)[:-1])
        tensors = {
            name: torch.tensor(part.reshape(shape), dtype=kinds[name])
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        tensors["count"] = torch.tensor(int(draw.integers(9)))
        return {name: t.numpy() if is_numpy else t for name, t in shuffled(draw, tensors).items()}

    states = [state(row) for row in x]
    # What the models hold, in float64.
    rows = np.stack(
        [np.concatenate([np.asarray(s[k], "f8").ravel() for k in shapes]) for s in states]
    )
    losses = draw.uniform(0.1, 2, m + 1)
    name = pick(draw, RULES)
    call, reference = RULES[name]

    # 2. An invalid model among them, or the result.
    if draw.random() < 0.25:
        places = [int(draw.integers(m))]
        if name in ("clipped_gossip", "centred_clipping", "fltrust", "balance", "ubar"):
            places.append(m)
        place, kind = pick(draw, places), pick(draw, FAULTS)
        bad = dict(states[place])
        key = pick(draw, shapes)
        values = np.asarray(bad[key], "f8")
        if kind == "a name":
            bad[f"module.{key}"] = bad.pop(key)
        elif kind == "a name too many":
            bad["head.weight"] = bad[key]
        elif kind == "a shape":
            bad[key] = bad[key].reshape((*values.shape, 1))
        elif kind == "a type":
            bad[key] = str(bad[key])
        else:
            values = (
                np.full(values.shape, np.nan) if kind == "NaN" else np.ma.masked_all(values.shape)
            )
            like = kinds[key]
            bad[key] = values.astype(str(like).removeprefix("torch."))
            bad[key] = bad[key] if is_numpy or kind == "masked" else torch.from_numpy(bad[key])
        changed = [bad if k == place else s for k, s in enumerate(states)]
        what = f"{name}: {kind} of model {place} of {m}"
        return require_message(
            what, lambda: call(changed[:m], changed[m], changed[m + 1], losses, f)
        )
    result = call(states[:m], states[m], states[m + 1], losses, f)
    expected = reference(rows[:m], rows[m], rows[m + 1], losses, f)
    parts = dict(zip(shapes, np.split(expected, np.cumsum(sizes)[:-1]), strict=True))
    for key, part in parts.items():
        require_close(
            f"{name} (m = {m}, f = {f}): `{key}`", np.asarray(result[key]).ravel(), part, 1e-4
        )
    counts = sorted(int(s["count"]) for s in states[:m])
    if int(result["count"]) != counts[(m - 1) // 2] and "nn" not in name and name != "clipping":
        raise FaultError(f"{name}: the count is {result['count']} of {counts}")
    return "equal"


# ---- Agents ----


class Tied(nn.Module):
    """A network with a frozen layer, a constant buffer, a batch norm and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.z = nn.Linear(4, 3)
        self.a = nn.Linear(4, 3, bias=False)
        self.a.weight = self.z.weight
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.base(x - self.mean))
        return self.z(h) + self.a(h)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "layers": lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    "tied": Tied,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
}
AGENT_RULES = {
    "coordinate_median": lambda x, own, n: np.median(np.vstack([x, own]), 0),
    "by_num_samples": lambda x, own, n: n @ np.vstack([x, own]) / n.sum(),
}
AGENT_FAULTS = ["a name", "a name too many", "a shape", "NaN", "huge", "frozen", "whole numbers"]


def named(network: nn.Module, buffers: str) -> dict[str, torch.Tensor]:
    """Return the tensors that agents exchange by name; a tied tensor once."""
    tensors = dict(network.named_parameters())
    exchanged = {name: p.detach() for name, p in tensors.items() if p.requires_grad}
    for name, tensor in network.named_buffers():
        if name.endswith(("running_mean", "running_var")) and buffers == "shared":
            exchanged[name] = tensor
    return exchanged


def try_agent(draw: Draw) -> str:
    torch.manual_seed(int(draw.integers(2**31)))
    kind = pick(draw, NETWORKS)
    network = NETWORKS[kind]()
    x = torch.tensor(draw.normal(size=(24, 4)), dtype=torch.float32)
    y = torch.tensor(draw.integers(0, 3, 24))
    rule = pick(draw, [*AGENT_RULES, "fedcbo"])
    method: Any = rule if rule == "fedcbo" else {"name": "by_rule", "rule": rule}
    own_count = int(draw.integers(1, 50))
    buffers = pick(draw, ["shared", "local", "dropped"])
    options: dict[str, Any] = {"num_samples": own_count, "buffers": buffers}
    alpha = 10.0  # of FedCBO
    if rule == "fedcbo":
        method = {"name": "fedcbo", "alpha": alpha}
    agent = fedcb2o.Agent(network, validation=(x, y), method=method, **options)
    what = f"{kind}, {rule}, {buffers}"
    for _ in range(2):
        # The user trains: all that is exchanged changes, in place or by assignment.
        with torch.no_grad():
            for tensor in named(network, buffers).values():
                tensor += 0.1 * torch.randn(tensor.shape).abs()
        network.train(bool(draw.integers(2)))
        was_training = network.training
        models, good, refused = {}, {}, set()
        frozen = {name: p.clone() for name, p in network.named_parameters() if not p.requires_grad}
        for k in draw.permutation(5)[: int(draw.integers(1, 6))]:
            name = pick(draw, ["lab", "ward", "Ward"]) + str(k)
            peer = NETWORKS[kind]()
            peer.load_state_dict(network.state_dict())
            with torch.no_grad():
                for tensor in named(peer, buffers).values():
                    tensor += 0.3 * torch.randn(tensor.shape).abs()
            good[name] = {key: t.clone() for key, t in named(peer, buffers).items()}
            models[name], is_bad = sent(draw, agent, peer, buffers, bool(frozen))
            if is_bad:
                refused.add(name)
                del good[name]
        counts = {name: int(draw.integers(1, 50)) for name in models}
        before = {key: t.clone() for key, t in named(network, buffers).items()}
        decision = agent.aggregate(models, samples=counts)
        if set(decision.refused) != refused:
            raise FaultError(f"{what}: refused {decision.refused}, right {refused}")
        if network.training != was_training:
            raise FaultError(f"{what}: training = {network.training}, before {was_training}")
        expected = reference_of(
            rule, network, before, good, counts, own_count, decision, x, y, alpha, buffers
        )
        for key, tensor in named(network, buffers).items():
            require_close(f"{what}: `{key}` of {len(good)} models", tensor, expected[key], 3e-5)
        for key, tensor in frozen.items():
            if not tensor.equal(network.get_parameter(key)):
                raise FaultError(f"{what}: frozen `{key}` has changed")
        # The network is ready for use, with statistics of its own samples where they are local.
        if good:
            right = loaded(network, {}, x, buffers)(x)
            require_close(
                f"{what}: outputs", copy.deepcopy(network).eval()(x).detach(), right.detach()
            )
    return "equal"


def loaded(network: nn.Module, state: Any, x: torch.Tensor, buffers: str) -> nn.Module:
    """Return a copy of a network with another model, ready for evaluation."""
    copied = copy.deepcopy(network)
    copied.load_state_dict(state, strict=False)
    estimate(copied, x, buffers)
    return copied


def sent(
    draw: Draw, agent: fedcb2o.Agent, peer: nn.Module, buffers: str, has_frozen: bool
) -> tuple[Any, bool]:
    """Return a peer's model in a random form, and whether it is invalid."""
    state: dict[str, Any] = {k: t.clone() for k, t in peer.state_dict().items()}
    exchanged = named(peer, buffers)
    if draw.random() < 0.3:
        state = {name: t.clone() for name, t in exchanged.items()}
    if draw.random() < 0.2:
        # A flat model is in the order of theta.
        theta = torch.cat([exchanged[name].flatten() for name in agent.publish()])
        return pick(draw, [theta, theta.numpy(), theta.double()]), False
    if draw.random() < 0.3:
        kind = pick(draw, AGENT_FAULTS)
        key = pick(draw, exchanged)
        if kind == "a name":
            state[f"module.{key}"] = state.pop(key)
            for alias in [k for k in state if k.endswith(("a.weight", "z.weight"))]:
                del state[alias]
        elif kind == "a name too many":
            state["head"] = state[key]
        elif kind == "a shape":
            state[key] = state[key][None]
        elif kind == "frozen" and has_frozen:
            state["base.weight"] = torch.ones(4, 4)
        elif kind == "whole numbers":
            state[key] = state[key].round().long()
        else:
            state[key] = torch.full_like(state[key], np.nan if kind == "NaN" else 1e7)
        return shuffled(draw, state), True
    state = shuffled(draw, state)
    form = pick(draw, ["tensors", "arrays", "float64", "lists", "safetensors"])
    if form == "arrays":
        state = {name: t.numpy() for name, t in state.items()}
    elif form == "float64":
        state = {name: t.double() if t.is_floating_point() else t for name, t in state.items()}
    elif form == "lists":
        state = {name: t.tolist() if name in exchanged else t for name, t in state.items()}
    elif form == "safetensors":
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.safetensors"
            save_file({name: t.clone().contiguous() for name, t in state.items()}, path)
            state = load_file(path)
    return state, False


def reference_of(
    rule: str,
    network: nn.Module,
    before: dict[str, torch.Tensor],
    good: dict[str, dict[str, torch.Tensor]],
    counts: dict[str, int],
    own_count: int,
    decision: fedcb2o.Decision,
    x: torch.Tensor,
    y: torch.Tensor,
    alpha: float,
    buffers: str,
) -> dict[str, Any]:
    """Return the agent's tensors after a round by a loop over the names of tensors."""
    if not good:
        return before
    names = sorted(good)
    share = 1.0
    weights = np.array([counts[name] for name in names] + [own_count], dtype=float)
    if rule == "fedcbo":
        losses = []
        for name in names:
            with torch.no_grad():
                outputs = loaded(network, good[name], x, buffers)(x)
            losses.append(float(F.cross_entropy(outputs, y)))
            require_close(f"the loss of {name}", decision.losses[name], losses[-1], 1e-4)
        weights = np.exp(-alpha * (np.array(losses) - min(losses)))
        weights /= weights.sum()
        share = decision.mixing_factor
        for name, weight in zip(names, weights, strict=True):
            require_close(f"the weight of {name}", decision.weights[name], weight, 1e-3)
    result = {}
    for key, own in before.items():
        rows = np.stack([good[name][key].double().numpy().ravel() for name in names])
        own_row = own.double().numpy().ravel()
        if rule == "fedcbo":
            mixed = own_row + share * (weights @ rows - own_row)
        else:
            mixed = AGENT_RULES[rule](rows, own_row[None], weights)
        result[key] = mixed.reshape(own.shape)
    return result


# ---- Sources of samples ----

WORDS = ("ant", "bee", "cat")


class Folder:
    """Data set with names of classes, as a folder of images."""

    def __init__(self, x: Array, y: Array, classes: tuple[str, ...]) -> None:
        self.x, self.y, self.classes = x, y, list(classes)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(self.x[k]), int(self.y[k])


def try_source(draw: Draw) -> str:
    """Each sample has its number as a feature, so that its label and owner can be looked up."""
    n = int(draw.integers(40, 90))
    x = draw.normal(size=(n, 3)).astype("f4")
    x[:, 1] = np.arange(n)
    y = draw.permutation(np.arange(n) % 3)
    owner = draw.permutation(np.arange(n) % 3)
    labels = [int(v) for v in y]
    classes = pick(draw, [WORDS, ("cat", "bee", "ant")])
    size = int(draw.integers(2, 9))
    words = np.array(classes)[y]
    pairs = [(torch.tensor(v), k) for v, k in zip(x, labels, strict=True)]
    rows = [
        {"x": v, "y": k, "site": int(s)}
        for v, k, s in zip(pairs_x(pairs), labels, owner, strict=True)
    ]
    table = pd.DataFrame(x, columns=["a", "b", "c"]).assign(y=y, site=owner, word=words)
    table = table.set_index(draw.permutation(n))
    generator = torch.Generator().manual_seed(int(draw.integers(2**31)))
    shuffle: dict[str, Any] = {"shuffle": True, "generator": generator}
    order = [int(k) for k in draw.permutation(n)]
    tensors = TensorDataset(torch.tensor(x), torch.tensor(y))
    by_rows: dict[str, Any] = {"columns": ("x", "y"), "owner": "site"}
    by_table: dict[str, Any] = {
        "columns": (["a", "b", "c"], pick(draw, ["y", "word"])),
        "owner": "site",
    }
    third = n // 3
    half = Folder(x[:third], y[:third], classes), Folder(x[third:], y[third:], classes)
    sources: dict[str, tuple[Any, dict[str, Any]]] = {
        "arrays": ((x, y), {"owner": owner}),
        "words": ((x, words), {"owner": owner}),
        "pairs": (pairs, {"owner": owner}),
        "tensors": (tensors, {"owner": owner}),
        "loader": (DataLoader(tensors, batch_size=size), {"owner": owner}),
        "shuffled loader": (DataLoader(tensors, batch_size=size, **shuffle), {}),
        "loader of samples": (DataLoader(pairs, batch_size=None), {"owner": owner}),
        "batch sampler": (DataLoader(tensors, batch_sampler=BatchSampler(order, size, False)), {}),
        "subset": (Subset(tensors, order), {"owner": owner[order]}),
        "rows": (rows, by_rows),
        "shuffled loader of rows": (DataLoader(rows, batch_size=size, **shuffle), by_rows),
        "table": (table, by_table),
        "mapping": ({"x": x, "y": y, "site": owner}, by_rows),
        "folder": (Folder(x, y, classes), {"owner": owner}),
        "folders": (ConcatDataset(half), {"owner": owner}),
        "loader of a folder": (DataLoader(Folder(x, y, classes), batch_size=size, **shuffle), {}),
        "subset of a folder": (Subset(Folder(x, y, classes), order), {"owner": owner[order]}),
        "!shuffled loader with owners": (DataLoader(tensors, batch_size=size, **shuffle), {"owner": owner}),
        "!drop_last": (DataLoader(tensors, batch_size=n - 1, drop_last=True), {}),
        "!batches of several shapes": (DataLoader([(v[: 1 + i // 20], k) for i, (v, k) in enumerate(pairs)], batch_size=1), {}),
        "!rows with other keys": ([*rows, {"x": x[0], "label": 0, "site": 0}], by_rows),
        "!no such column": (table, {"columns": (["a", "b"], "label")}),
        "!twice": (ConcatDataset([tensors, tensors]), {}),
        "!stream": (iter(pairs), {}),
        "!missing label": ([*pairs, (pairs[0][0], None)], {}),
        "!no label": (TensorDataset(torch.tensor(x), torch.tensor(np.where(np.arange(n) < 9, -100, y))), {}),
        "!folders of other classes": (ConcatDataset([half[0], Folder(x, y, ("ox", *classes[1:]))]), {}),
        "!labels as samples": (table, {"columns": (["a", "y"], "y")}),
    }  # fmt: skip
    name = pick(draw, sources)
    source, options = sources[name]

    def build() -> fedcb2o.Dataset:
        if isinstance(source, tuple):
            return fedcb2o.dataset(*source, **options)
        return fedcb2o.dataset(source, **options)

    if name.startswith("!"):
        return require_message(name, build)
    data = build()
    has_words = (
        "folder" in name
        or name == "words"
        or (name == "table" and by_table["columns"][1] == "word")
    )
    names = list(classes) if "folder" in name else sorted(WORDS) if has_words else ["0", "1", "2"]
    if list(data.class_names) != names:
        raise FaultError(f"{name}: classes {data.class_names}, right {names}")
    seen = []
    owner_names = data.owners.names if data.owners is not None else ()
    parts = [("pool", data.pool), ("test", data.test)]
    for part_name, part in parts:
        numbers = part.x[:, 1].long().numpy()
        seen += numbers.tolist()
        require_close(f"{name}: samples", part.x, x[numbers], 1e-6)
        expected = words[numbers] if has_words else y[numbers].astype(str)
        actual = [data.class_names[k] for k in part.y.tolist()]
        if actual != expected.tolist():
            raise FaultError(f"{name}: labels {actual[:5]}, right {expected[:5]}")
        if data.owners is not None:
            given = getattr(data.owners, part_name).tolist()
            if [owner_names[k] for k in given] != owner[numbers].astype(str).tolist():
                raise FaultError(f"{name}: owners {given[:5]}, right {owner[numbers][:5]}")
    if sorted(seen) != list(range(n)):
        raise FaultError(f"{name}: {len(seen)} samples of {n}, {len(set(seen))} different")
    return "equal"


def pairs_x(pairs: list[tuple[Any, int]]) -> list[Any]:
    return [v for v, _ in pairs]


# ---- Images ----

MODES = {
    "L": "L",
    "RGB": "RGB",
    "P": "RGB",
    "1": "L",
    "RGBA": "RGBA",
    "LA": "LA",
    "CMYK": "CMYK",
    "I;16": "I;16",
}


def try_images(draw: Draw) -> str:
    n = 12
    height, width = draw.integers(3, 7, 2)
    mode = pick(draw, MODES)
    orientation = int(pick(draw, [1, 1, 3, 6, 8]))
    pictures = []
    for _ in range(n):
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if mode == "I;16":
            picture = Image.fromarray(pixels[..., 0].astype("u2") * 257)
        else:
            picture = Image.fromarray(pixels).convert(mode)
        if orientation != 1:
            picture.getexif()[274] = orientation
        pictures.append(picture)
    expected = []
    for picture in pictures:
        array = np.asarray(ImageOps.exif_transpose(picture).convert(MODES[mode]))
        scaled = array.astype("f8") / 65535 if mode == "I;16" else array
        expected.append(scaled[None] if scaled.ndim == 2 else np.moveaxis(scaled, -1, 0))
    right = np.stack(expected)
    y = [int(k) for k in np.arange(n) % 3]
    objects = np.empty(n, object)
    objects[:] = pictures

    with tempfile.TemporaryDirectory() as folder:
        files = []
        if mode not in ("I;16", "CMYK") and orientation == 1:
            for k, picture in enumerate(pictures):
                picture.save(f"{folder}/{k}.png")
                files.append(Image.open(f"{folder}/{k}.png"))
        containers: dict[str, Callable[[], Any]] = {
            "list": lambda: fedcb2o.dataset(pictures, y),
            "objects": lambda: fedcb2o.dataset(objects, y),
            "series": lambda: fedcb2o.dataset(pd.Series(pictures, index=draw.permutation(n)), y),
            "pairs": lambda: fedcb2o.dataset(list(zip(pictures, y, strict=True))),
            "rows": lambda: fedcb2o.dataset([{"i": p, "y": k} for p, k in zip(pictures, y, strict=True)], columns=("i", "y")),
            "table": lambda: fedcb2o.dataset(pd.DataFrame({"i": objects, "y": y}), columns=("i", "y")),
            "files": lambda: fedcb2o.dataset(files or pictures, y),
            "owners": lambda: fedcb2o.datasets([(pictures[:6], y[:6]), (pictures[6:], y[6:])]),
            "array": lambda: fedcb2o.dataset(right.astype("f4") if mode == "I;16" else right, y),
            "!modes": lambda: fedcb2o.dataset([*pictures[1:], pictures[0].convert("LAB" if mode == "RGB" else "RGB").convert("YCbCr" if mode != "RGB" else "LAB")], y),
            "!sizes": lambda: fedcb2o.dataset([*pictures[1:], pictures[0].resize((9, 9))], y),
            "!other things": lambda: fedcb2o.dataset([*pictures[1:], "photo.png"], y),
            "!modes of test": lambda: fedcb2o.dataset(pictures, y, x_test=[p.convert("HSV") for p in as_rgb(pictures)], y_test=y),
        }  # fmt: skip
        name = pick(draw, containers)
        if name.startswith("!"):
            return require_message(f"{name} next to {mode}", containers[name])
        data = containers[name]()
    actual = torch.cat([data.pool.x, data.test.x]).double().numpy()
    if actual.shape != right.shape:
        raise FaultError(f"{name} of {mode}: shape {actual.shape}, right {right.shape}")
    keys = [
        sorted(np.round(rows.reshape(n, -1), 5).tolist()) for rows in (actual, right.astype("f8"))
    ]
    require_close(f"{name} of {mode}, orientation {orientation}", keys[0], keys[1], 1e-6)
    # Small images may be equal.
    known: dict[bytes, set[int]] = {}
    for v, k in zip(right.astype("f4"), y, strict=True):
        known.setdefault(np.round(v, 4).tobytes(), set()).add(k)
    labels = torch.cat([data.pool.y, data.test.y]).tolist()
    for v, label in zip(actual.astype("f4"), labels, strict=True):
        if label not in known[np.round(v, 4).tobytes()]:
            raise FaultError(f"{name} of {mode}: a label of another image")
    return "equal"


def as_rgb(pictures: list[Any]) -> list[Any]:
    return [
        Image.fromarray((np.asarray(p) // 257).astype("u1")).convert("RGB")
        if p.mode == "I;16"
        else p.convert("RGB")
        for p in pictures
    ]


# ---- Functions of `minimize` ----

Point = Any
TARGET = np.array([0.5, -0.25, 1.0, 0.75])


def sphere(point: Point) -> float:
    return float(((point - TARGET[: len(point)]) ** 2).sum())


def shares(point: Point) -> float:
    """A function that divides by the sum of a point, and accepts many points."""
    return float(abs(point / (abs(point).sum() + 0.1) - 0.2).sum())


def rosenbrock(point: Point) -> float:
    return float((100 * (point[1:] - point[:-1] ** 2) ** 2 + (1 - point[:-1]) ** 2).sum())


def branch(point: Point) -> float:
    return float(point[0]) if point[0] > 0.3 else float((point**2).sum())


# name -> (the function of a point, the forms in which users write it)
FUNCTIONS: dict[str, tuple[Callable[[Point], float], dict[str, Any]]] = {
    "sphere": (sphere, {
        "many tensors": lambda x: (x - torch.tensor(TARGET[: x.shape[-1]])).square().sum(-1),
        "many arrays": fedcb2o.from_numpy(lambda x: ((x - TARGET[: x.shape[-1]]) ** 2).sum(-1)),
        "arrays of NumPy alone": lambda x: np.square(np.asarray(x) - TARGET[: x.shape[-1]]).sum(-1),
        "[n, d]": lambda x: np.linalg.norm(np.atleast_2d(x) - TARGET[: x.shape[-1]], axis=1) ** 2,
        "[n, 1]": lambda x: ((x - torch.tensor(TARGET[: x.shape[-1]])) ** 2).sum(-1, keepdim=True),
        "one": lambda p: sum((p[k] - TARGET[k]) ** 2 for k in range(len(p))),
        "one dot": lambda p: (p - TARGET[: len(p)]) @ (p - TARGET[: len(p)]),
        "point": fedcb2o.from_point(sphere),
        "list of one": lambda p: [float(((np.asarray(p) - TARGET[: len(p)]) ** 2).sum())],
    }),
    "shares": (shares, {
        "one": lambda p: abs(p / (abs(p).sum() + 0.1) - 0.2).sum(),
        "float": shares,
        "NumPy": lambda p: np.abs(p / (np.abs(p).sum() + 0.1) - 0.2).sum(-1),
        "many tensors": lambda x: (x / (x.abs().sum(-1, keepdim=True) + 0.1) - 0.2).abs().sum(-1),
    }),
    "rosenbrock": (rosenbrock, {
        "one": rosenbrock,
        "columns": lambda p: (100 * (p[1:] - p[:-1] ** 2) ** 2 + (1 - p[:-1]) ** 2).sum(),
        "SciPy's": lambda p: (100 * (p[1:] - p[:-1] ** 2) ** 2 + (1 - p[:-1]) ** 2).sum(axis=0),
        "many tensors": lambda x: (100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2).sum(-1),
    }),
    "branch": (branch, {
        "one": branch,
        "where": lambda x: torch.where(x[..., 0] > 0.3, x[..., 0], (x**2).sum(-1)),
    }),
}  # fmt: skip
BAD_FUNCTIONS: dict[str, Any] = {
    "vector": lambda x: x**2, "None": lambda x: None, "words": lambda p: str(p[0]), "complex": lambda x: (x + 0j).sum(-1),
    "tuple": lambda x: (x.sum(-1), x), "NaN": lambda x: x.sum(-1) * np.nan, "raises": lambda x: {}["lost"],
}  # fmt: skip
CONSTRAINTS: dict[str, tuple[Callable[[Point], float], dict[str, Any]]] = {
    "half space": (lambda p: float(p[0] - 0.8), {
        "one": lambda p: p[0] - 0.8, "many": lambda x: x[..., 0] - 0.8, "point": fedcb2o.from_point(lambda p: p[0] - 0.8),
        "list": lambda p: [p[0] - 0.8],
    }),
    "share": (lambda p: float(p[0] / (abs(p).sum() + 0.1) - 0.3), {
        "one": lambda p: p[0] / (abs(p).sum() + 0.1) - 0.3,
        "many": lambda x: x[..., 0] / (x.abs().sum(-1) + 0.1) - 0.3,
    }),
}  # fmt: skip
TRUTHS = [
    lambda p: p[0] >= 0.8,
    lambda p: bool(p[0] >= 0.8),
    fedcb2o.from_point(lambda p: p[0] >= 0.8),
]


def try_minimize(draw: Draw) -> str:
    dim = int(draw.integers(2, 5))
    options: dict[str, Any] = {
        "dim": dim, "seed": int(draw.integers(99)), "maxiter": int(draw.integers(2, 12)),
        "num_particles": int(pick(draw, [dim, dim + 1, 8, 20])), "bounds": pick(draw, [None, (-2, 2)]),
        "runs": pick(draw, [None, 1, 3]), "dynamics": pick(draw, ["adaptive", "paper"]),
    }  # fmt: skip
    if draw.random() < 0.15:
        kind = pick(draw, BAD_FUNCTIONS)

        def minimize_bad() -> None:
            result = fedcb2o.minimize(BAD_FUNCTIONS[kind], **options)
            if not torch.as_tensor(result.success).any() and not result.fun.isfinite().any():
                warnings.warn("the result says that it has no value", stacklevel=1)

        return require_message(kind, minimize_bad)
    name = pick(draw, FUNCTIONS)
    point_function, forms = FUNCTIONS[name]
    form = pick(draw, forms)
    plain: dict[str, Any] = {"lower": loop_over_points(point_function)}
    users: dict[str, Any] = {"lower": forms[form]}
    what = f"{name} as {form}"
    if draw.random() < 0.3:
        other, other_forms = FUNCTIONS["sphere"]
        upper = pick(draw, other_forms)
        plain["upper"], users["upper"] = loop_over_points(other), other_forms[upper]
        what += f", sphere as {upper}"
    constraint_function = None
    if draw.random() < 0.4:
        if draw.random() < 0.2:
            truth = {"type": "ineq", "fun": pick(draw, TRUTHS)}
            return require_message(
                "truth values", lambda: fedcb2o.minimize(**users, **options, constraints=truth)
            )
        constraint = pick(draw, CONSTRAINTS)
        constraint_function, constraint_forms = CONSTRAINTS[constraint]
        kind = pick(draw, constraint_forms)
        make = pick(
            draw,
            [
                lambda fun: {"type": "ineq", "fun": fun},
                lambda fun: NonlinearConstraint(fun, 0, np.inf),
            ],
        )
        plain["constraints"] = make(fedcb2o.from_numpy(lambda x: values_of(constraint_function, x)))
        users["constraints"] = make(constraint_forms[kind])
        what += f", {constraint} as {kind}"
    what += f" {options}"
    with messages():
        expected = fedcb2o.minimize(**plain, **options)
        result = fedcb2o.minimize(**users, **options)
    require_close(f"{what}: x", result.x, expected.x, 1e-4)
    require_close(f"{what}: fun", result.fun, expected.fun, 1e-4)
    for x, fun in zip(result.x.reshape(-1, dim), result.fun.reshape(-1), strict=True):
        if fun.isfinite():
            require_close(f"{what}: fun at x", fun, point_function(x.numpy()), 1e-4)
    return "equal"


def values_of(function: Callable[[Point], float], x: Array) -> Array:
    return np.array([function(point) for point in x.reshape(-1, x.shape[-1])]).reshape(x.shape[:-1])


def loop_over_points(function: Callable[[Point], float]) -> Any:
    return fedcb2o.from_numpy(lambda x: values_of(function, x))


# ---- All kinds ----

KINDS: dict[str, Callable[[Draw], str]] = {
    "aggregator": try_aggregator, "agent": try_agent, "source": try_source, "images": try_images,
    "minimize": try_minimize,
}  # fmt: skip


def outcome_of(kind: str, number: int) -> tuple[str, str]:
    """Return the outcome (equal, refused, warned or fault) of a case, and the fault's message."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            return KINDS[kind](np.random.default_rng([number, list(KINDS).index(kind)])), ""
        except FaultError as error:
            return "fault", str(error)
        except Exception as error:
            return "fault", f"{type(error).__name__}: {error}"


def main(count: int = 1000, first: int = 0) -> int:
    """Try `count` cases of all kinds in turn; print faults and counts; return 1 for a fault."""
    torch.set_num_threads(1)
    logging.getLogger("fedcb2o").propagate = False
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in KINDS}
    for k, kind in itertools.islice(enumerate(itertools.cycle(KINDS)), count):
        number = first + k // len(KINDS)
        outcome, message = outcome_of(kind, number)
        counts[kind][outcome] += 1
        if outcome == "fault":
            print(f"fault: {kind} {number}: {message}", flush=True)
    for kind, outcomes in counts.items():
        print(
            f"{kind}: "
            + ", ".join(f"{times} {outcome}" for outcome, times in sorted(outcomes.items()))
        )
    return int(any(outcomes["fault"] for outcomes in counts.values()))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
