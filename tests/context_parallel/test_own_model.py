"""A model of a user's own learns how its sequences lie by naming ``sequence_layout``, and trains as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, PipelineModel
from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.layers.core_attention import CoreAttention
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import current_mesh
from lightning_megatron.testing import run_distributed
from tests.context_parallel.test_sequence_batch import QUIET, rows

WIDTH, HEADS, VOCAB = 16, 4, 67


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mesh = current_mesh()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core = CoreAttention(CausalAttention(dropout=0.0, mesh=mesh), dropout=0.0, mesh=mesh)

    def forward(self, hidden: Tensor, sequence_layout: SequenceLayout | None = None) -> Tensor:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)
        context = SequenceContext(len(hidden), len(hidden), layout=sequence_layout)
        attended: Tensor = self.out(self.core(q, k, v, context))
        return hidden + attended


class Own(PipelineModel):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def first(self, tokens: Tensor, sequence_layout: SequenceLayout | None = None) -> Tensor:
        layout = sequence_layout or SequenceLayout(tokens.shape[1], tokens.shape[1])
        places = layout.positions(layout.own_index(tokens.device)).expand(len(tokens), -1)
        hidden: Tensor = (self.embedding(tokens) + self.position(places)).transpose(0, 1)
        return hidden

    def context(self, *inputs: Any, **named: Any) -> tuple[()]:
        return ()

    def last(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).permute(1, 2, 0), labels, reduction="none")


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Own | None = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(4)
            self.model = Own()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        assert self.model is not None
        losses, num_tokens = self.model(batch["tokens"], labels=batch["labels"]), (batch["labels"] != -100).sum()
        return {"loss": losses.sum() / num_tokens, "num_tokens": num_tokens}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trained(options: dict[str, Any], borders: Tensor | None) -> dict[str, Tensor]:
    batch = {name: torch.stack([row[name] for row in rows(length=16)]) for name in ("tokens", "labels")}
    batch["labels"][:, :5] = -100
    if borders is not None:
        batch["cu_seqlens"] = borders
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = MegatronStrategy(**options)
    trainer = L.Trainer(strategy=strategy, devices=devices, precision="64-true", max_steps=1, **QUIET)  # type: ignore[arg-type]
    trainer.fit(Module(), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    return strategy.full_state_dict()


@pytest.mark.parametrize("borders", [None, torch.tensor([[0, 8, 16, 16], [0, 16, 16, 16], [0, 4, 8, 16], [0, 12, 16, 16]])])
@pytest.mark.parametrize("options", [{"cp": 2}, {"cp": 2, "pp": 2, "micro_batch_size": 2}], ids=["cp2", "cp2 pp2"])
def test_a_model_that_asks_for_its_layout_trains_as_on_one_process(options: dict[str, Any], borders: Tensor | None) -> None:
    (expected,) = run_distributed(lambda: trained({}, borders), 1)
    for found in run_distributed(lambda: trained(options, borders), 2 * options.get("pp", 1)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
