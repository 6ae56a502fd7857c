"""Names of defences and attacks on pages, for the names in committed values.

Committed values keep the names under which they were measured. Pages show the names below: the
defences that were called "FedCB2O" with further words are forms of the method that is now FedAssay,
and "FedCB2O" itself had its own model trusted. This module is the only place of these names.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedcb2o.report import GridResults

FIRST_FORM = "FedAssay (first form)"
HELD_OUT = f"{FIRST_FORM}, held out"
_STARTS = {
    "FedCB2O, all data, apart, six pixels": f"{FIRST_FORM}, backdoor search of 6 pixels",
    "FedCB2O, all data, apart, perturbations": f"{FIRST_FORM}, backdoor search",
    "FedCB2O, all data, apart": FIRST_FORM,
    "FedCB2O, all data": f"{FIRST_FORM} without apart",
    "FedCB2O, sub-level set and perturbations": f"{HELD_OUT}, backdoor search",
    "FedCB2O, sub-level set": HELD_OUT,
    "All data, without: ": f"{FIRST_FORM} without apart, without ",
    "Without the released split": f"{HELD_OUT}, without the released split",
    "Without: ": f"{HELD_OUT}, without ",
    "Algorithm 2, own model trusted": "FedCB2O (own model trusted)",
    "With the released split alone": "FedCB2O (own model trusted), with the released split",
    "Alone: ": "FedCB2O (own model trusted), with ",
}
_ATTACKS = {"Trash": "Random models", "Sign flip x5": "Sign flip, scale 5"}


def defence_name(name: str) -> str:
    """Return the name of a defence on pages.

    Args:
        name: Its name in committed values.

    Example:
        >>> defence_name("FedCB2O, all data, apart")
        'FedAssay (first form)'
        >>> defence_name("FedCB2O, released")
        'FedCB2O (released)'
    """
    for start, shown in _STARTS.items():
        if name.startswith(start):
            return shown + name.removeprefix(start)
    if name == "FedCB2O":
        return "FedCB2O (own model trusted)"
    return re.sub(r"^FedCB2O, (.+)$", r"FedCB2O (\1)", name)


def rename_results(results: GridResults) -> GridResults:
    """Return the results of a grid under the names of pages.

    Args:
        results: Results with the names of committed values.
    """
    table = dict(results.table)
    table["defences"] = _rename_keys(table["defences"], defence_name)
    table["attacks"] = _rename_keys(table["attacks"], attack_name)
    table["reference"] = defence_name(results.reference)
    table["set_aside"] = [attack_name(name) for name in results.set_aside]
    rows = results.rows.assign(
        defence=results.rows.defence.map(defence_name), attack=results.rows.attack.map(attack_name)
    )
    return replace(
        results, table=table, tuning=_rename_keys(results.tuning, defence_name), rows=rows
    )


def attack_name(name: str) -> str:
    """Return the name of an attack on pages.

    Args:
        name: Its name in committed values.
    """
    return _ATTACKS.get(name, name)


def _rename_keys(table: Mapping[str, Any], rename: Any) -> dict[str, Any]:
    return {rename(key): value for key, value in table.items()}
