"""How strong each attack was against each defence, and what was tried: read from a grid's strengths.json."""

import json
from typing import Any

import pandas as pd

from fedcb2o.records import read_json_with_checksum
from fedcb2o.report.grid_results import GridResults
from fedcb2o.report.grid_tables import describe_changes
from fedcb2o.report.page import Page, slug

_CAPTION = (
    "Each attack was run against each defence as strongly as harmed it most on tuning images, with seeds {seeds}: by "
    "its success rate where it has one, else by the accuracy. Every defence faced the same strengths, with the "
    "hyperparameters that it has here. {ends} of {choices} choices lie at an end of their list: beyond it more might "
    "have been done."
)


def read_choices(results: GridResults) -> list[dict[str, Any]]:
    """What was tried and chosen for each setting, defence and attack of a grid that are in its file."""
    path = results.folder / "strengths.json"
    lines = read_json_with_checksum(path)["choices"] if path.is_file() else []
    return [
        line
        for line in lines
        if line["defence"] in results.defences and line["attack"] in results.attacks
    ]


def chosen_strengths_table(choices: list[dict[str, Any]], setting: str) -> pd.DataFrame:
    """Defences by attacks: what the chosen strength changes."""
    mine = [line for line in choices if line["setting"] == setting]
    texts = {
        (line["defence"], line["attack"]): _describe_strength(line, line["worst"]) for line in mine
    }
    table = (
        pd.Series(texts, dtype=object).unstack().rename_axis("Defence").rename_axis(columns=None)
    )
    order = (
        list(dict.fromkeys(line["attack"] for line in mine)),
        list(dict.fromkeys(line["defence"] for line in mine)),
    )
    return table.reindex(columns=order[0], index=pd.Index(order[1], name="Defence")).fillna("–")


def tested_strengths_table(choices: list[dict[str, Any]]) -> pd.DataFrame:
    """A row for each strength that was tried: the means over seeds, whether it was chosen; and each seed's values."""
    rows = []
    for line in choices:
        for number, each in enumerate(line["tried"]):
            where = {key: line[key] for key in ("setting", "defence", "attack")}
            chosen = {
                "strength": _describe_strength(line, number),
                "chosen": "yes" * (number == line["worst"]),
            }
            seeds = line["asked"]["seeds"]
            for name in ("accuracy", "attack_success_rate"):
                values = each.get(name) or [None] * len(seeds)
                chosen |= {
                    f"{name}_seed_{seed}": value for seed, value in zip(seeds, values, strict=True)
                }
            rows.append({**where, **chosen, "harm": each["harm"]})
    return pd.DataFrame(rows)


def write_strengths(page: Page, results: GridResults) -> None:
    """The strengths on the page, each tried one in strengths.csv, and strengths.json; nothing where there are none."""
    if not (choices := read_choices(results)):
        return
    ends = sum(line["worst"] in (0, len(line["tried"]) - 1) for line in choices)
    seeds = ", ".join(map(str, choices[0]["asked"]["seeds"]))
    caption = _CAPTION.format(seeds=seeds, ends=ends, choices=len(choices))
    for setting in dict.fromkeys(line["setting"] for line in choices):
        title = ": ".join(filter(None, ["Strengths", setting]))
        name = "/".join(filter(None, ["matrices", setting and slug(setting), "strengths"]))
        page.add_table(
            title, name, chosen_strengths_table(choices, setting), caption, collapsed=True
        )
    page.write_file("strengths.csv", tested_strengths_table(choices).to_csv(index=False))
    page.write_file("strengths.json", json.dumps({"choices": choices}, indent=1) + "\n")


def _describe_strength(line: dict[str, Any], number: int) -> str:
    return describe_changes(line["asked"]["strengths"][number]).replace("attack.", "")
