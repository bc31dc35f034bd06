"""LightningCLI: every way to name the strategy, saved configurations, and the example."""

from __future__ import annotations

import runpy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_megatron import MegatronPrecision, MegatronStrategy, Recompute
from lightning_megatron.layers.te_backend import Fp8Options
from lightning_megatron.models.gpt_module import GPTModule
from lightning_megatron.testing import run_distributed

from .processes import ROOT

EXAMPLE = str(ROOT / "examples" / "lightning_cli.py")
YAML = str(ROOT / "examples" / "lightning_cli.yaml")
CLASS = "lightning_megatron.MegatronStrategy"


def parsed(*args: str) -> MegatronStrategy:
    """The strategy of a Trainer that a command line makes. Nothing is launched."""
    plain = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--model.config=llama_tiny"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *plain, *args])
        cli = LightningCLI(GPTModule, run=False, save_config_callback=None)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    return strategy


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        ([f"--trainer.strategy={CLASS}", "--trainer.strategy.tp=2"], {"tp": 2}),
        (["--trainer.strategy=MegatronStrategy", "--trainer.strategy.pp=2", "--trainer.strategy.vpp=2"], {"pp": 2, "vpp": 2}),
        ([f"--trainer.strategy={CLASS}"], {}),
        (["--trainer.strategy=MegatronStrategy"], {}),
        (["--trainer.strategy=megatron"], {}),
        (["--trainer.strategy=megatron_tp2"], {"tp": 2}),
        (["--trainer.strategy=megatron_tp2_pp2"], {"tp": 2, "pp": 2}),
        ([f'--trainer.strategy={{"class_path": "{CLASS}", "init_args": {{"pp": 4}}}}'], {"pp": 4}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_every_way_to_name_the_strategy_makes_it(args: list[str], sizes: dict[str, int]) -> None:
    parallelism = parsed("--trainer.devices=4", *args).parallelism
    assert {name: getattr(parallelism, name) for name in ("tp", "pp", "vpp")} == {"tp": 1, "pp": 1, "vpp": 1} | sizes


def test_typed_options_reach_the_strategy(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    options = {"pp": 2, "num_microbatches": 4, "schedule": "gpipe", "sequence_parallel": False, "timeout": "0:00:30"}
    options |= {"optimizer": {"class_path": "lightning_megatron.DistributedOptimizerConfig", "init_args": {"bucket_mb": 7}}}
    trainer = {"devices": 2, "strategy": {"class_path": CLASS, "init_args": options}}
    trainer["plugins"] = [{"class_path": "lightning_megatron.MegatronPrecision", "init_args": {"precision": "bf16-mixed"}}]
    config.write_text(yaml.safe_dump({"trainer": trainer}))
    strategy = parsed(f"--config={config}")
    assert strategy._timeout == timedelta(seconds=30)
    assert not strategy.parallelism.sequence_parallel
    assert (strategy._schedule, strategy._num_microbatches) == ("gpipe", 4)
    assert strategy._optimizer_config.bucket_mb == 7
    assert isinstance(strategy.precision_plugin, MegatronPrecision)
    assert strategy.precision_plugin.precision == "bf16-mixed"


def test_options_of_activations_products_and_precision_reach_the_strategy() -> None:
    options = {"recompute": "[mlp,norm]", "offload_activations": "true", "compile_pointwise": "true", "tp_overlap": "2"}
    options |= {"attention_kernel": "math", "gc_interval_steps": "7", "tune_products": "products.json"}
    precision = {"precision": "bf16-mixed", "fp8": "current", "first_last_layers_bf16": "[1,2]", "fp8_attention": "true"}
    args = [f"--trainer.strategy={CLASS}", *(f"--trainer.strategy.{name}={value}" for name, value in options.items())]
    args += ["--trainer.plugins=lightning_megatron.MegatronPrecision"]
    strategy = parsed("--trainer.devices=1", *args, *(f"--trainer.plugins.{name}={value}" for name, value in precision.items()))
    assert strategy._activations == {"recomputed": Recompute(["mlp", "norm"]), "offloads": True, "graphs": False}
    assert strategy._wanted_backend == {"name": "auto", "compiles": True, "attention_kernel": "math"}
    assert (strategy._tune_products, strategy.parallelism.tp_overlap, strategy._garbage._interval) == ("products.json", 2, 7)
    ends = {"first_layers_bf16": 1, "last_layers_bf16": 2}
    assert strategy.precision_plugin.fp8 == Fp8Options(recipe="current", attention=True, **ends)


def test_a_recompute_of_every_second_layer_is_given_by_its_class() -> None:
    every = ["--trainer.strategy.recompute=lightning_megatron.Recompute", "--trainer.strategy.recompute.every=2"]
    strategy = parsed("--trainer.devices=1", f"--trainer.strategy={CLASS}", *every)
    assert strategy._activations["recomputed"] == Recompute("full", every=2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trainer.strategy.tp=two"], "tp"),
        (["--trainer.strategy.schedule=zigzag"], "zigzag"),
        (["--trainer.strategy.tensor_parallel=2"], "tensor_parallel"),
        (["--trainer.strategy.vpp=2"], "vpp=2 needs pp >= 2"),
    ],
)
def test_a_wrong_option_is_named(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        parsed("--trainer.devices=2", f"--trainer.strategy={CLASS}", *args)
    assert message in capsys.readouterr().err + str(caught.value)


def run_example(monkeypatch: pytest.MonkeyPatch, *args: str) -> LightningCLI:
    """Run the example with its ranks forked from this process, which has the imports."""
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "fit", *args])
    made: dict[str, Any] = runpy.run_path(EXAMPLE, run_name="example")
    cli: LightningCLI = made["main"]()
    return cli


def test_the_example_trains_and_its_saved_configuration_runs_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--trainer.max_steps=2", "--trainer.enable_progress_bar=false", "--data.corpus_mb=0.2", "--data.batch_size=4"]
    small += ["--data.vocab_size=300", "--data.seq_len=32", "--trainer.val_check_interval=2"]
    cli = run_example(monkeypatch, f"--config={YAML}", *small, "--trainer.strategy.start_method=fork")
    first = float(cli.trainer.callback_metrics["train_loss"])
    saved = sorted(tmp_path.rglob("config.yaml"))
    assert len(saved) == 1
    arguments = yaml.safe_load(saved[0].read_text())["trainer"]["strategy"]
    assert arguments["class_path"] == CLASS
    assert (arguments["init_args"]["tp"], arguments["init_args"]["pp"]) == (2, 2)
    assert list(tmp_path.rglob("*.ckpt"))

    again = run_example(monkeypatch, f"--config={saved[0]}")
    assert float(again.trainer.callback_metrics["train_loss"]) == first

    # Another layout of the same configuration reads the same batches: dp=1 in both. In a process of its own, since a job of
    # one rank runs in the calling process.
    def alone() -> float:
        other = ["--trainer.strategy=megatron", "--trainer.devices=1"]
        return float(run_example(monkeypatch, f"--config={saved[0]}", *other).trainer.callback_metrics["train_loss"])

    assert run_distributed(alone, 1, init_process_group=False) == pytest.approx([first], rel=1e-4)
