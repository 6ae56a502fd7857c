"""Tested and chosen strengths of attacks, from strengths.json."""

import json
from typing import Any

import pandas as pd

from fedcb2o.records import read_json_with_checksum, slug
from fedcb2o.report._page import Page
from fedcb2o.report.grid_results import GridResults
from fedcb2o.report.grid_tables import describe_changes


def read_choices(results: GridResults) -> list[dict[str, Any]]:
    """Read the tested and chosen strengths of a grid, one dict for each cell of strengths.json."""
    path = results.folder / "strengths.json"
    if not path.is_file():
        return []
    choices: list[dict[str, Any]] = read_json_with_checksum(path)["choices"]
    return [
        choice
        for choice in choices
        if choice["defence"] in results.defences and choice["attack"] in results.attacks
    ]


def chosen_strengths_table(choices: list[dict[str, Any]], setting: str) -> pd.DataFrame:
    """Build the table of the changes of chosen strengths, defences by attacks."""
    selected = [choice for choice in choices if choice["setting"] == setting]
    texts = {}
    for choice in selected:
        key = (choice["defence"], choice["attack"])
        texts[key] = _describe_strength(choice, choice["worst"])
    table = pd.Series(texts, dtype=object).unstack()
    defences = list(dict.fromkeys(choice["defence"] for choice in selected))
    attacks = list(dict.fromkeys(choice["attack"] for choice in selected))
    table = table.reindex(index=pd.Index(defences, name="Defence"), columns=attacks)
    return table.rename_axis(columns=None).fillna("–")


def strength_trials_table(choices: list[dict[str, Any]]) -> pd.DataFrame:
    """Build the table of tested strengths: the values of each seed, the choice, and the harm."""
    rows = []
    for choice in choices:
        seeds = choice["asked"]["seeds"]
        for number, result in enumerate(choice["tried"]):
            row = {key: choice[key] for key in ("setting", "defence", "attack")}
            row["strength"] = _describe_strength(choice, number)
            row["chosen"] = "yes" * (number == choice["worst"])
            for name in ("accuracy", "attack_success_rate"):
                values = result.get(name) or [None] * len(seeds)
                for seed, value in zip(seeds, values, strict=True):
                    row[f"{name}_seed_{seed}"] = value
            rows.append({**row, "harm": result["harm"]})
    return pd.DataFrame(rows)


def write_strengths(page: Page, results: GridResults, start: str) -> None:
    """Write strengths.csv, strengths.json and matrices of the chosen strengths, if any."""
    choices = read_choices(results)
    if not choices:
        return
    for setting in dict.fromkeys(choice["setting"] for choice in choices):
        name = "/".join(filter(None, ["matrices", setting and slug(setting), "strengths"]))
        page.write_table(start + name, chosen_strengths_table(choices, setting))
    page.write_file(f"{start}strengths.csv", strength_trials_table(choices).to_csv(index=False))
    page.write_file(f"{start}strengths.json", json.dumps({"choices": choices}, indent=1) + "\n")


def _describe_strength(choice: dict[str, Any], number: int) -> str:
    return describe_changes(choice["asked"]["strengths"][number]).replace("attack.", "")
