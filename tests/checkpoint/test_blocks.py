"""Any box of any saved part arrives in any target, in blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint import blocks, staging
from lightning_megatron.checkpoint.storage import Place, Sums

_DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.int16, torch.bool)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, staging):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1024)


def part(dice: random.Random, dtype: torch.dtype) -> Tensor:
    sizes = [dice.randrange(1, 40) for _ in range(dice.randrange(4))]
    if dice.random() < 0.2:
        sizes = [dice.randrange(1, 4), dice.randrange(300, 3000)]  # a row is larger than a block
    return (torch.randn(sizes).abs() * 50).to(dtype)


def test_boxes_of_parts_arrive_whatever_their_shapes_dtypes_and_strides(tmp_path: Path) -> None:
    dice = random.Random(3)
    torch.manual_seed(3)
    for _ in range(200):
        dtype = dice.choice(_DTYPES)
        saved, begin = part(dice, dtype), dice.randrange(100)
        (tmp_path / "f").write_bytes(bytes(begin) + bytes(staging.raw_bytes(saved)))
        offsets = [dice.randrange(size) for size in saved.shape]
        box = [dice.randrange(1, size - offset + 1) for size, offset in zip(saved.shape, offsets, strict=True)]
        target = torch.zeros(box, dtype=dice.choice([dtype, dtype, torch.float32]))
        if dice.random() < 0.4:
            target = target.mT.contiguous().mT if target.dim() > 1 else target
        wanted = list(blocks.transfers("f", begin, dtype, sizes=saved.shape, offsets=offsets, target=target))
        assert all(one.num_bytes <= 1024 for one in wanted)
        with blocks.BlockReader(tmp_path) as reader:
            for read in reader.start(wanted):
                read.result()
        region = tuple(slice(offset, offset + length) for offset, length in zip(offsets, box, strict=True))
        assert torch.equal(target, saved[region].to(target.dtype))


def test_a_file_that_ends_in_the_middle_of_a_tensor_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(1000))
    wanted = list(blocks.transfers("f", 8, torch.float32, sizes=(300,), offsets=(0,), target=torch.zeros(300)))
    with blocks.BlockReader(tmp_path) as reader:
        first, *_ = reader.start(wanted)
        with pytest.raises(RuntimeError, match="f ends at byte 1000"):
            first.result()


def test_a_place_is_made_of_all_its_blocks_or_of_none() -> None:
    sums = Sums({"f": [(0, 10, 1), (10, 5, 2), (20, 5, 3)]}, {})
    assert sums.of(Place("k", "f", 0, 15)) == [(0, 10, 1), (10, 5, 2)]
    for offset, length in ((0, 12), (5, 10), (0, 25), (30, 5)):
        assert sums.of(Place("k", "f", offset, length)) == []
    assert sums.of(Place("k", "g", 0, 10)) == []
