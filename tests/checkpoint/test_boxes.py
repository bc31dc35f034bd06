"""``BoxedTensor``: which part of the global tensor each local element is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint import BoxedTensor
from lightning_megatron.checkpoint.optimizer_state import model_order
from lightning_megatron.sharding import Box, ParamSharding

THREE = ParamSharding((12, 2, 3), (Box((1, 0, 0), (2, 2, 3)), Box((6, 0, 0), (1, 2, 3)), Box((9, 0, 0), (3, 2, 3))))


def put_together(boxed: BoxedTensor) -> Tensor:
    whole = torch.full(tuple(boxed.shape), -1, dtype=boxed.dtype)
    for offset, part in boxed.parts.items():
        region = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
        assert (whole[region] == -1).all(), "parts overlap"
        whole[region] = part
    return whole


def local_and_whole(sharding: ParamSharding, rows: int) -> tuple[Tensor, Tensor]:
    """A local tensor numbered from 0 (with padding), and the global tensor with the numbers in place and -1 elsewhere."""
    local = torch.arange(rows * 6).view(rows, 2, 3)
    whole, row = torch.full(sharding.global_shape, -1), 0
    for box in sharding.boxes:
        whole[box.offset[0] : box.offset[0] + box.size[0]] = local[row : row + box.size[0]]
        row += box.size[0]
    return local, whole


def test_boxes_of_a_parameter_are_views_without_its_padding_rows() -> None:
    local, whole = local_and_whole(THREE, rows=8)
    boxed = BoxedTensor.from_param(local, THREE)
    assert torch.equal(put_together(boxed), whole)
    assert boxed.num_local == 36
    assert boxed.shape == (12, 2, 3)
    next(iter(boxed.parts.values())).fill_(99)
    assert (local[:2] == 99).all()


@pytest.mark.parametrize("size", [1, 4, 7, 13, 48])
def test_flat_slices_of_any_size_make_up_the_boxes(size: int) -> None:
    local, whole = local_and_whole(THREE, rows=8)
    total = torch.full_like(whole, -1)
    for start in range(0, 48, size):
        stop = min(48, start + size)
        boxed = BoxedTensor.from_flat_slice(local.reshape(-1)[start:stop], start, stop, local.shape, THREE)
        part = put_together(boxed)
        assert (total[part >= 0] == -1).all()
        total = torch.maximum(total, part)
        assert boxed.num_local == max(0, min(stop, 36) - min(start, 36))  # nothing but padding beyond 36
    assert torch.equal(total, whole)


def test_a_non_contiguous_parameter_is_filled_through_its_boxes() -> None:
    local = torch.zeros(3, 2, 6).permute(2, 1, 0)
    for part in BoxedTensor.from_param(local, THREE).parts.values():
        part.fill_(1)
    assert local.sum() == 36


def test_zero_sized_boxes_and_unwanted_boxes_have_no_part() -> None:
    sharding = ParamSharding((4, 2), (Box((2, 0), (0, 2)), Box((2, 0), (2, 2), replicated=("tp",))))
    local = torch.arange(4.0).view(2, 2)
    assert list(BoxedTensor.from_param(local, sharding).parts) == [torch.Size((2, 0))]
    assert not BoxedTensor.from_param(local, sharding, keep=lambda box: not box.replicated).parts
    assert not BoxedTensor.from_flat_slice(local.view(-1), 0, 4, (2, 2), sharding, keep=lambda box: not box.replicated).parts


def test_a_scalar_parameter_is_one_part() -> None:
    sharding: Any = ParamSharding((), (Box((), ()),))
    assert BoxedTensor.from_param(torch.tensor(3.0), sharding).num_local == 1
    assert BoxedTensor.from_flat_slice(torch.tensor([3.0]), 0, 1, (), sharding).parts[torch.Size(())].shape == ()


def test_no_operation_runs_on_a_boxed_tensor() -> None:
    boxed = BoxedTensor((4,), [((0,), torch.ones(2))], torch.float32)
    with pytest.raises(NotImplementedError, match="no storage"):
        boxed + 1
    assert "(4,)" in repr(boxed)


def test_names_of_interleaved_stages_go_back_into_the_order_of_the_model() -> None:
    first = ["m.embed", "m.scale", "m.layers.0.w", "m.layers.0.b", "m.layers.2.w", "m.layers.2.b"]
    last = ["m.embed", "m.bias", "m.layers.1.w", "m.layers.1.b", "m.layers.10.w", "m.layers.10.b", "m.norm", "m.heads.1.w"]
    expected = ["m.embed", "m.scale", "m.bias", "m.layers.0.w", "m.layers.0.b", "m.layers.1.w", "m.layers.1.b"]
    expected += ["m.layers.2.w", "m.layers.2.b", "m.layers.10.w", "m.layers.10.b", "m.norm", "m.heads.1.w"]
    assert list(model_order([first, last])) == expected
    assert list(model_order([["a", "b"], ["b", "a"]])) == ["a", "b"]  # no order fits: as they came
