"""The sections and keys of an experiment, validated once.

A configuration is a TOML file, a preset's name, a mapping, or an `Experiment` made in Python. A key
that names a function takes a built-in name, "package.module:function" or, in Python, the function
itself. The other keys of its table are the function's keyword arguments. The descriptions of the
keys are those that `fedcb2o keys` prints. The sections that rounds read are in
`federated.sections`.
"""

import functools
import json
import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedcb2o import plugins
from fedcb2o.experiments.config.resolved import COMPONENT_KEYS, Resolved, resolve
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.algorithms.section import RECOMMENDED, AlgorithmSection
from fedcb2o.federated.attacks.section import AttackSection
from fedcb2o.federated.run_spec import Algorithm, ConvolutionKernel, LinearKernel
from fedcb2o.federated.sections import (
    AgentsSection,
    Component,
    PositiveInt,
    Section,
    Seed,
    TrainingSection,
    as_component,
    key_field,
)
from fedcb2o.nn.batch_norm import StatisticsMode
from fedcb2o.nn.memory_layout import MemoryLayout
from fedcb2o.records import result_settings
from fedcb2o.simulation.traces import ClockSection

_BatchOfModels = Annotated[int, Field(ge=1, le=2**31)]


class MetricComponent(Component):
    """A metric of the outputs, by name."""

    better: Annotated[
        Literal["high", "low"] | None,
        key_field("the better values of your own metric", default='"high"'),
    ] = None
    column: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")] | None,
        key_field(
            "the name of its column, so that one metric may be there with several parameters",
            values="letters, digits, `_`",
            default="the function's name",
        ),
    ] = None


_Metrics = Annotated[tuple[MetricComponent, ...], Field(min_length=1, strict=False)]


class ModelSection(Component):
    """The network of the agents."""

    buffers: Annotated[
        StatisticsMode,
        key_field(
            "how agents treat [the statistics of norms](extending.md#model), where your own "
            "network has batch norms",
            default='"local"',
        ),
    ] = "local"
    random_evaluation: Annotated[
        bool,
        key_field(
            "true: your own network draws random numbers by PyTorch in evaluation too (dropout, "
            "noise). A random stream of its own seeds each forward pass, so that runs repeat and "
            "all models meet the same numbers",
            strict=True,
        ),
    ] = False


def with_recommended_agents(table: Any) -> Any:
    """Hold nothing out for the recommended method, unless the configuration says otherwise."""
    if not isinstance(table, Mapping) or not isinstance(table.get("agents"), Mapping):
        return table
    algorithm = as_component(table.get("algorithm", {}))
    if not isinstance(algorithm, Mapping) or algorithm.get("name", RECOMMENDED) != RECOMMENDED:
        return table
    training = table.get("training")
    if isinstance(training, Mapping) and training.get("privacy") is not None:
        # Epsilon counts noisy gradients only.
        return table  # losses on training samples would reveal them
    if table.get("keep_best"):
        return table
    return {**table, "agents": {"hold_out": False, "validation": 1.0, **table["agents"]}}


class Experiment(Section):
    """One experiment, run once for each of its seeds."""

    name: Annotated[
        str,
        key_field(
            "the run's folder is `runs/NAME` without `--out`",
            values="letters, digits, `.`, `_`, `-`",
            default="the file's name",
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        ),
    ]
    title: Annotated[
        str,
        key_field(
            "the name of the run in tables and legends. Where the configuration changes a preset "
            "(`extends`, or `--set` of a key of `algorithm` or `agents`), the default is the "
            "algorithm that runs, with the parameters that differ",
            default="the name",
        ),
    ] = ""
    description: Annotated[
        str, key_field("a sentence, which `fedcb2o presets` prints for a preset", default="none")
    ] = ""
    seeds: Annotated[  # a list is accepted
        tuple[Seed, ...],
        key_field(
            "each seed decides the partition, initial models, batches and choices of one run",
            values="different whole numbers from 0 to 2^63 - 1",
            min_length=1,
            strict=False,
        ),
    ] = (0, 1, 2)
    rounds: Annotated[PositiveInt, key_field("T, the number of rounds")]
    evaluate_every: Annotated[PositiveInt, key_field("rounds between two evaluations")] = 1
    checkpoint_every: Annotated[PositiveInt, key_field("rounds between two checkpoints")] = 1
    keep_best: Annotated[
        bool,
        key_field(
            "true: the model of each agent after its evaluated round with the lowest loss on its "
            "validation samples is kept, for `run.model(agent, best=True)`. They must not train: "
            "`agents.hold_out` is then true by default"
        ),
    ] = False
    records: Annotated[
        Literal["jsonl", "parquet"] | None,
        key_field(
            "the format of metrics and pairs, which a seed keeps: JSON lines, or "
            "[columns](runs.md#records-in-columns) by `pip install 'fedcb2o[parquet]'`. Above "
            "10,000 agents, lines have the pairs of 10,000, columns those of all",
            default='"parquet" above 10,000 agents with the extra, else "jsonl"',
        ),
    ] = None
    evaluate_on: Annotated[
        Literal["test", "tuning", "redrawn"],
        key_field(
            'the samples that scores are computed on. "tuning": samples that each seed draws from '
            "the part of the pool that no agent holds, at most as many as there are test samples. "
            '"redrawn": each seed draws its own test samples, per class as many, from pool and '
            "test set together, so that intervals over seeds include the variation of the samples. "
            "Drawn samples are in no cluster's data, turned or not"
        ),
    ] = "test"
    linear: Annotated[
        LinearKernel | None,
        key_field(
            "the kernel of dense layers: PyTorch's; oneDNN's for layers with at least 2^20 weights "
            "in float32; or one batched product for several agents, whose derivative is in the "
            "order of the weights. On a CPU the default is timed once, in less than a second, and "
            "kept in [environment.json](runs.md), which is written before the first round. Results "
            "agree to rounding. `fedcb2o run --verbose` prints the choice",
            default='the faster of "torch" and "onednn"; "batched" on another device',
        ),
    ] = None
    layout: Annotated[
        MemoryLayout | None,
        key_field(
            "the memory layout of images for a network with convolutions: channel after channel, "
            "or the channels of a pixel side by side. `resnet` on 32x32 images gains about 1.15 "
            'times by "channels_last". `cnn` chooses its own layout. A network that reads no '
            "other layout (it calls `view` after a convolution) needs contiguous images",
            default='"contiguous"',
        ),
    ] = None
    convolution: Annotated[
        ConvolutionKernel | None,
        key_field(
            "the kernel of convolutions without groups. For several agents in one program: "
            '"grouped", a group per agent; "unfolded", one batched product of unfolded images, '
            'which takes more memory; "mixed", unfolded only where a layer reads fewer than 8 '
            'channels. On the CPU, where agents train one by one in float32, "fourier" computes '
            "[by spectra](performance.md#milliseconds-per-step) those two-dimensional convolutions "
            "with `stride` and `dilation` of 1 that need less than half of the multiplications. "
            'Elsewhere "fourier" equals "grouped". The default is timed for each seed with two '
            'dozen steps on a batch, and kept like `linear`: "fourier" where a step is 1.3 times '
            "as fast, on a device another kernel where it is a tenth faster. Real peers time "
            'nothing: theirs is "grouped" unless the federation sets another',
            default='"grouped", unless another is clearly faster',
        ),
    ] = None
    device: Annotated[
        str | None,
        key_field(
            "the device of the models and the data, [see there](performance.md#on-another-device), "
            "as in `fedcb2o run --device cuda`. A run is resumed on the device that it names",
            values='"cpu", or a device of PyTorch: "cuda", "cuda:1", "mps", ...',
            default='"cpu"',
        ),
    ] = None
    together: Annotated[
        _BatchOfModels | None,
        key_field(
            "the number of agents that train, and of models that are evaluated, in one program; 1 "
            "means one by one. The default is small dense networks on the CPU, and on another "
            "device the number that half of its memory holds, kept in [environment.json](runs.md). "
            "Results agree to rounding, except where the network draws random numbers in training "
            "(dropout). A network that cannot be computed in this way (it branches on its numbers) "
            "is trained one by one; with the key set it is an error",
            default="by the device",
            values="from 1",
        ),
    ] = None
    data: Component
    agents: AgentsSection
    model: ModelSection
    training: TrainingSection = TrainingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    attack: AttackSection | None = None
    clock: Annotated[
        ClockSection | None,
        key_field(
            "[simulated time](#the-clock): computation, downloads and presence of each agent",
            values="a table",
        ),
    ] = None
    metrics: Annotated[
        _Metrics | None,
        key_field(
            "further columns of the records: [metrics of the outputs](#metrics), or "
            "[your own](extending.md#metric)",
            values="a list of names or tables",
        ),
    ] = None

    @field_validator("metrics", mode="before")
    @classmethod
    def _as_components(cls, metrics: Any) -> Any:
        if isinstance(metrics, list | tuple):
            return [as_component(metric) for metric in metrics]
        return metrics

    @field_validator("algorithm", "attack", mode="before")
    @classmethod
    def _as_component(cls, value: Any) -> Any:
        return as_component(value)

    @field_validator("device")
    @classmethod
    def _cpu_is_default(cls, device: str | None) -> str | None:
        # A record without the key and one with "cpu" have one fingerprint.
        return None if device == "cpu" else device

    @model_validator(mode="before")
    @classmethod
    def _recommended_agents(cls, table: Any) -> Any:
        return with_recommended_agents(table)

    @model_validator(mode="after")
    def _check_consistency(self) -> "Experiment":
        self._check_agents()
        self._check_precision()
        self._check_algorithm(self.resolved.algorithm)
        return self

    @functools.cached_property
    def resolved(self) -> Resolved:
        """The functions that the experiment names, with their checked parameters; made once."""
        # A frozen model allows it: nothing that it depends on can change.
        return resolve(self._components())

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> "Experiment":
        """Copy the experiment with other values; what it resolved stays, unless they change it."""
        # pydantic copies __dict__, and with it what this property cached.
        copy = super().model_copy(update=update, deep=deep)
        former = self._components()
        if any(former[key] is not value for key, value in copy._components().items()):
            # The cached functions are those of the original.
            copy.__dict__.pop("resolved", None)
        return copy

    def _components(self) -> dict[str, Any]:
        """Return the settings that name functions, by dotted key."""
        return {key: operator.attrgetter(key)(self) for key in COMPONENT_KEYS}

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state for a pickle; another process resolves the names again."""
        state = super().__getstate__()
        # The wrapped functions of a user have no pickle.
        values = {key: value for key, value in state["__dict__"].items() if key != "resolved"}
        return {**state, "__dict__": values}

    def _check_agents(self) -> None:
        """Raise ValueError if the numbers of agents, their budget or the seeds do not fit."""
        agents = self.agents
        # An agent does not ask itself.
        largest = agents.num_agents - 1
        if not 1 <= agents.budget <= max(1, largest):
            raise ValueError(
                f"`agents.budget` must be between 1 and num_agents - 1 = {largest}, "
                f"got {agents.budget}"
            )
        if agents.validation == 1 and agents.hold_out:
            raise ValueError(
                "`agents.validation` = 1 leaves nothing to train on: take less, or set "
                "`agents.hold_out` = false to train on all samples"
            )
        if self.keep_best and not agents.hold_out:
            raise ValueError(
                "`keep_best` compares losses on validation samples, and with `agents.hold_out` = "
                "false these train the model: leave `hold_out` out"
            )
        if agents.encoding == "top_k" and agents.initialisation != "common":
            raise ValueError(
                '`agents.encoding` = "top_k" begins with the initial model that all agents know: '
                'take `agents.initialisation` = "common"'
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"`seeds` must differ, got {list(self.seeds)}")
        # A clean twin and the oracles have malicious agents without an attack.
        if self.attacked and self.attack is None:
            raise ValueError(
                "malicious agents that attack need an [attack] section (or "
                'agents.malicious_role = "clean")'
            )

    def _check_precision(self) -> None:
        """Raise ValueError if the precision needs another device."""
        # TF32 is a mode of NVIDIA's matrix units: elsewhere it would silently be float32.
        device = self.device or "cpu"
        if self.training.precision == "tf32" and device.split(":")[0] != "cuda":
            raise ValueError(
                f'`training.precision` = "tf32" needs a CUDA device, and `device` is "{device}": '
                'take "float32" or "bfloat16", or another `device`'
            )

    def _check_algorithm(self, algorithm: Algorithm) -> None:
        """Raise ValueError if the algorithm does not fit the agents or the step size."""
        agents = self.agents
        # Line 7 moves a model by this factor: above 1 it would pass the consensus point.
        factor = algorithm.factor(self.training.gamma)
        if algorithm.needs_losses and agents.num_malicious and agents.malicious_role == "benign":
            raise ValueError(
                'malicious agents with `agents.malicious_role` = "benign" hold no validation data, '
                "so the algorithm must be one without validation, such as dfedavgm; "
                '"clean" and "removed" go with every algorithm'
            )
        if self.clock is not None and algorithm.clusters is not None:
            raise ValueError("`clock` goes with algorithms whose agents ask peers: leave it out")
        if agents.encoding == "top_k":
            if algorithm.clusters is not None:
                raise ValueError(
                    '`agents.encoding` = "top_k" goes with algorithms whose agents ask peers'
                )
            if self.clock is not None and self.clock.model_bytes is None:
                raise ValueError(
                    'with `agents.encoding` = "top_k" a download takes more bytes the longer ago '
                    "the last one was: give the mean as `clock.model_bytes`"
                )
        if self.clock is not None and agents.participation < 1:
            raise ValueError(
                "`clock` decides which agents are online: take `clock.online` and `clock.offline` "
                "in place of `agents.participation`"
            )
        self._check_privacy(algorithm)
        # Some rules need more models than the budget lets an agent ask for.
        if algorithm.validate_budget is not None:
            algorithm.validate_budget(agents.budget)
        if not 0 < factor <= 1:
            raise ValueError(
                f"lambda1 * gamma must be above 0 and at most 1, got {factor:g}: choose a smaller "
                "`algorithm.lambda1`, or set `algorithm.mixing_factor` itself"
            )

    def _check_privacy(self, algorithm: Algorithm) -> None:
        """Raise ValueError if models would depend on training samples other than by DP-SGD."""
        if self.training.privacy is None:
            return
        if algorithm.clusters is not None or (algorithm.needs_losses and not self.agents.hold_out):
            raise ValueError(
                "`training.privacy` protects training samples, and this algorithm computes losses "
                "on them without noise: set `agents.hold_out` = true with `agents.validation` "
                "below 1, or take an algorithm without losses, such as dfedavgm"
            )
        if algorithm.guards.exit_test is not False:
            raise ValueError(
                "`training.privacy` protects training samples, whose losses "
                "`algorithm.guards.exit_test` compares without noise: leave one out"
            )
        if self.training.weights is not None:
            raise ValueError(
                "`training.weights` of single samples would change what `training.privacy` "
                "guarantees: leave one out"
            )
        # The other kernels have no derivative by sample.
        if self.convolution not in (None, "grouped") or self.linear not in (None, "torch"):
            raise ValueError(
                "gradients of single samples (`training.privacy`) have PyTorch's kernels: leave "
                "out `linear` and `convolution`"
            )

    def settings(self) -> dict[str, Any]:
        """Return the experiment as plain values: the content of a run's `config.toml`.

        Returns:
            A table of tables, defaults included, functions by their import path.
        """
        # Defaults are written out, so that a later version with other defaults reads the run as it
        # was.
        settings = self.model_dump(mode="python", exclude_none=True)
        for key, table in self.resolved.settings.items():
            section, _, name = key.rpartition(".")
            (settings[section] if section else settings)[name] = table
        return plugins.to_plain(settings)  # type: ignore[no-any-return]

    def fingerprint(self, seed: int) -> str:
        """Return the text that identifies the checkpoints of a seed.

        Args:
            seed: Seed of the checkpoints, which need not be one of `seeds`.

        Returns:
            JSON of all settings that the state of the seed depends on. Renamed parameters have
            their former names, so that the checkpoints of earlier versions are still read.
        """
        # Titles, rounds and paths may change between a start and a resume.
        settings = result_settings(self.settings())
        return json.dumps({"seed": seed, **settings}, sort_keys=True, default=str)

    @property
    def attacked(self) -> bool:
        """True if there are malicious agents, and their role is "attack"."""
        return self.agents.num_malicious > 0 and self.agents.malicious_role == "attack"

    @property
    def active_attack(self) -> Attack:
        """The attack of the malicious agents; one without effect where they do not attack."""
        return (self.attacked and self.resolved.attack) or Attack()

    @property
    def num_models(self) -> int:
        """The number of models that a run holds at once.

        That is N + P: a model per agent, and those that attackers craft. There are N more where the
        models before the round are kept, N where published models are encoded, and those of
        clusters.
        """
        agents = self.agents
        algorithm = self.resolved.algorithm
        extra = self.num_further_rows
        if algorithm.keeps_previous:
            extra += agents.num_agents
        return (
            agents.num_agents
            + self.active_attack.num_published(agents.num_malicious, agents.num_benign)
            + extra
        )

    @property
    def num_further_rows(self) -> int:
        """The models next to those of agents that outlive a round: of clusters, or sent ones."""
        clusters = self.resolved.algorithm.clusters
        if clusters is not None:
            return clusters.num_rows(self.agents.num_agents)
        return self.agents.num_agents if self.agents.encoding == "top_k" else 0

    def clean_counterpart(self) -> "Experiment":
        """Return NAME-clean, the same with malicious agents that train on true labels."""
        # The same samples and graph, so that the difference is the attack alone.
        agents = self.agents.model_copy(update={"malicious_role": "clean"})
        description = f"Malicious agents train on true labels: {self.description}"
        names = {
            "name": f"{self.name}-clean",
            "title": f"{self.title} (clean counterpart)",
            "description": description,
        }
        return self.model_copy(update={**names, "agents": agents})

    def local_baseline(self) -> "Experiment":
        """Return NAME-local, the same with agents that train alone, without privacy."""
        names = {
            "name": f"{self.name}-local",
            "title": f"{self.title} (local baseline)",
            "description": f"Every agent trains alone: {self.description}",
        }
        return self.model_copy(
            update={
                **names,
                "algorithm": AlgorithmSection(name="local_training"),
                # An agent that sends no model has nothing to protect.
                "training": self.training.model_copy(update={"privacy": None}),
            }
        )
