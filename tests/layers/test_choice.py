"""What the strategy is asked for reaches the layers of the model, or is refused by name before anything trains."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, Parallelism
from lightning_megatron.layers.choice import current_backend
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.layers.torch_backend import TorchBackend
from lightning_megatron.models import GPTConfig, GPTModule
from lightning_megatron.strategy.options import check_overlap
from lightning_megatron.testing import run_distributed

CONFIG = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, ffn_hidden_size=16, vocab_size=20, max_seq_len=8)


class Module(GPTModule):
    def configure_model(self) -> None:
        super().configure_model()
        backend = current_backend()
        assert isinstance(backend, TorchBackend)
        self.found = backend.compiles, backend.attention_kernel


def fit(**options: Any) -> Any:
    tokens = list[Tensor](torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(0)))
    module, quiet = Module(CONFIG), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy=MegatronStrategy(**options), accelerator="cpu", devices=1, max_epochs=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(tokens, 2))  # type: ignore[arg-type]
    return module.found


def in_a_rank(**options: Any) -> Any:
    return run_distributed(lambda: fit(**options), 1)[0]


def test_models_are_built_on_the_backend_that_was_asked_for() -> None:
    assert in_a_rank() == (False, "auto")
    assert in_a_rank(compile_pointwise=True, attention_kernel="math") == (True, "math")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tune_products": True}, "tune_products=True times cuBLASLt's algorithms, but the device is cpu"),
        ({"attention_kernel": "cudnn"}, "attention_kernel='cudnn' is for 16 bits on a GPU"),
        ({"backend": "te"}, "backend='te' needs Transformer Engine: the model runs on cpu"),
        ({"cuda_graphs": True}, "cuda_graphs=True needs a CUDA device"),
        ({"recompute": "no.such.name"}, "recompute='no.such.name' fits no module of Module"),
    ],
    ids=str,
)
def test_what_cannot_be_had_here_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):  # of the rank
        in_a_rank(**options)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "nvfp4"])
def test_block_formats_and_products_in_pieces_are_refused_together(recipe: Any) -> None:
    options = Fp8Options(recipe=recipe)
    backend = TeBackend(PlainOperations(None), options)
    with pytest.raises(ValueError, match=f"tp_overlap=2 does not go with fp8='{recipe}'"):
        check_overlap(Parallelism(tp=2, tp_overlap=2), backend)
    check_overlap(Parallelism(tp=2), backend)
