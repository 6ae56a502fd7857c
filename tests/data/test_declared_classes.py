"""Classes that data sets declare: folders of images and columns of Hugging Face."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from tests.data.test_sources import ClassLabel, HuggingFace
from torch.utils.data import ConcatDataset, DataLoader, Subset

from fedcb2o import dataset, datasets
from fedcb2o.errors import DataError

N = 24


class Folder:
    """As torchvision's ImageFolder: it numbers its own classes, and has their names."""

    def __init__(self, classes, seed=0, **attributes):
        self.classes = classes
        self.x = np.random.default_rng(seed).normal(size=(N, 3)).astype(np.float32)
        self.y = np.arange(N) % len(classes)
        self.__dict__.update(attributes)

    def __len__(self):
        return N

    def __getitem__(self, k):
        return torch.tensor(self.x[k]), int(self.y[k])


def words(data, folder):
    """Return whether the pool's samples have the words that their folder gave them."""
    by_row = {tuple(x): folder.classes[y] for x, y in zip(folder.x.tolist(), folder.y, strict=True)}
    found = [
        data.class_names[y] == by_row[tuple(x)]
        for x, y in zip(data.pool.x.tolist(), data.pool.y.tolist(), strict=True)
        if tuple(x) in by_row
    ]
    return bool(found) and all(found)


PETS = Folder(["dog", "cat", "bird"])


@pytest.mark.parametrize(
    "source",
    [
        PETS,
        Subset(PETS, range(N)),
        Subset(Subset(PETS, range(N)), range(N)),
        DataLoader(PETS, batch_size=5),
        ConcatDataset([Subset(PETS, range(12)), Subset(PETS, range(12, N))]),
    ],
)
def test_classes_of_a_folder_are_the_names_in_its_order(source):
    data = dataset(source)
    assert data.class_names == ("dog", "cat", "bird")
    assert words(data, PETS)


def test_folders_of_owners_share_the_union_by_name():
    folders = {"north": Folder(["cat", "dog"], 0), "south": Folder(["dog", "horse"], 1), "east": Folder(["cat"], 2)}  # fmt: skip
    with pytest.warns(UserWarning, match="owners have different labels"):
        data = datasets(folders)
    assert data.class_names == ("cat", "dog", "horse")
    assert all(words(data, folder) for folder in folders.values())


def test_the_folder_with_all_classes_has_their_order():
    folders = [Folder(["dog", "cat"], 0), Folder(["horse", "dog", "cat"], 1)]
    data = datasets(folders, test=Folder(["cat", "horse"], 2))
    assert data.class_names == ("horse", "dog", "cat")
    assert all(words(data, folder) for folder in folders)


def test_words_and_numbers_next_to_folders():
    x = np.random.default_rng(5).normal(size=(6, 3))
    data = dataset(PETS, x_test=x, y_test=["bird", "dog"] * 3)
    assert data.test.y.tolist() == [2, 0] * 3
    data = dataset(PETS, x_test=x, y_test=[2, 0] * 3)
    assert data.test.y.tolist() == [2, 0] * 3
    with pytest.raises(
        DataError, match="`y of test` has numbers as labels, and the other data sets name"
    ):
        datasets([Folder(["cat", "dog"]), Folder(["dog", "horse"])], test=(x, [0, 1] * 3))


def test_names_of_the_user_and_other_labels_come_first():
    assert dataset(PETS, class_names=["a", "b", "c"]).class_names == ("a", "b", "c")
    assert dataset(Folder(["cat", "dog"], target_transform=str)).class_names == ("0", "1")
    assert dataset(Folder([0, 1])).class_names == ("0", "1")
    assert dataset(Folder(["a", "a"])).class_names == ("0", "1")


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [({"cat": 1, "dog": 0}, ("dog", "cat")), ({"cat": 0, "dog": 0, "ant": 1}, ("0", "1"))],
)
def test_the_numbers_of_a_folder_come_before_its_order(numbers, expected):
    assert dataset(Folder(["cat", "dog"], class_to_idx=numbers)).class_names == expected


def test_a_class_without_samples_keeps_its_place():
    data = dataset(Subset(PETS, np.flatnonzero(PETS.y != 1)))
    assert data.class_names == ("dog", "cat", "bird")
    assert torch.bincount(data.test.y).tolist() == [2, 0, 2]


def test_joined_folders_of_different_classes_are_refused():
    joined = ConcatDataset([Folder(["cat", "dog"]), Folder(["dog", "horse"])])
    with pytest.raises(DataError, match="`x` joins data sets with different names of classes"):
        dataset(joined)


def test_target_names_of_scikit_learn():
    assert dataset(load_iris()).class_names == ("setosa", "versicolor", "virginica")


# --- Hugging Face

PIXELS = np.random.default_rng(0).integers(0, 256, (N, 4, 4), dtype=np.uint8)
LABELS = np.arange(N) % 2
NAMES = ClassLabel(["World", "Sports"])
COLUMNS = ("image", "label")


class Image:
    """Stand-in for `datasets.Image`."""


def hub(labels=LABELS, form=None, decode=None, **features):
    from PIL import Image as Pillow

    rows = [
        {"image": Pillow.fromarray(image), "label": int(y), "age": k, "dose": 0.5 * k, "site": "ab"[k // 12]}
        for k, (image, y) in enumerate(zip(PIXELS, labels, strict=True))
    ]  # fmt: skip
    features = {"image": Image(), "label": NAMES, **features}
    return HuggingFace(rows, form, decode, **features)


def test_class_labels_are_the_names_in_their_order():
    data = dataset(hub(), columns=COLUMNS, owner="site")
    assert data.class_names == ("World", "Sports")
    assert data.pool.x.shape[1:] == (1, 4, 4)
    assert torch.bincount(data.owners.pool).tolist() == [9, 9]
    part = hub(decode=lambda row: {**row, "image": row["image"].rotate(90)})
    parts = datasets({"a": hub(), "b": {"train": part}}, columns=COLUMNS, test_share=0.5)
    assert parts.class_names == ("World", "Sports")


@pytest.mark.parametrize(
    "wrap", [lambda source: source, lambda source: DataLoader(Decoded(source), batch_size=5)]
)
def test_owners_have_the_names_of_their_column(wrap):
    sites = [3 * [k] for k in (2, 0, 1, 0)]
    rows = [
        {"x": [float(k), -1.0], "label": k % 2, "site": np.concatenate(sites)[k % 12]}
        for k in range(N)
    ]
    source = HuggingFace(rows, site=ClassLabel(["north", "south", "east"]))
    data = dataset(wrap(source), columns=("x", "label"), owner="site")
    assert data.owners.names == ("east", "north", "south")
    names = np.array(["north", "south", "east"])[np.concatenate(sites)]
    owners = [data.owners.names[k] for k in data.owners.pool]
    assert owners == [names[int(x) % 12] for x in data.pool.x[:, 0]]
    rows[3]["site"] = -1
    with pytest.raises(
        DataError, match="`x` has samples without an owner, of the number -1 in 'site'"
    ):
        dataset(wrap(source), columns=("x", "label"), owner="site")


class Decoded:
    """Data set of Hugging Face whose rows are read one by one."""

    def __init__(self, source):
        self.source, self.features = source, source.features

    def __len__(self):
        return N

    def __getitem__(self, k):
        row = self.source.rows[k]
        return {**row, "x": torch.tensor(row["x"])}


def test_the_label_for_no_label_is_refused():
    with pytest.raises(
        DataError,
        match=r"`y` has 3 samples with the label -1, which means that there is no label: .*`.filter`",
    ):
        dataset(hub(np.where(np.arange(N) < 3, -1, LABELS)), columns=COLUMNS)
    assert dataset(np.eye(N), 2 * LABELS - 1).class_names == ("-1", "1")


def as_arrays(row):
    """Decode a row as the format of NumPy does: images without an axis of channels."""
    return {**row, "image": np.asarray(row["image"])}


@pytest.mark.parametrize("form", ["numpy", "torch", "arrow", "polars", None])
def test_images_are_the_same_in_every_format(form):
    data = dataset(hub(form=form, decode=as_arrays if form else None), columns=COLUMNS)
    assert data.pool.x.equal(dataset(PIXELS[:, None], LABELS).pool.x)


def test_formats_without_images_and_transforms_stay():
    transformed = hub(form="custom", decode=lambda row: {**row, "image": row["age"] * np.ones(2)})
    assert dataset(transformed, columns=COLUMNS).pool.x.shape[1:] == (2,)
    tensors = hub(
        form="torch", decode=lambda row: {**row, "age": torch.tensor(row["age"])}, image=None
    )
    data = dataset(tensors, columns=(["age", "dose"], "label"))
    expected = dataset(np.column_stack([np.arange(N), 0.5 * np.arange(N)]), LABELS)
    assert data.pool.x.equal(expected.pool.x)


def test_several_columns_of_arrays_are_refused():
    with pytest.raises(
        DataError, match=r"`x` has samples of shape \(2,\) in the column 'left': of several"
    ):
        dataset(
            {"left": [[1, 2]] * 4, "right": [1] * 4, "label": [0, 1] * 2},
            columns=(["left", "right"], "label"),
        )


class DatasetDict(dict):
    """Stand-in for `datasets.DatasetDict`."""

    column_names = ()

    def with_format(self, kind):
        raise AssertionError


def test_several_splits_are_refused_with_the_cure():
    splits = DatasetDict(train=hub(), test=hub())
    cure = r'give each: dataset\(splits\["train"\], x_test=splits\["test"\], ...\)'
    with pytest.raises(DataError, match=cure):
        dataset(splits, columns=COLUMNS)
    with pytest.raises(DataError, match=cure):
        dataset(splits)
    with pytest.raises(DataError, match=r"`x_test` has no column 'image'. It is several data sets"):
        dataset(hub(), columns=COLUMNS, x_test=splits)
