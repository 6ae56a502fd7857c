"""Reproducible products of MKL."""

import pytest
import torch

from fedcb2o import _mkl


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("vendor_id\t: AuthenticAMD\n", None, "AUTO,STRICT"),
        ("vendor_id\t: AuthenticAMD\n", "COMPATIBLE", "COMPATIBLE"),
        ("vendor_id\t: GenuineIntel\n", None, None),
        (None, None, None),
    ],
)
def test_the_variable_is_set_on_amd_processors(tmp_path, monkeypatch, text, before, after):
    monkeypatch.delenv(_mkl.VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(_mkl.VARIABLE, before)
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    _mkl.set_reproducible(file)
    assert _mkl.os.environ.get(_mkl.VARIABLE) == after


def test_products_do_not_depend_on_the_memory_address_of_their_factors():
    x = torch.randn(20, 11, 9)
    weights, biases = torch.randn(20, 9, 8), torch.randn(20, 1, 8)
    moved = torch.zeros(x.numel() + 3)[3:].view_as(x).copy_(x)
    products = torch.baddbmm(biases, x, weights)
    assert torch.equal(torch.baddbmm(biases, moved, weights), products)
    one_by_one = torch.cat(
        [torch.baddbmm(biases[k : k + 1], moved[k : k + 1], weights[k : k + 1]) for k in range(20)]
    )
    assert torch.equal(one_by_one, products)
    shared = x[:1].expand(20, -1, -1)
    expected = torch.baddbmm(biases, shared.contiguous(), weights)
    assert torch.equal(torch.baddbmm(biases, shared, weights), expected)
