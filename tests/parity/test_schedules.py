"""Every schedule trains like one process, on a model that has all that is hard: lengths that change, two hidden tensors of
which one holds integers, tied weights, frozen parts, dropout inside activation checkpoints, stages without layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy, PipelineModel
from lightning_megatron.pipeline.schedule import Action, Kind, Placement, gpipe, zbh1
from lightning_megatron.testing import run_distributed

V, H, NUM_LAYERS = 13, 8, 5
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


@dataclass(frozen=True)
class Variant:
    """What is hard about the model."""

    tied: bool = False
    frozen: tuple[str, ...] = ()
    dropout: float = 0.0
    recompute: bool = False


VARIANTS = {
    "tied": Variant(tied=True),
    "dropout, recomputed": Variant(dropout=0.3, recompute=True),
    "first stage frozen": Variant(frozen=("table", "layers.0", "layers.1")),
}


class Layer(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        self.norm = nn.LayerNorm(H)
        self.mix, self.up, self.down = nn.Linear(H, H), nn.Linear(H, 2 * H), nn.Linear(2 * H, H, bias=False)
        self.gains = nn.Embedding(3, H)

    def forward(self, hidden: dict[str, Any], mask: Tensor) -> dict[str, Any]:
        x, kinds = hidden["states"]
        inner = (
            checkpoint(self.block, x, kinds, mask, use_reentrant=False)
            if self.variant.recompute
            else self.block(x, kinds, mask)
        )
        return {"states": (x + inner, (kinds + 1) % 3)}

    def block(self, x: Tensor, kinds: Tensor, mask: Tensor) -> Tensor:
        weights = mask / mask.sum(1, keepdim=True)
        pooled = self.mix((x * weights[..., None]).sum(1, keepdim=True))
        x = F.dropout(F.gelu(self.up(self.norm(x + pooled))), self.variant.dropout, self.training)
        return self.down(x) * self.gains(kinds)


class Hard(PipelineModel):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        self.table, self.head = nn.Embedding(V, H), nn.Linear(H, V)
        if variant.tied:
            self.head.weight = self.table.weight
        self.layers = nn.ModuleList(Layer(variant) for _ in range(NUM_LAYERS))

    def first(self, tokens: Tensor) -> dict[str, Any]:
        return {"states": (self.table(tokens), tokens % 3)}

    def context(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return ((tokens > 0).double(),)

    def last(self, hidden: dict[str, Any], mask: Tensor) -> Tensor:
        return self.head(hidden["states"][0]) * mask[..., None]


class Sentences(Dataset[Tensor]):
    """Batches of another size and length each; token 0 pads."""

    def __init__(self, sizes: Sequence[tuple[int, int]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = []
        for rows, length in sizes:
            tokens = torch.randint(1, V, (rows, length), generator=generator)
            ends = torch.randint(2, length + 1, (rows, 1), generator=generator)
            self.batches.append(tokens * (torch.arange(length) < ends))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


TRAIN, VALIDATE = [(8, 7), (8, 5), (2, 6), (4, 9)], [(6, 11), (3, 4)]


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)
    predictions: list[Tensor] | None = None
    has_last_stage: bool = False


class Module(L.LightningModule):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Hard(variant).double()
        for name, param in self.model.named_parameters():
            param.requires_grad_(not name.startswith(tuple(f"{part}." for part in variant.frozen)))
        self.outcome = Outcome()

    def split_batch(self, batch: Tensor, micro_batch_size: int | None) -> list[Tensor]:
        """Each micro-batch as long as its longest sentence."""
        parts = batch.split(micro_batch_size or len(batch))
        return [part[:, : int((part > 0).sum(1).max())] for part in parts]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).sum((1, 2))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten(), ignore_index=0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outcome.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.outcome.norms.append(float(self.trainer.strategy.grad_norm))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def train(variant: Variant, layout: dict[str, Any], *, max_epochs: int = 1, **options: Any) -> Outcome:
    """Training, validation and prediction by the stock Trainer; on every rank."""
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(micro_batch_size=2, **layout)
    trainer = L.Trainer(
        strategy=strategy,
        max_epochs=max_epochs,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **({"accelerator": "cpu", "devices": layout.get("pp", 1)} | options),
    )
    module = Module(variant)
    validation = DataLoader(Sentences(VALIDATE, seed=5), batch_size=None)
    trainer.fit(module, DataLoader(Sentences(TRAIN, seed=4), batch_size=None), validation)
    outcome = module.outcome
    outcome.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    outcome.final = strategy.full_state_dict()
    outcome.predictions = trainer.predict(module, validation)
    outcome.has_last_stage = strategy.is_last_stage
    return outcome


def weights_last(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    """GPipe whose weight gradients all come at the end: a function of the user's own."""
    actions = [a._replace(kind=Kind.I) if a.kind is Kind.B else a for a in gpipe(rank, placement, num_microbatches)]
    return actions + [a._replace(kind=Kind.W) for a in actions if a.kind is Kind.I]


def own_v(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards, down and up a V."""
    return gpipe(rank, placement, num_microbatches)


own_v.placement = "v"  # type: ignore[attr-defined]

LAYOUTS: dict[str, dict[str, Any]] = {
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b, uneven": {"pp": 3, "schedule": "1f1b", "pipeline_layout": [3, 0, 2]},
    "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "zbh1": {"pp": 2, "schedule": "zbh1"},
    "zbh1, uneven": {"pp": 3, "schedule": "zbh1", "pipeline_layout": [2, 3, 0]},
    "zbv": {"pp": 2, "vpp": 2, "schedule": "zbv"},
    "zbv, uneven": {"pp": 3, "vpp": 2, "schedule": "zbv", "pipeline_layout": [1, 0, 1, 2, 0, 1]},
    "own function": {"pp": 2, "schedule": weights_last},
    "own function in a V": {"pp": 2, "vpp": 2, "schedule": own_v},
    "own lists": {"pp": 2, "schedule": [zbh1(rank, Placement(2), 4) for rank in range(2)]},
    "auto": {"pp": 3},
}


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Outcome]:
    """The same training on one process, by the name of the variant."""
    known: dict[str, Outcome] = {}

    def of(name: str) -> Outcome:
        if name not in known:
            known[name] = run_distributed(lambda: train(VARIANTS[name], {}), 1)[0]
        return known[name]

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_schedule_trains_like_one_process(variant: str, layout: str, reference: Callable[[str], Outcome]) -> None:
    expected = reference(variant)
    ranks = run_distributed(lambda: train(VARIANTS[variant], LAYOUTS[layout]), LAYOUTS[layout]["pp"])
    assert [rank.has_last_stage for rank in ranks] == [True] + [False] * (len(ranks) - 1), "global rank 0 has the last stage"
    for found in ranks:
        assert found.final.keys() == expected.final.keys()
        for name, value in expected.final.items():
            torch.testing.assert_close(found.final[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
        for numbers in ("losses", "norms"):
            torch.testing.assert_close(torch.tensor(getattr(found, numbers)), torch.tensor(getattr(expected, numbers)))
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)
        assert expected.predictions is not None
        assert found.predictions is not None
        for one, other in zip(found.predictions, expected.predictions, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def plain_loop(variant: Variant, max_epochs: int = 1) -> tuple[Module, float]:
    """The same training without the package: the module as it has become, and the sum of its losses."""
    module = Module(variant)
    optimizer = module.configure_optimizers()
    losses = 0.0
    for batch in Sentences(TRAIN, seed=4).batches * max_epochs:
        optimizer.zero_grad()
        for part in module.split_batch(batch, 2):
            loss = module.loss(part) * len(part) / len(batch)
            loss.backward()
            losses += float(loss.detach())
        optimizer.step()
    return module, losses


@pytest.mark.parametrize("variant", ["tied", "first stage frozen"])
def test_one_process_trains_like_a_plain_loop(variant: str, reference: Callable[[str], Outcome]) -> None:
    module, losses = plain_loop(VARIANTS[variant])
    expected = reference(variant)
    assert sum(expected.losses) == pytest.approx(losses, rel=1e-6)
    for name, value in module.named_parameters():
        torch.testing.assert_close(expected.final[name], value.detach(), **TOLERANCE)
