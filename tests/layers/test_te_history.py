"""What 8-bit factors remember: of tensors that a step did not meet, of overflows, of odd lengths, of other runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, Scales, TeBackend, scales_of
from lightning_megatron.models import GPT, GPTModule
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.strategy import strategy
from lightning_megatron.strategy.prepare import PreparedModule
from lightning_megatron.testing import run_distributed
from tests.layers.test_te_gated import LLAMA, TOKENS

SMALL = 2.0**-12  # of a loss: a mean over many tokens makes gradients as small
ATTENTION = [False, True]


def built(options: Fp8Options | None, **fields: Any) -> tuple[GPT, Callable[[], None]]:
    """A model, and what ends a step."""
    backend = None if options is None else TeBackend(PlainOperations(options), options)
    scales = None if backend is None else backend.scales

    def end() -> None:
        if scales is not None:
            scales.advance(lambda numbers: numbers)

    return GPT(replace(LLAMA, **fields), seed=5, backend=backend), end


def step(model: GPT, end: Callable[[], None], *, scale: float = SMALL) -> dict[str, Tensor]:
    """Gradients of a step."""
    model.zero_grad()
    (model(TOKENS, labels=TOKENS.flip(1)).mean() * scale).backward()
    end()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within the noise of 8 bits; a factor that fits nothing leaves zeros, or clips."""
    norm = torch.linalg.vector_norm
    assert found.keys() == expected.keys()
    far = {name: float(norm(found[name] - value) / norm(value)) for name, value in expected.items()}
    assert max(far.values()) < 0.25, far


@pytest.mark.parametrize("attention", ATTENTION)
def test_layers_that_are_thawed_have_factors_of_their_own_at_first(attention: bool) -> None:
    found, expected = [], []
    for options, steps in ((Fp8Options(attention=attention), found), (None, expected)):
        model, end = built(options)
        lower = [*model.embedding.parameters(), *model.layers[0].parameters()]
        for param in lower:
            param.requires_grad_(False)
        step(model, end)
        for param in lower:
            param.requires_grad_(True)
        steps += [step(model, end) for _ in range(3)]
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("scale", [inf, 0.0], ids=["overflow", "nothing"])
def test_a_first_step_that_says_nothing_is_as_none(attention: bool, scale: float) -> None:
    model, end = built(Fp8Options(attention=attention))
    wide, _ = built(None)
    expected = step(wide, lambda: None)
    step(model, end, scale=scale)
    for _ in range(3):
        assert_near(step(model, end), expected)


def test_an_overflow_is_not_remembered() -> None:
    scales = Scales(Fp8Options())
    slots = [scales.slot(torch.float8_e4m3fn) for _ in range(2)]
    scales.prepare(torch.device("cpu"))
    for met in (2.0, inf, 8.0):
        slots[0].amax.fill_(met)
        scales.advance(lambda numbers: numbers)
    assert [slot.is_known for slot in slots] == [True, False]
    assert [float(slot.scale) for slot in slots] == [32.0, 1.0]


def test_lengths_that_are_not_handed_over_have_the_factors_of_those_that_are() -> None:
    model, end = built(Fp8Options(attention=True), num_layers=1)
    wide, _ = built(None, num_layers=1)
    for _ in range(20):
        for one in (model, wide):
            with torch.no_grad():
                one.layers[0].attn.qkv.weight[-32:] *= 1.15  # values, as training may make them grow
        step(model, end, scale=1.0)
    odd = TOKENS[:1].repeat(1, 2)[:, :17]
    with torch.no_grad():
        found, expected = model(odd), wide(odd)
    assert float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)) < 0.2


def test_a_run_that_is_set_back_to_its_start_has_no_history() -> None:
    model, end = built(Fp8Options())
    scales = model.layers[0].attn.qkv.scales
    precision = MegatronPrecision("bf16-mixed", fp8="delayed")
    precision.use_scales([scales], lambda numbers: numbers, torch.device("cpu"))
    before = precision.state_dict()
    first = step(model, end)
    second = step(model, end)
    precision.load_state_dict(before)
    assert not scales.is_warm
    again = step(model, end)
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert not all(torch.equal(again[name], value) for name, value in second.items())


def test_a_first_look_in_inference_mode_leaves_training_as_it_is() -> None:
    (looked, end), (other, end_other) = built(Fp8Options(attention=True)), built(Fp8Options(attention=True))
    with torch.inference_mode():
        looked(TOKENS)
    for _ in range(2):
        found, expected = step(looked, end), step(other, end_other)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


class Stages(GPTModule):
    """Its loss, and nothing else."""

    def __init__(self) -> None:
        super().__init__(LLAMA)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With steps that show."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Averages(L.Callback):
    """Other weights for validation, put there by a way that leaves no trace."""

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Put them there."""
        self.kept = [param.detach().clone() for param in module.parameters()]
        for param in module.parameters():
            param.data.mul_(0.5)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Take them back."""
        for param, value in zip(module.parameters(), self.kept, strict=True):
            param.data.copy_(value)


class Evaluated(GPTModule):
    """Keeps each validation loss, and the same with weights that are rounded anew."""

    def __init__(self) -> None:
        super().__init__(LLAMA)
        self.seen: list[tuple[float, float]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Twice."""
        losses = []
        for _ in range(2):
            losses.append(float(self.model(batch["tokens"], labels=batch["labels"]).mean()))
            for scales in scales_of(self):
                scales.weights_changed()
        self.seen.append((losses[0], losses[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With steps that show."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(module: L.LightningModule, *callbacks: L.Callback, layout: dict[str, Any], **fp8: Any) -> None:
    """Four steps and two validations by a new Trainer, 8 bits in plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "choose_backend", lambda *args, fp8=None, **kwargs: TeBackend(PlainOperations(fp8), fp8))
        trainer = L.Trainer(
            strategy=MegatronStrategy(**layout),
            plugins=[MegatronPrecision("bf16-mixed", fp8="delayed", **fp8)],
            accelerator="cpu",
            devices=layout.get("pp", 1),
            max_steps=4,
            limit_val_batches=1,
            val_check_interval=2,
            num_sanity_val_steps=0,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        samples = [{"tokens": row, "labels": row.flip(0)} for row in TOKENS.repeat(4, 1)]
        trainer.fit(module, DataLoader(samples, batch_size=2), DataLoader(samples, batch_size=2))


def test_weights_that_a_callback_swaps_for_validation_are_those_that_are_multiplied() -> None:
    def run() -> list[tuple[float, float]]:
        module = Evaluated()
        fit(module, Averages(), layout={})
        return module.seen

    (seen,) = run_distributed(run, 1)
    assert len(seen) == 2
    for loss, fresh in seen:
        assert loss == fresh


@pytest.mark.parametrize("fp8", [{"fp8_head": True}, {"first_last_layers_bf16": (1, 0)}], ids=str)
def test_a_second_trainer_goes_on_with_the_stages_of_the_first(fp8: dict[str, Any]) -> None:
    def run() -> list[int]:
        module = Stages()
        for _ in range(2):
            fit(module, layout={"pp": 2, "micro_batch_size": 1}, **fp8)
        prepared = PreparedModule.of(module)
        assert prepared is not None
        return [scales._steps for scales in prepared.scales]

    assert run_distributed(run, 2) == [[8], [8]]
