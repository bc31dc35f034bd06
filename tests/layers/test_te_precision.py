"""What ``MegatronPrecision`` takes, refuses, and makes of Lightning's own plugin for Transformer Engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.precision import transformer_engine
from lightning.pytorch.plugins.precision import TransformerEnginePrecision

from lightning_megatron import MegatronPrecision, MegatronStrategy
from lightning_megatron.layers.te_backend import Fp8Options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fp8": "fp9"}, "fp8='fp9' is unknown"),
        ({"fp8": "delayed", "precision": "32-true"}, "fp8='delayed' goes with bf16-mixed or bf16-true"),
        ({"fp8_attention": True}, "fp8_attention=True says what is in 8 bits, but fp8=None"),
        ({"fp8_head": True}, "fp8_head=True says what is in 8 bits, but fp8=None"),
        ({"first_last_layers_bf16": (1, 0)}, "first_last_layers_bf16=.* says what is in 8 bits, but fp8=None"),
        ({"fp8": "delayed", "first_last_layers_bf16": (1, 1, 2)}, "must be a whole number, or two"),
        ({"fp8": "delayed", "first_last_layers_bf16": 1.5}, "must be a whole number, or two"),
        ({"fp8": "mxfp8", "fp8_attention": True}, "fp8_attention=True goes with fp8='delayed', 'current' or 'blockwise'"),
        ({"fp8": "delayed", "first_last_layers_bf16": -1}, "first_layers_bf16=-1 must be 0 or more"),
        ({"fp8": "delayed", "fp8_history_steps": 0}, "history_steps=0 must be 1 or more"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MegatronPrecision(**({"precision": "bf16-mixed"} | options))


@dataclass
class DelayedScaling:
    """Fields and defaults of Transformer Engine's."""

    margin: int = 0
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8BlockScaling:
    fp8_format: str = "E4M3"
    fp8_dpa: bool = False
    fp8_mha: bool = False


def translated(recipe: object, **options: Any) -> MegatronPrecision:
    """Of Lightning's plugin, whose constructor needs the library."""
    plugin = TransformerEnginePrecision.__new__(TransformerEnginePrecision)
    given = {"weights_dtype": torch.bfloat16, "fallback_compute_dtype": torch.bfloat16, "replace_layers": None} | options
    plugin.__dict__.update(given, recipe=recipe)
    return MegatronPrecision.from_lightning(plugin)


@pytest.mark.parametrize(
    ("recipe", "fp8"),
    [
        (DelayedScaling(), Fp8Options()),
        (DelayedScaling(margin=1, amax_history_len=4), Fp8Options(margin=1, history_steps=4)),
        (DelayedScaling(amax_compute_algo="most_recent"), Fp8Options(history_steps=1)),
        (DelayedScaling(fp8_dpa=True), Fp8Options(attention=True)),
        (DelayedScaling(fp8_dpa=True, fp8_mha=True), Fp8Options(attention=True)),
        (Float8BlockScaling(fp8_dpa=True), Fp8Options(recipe="blockwise", attention=True)),
    ],
    ids=str,
)
def test_lightnings_transformer_engine_precision_is_translated(recipe: object, fp8: Fp8Options) -> None:
    precision = translated(recipe, replace_layers=False)
    assert precision.precision == "bf16-mixed"
    assert precision.fp8 == fp8


@pytest.mark.parametrize(
    ("recipe", "options", "says"),
    [
        (DelayedScaling(), {"weights_dtype": torch.float16}, "float16 weights is not supported"),
        (DelayedScaling(), {"fallback_compute_dtype": torch.float16}, "fallback_compute_dtype=torch.float16"),
        (DelayedScaling(), {"replace_layers": True}, "replace_layers=True"),
        (DelayedScaling(fp8_format="E4M3"), {}, "DelayedScaling\\(fp8_format=E4M3"),
        (DelayedScaling(amax_compute_algo="mean"), {}, "amax_compute_algo=mean"),
        (Float8BlockScaling(fp8_format="HYBRID"), {}, "Float8BlockScaling\\(fp8_format=HYBRID"),
        (object(), {}, "recipe=object"),
    ],
    ids=str,
)
def test_what_lightnings_precision_has_beyond_that_is_refused_by_name(
    recipe: object, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        translated(recipe, **options)


def test_a_trainer_with_the_name_of_lightnings_precision_trains_by_delayed_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes: Any = ModuleType("transformer_engine.common.recipe")
    recipes.DelayedScaling = DelayedScaling
    monkeypatch.setitem(sys.modules, recipes.__name__, recipes)
    monkeypatch.setattr(transformer_engine, "_TRANSFORMER_ENGINE_AVAILABLE", True)
    trainer = L.Trainer(strategy=MegatronStrategy(), precision="transformer-engine", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.precision_plugin, MegatronPrecision)
    assert (trainer.precision, trainer.precision_plugin.fp8) == ("bf16-mixed", Fp8Options())
