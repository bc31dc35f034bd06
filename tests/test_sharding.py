"""Shardings: boxes tile what they should, a cut puts together again, and flat ranges become boxes in order."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest
import torch
from torch import nn

from lightning_megatron.initialize import load_unsharded, materialize
from lightning_megatron.sharding import (
    Box,
    Init,
    ParamSharding,
    copy_sharding,
    flat_boxes,
    mark_tied,
    replicated,
    set_sharding,
    sharding_of,
)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 1, 3)])
def test_flat_boxes_cover_every_range_once_in_order(shape: tuple[int, ...]) -> None:
    index = torch.arange(prod(shape)).view(shape)
    for start, stop in combinations(range(prod(shape) + 1), 2):
        boxes = flat_boxes(shape, start, stop)
        parts = [index[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].flatten() for offset, size in boxes]
        assert torch.cat(parts).tolist() == list(range(start, stop))
        assert len(boxes) <= 2 * len(shape) - 1


def test_no_range_is_no_box_and_a_number_is_one() -> None:
    assert flat_boxes((3, 2), 4, 4) == []
    assert flat_boxes((), 0, 1) == [((), ())]


def test_several_boxes_are_cut_stacked_and_padded() -> None:
    full = torch.arange(20.0).view(10, 2)
    sharding = ParamSharding((10, 2), (Box((1, 0), (2, 2)), Box((6, 0), (1, 2))))
    local = sharding.cut(full, (5, 2))
    assert local.tolist() == [[2, 3], [4, 5], [12, 13], [0, 0], [0, 0]]
    assert [(start, stop) for start, stop, _ in sharding.local_ranges()] == [(0, 4), (4, 6)]
    for box, part in sharding.parts(local):
        rows = slice(box.offset[0], box.offset[0] + box.size[0])
        assert torch.equal(part, full[rows])


def test_a_full_tensor_of_another_shape_is_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2\) was given where the unsharded shape is \(4, 2\)"):
        replicated((4, 2)).cut(torch.ones(3, 2), (4, 2))


def test_a_parameter_without_a_sharding_is_whole_and_replicated() -> None:
    sharding = sharding_of(nn.Parameter(torch.ones(2, 3)))
    assert sharding.global_shape == (2, 3)
    assert sharding.boxes[0].replicated == ("tp",)


def test_the_sharding_goes_with_the_parameter_that_replaces_one() -> None:
    old = set_sharding(nn.Parameter(torch.ones(2)), replicated((2,), partial=True))
    mark_tied(old)
    new = copy_sharding(old, nn.Parameter(torch.zeros(2)))
    assert sharding_of(new).tied
    assert sharding_of(new).boxes[0].partial == ("tp",)


class Half(nn.Module):
    """Rows ``[2 * rank, 2 * rank + 2)`` of a ``[4, 3]`` matrix, on the meta device."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(2, 3, device="meta"))
        self.weight = set_sharding(weight, ParamSharding((4, 3), (Box((2 * rank, 0), (2, 3)),), init=Init("normal", 0.5)))


def test_first_values_are_cuts_of_one_draw_that_depends_on_seed_and_name() -> None:
    halves = []
    for rank in range(2):
        module = nn.ModuleDict({"a": Half(rank), "b": Half(rank)})
        materialize(module, device=torch.device("cpu"), seed=3)
        halves.append(module)
    whole = [torch.cat([half.get_parameter(f"{name}.weight") for half in halves]) for name in "ab"]
    assert not torch.equal(whole[0], whole[1])
    assert len(set(whole[0].flatten().tolist())) == 12  # no two shards alike
    other = Half(0)
    materialize(nn.ModuleDict({"a": other}), device=torch.device("cpu"), seed=4)
    assert not torch.equal(other.weight, whole[0][:2])


def test_a_meta_module_of_the_users_is_reset_and_ties_are_kept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
    materialize(model, device=torch.device("cpu"), seed=0)
    assert model[0].weight is model[1].weight
    assert float(model[0].weight.detach().abs().max()) > 0


def test_a_meta_module_that_cannot_be_reset_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(ValueError, match=r"part \(Bare\) was built on the meta device and has no reset_parameters"):
        materialize(nn.ModuleDict({"part": Bare()}), device=torch.device("cpu"), seed=0)


def test_a_full_state_is_loaded_by_part_and_misfits_are_named() -> None:
    module = nn.ModuleDict({"a": Half(1)})
    materialize(module, device=torch.device("cpu"), seed=0)
    full = torch.arange(12.0).view(4, 3)
    load_unsharded(module, {"a.weight": full})
    assert torch.equal(module.get_parameter("a.weight"), full[2:])
    with pytest.raises(ValueError, match=r"a\.weight: a tensor of shape \(2, 3\)"):
        load_unsharded(module, {"a.weight": full[:2]})
    with pytest.raises(KeyError, match=r"a\.weight"):
        load_unsharded(module, {})
