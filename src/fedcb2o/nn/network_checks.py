"""Checks of users' networks on two samples, before a run begins.

A network's output must be a function of its parameters and of one sample. It is evaluated twice, on
samples apart and together, and after a trial training of other parameters. Errors and warnings name
the layer or attribute at fault.
"""

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.nn import batch_norm
from fedcb2o.nn.comparison import agree, equal, first_difference
from fedcb2o.nn.parameters import agent_state, shared_tensors
from fedcb2o.nn.random_evaluation import seed_if_random_
from fedcb2o.plugins import attribute_errors, failing_line

_TRIAL_SCALES = (1.0, -1.0, -3.0, 10.0)  # factors on weights, each after the others
_TRIAL_STEPS = 1000  # by which counters of a network advance in the trial


def check_networks(
    name: str,
    networks: Sequence[nn.Module],
    x: Float[Tensor, "2 *features"],
    several: Float[Tensor, "n *features"],
    seed: int,
    *,
    num_outputs: int,
    layout: str | None,
    random_evaluation: bool,
) -> tuple[Tensor, str]:
    """Return a network's outputs for two samples, and `bounded_outputs` for several.

    A second network, of a user's function, is checked and changed. A network that draws random
    numbers in evaluation is seeded, with a warning unless `random_evaluation` is set.
    """
    kind = ""
    module, *twins = networks
    with contextlib.ExitStack() as stack:
        for twin in twins:
            stack.enter_context(attribute_errors("model", name))
            check_construction(name, module, twin)
        stack.enter_context(perturbed_constants(*networks))
        outputs = _evaluate(name, module, x, layout, num_outputs)
        for twin in twins:
            is_random = random_evaluation or seed_if_random_(name, networks, x, seed)
            check_network(name, module, twin, x, random_evaluation=is_random)
            if num_outputs > 1 and outputs.ge(0).all() and outputs.le(1).all():
                kind = bounded_outputs(twin, several)
    return outputs, kind


def check_construction(name: str, module: nn.Module, twin: nn.Module) -> None:
    """Refuse a network with hidden or shared parameters, before its first evaluation.

    `twin` is a second network, made by the same function from the same random numbers. ConfigError
    is raised if parameters share memory, are not registered, belong to both networks or begin with
    different values. `name` is that of the model in messages.
    """
    _check_hidden_parts(name, module)
    _check_memory(name, module)
    own = agent_state(module)
    other = {id(tensor) for tensor in agent_state(twin).values()}
    for key, tensor in own.items():
        if id(tensor) in other:
            raise ConfigError(
                f"the model `{name}` returned the same `{key}` in two calls, so that all seeds"
                " would train one network: let its function make new layers in each call (or"
                " return copy.deepcopy(network))"
            )
    for key, first, second in _tensor_pairs(module, twin):
        # The twin is changed later, which must not change the network.
        if first is not second and first.data_ptr() == second.data_ptr():
            second.data = second.data.clone()
        if not equal(first, second):
            raise ConfigError(
                f"the model `{name}` has other initial values of `{key}` in a second call, though"
                " PyTorch's random numbers are the same: draw them by PyTorch (torch.randn,"
                " nn.init), whose generator is seeded"
            )


@contextlib.contextmanager
def perturbed_constants(module: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Add equal noise to constant parameters of networks inside a block."""
    draw = torch.Generator().manual_seed(0)
    original = []
    networks = [dict(network.named_parameters()) for network in (module, *others)]
    for key, p in networks[0].items():
        if not p.requires_grad:
            continue
        # A layer of zeros would hide what the layers before it do.
        low, high = p.detach().aminmax()
        if low == high:
            noise = (0.1 * torch.rand(p.shape, generator=draw)).to(p.device)
            for network in networks:
                original.append((network[key], network[key].data))
                network[key].data = network[key].data + noise
    try:
        yield
    finally:
        for parameter, values in original:
            parameter.data = values


def check_network(
    name: str,
    module: nn.Module,
    twin: nn.Module,
    x: Float[Tensor, "2 *features"],
    *,
    random_evaluation: bool = False,
) -> None:
    """Check that a network's output depends on its parameters and one sample only.

    The network is left as it was, in evaluation mode; its twin of equal parameters is changed. The
    two samples in `x` differ. With `random_evaluation`, evaluation draws random numbers, the same
    in each forward pass. ConfigError is raised if the network writes in evaluation, keeps state or
    has no gradient. An output for a sample that depends on other samples gives a UserWarning.
    """
    original = x.clone()
    mixture = ""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, on single samples
        outputs = module.eval()(x)
        changed = [key for key, p, q in _tensor_pairs(module, twin) if not equal(p, q)]
        if changed or not equal(x, original):
            place = "".join(f", here into `{key}`" for key in changed[:1])
            raise ConfigError(
                f"the model `{name}` writes into the samples that it reads, or into its parameters,"
                f" in evaluation{place}, where other code reads them after it: let it compute new"
                " tensors (no `inplace=True` in its first layer, no norm in training mode)"
            )
        _check_repeatable(name, module, x, outputs)
        if not random_evaluation:
            mixture = _mixture_of_samples(name, module, x, outputs)
        _check_trial_training(name, module, twin, x, outputs)
    if mixture:
        warnings.warn(mixture, stacklevel=2)


def bounded_outputs(twin: nn.Module, x: Float[Tensor, "n *features"]) -> str:
    """Return "softmax" or "sigmoid" if outputs are bounded as by that, for any weights; else "".

    The parameters of the network are changed.
    """
    is_softmax = True
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scale in _TRIAL_SCALES:
            for parameter in twin.parameters():
                if parameter.requires_grad:
                    parameter.mul_(scale)
            # Apart, because a network that mixes samples has another warning.
            outputs = torch.cat([twin.eval()(row) for row in torch.split(x, 1)]).double()
            if not outputs.isfinite().all():  # of a deep network with large weights
                continue
            # Equal numbers are those of a layer of zeros.
            low, high = outputs.aminmax()
            if low < 0 or high > 1 or low == high:
                return ""
            is_softmax &= agree(outputs.sum(1), torch.ones(len(outputs), dtype=torch.float64))
    return "softmax" if is_softmax else "sigmoid"


def accepts_single_sample(module: nn.Module, x: Float[Tensor, "1 *features"]) -> bool:
    """Return whether a network's norms can train on one sample.

    The network is left as it was, in evaluation mode.
    """
    if not batch_norm.statistics(module, "shared", "local"):
        return True
    try:
        _trial_outputs(module, x)
    except ValueError:
        return False
    except Exception:  # training reports any other failure of a user's network
        return True
    return True


def is_sample_independent(module: nn.Module, x: Float[Tensor, "2 *features"]) -> bool:
    """Return whether a sample's training output is independent of other samples.

    It is not where the network draws random numbers or its norms keep statistics. The network is
    left as it was, in evaluation mode.
    """
    if batch_norm.statistics(module, "shared", "local"):
        return False
    try:
        return agree(*_trial_outputs(module, x, x[:1]))
    except Exception:  # training reports any failure of a user's network
        return False


def _evaluate(
    name: str, module: nn.Module, x: Tensor, layout: str | None, num_outputs: int
) -> Tensor:
    """Return the outputs for two samples. Raise ConfigError for a failure or another shape."""
    try:
        with torch.no_grad():
            outputs: Any = module.eval()(x.clone())
    except (Exception, SystemExit) as error:  # a user's network may fail in any way
        by_layout = ' with `layout` = "channels_last"' if layout == "channels_last" else ""
        raise ConfigError(
            f"the model `{name}` cannot read samples of shape {tuple(x.shape[1:])}{by_layout}"
            f"{failing_line(error)}: {error}"
        ) from error
    got: Any = tuple(outputs.shape) if isinstance(outputs, Tensor) else describe_type(outputs)
    shape: Any = (2, num_outputs)
    if num_outputs == 1:  # the shape of numbers is a matter between network and loss
        shape = "(2, ...)"
    if isinstance(outputs, Tensor) and (got == shape or (num_outputs == 1 and got[:1] == (2,))):
        return outputs
    raise ConfigError(f"the model `{name}` returned {got} for 2 samples, expected shape {shape}")


def _check_hidden_parts(name: str, module: nn.Module) -> None:
    """Refuse trained layers and tensors in plain attributes, which PyTorch does not see."""
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    registered |= {id(layer) for layer in module.modules()}
    for place, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            hidden = _hidden_part(value, registered)
            if hidden is not None:
                raise ConfigError(
                    f"the model `{name}` has a {type(hidden).__name__} in its attribute"
                    f" `{f'{place}.{attribute}'.lstrip('.')}` that PyTorch does not see, so that it"
                    " is never trained: put layers into an nn.ModuleList or nn.ModuleDict, tensors"
                    " into an nn.Parameter or nn.ParameterList (or freeze them by"
                    " requires_grad_(False))"
                )


def _check_memory(name: str, module: nn.Module) -> None:
    """Refuse parameters that share memory without being the same parameter."""
    trained = shared_tensors(module)
    extents: dict[int, list[tuple[int, int, str]]] = {}
    for key, tensor, _ in _tensor_pairs(module, module):
        if not tensor.numel():
            continue
        if key in trained and torch._debug_has_internal_overlap(tensor) == 1:
            raise ConfigError(
                f"the model `{name}` has the parameter `{key}`, whose numbers share memory"
                " (`expand`): make it a tensor of its own by `.clone()`"
            )
        start = tensor.data_ptr()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        extent = (start, start + (last + 1) * tensor.element_size(), key)
        extents.setdefault(tensor.untyped_storage().data_ptr(), []).append(extent)

    for shared in extents.values():
        # In the order of addresses, neighbours overlap if any two do.
        for first, second in itertools.pairwise(sorted(shared)):
            if second[0] < first[1] and {first[2], second[2]} & trained.keys():
                raise ConfigError(
                    f"the model `{name}` has `{first[2]}` and `{second[2]}` in the same memory"
                    " (`.data = `), which training would take apart: tie parameters themselves, as"
                    " in `b.weight = a.weight`, or compute with `a.weight` twice"
                )


def _hidden_part(value: Any, registered: set[int]) -> Any:
    """Return a trained layer or tensor in a plain attribute, or None."""
    values: list[Any] = [value]
    if isinstance(value, list | tuple):
        values = list(value)
    elif isinstance(value, dict):
        values = list(value.values())
    for part in values:
        # A registered layer may be in a plain list, too.
        if id(part) in registered:
            continue
        if isinstance(part, nn.Module) and any(
            p.requires_grad and id(p) not in registered for p in part.parameters()
        ):
            return part
        if isinstance(part, Tensor) and part.is_leaf and part.requires_grad:
            return part
    return None


def _tensor_pairs(module: nn.Module, twin: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names, and the dense parameters and buffers of two networks."""
    other = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    for key, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if key in other and tensor.layout is torch.strided and not tensor.is_quantized:
            yield key, tensor, other[key]


def _trained_pairs(module: nn.Module, twin: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names, and the trained parameters of two networks with at least one axis."""
    for key, own, other in _tensor_pairs(module, twin):
        if own.requires_grad and own.ndim:
            yield key, own.detach(), other.detach()


def _check_repeatable(name: str, module: nn.Module, x: Tensor, outputs: Tensor) -> None:
    """Refuse a network that returns other outputs when it is evaluated again."""
    if outputs.isnan().any():
        raise ConfigError(
            f"the model `{name}` returns NaN for samples of the data set before any training: let"
            " it be a number for any sample (no log or sqrt of 0, no division by 0)"
        )
    if agree(outputs, module(x)):
        return
    place = first_difference(module, x, [x])
    raise ConfigError(
        f"the model `{name}` returns other outputs for the same samples in its next evaluation,"
        f" first in {place}: it keeps state, or draws random numbers outside PyTorch's generator"
        " (numpy.random, random, torch.Generator). Let its output depend on parameters and samples"
        " alone"
    )


def _mixture_of_samples(name: str, module: nn.Module, x: Tensor, outputs: Tensor) -> str:
    """Return a warning if the output for a sample depends on the samples next to it."""
    try:
        alone = [module(part) for part in torch.split(x, 1)]
    except Exception as error:
        raise ConfigError(
            f"the model `{name}` cannot evaluate a single sample ({error}): let its output for a"
            " sample not depend on other samples (no statistics of a batch in evaluation)"
        ) from error
    expected = (1, *outputs.shape[1:])
    for output in alone:
        if output.shape != expected:
            raise ConfigError(
                f"the model `{name}` returned shape {tuple(output.shape)} for one sample, expected"
                f" {expected}: keep the axis of samples (`squeeze()` drops it; name the axis)"
            )
    if agree(outputs, torch.cat(alone)) or _agree_in_float64(module, x):
        return ""
    place = first_difference(module, x, torch.split(x, 1))
    return (
        f"the model `{name}` mixes samples, first in {place}: in evaluation its output for a sample"
        " depends on the other samples of the batch, in tests too, so that losses and accuracies"
        " depend on their order. Samples are the first axis: batch_first=True for attention and"
        " recurrent layers, dim=1 for a softmax over classes, nn.BatchNorm or a group norm in place"
        " of statistics of a batch"
    )


def _check_trial_training(
    name: str, module: nn.Module, twin: nn.Module, x: Tensor, outputs: Tensor
) -> None:
    """Train and evaluate the twin with other parameters; then it must agree with the network."""
    # Shifted by one row, so that parameters are others of the same size.
    for _, own, other in _trained_pairs(module, twin):
        other[1:].copy_(own[:-1])
        other[:1].copy_(own[-1:])
    twin.eval()(x)
    before = _plain_numbers(twin)

    # 1. Training is a function of the seed, also when counters are a thousand steps further.
    batch_norm.train_(twin)
    first = _seeded_training_outputs(name, twin, x)
    _check_trained_tensors(name, module, twin)
    changed = _advance_counters_(twin, before)
    second = _seeded_training_outputs(name, twin, x)
    state = f"its attribute `{changed[0]}`" if changed else "something that it keeps"
    message = (
        f"the model `{name}` keeps state in {state}, which agents do not exchange: its outputs"
        " depend on the samples and models that it computed before. Let them depend on parameters"
        " and samples alone, and draw random numbers by PyTorch alone"
    )
    if not agree(first, second):
        raise ConfigError(message)

    # 2. Nothing of the other parameters and of training is left.
    for _, own, other in _tensor_pairs(module, twin):
        other.detach().copy_(own.detach())
    if not agree(outputs, twin.eval()(x)):
        raise ConfigError(message)


def _seeded_training_outputs(name: str, module: nn.Module, x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(0)
    with torch.enable_grad():
        outputs: Tensor = module(x)
    if not outputs.requires_grad:
        raise ConfigError(
            f"the model `{name}` has outputs without a gradient in training, so that nothing would"
            " be trained: take out `detach()`, `torch.no_grad()`, `.data` and `argmax`"
        )
    return outputs.detach()


def _check_trained_tensors(name: str, module: nn.Module, twin: nn.Module) -> None:
    """Refuse a forward pass in training that changes parameters or buffers, except statistics."""
    tracked = batch_norm.statistics(module, "shared", "local", "dropped").keys()
    for key, own, other in _tensor_pairs(module, twin):
        if own.requires_grad or key in tracked or key.endswith("num_batches_tracked"):
            continue
        if not equal(own, other):
            raise ConfigError(
                f"the model `{name}` changes its buffer `{key}` in training, which is neither a "
                "parameter nor the statistics of a norm, so that agents cannot exchange it: make "
                "it one of these, or leave it unchanged"
            )
    for key, own, other in _trained_pairs(module, twin):
        if not (equal(other[1:], own[:-1]) and equal(other[:1], own[-1:])):
            raise ConfigError(
                f"the model `{name}` writes into its parameter `{key}` when it computes outputs in"
                " training, where the optimiser alone may change it: compute a new tensor (such as"
                " weight.clamp(...)), or set initial values when the network is made"
            )


def _slots(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, container and key of plain attributes, and of the items of lists and dicts."""
    for place, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            name = f"{place}.{attribute}".lstrip(".")
            yield name, vars(layer), attribute
            keys: Any = ()
            if isinstance(value, list):
                keys = range(len(value))
            elif isinstance(value, dict) and not attribute.startswith("_"):
                keys = value
            for key in keys:
                yield f"{name}[{key!r}]", value, key


def _plain_numbers(module: nn.Module) -> dict[str, Tensor]:
    """Return the numbers and tensors in plain attributes, and those of classes, by name."""
    found = {}
    for place, layer in module.named_modules():
        for attribute, value in vars(type(layer)).items():
            found[f"{place}.{attribute}".lstrip(".")] = value
    for name, container, key in _slots(module):
        found[name] = container[key]
    return {name: _as_tensor(value) for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return torch.tensor(value, dtype=torch.float64)


def _advance_counters_(module: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Advance the plain numbers that a training step changed; return their names."""
    changed = []
    for name, container, key in list(_slots(module)):
        value = container[key]
        if name not in before or not _is_number(value):
            continue
        old = before[name]
        new = _as_tensor(value)
        if old.shape == new.shape and not equal(old, new):
            advanced: Any = old + _TRIAL_STEPS * (new - old)
            if not isinstance(value, Tensor):
                advanced = type(value)(advanced)
            container[key] = advanced
            changed.append(name)
    return changed


def _trial_outputs(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return training outputs for the first sample of each input; buffers are restored."""
    original = {name: buffer.clone() for name, buffer in module.named_buffers()}
    batch_norm.train_(module)
    try:
        outputs = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            for x in inputs:
                outputs.append(module(x)[:1])
        return outputs
    finally:
        for name, buffer in module.named_buffers():
            buffer.copy_(original[name])
        module.eval()


def _agree_in_float64(module: nn.Module, x: Tensor) -> bool:
    """Return whether outputs apart and together agree in float64, without float32's rounding."""
    try:
        exact = copy.deepcopy(module).double().eval()
        samples = x.double()
        alone = torch.cat([exact(part) for part in torch.split(samples, 1)])
        return agree(exact(samples), alone)
    except Exception:  # a network may compute in float32 alone
        return False
