"""Parameters in 8 bits: the same training bit for bit, half the bytes, checkpoints as any other run's, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CheckpointConfig, MegatronStrategy
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend, narrow_weights
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.strategy import strategy as strategy_file
from lightning_megatron.testing import run_distributed

LLAMA = GPTConfig(
    num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, ffn_hidden_size=64, vocab_size=96, max_seq_len=32, init_std=0.1
)
STEPS = 4


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: GPT | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(LLAMA)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(batch[0][:, :-1], labels=batch[0][:, 1:]).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert self.model is not None
        self.log("val", self.model(batch[0][:, :-1], labels=batch[0][:, 1:]).mean(), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Look(Callback):
    """Notes what parameters read as between steps, and what their buffers hold."""

    def __init__(self) -> None:
        self.num_nan = self.num_params = self.bytes = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.num_nan = sum(int(param.detach().isnan().all()) for param in module.parameters())
        self.num_params = sum(1 for _ in module.parameters())
        self.bytes = sum(bucket.values.nbytes for one in strategy._distributed for bucket in one._buckets)


def train(
    layout: dict[str, Any],
    precision: dict[str, Any],
    *,
    steps: int = STEPS,
    resume: str | None = None,
    save: str | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, parameters at the end, and the loss of a validation after it."""

    def chosen(*_: Any, fp8: Fp8Options | None = None, **__: Any) -> TeBackend:
        return TeBackend(PlainOperations(fp8), fp8)

    strategy_file.choose_backend = chosen  # this process is forked for one test
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(micro_batch_size=2, **layout)
    module = Module()
    trainer = L.Trainer(
        strategy=strategy,
        plugins=[MegatronPrecision("bf16-mixed", **precision)],
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        check_val_every_n_epoch=None,
        val_check_interval=2,
        callbacks=list(callbacks),
    )
    samples = torch.randint(96, (8 * STEPS, 17), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(samples), batch_size=8 // strategy.dp_size)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    state = strategy.full_state_dict()
    after = trainer.validate(module, loader, verbose=False)[0]["val"]
    return module.losses, state, after


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    assert one[2] == other[2]


NARROW = {"fp8": "delayed", "fp8_params": True}


@pytest.mark.parametrize("layout", [{}, {"world": 2}, {"tp": 2}, {"pp": 2}], ids=["one rank", "dp2", "tp2", "pp2"])
def test_training_is_that_of_16_bit_parameters_bit_for_bit(layout: dict[str, Any]) -> None:
    layout = dict(layout)
    world = layout.pop("world", max(layout.values(), default=1))
    narrow, wide = (run_distributed(train, world, layout, {**NARROW, "fp8_params": value}) for value in (True, False))
    for one, other in zip(narrow, wide, strict=True):
        assert_same(one, other)
        assert all(not value.isnan().any() for value in one[1].values())


@pytest.mark.parametrize("recipe", ["current", "delayed with head"])
def test_with_a_head_in_8_bits_and_by_current_factors_too(recipe: str) -> None:
    options = {"fp8": recipe.split()[0], "fp8_head": "head" in recipe}
    (narrow,), (wide,) = (run_distributed(train, 1, {}, {**options, "fp8_params": value}) for value in (True, False))
    assert_same(narrow, wide)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_a_fused_step_and_narrow_states_work_on_main_values_alike(state_dtype: Any) -> None:
    layout = {"optimizer": DistributedOptimizerConfig(fused_adam=state_dtype == "fp32", state_dtype=state_dtype)}
    narrow, wide = (run_distributed(train, 2, layout, {**NARROW, "fp8_params": value}) for value in (True, False))
    for one, other in zip(narrow, wide, strict=True):
        assert_same(one, other)


def test_the_model_holds_one_byte_of_each_weight_and_the_gathers_move_that() -> None:
    def look(narrow: bool) -> tuple[int, int, int]:
        noted = Look()
        train({}, {"fp8": "delayed", "fp8_params": narrow}, steps=1, callbacks=(noted,))
        return noted.num_nan, noted.num_params, noted.bytes

    (num_nan, num_params, held), *_ = run_distributed(look, 2, True)
    (none, _, wide), *_ = run_distributed(look, 2, False)
    in_8_bits = 2 * (128 * 64 + 64 * 64 + 128 * 64 + 64 * 64)  # of two layers
    assert (num_nan, none) == (8, 0)
    assert num_params == 8 + 2 * 2 + 3
    assert wide - held == in_8_bits


def test_a_run_goes_on_where_it_was_saved_bit_for_bit(tmp_path: Path) -> None:
    whole = run_distributed(train, 2, {}, NARROW)
    run_distributed(partial(train, steps=2, save=str(tmp_path / "saved")), 2, {}, NARROW)
    resumed = run_distributed(partial(train, resume=str(tmp_path / "saved")), 2, {}, NARROW)
    for one, other in zip(resumed, whole, strict=True):
        assert one[0] == other[0][2:]
        assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_checkpoints_move_between_8_and_16_bit_parameters_and_other_layouts(tmp_path: Path) -> None:
    for narrow in (True, False):
        saved = str(tmp_path / f"from {narrow}")
        first = run_distributed(partial(train, steps=2, save=saved), 1, {}, {"fp8": "delayed", "fp8_params": narrow})[0]
        for to_narrow in (True, False):
            there = run_distributed(partial(train, resume=saved), 1, {}, {"fp8": "delayed", "fp8_params": to_narrow})[0]
            if narrow and to_narrow:
                expected = there
            assert_same(there, expected)
        loaded = run_distributed(partial(train, steps=2, resume=saved), 2, {"tp": 2}, {})[
            0
        ]  # nothing in 8 bits, and no step is left
        assert all(torch.equal(loaded[1][name], first[1][name]) for name in first[1])


def test_values_are_shown_wide_and_the_8_bits_follow_what_is_loaded() -> None:
    def check() -> None:
        options = Fp8Options(params=True)
        model = GPT(LLAMA, seed=5, backend=TeBackend(PlainOperations(options), options), dtype=torch.bfloat16)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        holders = narrow_weights(model)
        assert len(holders) == 8
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distributed = DistributedOptimizer(optimizer, model.named_parameters(), mesh=Mesh(), narrow=holders)
        weight = model.layers[0].mlp.down.weight
        assert weight.isnan().all()
        assert weight.shape == before["layers.0.mlp.down.weight"].shape
        with distributed.wide_parameters(changed=True):
            assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
            with torch.no_grad():
                weight.mul_(3.0)
            distributed.refresh_main()
        assert weight.isnan().all()
        rows, scale_inv = holders[weight][0]._held or (torch.empty(0), torch.empty(0))
        held = rows.view(torch.float8_e4m3fn).float() * scale_inv
        expected = before["layers.0.mlp.down.weight"].float() * 3.0
        assert float((held - expected).abs().max()) <= float(expected.abs().max()) / 16  # 3 bits of mantissa
        distributed.close()
        torch.testing.assert_close(weight.float(), expected, rtol=2**-8, atol=0.0)
        assert holders[weight][0]._held is None

    run_distributed(check, 1)


def test_weights_alone_are_loaded_and_rounded_anew(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    run_distributed(partial(train, steps=2, save=saved), 1, {}, {"fp8": "delayed"})
    config = {"checkpoint": CheckpointConfig(weights_only=True)}
    narrow, wide = (
        run_distributed(partial(train, resume=saved), 1, config, {**NARROW, "fp8_params": value})[0] for value in (True, False)
    )
    assert_same(narrow, wide)


# What is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fp8_params": True}, "fp8_params=True says what is in 8 bits, but fp8=None"),
        ({"fp8": "blockwise", "fp8_params": True}, "goes with fp8='delayed' or 'current'"),
        ({"fp8": "delayed", "fp8_params": True, "precision": "bf16-true"}, "needs fp32 main parameters"),
    ],
)
def test_precisions_without_wide_values_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MegatronPrecision(**({"precision": "bf16-mixed"} | options))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DistributedOptimizerConfig(main_param="remainder"), "not main_param='remainder'"),
        (DistributedOptimizerConfig(offload_fraction=0.5), "offload_fraction=0.5"),
    ],
)
def test_optimizers_that_keep_values_elsewhere_are_refused(config: DistributedOptimizerConfig, says: str) -> None:
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=says):
        DistributedOptimizer(optimizer, model.named_parameters(), mesh=Mesh(), config=config, narrow={model.weight: []})


def test_averages_of_parameters_are_refused() -> None:
    def check() -> None:
        with pytest.raises(ValueError, match="WeightAveraging averages the model's own parameters"):
            train({}, NARROW, callbacks=(WeightAveraging(),))

    run_distributed(check, 1)


def test_a_weight_that_others_use_as_well_stays_in_16_bits() -> None:
    options = Fp8Options(params=True)
    model = GPT(LLAMA, backend=TeBackend(PlainOperations(options), options))
    model.other = nn.Linear(1, 1)
    model.other.weight = model.layers[0].mlp.down.weight  # type: ignore[union-attr]
    assert len(narrow_weights(model)) == 7


class SaveHalves(Callback):
    """Saves between steps half of each weight."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value * 0.5 for name, value in checkpoint["state_dict"].items()}


class Negative(Module):
    """Loads its weights with the other sign."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: -value for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize("layout", [{}, {"world": 2}], ids=["one rank", "dp2"])
def test_hooks_on_checkpoints_see_and_change_the_values_of_weights_in_8_bits(
    layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = layout.get("world", 1)
    found = []
    for params in (True, False):
        path, precision = str(tmp_path / f"{params}.ckpt"), {**NARROW, "fp8_params": params}
        run_distributed(partial(train, callbacks=(SaveHalves(path),)), world, {}, precision)
        found.append(run_distributed(partial(train, resume=path), world, {}, precision))
        with monkeypatch.context() as patched:
            patched.setitem(globals(), "Module", Negative)
            found.append(run_distributed(partial(train, resume=path), world, {}, precision))
    halved, negative, wide_halved, wide_negative = found
    for rank in range(world):
        assert_same(halved[rank], wide_halved[rank])
        assert_same(negative[rank], wide_negative[rank])
        assert halved[rank][0] != negative[rank][0]
