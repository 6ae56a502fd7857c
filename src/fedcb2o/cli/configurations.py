"""The commands for configurations: presets, keys, schema."""

import json
import sys
import textwrap
from collections.abc import Mapping
from typing import Annotated

from typer import Argument, Option

from fedcb2o.cli import completion
from fedcb2o.errors import ConfigError
from fedcb2o.safe_stdio import encodable

# Headings of the presets by the beginning of their names.
_GROUPS = {
    "digits": "Digits of scikit-learn, seconds",
    "emnist-small": "Reduced EMNIST, minutes a seed",
    "emnist": "EMNIST at the paper's full size, hours, or minutes on a GPU",
    "": "Agents with data of their own, seconds to a minute",
}


def presets(
    name: Annotated[
        str | None,
        Argument(metavar="[PRESET]", help="Preset to print.", autocompletion=completion.presets),
    ] = None,
) -> None:
    """List the presets, or print one as a configuration file.

    Example: fedcb2o presets digits-fedassay > mine.toml
    """
    if name is None:
        from fedcb2o.experiments.config.tables import presets as all_presets

        _print_groups(all_presets())
        return
    from fedcb2o.experiments.config.loading import load
    from fedcb2o.records import to_toml

    print(to_toml(load(name).settings()), end="")


def keys(
    name: Annotated[
        str | None,
        Argument(
            metavar="[NAME]",
            help="A kind: data, model, algorithm, attack, criterion, rule, pre_step, selection, "
            "graph, skew, cluster_transform, loss, optimiser, metric. Or a part, such as krum or "
            "your own module:function, or a key, such as agents.budget.",
        ),
    ] = None,
) -> None:
    """List the keys of a configuration or the built-in parts of a kind; describe a key or a part.

    Example: fedcb2o keys, and: fedcb2o keys attack, and: fedcb2o keys krum
    """
    from fedcb2o import plugins
    from fedcb2o.experiments import key_table
    from fedcb2o.experiments import schema as catalogues

    all_rows = list(key_table.key_rows())
    rows = [row for row in all_rows if name is None or f".{row[0]}".endswith(f".{name}")]
    if name in catalogues.KINDS:
        for part, parameters, summary in catalogues.part_rows(name):
            _print_entry(": ".join(filter(None, [part, parameters])), summary)
    elif name is not None and (text := catalogues.describe_part(name)):
        print(text)
    elif rows:
        for key, values, default, meaning in rows:
            _print_entry(f"{key}: {values} (default: {default})", meaning)
    else:
        section, _, parameter = str(name).rpartition(".")
        parts = catalogues.parts_with(parameter, section)
        if parts:
            raise ConfigError(
                f"`{parameter}` is a parameter of {', '.join(parts)}: such as `fedcb2o keys "
                f"{parts[0]}`"
            )
        kinds = ", ".join(catalogues.KINDS)
        names = [*catalogues.part_names(), *(row[0] for row in all_rows)]
        raise ConfigError(
            f"{name!r} is no key, no built-in part, and no kind of parts ({kinds})."
            f"{plugins.did_you_mean(str(name), names)} A part shows its parameters: `fedcb2o keys "
            "fedassay`"
        )


def _print_entry(head: str, text: str) -> None:
    from fedcb2o.experiments.schema import plain_text

    print(plain_text(head))
    print(textwrap.fill(plain_text(text), 100, initial_indent="    ", subsequent_indent="    "))


def schema(
    grid: Annotated[
        bool, Option("--grid", help="Print the schema of a grid file instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of a configuration, for editors.

    Example: fedcb2o schema > fedcb2o.schema.json, and in the first line of mine.toml:
    #:schema fedcb2o.schema.json
    """
    from fedcb2o.experiments.schema import grid_schema
    from fedcb2o.experiments.schema import schema as experiment_schema

    content = experiment_schema()
    if grid:
        content = grid_schema()
    text = json.dumps(content, indent=1, ensure_ascii=False)
    # Output that cannot show all characters gets escapes, which mean the same in JSON.
    if text != encodable(text, sys.stdout.encoding):
        text = json.dumps(content, indent=1)
    print(text)


def _print_groups(descriptions: Mapping[str, str]) -> None:
    """Print the presets by data set, the recommended method first."""
    left = dict(descriptions)
    for prefix, heading in _GROUPS.items():
        names = [name for name in left if name.startswith(prefix)]
        names.sort(key=lambda name: ("fedassay" not in name, name))
        if names:
            print(f"{heading}:")
            print_descriptions({f"  {name}": left.pop(name) for name in names})


def print_descriptions(descriptions: Mapping[str, str]) -> None:
    """Print names and descriptions, one per line."""
    width = max(map(len, descriptions))
    for name, description in descriptions.items():
        print(f"{name:{width}}  {description}")
