"""How tuned products rotate queries and keys, where there is no GPU; what runs on one is in tests/gpu/hopper_products.py."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.kernels import hopper_products, timing
from lightning_megatron.kernels.products import TorchProducts
from lightning_megatron.kernels.tuned_products import way_key
from tests.test_products import Multiplying, gated_kernels, tuned


@pytest.mark.parametrize(("times", "way"), [((2.0, 1.0), 1), ((1.0, 2.0), 0)], ids=["together", "apart"])
def test_tuned_products_rotate_in_the_faster_way(times: tuple[float, ...], way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    products, ran = tuned(Multiplying(), None, monkeypatch), gated_kernels(monkeypatch)
    monkeypatch.setattr(timing, "_seconds", lambda run, algorithm, repeats: (run(algorithm), (*times, 9.0, 9.0)[algorithm])[1])
    x, weight, heads = torch.randn(5, 2, 8), torch.randn((3 + 2 * 1) * 4, 8), (3, 1)
    turns = torch.randn(5, 1, 1, 2)
    tables = torch.cat((turns.cos(), turns.cos()), -1), torch.cat((turns.sin(), turns.sin()), -1)
    assert products.rotates(x, weight, tables, heads)
    expected = TorchProducts().forward_rotated(x, weight, tables, heads)
    torch.testing.assert_close(products.forward_rotated(x, weight, tables, heads), expected)
    assert products.chosen[way_key("rotated", (5, 2, 8, 20, 8, 3, 1, 4))] == way
    ran.clear()
    torch.testing.assert_close(products.forward_rotated(x, weight, tables, heads), expected)
    assert ran == ["rotated"] * way
    assert products.rotates(x, weight, tables, heads) == bool(way)  # what is slower is left to two Functions
    for other_x, other_weight in ((x.transpose(0, 1).contiguous().transpose(0, 1), weight), (x, torch.randn(8, 20).t())):
        ran.clear()
        assert not products.rotates(other_x, other_weight, tables, heads)
        torch.testing.assert_close(
            products.forward_rotated(other_x, other_weight, tables, heads),
            TorchProducts().forward_rotated(other_x, other_weight, tables, heads),
        )
        assert not ran


@pytest.mark.parametrize(
    ("rows", "weight", "table", "heads", "fits"),
    [
        ((512, 64), (768, 64), (256, 1, 1, 128), (2, 2), True),
        ((512, 64), (1024, 64), (512, 1, 1, 64), (8, 4), True),
        ((512, 64), (768, 64), (200, 1, 1, 128), (2, 2), False),  # rows are no multiple of positions
        ((512, 64), (768, 64), (256, 2, 1, 128), (2, 2), False),  # positions differ among samples
        ((512, 64), (768, 64), (256, 1, 1, 96), (4, 2), False),
        ((512, 64), (1024, 64), (256, 1, 1, 128), (2, 3), False),  # a tile of keys and values
        ((512, 64), (768, 64), (256, 1, 1, 128), (1, 2), False),
        ((300, 64), (768, 64), (150, 1, 1, 128), (2, 2), False),
    ],
    ids=str,
)
def test_shapes_that_can_be_rotated_in_the_product(
    rows: tuple[int, ...],
    weight: tuple[int, ...],
    table: tuple[int, ...],
    heads: tuple[int, int],
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper_products, "runs_on", lambda device: True)
    x, w = torch.empty(rows, dtype=torch.bfloat16), torch.empty(weight, dtype=torch.bfloat16)
    tables = torch.empty(table), torch.empty(table)
    assert hopper_products.fits_rotated(x, w, tables, heads) == fits
    assert not hopper_products.fits_rotated(x, w, (tables[0].double(), tables[1]), heads)
    assert not hopper_products.fits_rotated(x, w, (tables[0], tables[1].transpose(0, 3).contiguous().transpose(0, 3)), heads)
