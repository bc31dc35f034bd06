"""Packed documents end in padding that nothing sees, and what does not describe documents is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.data.packing import DynamicPackingCollator, PackingCollator, first_fit_decreasing
from lightning_megatron.models import GPTConfig
from lightning_megatron.sequence_batch import SequenceCut, sequence_length
from lightning_megatron.testing import run_distributed
from tests.context_parallel.test_parity import FULL, LENGTHS, MIXED_LENGTHS, SEQUENCE, assert_same, one_by_one, packed_run
from tests.parity.harness import LLAMA_GQA

FULL_WINDOW = replace(FULL, sliding_window=3)

# Name, ranks, options, and the model. No length divides by 2 * cp but two.
PADDED: dict[str, tuple[int, dict[str, Any], GPTConfig]] = {
    "cp2": (2, {"cp": 2}, FULL),
    "cp4": (4, {"cp": 4}, FULL),
    "cp4 all_gather": (4, {"cp": 4, "cp_comm": "all_gather"}, FULL),
    "cp4 a2a": (4, {"cp": 4, "cp_comm": "a2a"}, FULL),
    "cp4 a2a+p2p": (4, {"cp": 4, "cp_comm": "a2a+p2p"}, FULL),
    "cp2 tp2": (4, {"cp": 2, "tp": 2}, FULL),
    "cp2 pp2": (4, {"cp": 2, "pp": 2, "micro_batch_size": 1}, FULL),
    "cp2 dp2": (4, {"cp": 2}, FULL),
    "cp4 window": (4, {"cp": 4}, FULL_WINDOW),
    "cp4 all_gather window": (4, {"cp": 4, "cp_comm": "all_gather"}, FULL_WINDOW),
    "cp4 a2a window": (4, {"cp": 4, "cp_comm": "a2a"}, FULL_WINDOW),
}


@pytest.mark.parametrize("case", PADDED)
def test_full_attention_does_not_see_the_padding_of_documents(case: str) -> None:
    world_size, options, config = PADDED[case]
    collate = PackingCollator(SEQUENCE, multiple_of=2 * options["cp"])
    ranks = run_distributed(lambda: packed_run(config, options, collate=collate), world_size)
    assert_same(ranks, one_by_one(config), losses="dp2" not in case)


@pytest.mark.parametrize("config", [FULL, FULL_WINDOW], ids=["full", "window"])
def test_full_attention_of_documents_on_few_ranks_does_not_see_their_padding(config: GPTConfig) -> None:
    config = replace(config, max_seq_len=32)
    collate = DynamicPackingCollator(32, 4, round_to=2)
    ranks = run_distributed(lambda: packed_run(config, {"cp": 4}, collate=collate, lengths=MIXED_LENGTHS), 4)
    assert_same(ranks, one_by_one(config, MIXED_LENGTHS), losses=True)


def test_rows_that_documents_do_not_fill_fit_any_model_that_the_documents_fit() -> None:
    """Rows of 64 tokens and a model of 16: what is left of a row is no document of up to 64."""
    assert LLAMA_GQA.max_seq_len == max(LENGTHS) == 16
    collate = PackingCollator(64, multiple_of=4)
    ranks = run_distributed(lambda: packed_run(LLAMA_GQA, {"cp": 2}, collate=collate), 2)
    assert_same(ranks, one_by_one(LLAMA_GQA), losses=True)


def test_long_documents_are_packed_first() -> None:
    """In the order that they come in they would need four rows."""
    assert first_fit_decreasing([4, 4, 4, 6, 6, 6], 10) == [[0, 3], [1, 4], [2, 5]]


def test_documents_with_another_number_of_labels_than_tokens_are_refused() -> None:
    document = {"tokens": torch.arange(5), "labels": torch.arange(1, 5)}
    with pytest.raises(ValueError, match="a document has 5 tokens and 4 labels"):
        PackingCollator(16)([document])


def batch_of(borders: list[int], **more: Any) -> dict[str, Tensor | int]:
    return {"tokens": torch.ones(1, 16), "cu_seqlens": torch.tensor([borders]), **more}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("borders", [[0, 8, 24], [4, 8, 16], [0, 12, 8, 16]])
def test_borders_that_do_not_rise_from_0_to_the_length_are_refused(borders: list[int], size: int) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens of a row are \[.*\], which do not rise from 0 to S=16"):
        SequenceCut(size, 0, multiple=4)(batch_of(borders))


def test_a_longest_document_that_is_not_is_refused() -> None:
    cut = SequenceCut(2, 0, multiple=4)
    assert cut(batch_of([0, 4, 16], max_seqlen=12))["tokens"].shape == (1, 8)
    with pytest.raises(ValueError, match="max_seqlen=4, but a document has 12 tokens"):
        cut(batch_of([0, 4], max_seqlen=4))


@dataclass
class Captioned:
    image: Tensor
    tokens: Tensor


@pytest.mark.parametrize("make", [lambda **parts: parts, Captioned], ids=["dict", "dataclass"])
def test_the_length_is_that_of_what_is_named_tokens(make: Callable[..., Any]) -> None:
    assert sequence_length(make(image=torch.ones(2, 3, 5), tokens=torch.ones(2, 8))) == 8
