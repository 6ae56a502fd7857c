"""Plug-ins: names, functions, and keyword-only arguments as parameters."""

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedcb2o import plugins
from fedcb2o.data import sets
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.federated import algorithms, attacks, criteria, selection
from fedcb2o.plugins import to_python


def plain(
    judged: Any, *, power: float = 1.0, kind: Literal["a", "b"] = "a", many: tuple[int, ...] = (1,)
) -> Any:
    return judged, power, kind, many


def required(judged: Any, *, level: int) -> int:
    return judged + level


class Callable:
    def __call__(self, judged: Any, *, power: float = 1.0) -> float:
        return judged * power


def test_built_in_names_are_the_public_names_of_a_module():
    assert plugins.resolve("criterion", "average_loss", criteria) is criteria.average_loss
    assert plugins.resolve("algorithm", "fedcbo", algorithms) is algorithms.fedcbo
    for hidden in ("annotations", "Judged", "torch", "__doc__", "Tensor"):
        with pytest.raises(ConfigError, match=f"there is no criterion `{hidden}`"):
            plugins.resolve("criterion", hidden, criteria)
    message = r"Built in: everyone, prob_sampling, uniform; or name your own as \"package"
    with pytest.raises(ConfigError, match=message):
        plugins.resolve("selection", "best", selection)
    message = r"there is no data set `digit`\. Did you mean `digits`\?"
    with pytest.raises(ConfigError, match=message):
        plugins.resolve("data set", "digit", sets)


def test_import_paths_find_a_users_module_next_to_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "my_own_parts.py").write_text(
        "class Room:\n    @staticmethod\n    def f(x, *, y=1):\n        return x + y\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    function = plugins.resolve("rule", "my_own_parts:Room.f", attacks)
    assert function(2, y=3) == 5
    assert list(plugins.parameters(function)) == ["y"]
    del sys.modules["my_own_parts"]


@pytest.mark.parametrize(
    "function", [plain, Callable(), functools.partial(plain, power=3.0), lambda judged: judged]
)
def test_functions_are_accepted_and_keep_their_signature(function):
    resolved = plugins.resolve("criterion", function, criteria)
    assert plugins.parameters(resolved) == plugins.parameters(function)
    assert resolved(2) == function(2)


def test_labels_are_names_or_import_paths():
    assert plugins.label("average_loss") == "average_loss"
    assert plugins.label(plain) == f"{__name__}:plain"
    assert plugins.label(Callable()) == f"{__name__}:Callable"


def test_an_error_of_a_users_function_names_it_and_its_line():
    def fails(kind):
        if kind == "ours":
            raise DataError("no samples")
        raise KeyError(kind)

    resolved = plugins.resolve("rule", fails, attacks)
    line = fails.__code__.co_firstlineno + 3
    message = rf"fails` failed at line {line} of .*test_plugins\.py: KeyError: 'x'"
    with pytest.raises(ConfigError, match=message) as caught:
        resolved("x")
    assert isinstance(caught.value.__cause__, KeyError)  # for debugging in Python
    with pytest.raises(DataError, match=r"^no samples$"):
        resolved("ours")


@pytest.mark.parametrize("fails", [False, True])
def test_pytorchs_settings_are_restored_after_a_users_function(fails):
    def changes():
        torch.set_num_threads(7)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        if fails:
            raise SystemExit

    before = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    with pytest.raises(ConfigError, match="SystemExit") if fails else contextlib.nullcontext():
        plugins.resolve("rule", changes, attacks)()
    assert before == (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())


def test_ctrl_c_in_a_users_function_is_not_an_error_of_it():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plugins.resolve("rule", interrupted, attacks)()


def test_parameters_are_checked_against_the_signature():
    bound = plugins.bind("criterion", plain, {"power": 2, "kind": "b", "many": [1, 2]})
    assert bound == {"power": 2.0, "kind": "b", "many": (1, 2)}
    assert plugins.bind("criterion", plain, {}) == {}
    wrong = [
        ({"powr": 2}, r"criterion `plain` has no parameter `powr`\. Did you mean `power`\?"),
        ({"zzz": 2}, r"criterion `plain` has no parameter `zzz`\. It has: power, kind, many"),
        ({"judged": 2}, "criterion `plain` has no parameter `judged`"),
        ({"power": "much"}, "criterion `plain`: `power` = 'much': Input should be a valid number"),
        ({"power": True}, "criterion `plain`: `power` = True: Input should be a valid number"),
        ({"power": "5"}, "criterion `plain`: `power` = '5': Input should be a valid number"),
        ({"many": [1, "2"]}, "criterion `plain`: `many` = .*: Input should be a valid integer"),
        ({"kind": 1}, "criterion `plain`: `kind` = 1: Input should be 'a' or 'b'"),
        (
            {"power": float("nan")},
            "criterion `plain`: `power` = nan: Input should be a finite number",
        ),
        ({"kind": "c"}, "criterion `plain`: `kind` = 'c': Input should be 'a' or 'b'"),
        ({"many": ["x"]}, "criterion `plain`: `many` = "),
    ]
    for invalid, message in wrong:
        with pytest.raises(ConfigError, match=message):
            plugins.bind("criterion", plain, invalid)
    with pytest.raises(ConfigError, match="attack `required` needs the parameter `level`"):
        plugins.bind("attack", required, {})
    with pytest.raises(ConfigError, match=r"has no parameter `x`\. It has none"):
        plugins.bind("attack", lambda judged: judged, {"x": 1})


POSTPONED = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nowhere import Judged

def checked(judged, *, power: float = 1.0):
    return judged

def unknown(judged: Judged, *, power: float = 1.0):
    return judged
"""


def test_annotations_that_are_strings_are_checked_if_they_can_be_resolved():
    namespace: dict[str, Any] = {}
    exec(POSTPONED, namespace)
    assert plugins.bind("criterion", namespace["checked"], {"power": 2}) == {"power": 2.0}
    message = "criterion `checked`: `power` = 'much': Input should be a valid number"
    with pytest.raises(ConfigError, match=message):
        plugins.bind("criterion", namespace["checked"], {"power": "much"})
    assert plugins.bind("criterion", namespace["unknown"], {"power": "much"}) == {"power": "much"}


def test_a_similar_name_is_suggested():
    assert plugins.did_you_mean("gama", ["gamma", "alpha"]) == " Did you mean `gamma`?"
    assert plugins.did_you_mean("qqq", ["gamma", "alpha"]) == ""


RULES = [
    "mean",
    "coordinate_median",
    "geometric_median",
    "trimmed_mean",
    "multi_krum",
    "krum",
    "norm_clipping",
    "meamed",
]


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("median", ["geometric_median", "coordinate_median"]),
        ("medain", ["geometric_median", "coordinate_median"]),
        ("Median", ["geometric_median", "coordinate_median"]),
        ("trimmed", ["trimmed_mean"]),
        ("geomed", ["geometric_median"]),
        ("coord_median", ["coordinate_median"]),
        ("trmean", ["trimmed_mean"]),
        ("multikrum", ["multi_krum"]),
        ("krumm", ["krum"]),
        ("clipping", ["norm_clipping"]),
        ("mena", ["mean"]),
        ("", []),
        ("x" * 10_000, []),
    ],
)
def test_names_with_similar_parts_and_abbreviations_are_suggested(word, names):
    suggestion = f" Did you mean {' or '.join(f'`{name}`' for name in names)}?" if names else ""
    assert plugins.did_you_mean(word, RULES) == suggestion


def test_settings_become_numbers_texts_and_lists_of_python():
    value = {
        "seeds": np.arange(2),
        "gamma": np.float32(0.5),
        np.str_("key"): (np.int64(1), torch.tensor(2), [np.bool_(True)]),
        "path": Path("x"),
        "long": np.longdouble(0.25),
    }
    expected = {"seeds": [0, 1], "gamma": 0.5, "key": (1, 2, [True]), "path": "x", "long": 0.25}
    result = to_python(value)
    assert result == expected
    assert [type(item) for item in result.values()] == [list, float, tuple, str, float]
    assert to_python(value["seeds"], arrays=False) is value["seeds"]


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (int, np.array(2), 2),
        (float, torch.tensor(0.5), 0.5),
        (float, np.float32(0.5), 0.5),
        (Sequence[float], np.arange(2.0), [0.0, 1.0]),
        (tuple[int, ...], torch.arange(2), (0, 1)),
        (Path, Path("x"), Path("x")),
        (str, Path("x"), "x"),
    ],
)
def test_parameters_accept_numbers_of_other_libraries(annotation, value, expected):
    def function(*, parameter):
        """Return nothing."""

    function.__annotations__["parameter"] = annotation
    result = plugins.bind("rule", function, {"parameter": value})["parameter"]
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value"), [(int, np.float32(2.5)), (float, np.bool_(True)), (int, [1])]
)
def test_parameters_of_another_type_are_refused(annotation, value):
    def function(*, parameter):
        """Return nothing."""

    function.__annotations__["parameter"] = annotation
    with pytest.raises(ConfigError, match="rule `function`: `parameter` = "):
        plugins.bind("rule", function, {"parameter": value})
