"""Cutting batches and merging outputs: pure."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.micro_batch import MicroBatches, batch_size_of, merge_outputs, split_batch

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    tokens: Tensor
    scale: float


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(6, 2),
        {"scalar": torch.tensor(1.0), "x": torch.zeros(6)},
        [("a",), torch.zeros(6, 1), torch.zeros(3)],
        Sample(torch.zeros(6, 2), 0.5),
        UserDict(x=torch.zeros(6)),
        (Pair(torch.zeros(6), None),),
    ],
)
def test_batch_size_is_dim_0_of_the_first_tensor_with_dims(batch: Any) -> None:
    assert batch_size_of(batch) == 6


@pytest.mark.parametrize("batch", [{"a": torch.tensor(1.0), "b": "text"}, [], None, object()])
def test_a_batch_without_a_batch_dim_is_refused_by_type(batch: Any) -> None:
    with pytest.raises(ValueError, match=f"type {type(batch).__name__} holds"):
        batch_size_of(batch)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8, 20])
def test_micro_batches_of_a_size_hold_every_sample_once_and_only_the_last_is_short(
    num_samples: int, micro_batch_size: int
) -> None:
    batch = torch.arange(num_samples)
    parts = split_batch(batch, micro_batch_size=micro_batch_size)
    assert torch.cat(list(parts)).tolist() == batch.tolist()
    assert parts.sizes == [len(part) for part in parts]
    assert all(size == micro_batch_size for size in parts.sizes[:-1])
    assert 0 < parts.sizes[-1] <= micro_batch_size


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 20])
def test_a_number_of_micro_batches_is_met_evenly_or_by_one_sample_each(num_samples: int, num_microbatches: int) -> None:
    batch = torch.arange(num_samples)
    parts = split_batch(batch, num_microbatches=num_microbatches)
    assert len(parts) == min(num_samples, num_microbatches)
    assert torch.cat(list(parts)).tolist() == batch.tolist()
    assert max(parts.sizes) - min(parts.sizes) <= 1


def test_parts_are_views() -> None:
    batch = {"x": torch.zeros(4, 3)}
    for part in split_batch(batch, micro_batch_size=2):
        part["x"] += 1
    assert batch["x"].eq(1).all()


def test_what_is_not_batched_is_shared() -> None:
    mask, text = torch.ones(7, 7), "four"
    first, second = split_batch({"x": torch.arange(4), "mask": mask, "text": text, "n": 4, "none": None}, num_microbatches=2)
    assert first["mask"] is mask is second["mask"]
    assert (first["text"], second["n"], second["none"]) == (text, 4, None)
    assert second["x"].tolist() == [2, 3]


def test_lists_of_one_thing_a_sample_are_cut_with_the_tensors() -> None:
    boxes = [{"boxes": torch.zeros(n, 4)} for n in (1, 0, 3)]
    batch = {"x": torch.arange(3), "text": ["a", "b", "c"], "ids": ("p", "q", "r"), "boxes": boxes, "names": ["u", "v"]}
    first, second = split_batch(batch, micro_batch_size=2)
    assert (first["text"], second["text"]) == (["a", "b"], ["c"])
    assert (first["ids"], second["ids"]) == (("p", "q"), ("r",))
    assert [len(entry["boxes"]) for entry in first["boxes"] + second["boxes"]] == [1, 0, 3]
    assert first["names"] == second["names"] == ["u", "v"]


def test_a_pair_of_batched_tensors_is_not_mistaken_for_two_samples() -> None:
    x, y = torch.arange(2), torch.arange(2) + 10
    for batch in ([x, y], (x, y), [{"x": x}, {"x": y}], {"views": [{"x": x}, {"x": y}]}):
        parts = split_batch(batch, micro_batch_size=1)
        leaves = [[part["views"][0]["x"], part["views"][1]["x"]] if isinstance(part, dict) else part for part in parts]
        values = [[leaf["x"] if isinstance(leaf, dict) else leaf for leaf in pair] for pair in leaves]
        assert [[int(leaf) for leaf in pair] for pair in values] == [[0, 10], [1, 11]]


def test_containers_keep_their_type() -> None:
    x = torch.arange(3)
    batch = {"pair": Pair(x, 1), "ordered": OrderedDict(x=x), "user": UserDict(x=x), "sample": Sample(x, 0.5)}
    _, second = split_batch(batch, micro_batch_size=2)
    assert isinstance(second["pair"], Pair)
    assert isinstance(second["ordered"], OrderedDict)
    assert isinstance(second["user"], UserDict)
    assert second["sample"].scale == 0.5
    for tensor in (second["pair"].x, second["ordered"]["x"], second["user"]["x"], second["sample"].tokens):
        assert tensor.tolist() == [2]
    assert batch["user"]["x"] is x
    assert batch["sample"].tokens is x


def test_numpy_arrays_are_cut_like_tensors() -> None:
    x = torch.arange(4)
    _, second = split_batch({"x": x, "array": x.numpy()}, micro_batch_size=3)
    assert second["array"].tolist() == [3]


def test_micro_batches_made_by_the_user_are_taken_as_they_are() -> None:
    made = MicroBatches([torch.zeros(1), torch.zeros(3)], [1, 3])
    assert split_batch(made, micro_batch_size=2) is made
    moved = apply_to_collection(made, Tensor, lambda tensor: tensor + 1)  # as Lightning moves a batch to the device
    assert isinstance(moved, MicroBatches)
    assert moved.sizes == [1, 3]
    assert batch_size_of(moved) == 4
    with pytest.raises(ValueError, match="2 micro-batches came with 1 sizes"):
        MicroBatches([1, 2], [1])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"micro_batch_size": 2, "num_microbatches": 2}, "both given"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"num_microbatches": -1}, "num_microbatches=-1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(torch.zeros(4), **sizes)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        split_batch(torch.zeros(0, 3), micro_batch_size=2)


def test_merging_undoes_splitting() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, 2), "nested": (torch.arange(5), ["a", "b", "c", "d", "e"])}
    parts = split_batch(batch, micro_batch_size=2)
    merged = merge_outputs(list(parts), parts.sizes)
    assert_close(merged["x"], batch["x"])
    assert merged["nested"][0].tolist() == [0, 1, 2, 3, 4]
    assert merged["nested"][1] == ["a", "b", "c", "d", "e"]


def test_means_of_unequal_micro_batches_merge_to_the_mean_over_samples() -> None:
    torch.manual_seed(0)
    samples = torch.randn(5, dtype=torch.float64)
    parts = split_batch(samples, micro_batch_size=2)
    outputs = [{"loss": part.mean(), "number": float(part.mean())} for part in parts]
    merged = merge_outputs(outputs, parts.sizes)
    assert_close(merged["loss"], samples.mean(), rtol=0, atol=1e-15)
    assert merged["number"] == pytest.approx(float(samples.mean()), abs=1e-15)


def test_none_stays_none_and_the_rest_becomes_a_list() -> None:
    assert merge_outputs([None, None], [2, 1]) is None
    assert merge_outputs(["a", "b"], [2, 1]) == ["a", "b"]
    assert merge_outputs([None, 1.0], [2, 1]) == [None, 1.0]
    assert merge_outputs([{"a": 1.0}, {"b": 1.0}], [2, 1]) == [{"a": 1.0}, {"b": 1.0}]
    ragged = merge_outputs([torch.zeros(2, 3), torch.zeros(1, 4)], [2, 1])
    assert [tuple(tensor.shape) for tensor in ragged] == [(2, 3), (1, 4)]
    assert merge_outputs(["only"], [3]) == "only"
    with pytest.raises(ValueError, match="1 outputs came with 2"):
        merge_outputs([1.0], [2, 1])


def test_merging_keeps_the_gradient() -> None:
    x = torch.arange(5.0, requires_grad=True)
    parts = split_batch(x, micro_batch_size=2)
    merge_outputs([part.square().mean() for part in parts], parts.sizes).backward()
    assert_close(x.grad, 2 * x.detach() / 5)


def test_borders_of_documents_are_no_samples() -> None:
    batch = {"cu_seqlens": torch.tensor([0, 3, 8]), "tokens": torch.zeros(1, 8)}
    assert batch_size_of(batch) == 1
    assert split_batch(batch, micro_batch_size=1)[0]["cu_seqlens"] is batch["cu_seqlens"]
