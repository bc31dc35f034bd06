"""One rule of loss normalisation: equal weight for samples, or for valid tokens, and none for what has no valid token."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, PipelineModel
from lightning_megatron.loss import StepLosses
from lightning_megatron.testing import run_distributed
from lightning_megatron.token_guard import GuardedModels, TokenGuard

CPU = torch.device("cpu")


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Squared distance to the label over valid rows: 0/0 without any, and so is its gradient."""
    valid = labels != -100
    return ((logits.sum(-1) - labels).square() * valid).sum() / valid.sum()


def test_plain_losses_weigh_micro_batches_by_their_samples_and_share_the_step() -> None:
    losses = StepLosses([4, 2], num_sharers=3, device=CPU)
    scaled = [losses.scaled(0, torch.tensor(3.0)), losses.scaled(1, {"loss": torch.tensor(6.0)})]
    assert torch.allclose(torch.stack([s for s in scaled if s is not None]), torch.tensor([3.0 * 4 / 6 / 3, 6.0 * 2 / 6 / 3]))
    assert float(losses.mean()) == pytest.approx((3 * 4 + 6 * 2) / 6)
    assert float(losses.num_tokens) == 0


def test_token_losses_become_sums_and_the_mean_is_over_tokens() -> None:
    losses = StepLosses([1, 1], num_sharers=3, device=CPU)
    assert float(losses.scaled(0, {"loss": torch.tensor(2.0), "num_tokens": 5})) == 10.0
    assert float(losses.scaled(1, {"loss": torch.tensor(4.0), "num_tokens": torch.tensor(1)})) == 4.0
    assert float(losses.num_tokens) == 6
    assert float(losses.mean()) == pytest.approx(14 / 6)


def test_a_micro_batch_without_tokens_has_no_loss_and_leaves_the_mean_alone() -> None:
    losses = StepLosses([1, 1], num_sharers=1, device=CPU)
    assert losses.scaled(0, {"loss": torch.tensor(float("nan")), "num_tokens": 0}) is None
    losses.scaled(1, {"loss": torch.tensor(4.0), "num_tokens": 2})
    assert float(losses.mean()) == 4.0


def test_a_guarded_model_gets_a_gradient_of_zero_where_the_mean_is_over_no_token() -> None:
    model = nn.Linear(3, 5)
    guarded, losses = GuardedModels([model]), StepLosses([1, 1], num_sharers=1, device=CPU)
    for microbatch, labels in enumerate([torch.full((2,), -100), torch.tensor([1, 4])]):
        guard = TokenGuard()
        with guarded.guarding(guard):
            loss = masked_mean(model(torch.ones(2, 3)), labels)
        scaled = losses.scaled(microbatch, {"loss": loss, "num_tokens": (labels != -100).sum()}, guard)
        assert scaled is not None
        assert bool(scaled.isnan()) is (microbatch == 0)
        model.zero_grad()
        scaled.backward()
        assert model.weight.grad is not None
        assert bool((model.weight.grad == 0).all()) is (microbatch == 0)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "it returned NoneType"),
        (torch.ones(2), r"a tensor of shape \(2,\)"),
        ({"value": torch.ones(())}, "a dict without 'loss'"),
    ],
)
def test_what_is_no_loss_is_named(output: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        StepLosses([1], num_sharers=1, device=CPU).scaled(0, output)


def test_the_two_forms_do_not_mix_within_a_step() -> None:
    losses = StepLosses([1, 1], num_sharers=1, device=CPU)
    losses.scaled(0, torch.tensor(1.0))
    with pytest.raises(ValueError, match="always, or a plain loss always"):
        losses.scaled(1, {"loss": torch.tensor(1.0), "num_tokens": 3})


class Tagger(PipelineModel):
    """``[B, 3] -> [B, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inlet, self.outlet = nn.Linear(3, 4), nn.Linear(4, 5)

    def first(self, x: Tensor) -> Tensor:
        return self.inlet(x)

    def last(self, hidden: Tensor) -> Tensor:
        return self.outlet(hidden)


class TaggerModule(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Tagger()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = masked_mean(self.model(batch[0]), batch[1])
        return {"loss": loss, "num_tokens": (batch[1] != -100).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, generator=generator), torch.tensor([-100, -100, 1, -100, 2, 3, 4, -100])


@pytest.mark.parametrize(("world_size", "pp"), [(1, 1), (2, 2), (2, 1)])
def test_a_step_with_micro_batches_without_tokens_equals_one_over_all_tokens(world_size: int, pp: int) -> None:
    x, labels = samples()
    reference = Tagger()
    masked_mean(reference(x), labels).backward()
    expected = {f"model.{name}": param.detach() - 0.01 * param.grad for name, param in reference.named_parameters()}

    def run() -> dict[str, Tensor]:
        strategy = MegatronStrategy(pp=pp, micro_batch_size=2)
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=world_size, max_steps=1, **quiet)
        trainer.fit(TaggerModule(), DataLoader(TensorDataset(*samples()), batch_size=8 // strategy.dp_size))
        return strategy.full_state_dict()

    for state in run_distributed(run, world_size):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
