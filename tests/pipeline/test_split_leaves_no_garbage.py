"""What a split backward has used goes at once: nothing of it waits for garbage collection, which may be far off."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.pipeline.backward_split import SplitBackward

CONFIG = GPTConfig(num_layers=2, hidden_size=16, ffn_hidden_size=16, num_heads=2, vocab_size=20, max_seq_len=8)


@pytest.fixture
def saved_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.usefixtures("saved_garbage")
def test_a_split_backward_leaves_no_tensor_in_a_cycle() -> None:
    model = GPT(CONFIG, seed=0)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    loss = model(tokens, labels=tokens).mean()
    split = SplitBackward([(get_gradient_edge(loss), torch.ones(()))], [])
    split.run_input_part()
    assert split.num_late > 0
    split.run_weight_part()
    del loss, split
    gc.collect()
    assert not [found.shape for found in gc.garbage if isinstance(found, Tensor)]
