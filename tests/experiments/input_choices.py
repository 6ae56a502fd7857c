"""Choices for random inputs: data and settings as users pass them.

A choice whose name begins with "!" is invalid on purpose: it is refused or named in a warning.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 3
Array = np.ndarray[Any, Any]
Table = dict[str, Any]


class NotComparableError(Exception):
    """A combination without a plain counterpart."""


# fmt: off
# ---- Samples: levels 0 to 16, in a shape, a scale, a type and a container ----

SHAPES: Table = {
    "table": (6,), "image": (1, 8, 8), "rgb": (3, 8, 8), "sequence": (3, 4), "tokens": (5,), "one feature": (1,),
    "wide image": (1, 8, 5),
}
SCALES: Table = {
    "sixteenths": lambda v: v / 16,
    "bytes": lambda v: np.minimum(v * 16, 255),
    "levels": lambda v: v,
    "signed": lambda v: v - 8,
    "tiny": lambda v: v * 1e-12,
    "large": lambda v: v * 1e4,
    "offset": lambda v: v + 1e5,
    "constant feature": lambda v: v * (np.arange(v.shape[-1]) >= min(1, v.shape[-1] - 1)) / 16,
    "denormal": lambda v: v * 1e-42,
    "!float32 merges": lambda v: v / 16 + 1e9,
    "!beyond float32": lambda v: v * 1e38,
    "!NaN": lambda v: np.where(v == v.flat[5], np.nan, v),
    "!infinite": lambda v: np.where(v == v.flat[5], np.inf, v),
}
DTYPES: Table = {
    "float64": "f8", "float32": "f4", "float16": "f2", "big-endian": ">f4", "long double": "g", "int64": "i8",
    "int32": "i4", "big-endian int": ">i2", "uint16": "u2", "int8": "i1", "uint8": "u1", "bool": "?", "uint64": "u8",
    "!complex": "c8", "!datetime": "M8[s]", "!words": "U9",
}


def as_tensor(values: Any) -> torch.Tensor:
    """Convert values to a tensor, as a user would."""
    if isinstance(values, np.ndarray):
        values = values.astype("f8" if values.dtype.char == "g" else values.dtype.newbyteorder("="))
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotComparableError("a user cannot make a tensor of it") from error


def frame(v: Array) -> pd.DataFrame:
    return pd.DataFrame(v, columns=[f"f{k}" for k in range(v.shape[1])])


def mixed(v: Array) -> pd.DataFrame:
    table = frame(v).astype({"f0": "float64"})
    return table if v.shape[1] < 2 else table.assign(f1=table["f1"] != 0)


def masked(v: Array, count: int) -> Any:
    return np.ma.array(v, mask=np.arange(v.size).reshape(v.shape) < count)


def read_only(v: Array) -> Array:
    v = v.copy()
    v.setflags(write=False)
    return v


@torch.inference_mode()
def inference(v: Array) -> torch.Tensor:
    return as_tensor(v) * 1.0


CONTAINERS: Table = {
    "array": lambda v: v,
    "tensor": as_tensor,
    "tensor with gradient": lambda v: (as_tensor(v) * 1.0).requires_grad_(),
    "bfloat16 tensor": lambda v: as_tensor(v).to(torch.bfloat16),
    "list": lambda v: v.tolist(),
    "list of arrays": list,
    "tuple of tensors": lambda v: tuple(as_tensor(v)),
    "object array": lambda v: v.astype(object),
    "frame": frame,
    "nullable frame": lambda v: frame(v).convert_dtypes(),
    "mixed frame": mixed,
    "frame with an index": lambda v: frame(v).set_index(np.arange(len(v))[::-1]),
    "masked array without a mask": lambda v: masked(v, 0),
    "strided": lambda v: np.repeat(v, 2, -1)[..., ::2],
    "reversed": lambda v: v[::-1].copy()[::-1],
    "transposed": lambda v: np.ascontiguousarray(v.T).T,
    "Fortran order": np.asfortranarray,
    "read-only": read_only,
    "matrix": np.asmatrix,
    "parameter": lambda v: nn.Parameter(as_tensor(v) * 1.0),
    "inference tensor": inference,
    "columns of numbers": lambda v: pd.DataFrame(v),
    "columns of one name": lambda v: frame(v).set_axis(["f"] * v.shape[1], axis=1),
    "columns of two levels": lambda v: frame(v).set_axis(pd.MultiIndex.from_product([["f"], range(v.shape[1])]), axis=1),
    "sparse columns": lambda v: frame(v).astype(pd.SparseDtype("float32")),
    "column of arrays": lambda v: pd.Series(list(v)),
    "!mapping of columns": lambda v: dict(frame(v)),
    "structured array": lambda v: frame(v).to_records(index=False),
    "!words for numbers": lambda v: v.astype(str),
    "!masked array": lambda v: masked(v, 3),
    "!wholly masked sample": lambda v: masked(v, v[0].size),
    "!frame with a gap": lambda v: frame(v).convert_dtypes().mask(np.arange(v.size).reshape(v.shape) == 4),
    "!categorical column": lambda v: frame(v).assign(f0=pd.Categorical(np.resize(["a", "b"], len(v)))),
    "!column of words": lambda v: frame(v).assign(f0=np.resize(["a", "b"], len(v))),
    "!column of dates": lambda v: frame(v).assign(f0=pd.Timestamp("2026-01-01")),
    "!sparse matrix": lambda v: scipy.sparse.csr_matrix(v.astype("f8")),
    "!sparse array": lambda v: scipy.sparse.coo_array(v.astype("f8")),
    "!sparse tensor": lambda v: as_tensor(v).float().to_sparse(),
    "!ragged": lambda v: [*v[:-1].tolist(), v[-1].tolist()[:-1]],
    "!one axis": lambda v: v.reshape(len(v), -1)[:, 0],
    "!no samples": lambda v: v[:0],
    "!no features": lambda v: v[..., :0],
    "!nothing": lambda v: None,
    "!generator": lambda v: (row for row in v),
    "!meta tensor": lambda v: torch.empty(v.shape, device="meta"),
    "!too few samples": lambda v: v[:-1],
}
FLAT = ("frame", "matrix", "sparse m", "sparse a", "column", "structured")  # containers of two axes
CHANNELS: Table = {
    "first": lambda v: v,
    "last": lambda v: np.moveaxis(v, 1, -1) if v.ndim == 4 and v.shape[1] == 3 else v,
}


def other_bytes(samples: Any, values: Array) -> Any:
    return values * 255.0 if values.dtype == np.uint8 else np.minimum(abs(values * 15.0), 255).astype(np.uint8)


def reordered(samples: Any) -> Any:
    has_names = isinstance(samples, pd.DataFrame) and samples.columns.is_unique
    return samples.iloc[:, ::-1] if has_names else samples


TESTS: Table = {
    "held out": None,
    "alike": lambda samples, values: samples,
    "columns in another order": lambda samples, values: reordered(samples),
    "list": lambda samples, values: samples if values.dtype == np.uint8 else values.tolist(),
    "a class in tests only": lambda samples, values: samples,
    "!another width": lambda samples, values: np.concatenate([values, values], -1),
    "!bytes for numbers, numbers for bytes": other_bytes,
    "!no labels": lambda samples, values: samples,
}

# ---- Labels of the classes k, owners j ----

WORDS = np.array(["ant", "bee", "cat"])
FROM_ZERO: Table = {
    "from 0": lambda k: k,
    "list": lambda k: k.tolist(),
    "uint8": lambda k: k.astype("u1"),
    "big-endian": lambda k: k.astype(">i4"),
    "tensor": torch.from_numpy,
    "int32 tensor": lambda k: torch.from_numpy(k.astype("i4")),
    "Series": lambda k: pd.Series(k, index=np.arange(len(k))[::-1]),
    "nullable": lambda k: pd.Series(k, dtype="Int64"),
    "whole floats": lambda k: k.astype("f4"),
}
LABELS: Table = {
    **FROM_ZERO,
    "other numbers": lambda k: np.array([-7, 3, 1000])[k],
    "words": lambda k: WORDS[k],
    "list of words": lambda k: WORDS[k].tolist(),
    "object words": lambda k: WORDS[k].astype(object),
    "Series of words": lambda k: pd.Series(WORDS[k]),
    "bytes words": lambda k: WORDS[k].astype("S"),
    "numbers as words": lambda k: np.array(["9", "10", "11"])[k],
    "accents": lambda k: np.array(["\u00e9", "o", "z"])[k],
    "object numbers": lambda k: k.astype(object),
    "huge numbers": lambda k: k + 2**62,
    "huge floats": lambda k: np.array([2.0**60, 2.0**61, 2.0**62])[k],
    "uint64": lambda k: k.astype("u8"),
    "an empty word": lambda k: np.array(["", "b", "c"])[k],
    "words with spaces": lambda k: np.array(["a b", " a", "a"])[k],
    "words for missing": lambda k: np.array(["None", "nan", "x"])[k],
    "truth values": lambda k: [bool(v) for v in k],
    "nullable words": lambda k: pd.Series(WORDS[k], dtype="string"),
    "nullable truth values": lambda k: pd.Series(k > 0, dtype="boolean"),
    "bool": lambda k: k > 0,
    "categories": lambda k: pd.Series(pd.Categorical.from_codes(k, ["z", "a", "m"])),
    "frame of one column": lambda k: pd.DataFrame({"y": k}),
    "masked array without a mask": lambda k: np.ma.array(k, mask=False),
    "one column": lambda k: k[:, None],
    "targets": lambda k: k * 0.75 - 0.3,
    "whole targets": lambda k: k,
    "two targets": lambda k: np.stack([k / 2, 1 - k], 1),
    "target column": lambda k: (k * 0.75)[:, None],
    "nullable targets": lambda k: pd.Series(k * 0.75, dtype="Float64"),
    "large targets": lambda k: k * 1e4,
    "!one-hot": lambda k: np.eye(CLASSES)[k],
    "!multi-hot": lambda k: (np.arange(CLASSES) <= k[:, None]).astype(int),
    "!fractions": lambda k: k + 0.5,
    "!missing": lambda k: np.where(k == 2, np.nan, k),
    "!missing word": lambda k: pd.Series(np.array(["ant", "bee", None], object)[k]),
    "!missing category": lambda k: pd.Series(pd.Categorical.from_codes(np.where(k == 2, -1, k), ["a", "b"])),
    "!missing nullable": lambda k: pd.Series(np.where(k == 2, np.nan, k)).astype("Int64"),
    "!masked": lambda k: np.ma.array(k, mask=k == 2),
    "!one class": lambda k: k * 0,
    "!numbers and words": lambda k: np.array([0, "a", 2], object)[k],
    "!too few": lambda k: k[:-1],
    "!scalar": lambda k: 1,
    "!huge targets": lambda k: k * 1e39,
    "!missing targets": lambda k: np.where(k == 2, np.nan, k),
    "!masked targets": lambda k: np.ma.array(k * 0.5, mask=k == 2),
    "!targets that float32 merges": lambda k: k / 4 + 1e9,
    "!dates": lambda k: pd.Timestamp("2026-01-01") + pd.to_timedelta(k, "D"),
    "!one label huge": lambda k: np.where(k == 2, 2.0**70, k),
    "!complex targets": lambda k: k + 1j,
}
NAMES: Table = {
    "none": None, "list": ["c0", "c1", "c2"], "array": np.array(["c0", "c1", "c2"]), "mapping": {2: "c2", 0: "c0", 1: "c1"},
    "Index": pd.Index(["c0", "c1", "c2"]), "!set": {"c0", "c1", "c2"}, "!twice": ["c", "c", "d"], "!too few": ["c0"],
    "!word": "abc",
}
OWNERS: Table = {
    "none": None,
    "numbers": lambda j: j,
    "words": lambda j: np.array(["north", "south", "west"])[j],
    "Series": lambda j: pd.Series(j * 10),
    "categories": lambda j: pd.Categorical.from_codes(j, ["a", "b", "c"]),
    "datasets": "list", "datasets by name": "mapping", "PyTorch data sets": "torch", "by hand": "hand",
    "!too few": lambda j: j[:-1],
    "!missing": lambda j: np.where(j == 1, np.nan, j),
    "!masked": lambda j: np.ma.array(j, mask=j == 1),
    "!fractions": lambda j: j + 0.5,
}
SPREADS: Table = {  # sample indices -> classes, owners
    "even": lambda i: (i // 3 % CLASSES, i % 3),
    "uneven": lambda i: (i // 3 % CLASSES, np.minimum(i // 4, 2)),
    "a class each": lambda i: (i % CLASSES, i % 3),
    "an owner of one sample": lambda i: (i // 3 % CLASSES, np.where(i == 0, 2, i % 2)),
    "a class of one sample": lambda i: (np.where(i == 0, 2, i % 2), i % 3),
    "a rare class": lambda i: (np.where(i < 2, 2, i % 2), i % 3),
}

# ---- Networks ----

LAYERS: Table = {  # the layer in the middle
    "batch norm": lambda: nn.BatchNorm1d(8),
    "layer norm": lambda: nn.LayerNorm(8),
    "dropout": lambda: nn.Dropout(0.3),
    "LSTM": lambda: nn.LSTM(8, 8, batch_first=True),
    "embedding": lambda: nn.Embedding(20, 8),
    "sparse embedding": lambda: nn.Embedding(20, 8, sparse=True),
    "frozen layer": lambda: nn.Linear(8, 8).requires_grad_(False),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
    "!transformer of samples": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0),
    "!untracked norm": lambda: nn.BatchNorm1d(8, track_running_stats=False),
}
CHANGES: Table = {  # of the activations h
    "functional dropout": lambda net, h: F.dropout(h, 0.3, net.training),
    "constant buffer": lambda net, h: h + net.buffer,
    "branches on numbers": lambda net, h: h * 2 if float(h.detach().sum()) > 1e30 else h,
    "tied": lambda net, h: net.again(h),
    "unused parameter": lambda net, h: h,
    "!dropout in evaluation": lambda net, h: F.dropout(h, 0.3),
    "!counting buffer": lambda net, h: h + net.buffer.add_(net.training),
    "!counts in an attribute": lambda net, h: h * (1 + net.add_one() / 9),
    "!batch statistics": lambda net, h: h - h.mean(0),
    "!tied by data": lambda net, h: net.again(h),
}
ENDS: Table = {  # of the outputs
    "log softmax": lambda out: out.log_softmax(1),
    "double precision": lambda out: out.double() * 1.5,
    "!softmax over samples": lambda out: out.softmax(0),
    "!tuple": lambda out: (out, out),
    "!NumPy": lambda out: out.detach().numpy(),
    "!another width": lambda out: torch.cat([out, out, out], 1),
}


class Net(nn.Module):
    """A small network for samples of any shape."""

    def __init__(self, shape: list[int], outputs: int, kind: str) -> None:
        super().__init__()
        self.kind, self.count = kind, 0
        self.first, self.last = nn.Linear(int(np.prod(shape)), 8), nn.Linear(8, outputs)
        self.middle = LAYERS.get(kind, nn.Identity)()
        if "tied" in kind:
            self.middle, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
            if kind == "tied":
                self.again.weight = self.middle.weight
            else:
                self.again.weight.data = self.middle.weight.data
        if "buffer" in kind:
            self.register_buffer("buffer", torch.linspace(0, 1, 8))
        if kind == "unused parameter":
            self.idle = nn.Parameter(torch.ones(3))

    def add_one(self) -> int:
        self.count += self.training
        return self.count

    def forward(self, x: torch.Tensor) -> Any:
        x = x.flatten(1).float()
        if "embedding" in self.kind:
            return self.last(self.middle(x.long().clamp(0, 19)).mean(1))
        h = self.first(x).tanh()
        if self.kind in ("LSTM", "transformer"):
            h = self.middle(torch.stack([h, -h], 1))
            h = (h[0] if isinstance(h, tuple) else h)[:, -1]
        else:
            h = CHANGES.get(self.kind, lambda net, h: h)(self, self.middle(h))
        return ENDS.get(self.kind, lambda out: out)(self.last(h))


def network(kind: str) -> Callable[..., nn.Module]:
    def make(input_shape: list[int], num_classes: int) -> nn.Module:
        return Net(input_shape, num_classes, kind)

    return make


def dense(*widths: int) -> Callable[..., nn.Module]:
    def make(shape: list[int], outputs: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in itertools.pairwise([int(np.prod(shape)), *widths, outputs]):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return make


def convolutions(shape: list[int], outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(4, 4, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * (shape[1] // 4) * (shape[2] // 4), 8), nn.ReLU(), nn.Linear(8, outputs),
    )


SINGLE = dict[tuple[int, ...], nn.Module]()


def always_one(input_shape: list[int], num_classes: int) -> nn.Module:
    return SINGLE.setdefault((*input_shape, num_classes), Net(input_shape, num_classes, "plain"))


# Each entry has the value of the configuration and the network of the plain loop.
MODELS: Table = {
    "mlp": ({"name": "mlp", "hidden": [8]}, dense(8)),
    "logistic": ({"name": "logistic"}, dense()),
    "mlp of an array": ({"name": "mlp", "hidden": np.array([5, 4])}, dense(5, 4)),
    "cnn": ({"name": "cnn", "hidden": 8, "channels": [4, 4]}, convolutions),
    **{kind: ({"name": network(kind)}, network(kind)) for kind in ("plain", *LAYERS, *CHANGES, *ENDS)},
    "!one for all": ({"name": always_one}, None),
    "!all frozen": ({"name": lambda input_shape, num_classes: Net(input_shape, num_classes, "plain").requires_grad_(False)}, None),
    "!float64": ({"name": lambda input_shape, num_classes: Net(input_shape, num_classes, "plain").double()}, None),
    "!lazy": ({"name": lambda input_shape, num_classes: nn.LazyLinear(num_classes)}, None),
    "!no width": ({"name": "mlp", "hidden": [0]}, None),
    "!width of a fraction": ({"name": "mlp", "hidden": [8.5]}, None),
    "!a network": ({"name": nn.Linear(6, 3)}, None),
    "!no network": ({"name": lambda input_shape, num_classes: None}, None),
    "!unknown": ({"name": "mpl"}, None),
}


# ---- Losses, optimisers, settings ----


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if targets.is_floating_point():
        return (outputs.reshape(targets.shape) - targets).square().add(1).log().reshape(len(targets), -1).sum(1)
    picked = outputs.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (picked.exp() - 1) * picked


def alike(plain: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    return lambda out, y: plain(out.reshape(y.shape), y.to(out.dtype), **options)


def wrong_squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[..., :1] - targets.float().reshape(len(targets), -1)[:, 0]).square().mean(-1)


def relative(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = own_loss(outputs, targets)
    return losses / losses.mean().detach()


def errors(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) != targets.reshape(len(targets), -1)[:, 0]).float()


LOSSES: Table = {
    "fitting": (None, None),  # the default: cross-entropy or squared error
    "smoothed": ({"name": "cross_entropy", "label_smoothing": 0.1}, lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1)),
    "smoothed by NumPy": ({"name": "cross_entropy", "label_smoothing": np.float64(0.1)}, lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1)),
    "cross_entropy": ("cross_entropy", F.cross_entropy),
    "squared_error": ("squared_error", alike(F.mse_loss)),
    "absolute_error": ("absolute_error", alike(F.l1_loss)),
    "huber_error": ({"name": "huber", "delta": 0.5}, alike(F.huber_loss, delta=0.5)),
    "own": (own_loss, lambda o, y: own_loss(o, y).mean()),
    "!mean": (lambda outputs, targets: own_loss(outputs, targets).mean(), None),
    "!broadcasts": (wrong_squares, None),
    "!looks at others": (relative, None),
    "!without gradient": (errors, None),
    "!NaN": (lambda outputs, targets: own_loss(outputs, targets) * float("nan"), None),
    "!nothing": (lambda outputs, targets: None, None),
    "!fails": (lambda outputs, targets: 1 / 0, None),
    "!NumPy": (lambda outputs, targets: own_loss(outputs.detach(), targets).numpy(), None),
    "!negative smoothing": ({"name": "cross_entropy", "label_smoothing": -0.1}, None),
    "!smoothing above 1": ({"name": "cross_entropy", "label_smoothing": 1.5}, None),
    "!negative delta": ({"name": "huber", "delta": -1.0}, None),
}
SGD = torch.optim.SGD
OPTIMISERS: Table = {
    "momentum": (None, lambda p, lr: SGD(p, lr, momentum=0.9)),
    "SGD": (0.0, SGD),
    "NumPy momentum": (np.float32(0.5), lambda p, lr: SGD(p, lr, momentum=0.5)),
    "adamw": ("adamw", lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.01)),
    "Adam": (lambda parameters, lr: torch.optim.Adam(parameters, lr), torch.optim.Adam),
    "nesterov": (lambda parameters, lr: SGD(parameters, lr, momentum=0.5, nesterov=True), lambda p, lr: SGD(p, lr, momentum=0.5, nesterov=True)),
    "decay": (lambda parameters, lr: SGD(parameters, lr, weight_decay=0.1), lambda p, lr: SGD(p, lr, weight_decay=0.1)),
    "NumPy decay": ({"name": "adamw", "weight_decay": np.float64(0.1)}, lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1)),
    "!scheduler": (lambda parameters, lr: torch.optim.lr_scheduler.StepLR(SGD(parameters, lr), 5), None),
    "!copies": (lambda parameters, lr: SGD([p.detach().clone().requires_grad_() for p in parameters], lr), None),
    "!rate 0": (lambda parameters, lr: SGD(parameters, 0.0), None),
    "!needs a closure": (lambda parameters, lr: torch.optim.LBFGS(parameters, lr), None),
    "!nothing": (lambda parameters, lr: None, None),
    "!a class": (lambda parameters, lr: SGD, None),
    "!negative beta": ({"name": "adamw", "beta1": -0.5}, None),
    "!fails": (lambda parameters, lr: SGD(parameters, -1.0), None),
}
SETTINGS: Table = {
    "plain": {}, "batch of 1": {"training.batch_size": 1}, "batch of 7": {"training.batch_size": 7},
    "steps": {"training.local_steps": 5}, "small rate": {"training.gamma": 1e-6}, "lambda2": {"training.lambda2": 0.5},
    "three rounds": {"rounds": 3}, "another seed": {"seeds": [12345]}, "a seed of 64 bits": {"seeds": [2**63 + 5]},
    "wide batch": {"training.batch_size": 1000}, "validation": {"agents.validation": 0.5},
    "no hold-out": {"agents.hold_out": False}, "independent": {"agents.initialisation": "independent"},
    "two clusters": {"agents.num_clusters": 2}, "four clusters": {"agents.num_clusters": 4}, "together": {"together": 2},
    "shared": {"model.buffers": "shared"}, "dropped": {"model.buffers": "dropped"}, "channels last": {"layout": "channels_last"},
    "few samples": {"agents.benign_samples": 3}, "two samples": {"agents.benign_samples": 2, "agents.validation": 0.5},
    "NumPy integers": {"training.batch_size": np.int64(4), "rounds": np.int32(2), "seeds": np.arange(3, 4)},
    "NumPy floats": {"training.gamma": np.float32(0.03125), "agents.validation": np.float64(0.25)},
    "tensor": {"training.batch_size": torch.tensor(4)}, "NumPy bool": {"agents.hold_out": np.bool_(False)},
    "NumPy word": {"agents.initialisation": np.str_("common")}, "0-d array": {"training.gamma": np.array(0.25)},
    "!batch of 0": {"training.batch_size": 0}, "!word": {"training.batch_size": "8"}, "!fraction": {"rounds": 1.5},
    "!NaN": {"training.gamma": float("nan")}, "!negative": {"training.gamma": -0.1}, "!NumPy NaN": {"training.gamma": np.float32("nan")},
    "!validation": {"agents.validation": 1.5}, "!too many samples": {"agents.benign_samples": 10**6}, "!seeds": {"seeds": [1, 1]},
    "!no seeds": {"seeds": np.arange(0)}, "!infinite": {"training.gamma": float("inf")}, "!unknown key": {"training.gama": 0.1},
    "!array": {"rounds": np.array([1, 2])}, "!true": {"rounds": True}, "!none": {"rounds": None},
    "!no clusters": {"agents.num_clusters": 0}, "!complex": {"training.gamma": 1j}, "!negative seed": {"seeds": [-1]},
    "!NumPy fraction": {"rounds": np.float64(1.5)},
}
SHARES: Table = {
    "default": 0.25, "half": 0.5, "NumPy": np.float32(0.25), "!negative": -0.25, "!one": 1, "!word": "0.2", "!NaN": float("nan"),
    "!none": None,
}
CHOICES: dict[str, Table] = {
    "shape": SHAPES, "scale": SCALES, "dtype": DTYPES, "container": CONTAINERS, "channels": CHANNELS, "test": TESTS,
    "labels": LABELS, "names": NAMES, "owners": OWNERS, "spread": SPREADS, "model": MODELS, "loss": LOSSES,
    "optimiser": OPTIMISERS, "settings": SETTINGS, "test share": SHARES, "standardise": {"no": False, "yes": True},
    "algorithm": {"local_training": False, "dfedavgm": True}, "size": {"36": 36, "90": 90},
}
DEFAULTS = {key: next(iter(options)) for key, options in CHOICES.items()}
# fmt: on
