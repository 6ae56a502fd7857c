"""Data sets from arrays and .npz files: their contents, and errors that name the fault."""

import io
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch

import fedcb2o
from fedcb2o import dataset
from fedcb2o.data import arrays, breast_cancer
from fedcb2o.errors import ConfigError, DataError

X = np.arange(60.0).reshape(20, 3)
Y = np.arange(20) % 2
TORCH_DATASET = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4))


def test_labels_are_numbered_in_order_and_their_values_are_the_names():
    data = dataset(X, [7, 3] * 10)
    assert data.class_names == ("3", "7")
    assert data.pool.y.dtype == torch.int64
    # 7, the greater, in even rows
    assert torch.equal(data.pool.y, (data.pool.x[:, 0].int() % 2 == 0).long())
    assert dataset(X, ["dog", "cat"] * 10).class_names == ("cat", "dog")
    assert dataset(X, np.array([True, False] * 10)).class_names == ("False", "True")
    assert dataset(X, np.array([0.0, 2.0] * 10)).class_names == ("0", "2")


def test_with_class_names_labels_are_their_indices():
    data = dataset(X, Y, x_test=X + 1, y_test=Y, class_names=("no", "yes", "never seen"))
    assert data.class_names == ("no", "yes", "never seen")
    assert data.num_classes == 3
    assert torch.equal(data.pool.y, torch.from_numpy(Y))


@pytest.mark.parametrize(
    "convert",
    [
        np.asarray,
        torch.tensor,
        np.ndarray.tolist,
        lambda a: pd.DataFrame(a).squeeze(),
        torch.from_numpy,
    ],
)
def test_arrays_tensors_lists_and_tables_give_equal_data(convert):
    data, expected = dataset(convert(X), convert(Y)), dataset(X, Y)
    assert torch.equal(data.pool.x, expected.pool.x)
    assert torch.equal(data.test.y, expected.test.y)
    assert data.pool.x.dtype == torch.float32


def test_bytes_stay_bytes_and_other_types_become_float32():
    images = np.arange(20 * 4, dtype=np.uint8).reshape(20, 1, 2, 2)
    with pytest.warns(UserWarning, match="20 of 20 test samples are samples to train on"):
        data = dataset(images, Y, x_test=images, y_test=Y)
    assert data.pool.x.dtype == torch.uint8
    assert torch.equal(data.test.x, torch.from_numpy(images))
    images[:] = 0
    assert data.pool.x.any()  # a copy
    for dtype in (bool, np.int32, np.float16, np.float64):
        assert dataset(X.astype(dtype), Y).pool.x.dtype == torch.float32


def test_a_share_of_each_class_is_held_out():
    x, y = np.arange(100.0)[:, None], np.repeat([0, 1, 2, 3], [60, 31, 7, 2])
    data = dataset(x, y, test_share=0.25)
    assert torch.bincount(data.test.y).tolist() == [15, 8, 2, 1]
    assert sorted([*data.pool.x[:, 0].tolist(), *data.test.x[:, 0].tolist()]) == list(range(100))
    assert torch.equal(data.pool.y, torch.from_numpy(y)[data.pool.x[:, 0].long()])
    repeated, largest_share = dataset(x, y, test_share=0.25), dataset(x, y, test_share=0.99)
    assert torch.equal(data.test.x, repeated.test.x)
    assert torch.bincount(largest_share.pool.y).tolist() == [1, 1, 1, 1]


def test_features_are_standardised_over_the_pool_alone():
    x = np.column_stack([X, np.full(20, 0.1)])
    x_test = x[:5] * 3
    data = dataset(x, Y, x_test=x_test, y_test=Y[:5], standardise=True)
    torch.testing.assert_close(data.pool.x.mean(0), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.pool.x.std(0, correction=0), torch.tensor([1.0, 1, 1, 0]))
    expected = (x_test - x.mean(0)) / np.array([*X.std(0), 1])
    torch.testing.assert_close(data.test.x, torch.from_numpy(expected).float())
    pixels = dataset(np.arange(40, dtype=np.uint8).reshape(20, 2), Y, standardise=True)
    assert pixels.pool.x.dtype == torch.float32


def with_value(value: float) -> np.ndarray:
    x = X.copy()
    x[4, 2] = x[9, 0] = value
    return x


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (with_value(np.nan), Y, {}, r"`x` holds 2 values that are no finite .* in sample 4 at \[2\]: nan; fill"),
        (with_value(1e300), Y, {}, r"`x` holds 2 values that are no finite float32 .* in sample 4 at \[2\]: 1e\+300"),
        (X.astype(str), Y, {}, "`x` must hold numbers, got values of type <U32"),
        (X[:, 0], Y, {}, r"`x` must hold samples \[n, features\] or images .* got shape \(20,\)"),
        ([[1], [2, 3]], [0, 1], {}, r"`x` cannot be read as an array \("),
        (TORCH_DATASET, None, {}, "every sample has the label 0"),
        (TORCH_DATASET, Y, {}, r"`x` cannot be read as an array \(.*\); a data set of pairs"),
        (X, Y[:-1], {}, "`x` holds 20 samples, and `y` 19 labels"),
        (X, Y[:, None], {}, r"`y` must hold one label for each sample, \[n\], got shape \(20, 1\)"),
        (X, np.eye(2)[Y % 2], {}, r"one label for each sample, \[n\], got shape \(20, 2\): take its argmax"),
        (X, Y + 0.5, {}, "hold classes, whole numbers or words, got 0.5; the targets of a regression need `numbers=True`"),
        (X, np.where(Y, np.nan, 1.0), {}, "`y` must hold classes, whole numbers or words, got nan$"),
        (X, np.array([None, "a"] * 10), {}, "`y` has 10 missing values, the first in sample 0: fill them in"),
        (X, Y * 0 + 3, {}, "every sample has the label 3: there must be two classes or more"),
        (np.ma.masked_greater(X, X.mean()), Y, {}, "`x` has masked values: fill them in, or leave these samples out"),
        (X, Y, {"class_names": "ab"}, "`class_names` must be a list of words, one for each class, got 'ab'"),
        (X, np.arange(20), {}, "class '0' has 1 samples, and holding some out needs 2 or more of each class"),
        (X, Y, {"class_names": ("a", "a")}, "two classes or more, of different names, got a, a"),
        (X, Y + 1, {"class_names": ("a", "b")}, "of 2 classes, labels are numbers from 0 to 1, got 1 to 2"),
        (X, Y, {"class_names": ("a", "b", "c")}, "class 'c' has 0 samples"),
        (X, Y, {"x_test": X}, "`x_test` and `y_test` go together"),
        (X, Y, {"x_test": X[:, :2], "y_test": Y}, r"of `x` have shape \(3,\), and those of `x_test` \(2,\)"),
        (X, Y, {"x_test": X, "y_test": Y[:3]}, "`x_test` holds 20 samples, and `y_test` 3 labels"),
        (X, Y, {"x_test": X, "y_test": ["a", "b"] * 10}, "`y` and `y_test` must hold labels of one kind"),
    ],
)  # fmt: skip
def test_invalid_arrays_are_refused(x, y, options, message):
    with pytest.raises(DataError, match=message) as caught:
        dataset(x, y, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_test_share_must_be_between_0_and_1(share):
    message = "`test_share` is the share of every class that tests, between 0 and 1, got"
    with pytest.raises(ConfigError, match=message):
        dataset(X, Y, test_share=share)


# --- .npz files


def test_an_npz_file_equals_its_arrays(tmp_path, monkeypatch):
    np.savez(tmp_path / "my.npz", x=X, y=np.array(["a", "b"])[Y])
    data = arrays(path=str(tmp_path / "my.npz"), test_share=0.5, standardise=True)
    expected = dataset(X, np.array(["a", "b"])[Y], test_share=0.5, standardise=True)
    assert data.class_names == ("a", "b")
    assert torch.equal(data.pool.x, expected.pool.x)
    assert torch.equal(arrays(path="my.npz", data_dir=tmp_path).pool.y, dataset(X, Y).pool.y)
    monkeypatch.chdir(tmp_path)
    assert len(arrays(path="my.npz").test) == 4  # a quarter of 10 is 2, of both classes


def test_an_npz_file_with_a_test_set_and_class_names(tmp_path):
    names = np.array(["no", "yes"])
    np.savez_compressed(
        tmp_path / "my.npz", x=X, y=Y, x_test=X[:6] + 1, y_test=Y[:6], class_names=names
    )
    data = arrays(path="my.npz", data_dir=tmp_path)
    assert (len(data.pool), len(data.test), data.class_names) == (20, 6, ("no", "yes"))
    assert all(type(name) is str for name in data.class_names)


def overwrite_bytes(path):
    body = bytearray(path.read_bytes())
    body[300:320] = bytes(20)
    path.write_bytes(body)


def set_flag(path, flag):
    """Set a flag of the first entry of an archive, in both of its headers."""
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(signature) + offset] |= flag
    path.write_bytes(content)


def write_huge_shape(path):
    """Write an archive whose `x` has a header of 8 PB, and 8 bytes."""
    content = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (10**15, 2)}
    np.lib.format.write_array_header_1_0(content, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", content.getvalue() + bytes(8))


FILES = {
    "missing": (
        lambda path: path.unlink(),
        "there is no file .*my.npz: `data.path` begins in the folder of `--data-",
    ),
    "text": (
        lambda path: path.write_text("x,y\n1,2\n"),
        "my.npz is no .npz file: write it with numpy.savez",
    ),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-30]), "my.npz is no .npz file"),
    "damaged": (
        overwrite_bytes,
        "my.npz cannot be read .* it must hold arrays of numbers and words only",
    ),
    "encrypted": (lambda path: set_flag(path, 1), "my.npz cannot be read .*encrypted"),
    "another compression": (lambda path: set_flag(path, 0x20), "my.npz cannot be read .*patched"),
    "huge": (write_huge_shape, "my.npz cannot be read .*Unable to allocate"),
    "no y": (lambda path: np.savez(path, x=X), "my.npz holds no `y`"),
    "another key": (
        lambda path: np.savez(path, x=X, y=Y, X_test=X),
        "`X_test`, .* Did you mean `x_test`?",
    ),
    "an object": (
        lambda path: np.savez(path, x=X, y=np.array([{}] * 20)),
        "Object arrays cannot be loaded when",
    ),
    "not finite": (
        lambda path: np.savez(path, x=X * np.nan, y=Y),
        "my.npz: `x` holds 60 values that are no finite",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_without_a_valid_data_set_give_a_one_line_error(tmp_path, case):
    path = tmp_path / "my.npz"
    np.savez(path, x=X, y=Y)
    change, message = FILES[case]
    change(path)
    with pytest.raises(DataError, match=message) as caught:
        arrays(path="my.npz", data_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_runs_from_a_file_and_from_arrays_are_equal_to_the_bit(tmp_path):
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    np.savez(tmp_path / "wine.npz", x=x, y=y)
    agents = {
        "num_clusters": 1,
        "benign": 3,
        "malicious": 0,
        "benign_samples": 30,
        "malicious_samples": 1,
        "budget": 2,
    }
    runs = []
    for name, data in (
        ("file", {"name": "arrays", "path": "wine.npz", "standardise": True}),
        ("here", {"name": lambda: dataset(x, y, standardise=True)}),
    ):
        experiment = {
            **{
                "name": name,
                "seeds": [0],
                "rounds": 3,
                "data": data,
                "agents": {**agents, "skew": "dirichlet"},
            },
            **{
                "model": {"name": "logistic"},
                "training": {"gamma": 0.05},
                "algorithm": {"name": "fedcbo"},
            },
        }
        runs.append(fedcb2o.run(experiment, out=tmp_path / name, data_dir=tmp_path))
    pd.testing.assert_frame_equal(runs[0].records, runs[1].records)
    assert runs[0].records.accuracy.iloc[-1] > 0.8
    assert runs[0].config["agents"]["skew"] == {"name": "dirichlet", "concentration": 0.5}


# --- breast cancer


def test_breast_cancer_is_standardised_and_split_by_class():
    data = breast_cancer()
    assert data.class_names == ("malignant", "benign")
    assert data.pool.x.shape == (427, 30)
    assert torch.bincount(data.test.y).tolist() == [53, 89]  # a quarter of 212 and of 357
    assert data.pool.x.dtype == torch.float32
    torch.testing.assert_close(data.pool.x.mean(0), torch.zeros(30), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.pool.x.std(0, correction=0), torch.ones(30))
    assert data.test.x.mean(0).abs().max() > 1e-3  # not over the test set
    assert torch.equal(data.test.x, breast_cancer().test.x)


def test_breast_cancer_labels_match_their_samples():
    data = breast_cancer()
    means = torch.stack([data.pool.x[data.pool.y == c].mean(0) for c in range(2)])
    assert (torch.cdist(data.test.x, means).argmin(1) == data.test.y).float().mean() > 0.9
