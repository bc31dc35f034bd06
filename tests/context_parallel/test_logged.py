"""Logged values are those of one process: a micro-batch's mean is over its tokens, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.data.packing import DynamicPackingCollator
from lightning_megatron.models import GPTModule
from lightning_megatron.testing import run_distributed
from tests.context_parallel.test_parity import MIXED_LENGTHS, documents
from tests.context_parallel.test_sequence_batch import rows, trainer_of
from tests.parity.harness import LLAMA_GQA


def logged(options: dict[str, Any], samples: list[dict[str, Tensor]], collate: Callable[..., Any] | None = None) -> list[float]:
    """The losses of a training step and of validation, as callbacks see them."""
    L.seed_everything(3, verbose=False)
    module = GPTModule(replace(LLAMA_GQA, max_seq_len=32), lr=0.0)
    found = trainer_of(options)
    found.fit(module, DataLoader(samples, batch_size=len(samples), collate_fn=collate))
    train = float(found.callback_metrics["train_loss"])
    (validated,) = found.validate(module, DataLoader(samples, batch_size=len(samples), collate_fn=collate), verbose=False)
    return [train, validated["val_loss"]]


@pytest.mark.parametrize("options", [{"cp": 2}, {"cp": 2, "pp": 2}], ids=["cp2", "cp2 pp2"])
def test_micro_batches_with_uneven_masks_are_logged_as_by_one_process(options: dict[str, Any]) -> None:
    samples = rows(number=4)
    for number, sample in enumerate(samples):
        sample["labels"][: 2 * number] = -100
    (expected,) = run_distributed(lambda: logged({"micro_batch_size": 1}, samples), 1)
    for found in run_distributed(lambda: logged({**options, "micro_batch_size": 1}, samples), 2 * options.get("pp", 1)):
        assert found == pytest.approx(expected, rel=1e-5)


def test_ranks_without_a_document_do_not_dilute_what_is_logged() -> None:
    """One process runs the same micro-batches as whole rows."""
    samples, dynamic = documents(67, MIXED_LENGTHS), DynamicPackingCollator(32, 4, round_to=2)
    (expected,) = run_distributed(lambda: logged({}, samples, dynamic), 1)
    for found in run_distributed(lambda: logged({"cp": 4}, samples, dynamic), 4):
        assert found == pytest.approx(expected, rel=1e-5)
