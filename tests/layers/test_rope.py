from __future__ import annotations

import copy
import pickle
from math import cos, pi, sin

import pytest
import torch
from torch.testing import assert_close

from lightning_megatron.kernels.rotation import apply_rope
from lightning_megatron.layers.rope import Rope, RopeScaling, WholeRows, rotate_heads


def test_tables_are_cosines_and_sines_of_position_times_frequency() -> None:
    tables = Rope(head_dim=8, theta=100.0).tables(torch.tensor([0, 1, 5]))
    assert tables.cos.shape == tables.sin.shape == (3, 1, 1, 8)
    assert tables.cos.dtype == torch.float32
    for row, position in enumerate((0, 1, 5)):
        for i in range(4):
            angle = position * 100.0 ** (-2 * i / 8)
            for column in (i, i + 4):
                assert tables.cos[row, 0, 0, column].item() == pytest.approx(cos(angle), abs=1e-6)
                assert tables.sin[row, 0, 0, column].item() == pytest.approx(sin(angle), abs=1e-6)


def test_scaled_frequencies_follow_the_three_bands_of_llama_3_1() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    plain = Rope(head_dim=128, theta=500000.0).frequencies(torch.device("cpu"))
    scaled = Rope(head_dim=128, theta=500000.0, scaling=scaling).frequencies(torch.device("cpu"))
    bands = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * pi / before
        if wavelength < 8192 / 4:
            band, expected = "kept", before
        elif wavelength > 8192:
            band, expected = "slowed", before / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            band, expected = "between", (1 - smooth) * before / 8 + smooth * before
        bands.add(band)
        assert after == pytest.approx(expected, rel=1e-5)
    assert bands == {"kept", "slowed", "between"}


def test_rotation_turns_pairs_half_a_head_apart_and_keeps_lengths() -> None:
    torch.manual_seed(0)
    tables = Rope(head_dim=6).tables(torch.arange(4))
    heads = torch.randn(4, 2, 3, 6, dtype=torch.float64)
    rotated = apply_rope(heads, tables.cos, tables.sin)
    pairs = torch.complex(heads[..., :3], heads[..., 3:])
    turn = torch.complex(tables.cos[..., :3].double(), tables.sin[..., :3].double())
    assert_close(rotated, torch.cat(((pairs * turn).real, (pairs * turn).imag), -1))
    assert_close(rotated.norm(dim=-1), heads.norm(dim=-1), rtol=1e-6, atol=1e-6)


def test_scores_depend_on_the_distance_alone() -> None:
    rope, torch_generator = Rope(head_dim=16), torch.Generator().manual_seed(0)
    q, k = (torch.randn(16, generator=torch_generator) for _ in range(2))
    tables = rope.tables(torch.arange(20))

    def score(i: int, j: int) -> float:
        turned = [apply_rope(x.expand(20, 1, 1, 16), tables.cos, tables.sin)[p, 0, 0] for x, p in ((q, i), (k, j))]
        return float(turned[0] @ turned[1])

    assert score(3, 1) == pytest.approx(score(17, 15), abs=1e-4)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-2)


def test_bfloat16_heads_are_rounded_once() -> None:
    torch.manual_seed(0)
    tables = Rope(head_dim=8).tables(torch.arange(50))
    heads = torch.randn(50, 1, 2, 8).bfloat16()
    rotated = apply_rope(heads, tables.cos, tables.sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rope(heads.float(), tables.cos, tables.sin).bfloat16())


def test_scaling_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="high_freq_factor > low_freq_factor"):
        RopeScaling(low_freq_factor=4.0, high_freq_factor=1.0)


def test_tables_of_whole_rows_are_made_once_and_an_evaluation_may_make_them() -> None:
    rope = Rope(head_dim=8)
    rows, cpu = WholeRows(rope), torch.device("cpu")
    with torch.inference_mode():
        first = rows.tables(5, 8, cpu)
    assert rows.tables(5, 8, cpu) is first
    expected = rope.tables(torch.tensor([0, 1, 2, 3, 4, 0, 0, 0]))
    assert_close((first.cos, first.sin), (expected.cos, expected.sin), rtol=0.0, atol=0.0)
    heads = torch.randn(8, 1, 2, 8, requires_grad=True)
    rotate_heads(heads, first.cos, first.sin).sum().backward()  # saves the tables
    assert heads.grad is not None
    assert rows.tables(6, 8, cpu) is not first
    assert len(pickle.dumps(rows)) < 400  # frequencies, no tables
    copied = copy.deepcopy(rows).tables(6, 8, cpu)
    assert_close(copied.cos, rows.tables(6, 8, cpu).cos, rtol=0.0, atol=0.0)
