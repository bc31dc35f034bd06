"""``MegatronPrecision``: in which dtype parameters, main parameters, gradients and activations live."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Protocol, get_args

import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.layers.te_backend import Fp8Options, Scales
from lightning_megatron.layers.te_backend.options import Recipe
from lightning_megatron.optim.loss_scale import DynamicLossScale

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"]
_PARAM_DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "16-mixed": torch.float16, "16-true": torch.float16}


class GradientFinisher(Protocol):
    """What finishes the gradients of one optimizer: the distributed optimizer, which knows every shard."""

    @property
    def should_skip(self) -> bool:
        """Whether the step must not be taken, on every rank alike."""

    def step(self, **kwargs: Any) -> None:
        """Take the step."""

    def apply_scaling(self) -> None:
        """Divide by what is still to be divided by: nobody has clipped."""

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale all gradients so that their global norm is at most ``max_norm``."""

    def clip_by_value(self, value: float) -> None:
        """Clamp each gradient element to ``[-value, value]``."""


class MegatronPrecision(Precision):
    """Dtypes of a training run.

    =============  ==========  ===============  =========================  =================================
    name           parameters  main parameters  gradients are summed in    the user's step
    =============  ==========  ===============  =========================  =================================
    ``32-true``    fp32        the parameters   fp32                       as it is
    ``bf16-mixed`` bf16        fp32             fp32                       under ``torch.autocast`` to bf16
    ``bf16-true``  bf16        the parameters   fp32                       float inputs are cast to bf16
    ``16-mixed``   fp16        fp32             fp32                       under ``torch.autocast`` to fp16
    ``16-true``    fp16        the parameters   fp32                       float inputs are cast to fp16
    ``64-true``    fp64        the parameters   fp64                       float inputs are cast to fp64
    =============  ==========  ===============  =========================  =================================

    ``Trainer(precision=...)`` with one of these names is translated to this plugin by the strategy.

    In fp16 losses are multiplied by a dynamic scale before the backward, never the logged ones. A step in which a gradient
    overflows on any rank is skipped on all ranks, which hold the same scale; it is saved in checkpoints. As under stock
    Lightning, a skipped step counts in ``global_step`` and for learning rate schedulers. Lightning turns ``16-mixed`` into
    ``bf16-mixed`` on CPU; give ``MegatronPrecision("16-mixed")`` as the plugin to have it there.

    With ``fp8`` the matrix products of the transformer layers run in 8 bits or fewer on Transformer Engine, the rest in bf16;
    parameters and the optimizer are as without. See docs/precision.md. ``Trainer(precision="transformer-engine")`` means
    ``MegatronPrecision("bf16-mixed", fp8="delayed")``.

    Args:
        precision: one of the names above.
        loss_scale: how the scale of fp16 moves; by default from 2**16, with hysteresis 2.
        fp8: how numbers are scaled into 8 bits: ``delayed``, ``current`` (one factor a tensor, from earlier steps or from the
            tensor itself), ``blockwise``, ``mxfp8``, ``nvfp4``. What the GPU cannot do is refused by name.
        fp8_head: multiply the vocabulary head in 8 bits as well (of models that do not share it with the embedding).
        fp8_attention: the products of attention in 8 bits as well: causal, whole rows, no dropout, heads of 128.
        fp8_params: the model holds the weights of 8-bit products in 8 bits, with fp32 main values in the optimizer alone.
        fp8_fast_gradients: sums of gradient products may be kept in less than fp32, as those of forward products are; those
            of the head are not.
        first_last_layers_bf16: layers at each end of the model that stay in bf16, as one number or two.
        fp8_history_steps: optimizer steps that ``delayed`` looks back on.
        fp8_margin: powers of two of headroom that ``delayed`` leaves.

    Raises:
        ValueError: another name, a loss scale where there is no fp16, FP8 where there is no bf16, options of FP8 without it.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        *,
        loss_scale: DynamicLossScale | None = None,
        fp8: Recipe | None = None,
        fp8_head: bool = False,
        fp8_attention: bool = False,
        fp8_params: bool = False,
        fp8_fast_gradients: bool = False,
        first_last_layers_bf16: int | tuple[int, int] = 0,
        fp8_history_steps: int = 16,
        fp8_margin: int = 0,
    ) -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"precision={precision!r} is not supported by MegatronStrategy yet; "
                f"use one of {', '.join(get_args(PrecisionName))}."
            )
        self.precision = precision
        in_fp16 = self.param_dtype == torch.float16
        if loss_scale is not None and not in_fp16:
            raise ValueError(f"loss_scale=... is for 16-mixed and 16-true; precision={precision!r} needs none.")
        self.scaler = (loss_scale or DynamicLossScale()) if in_fp16 else None
        self.finishers: dict[int, GradientFinisher] = {}
        asked: dict[str, object] = {"fp8_head": fp8_head, "fp8_attention": fp8_attention, "fp8_params": fp8_params}
        ends = _both_ends(first_last_layers_bf16)
        asked |= {"fp8_fast_gradients": fp8_fast_gradients, "first_last_layers_bf16": any(ends) and first_last_layers_bf16}
        _refuse_without(fp8, **asked)
        options: dict[str, Any] = {"history_steps": fp8_history_steps, "margin": fp8_margin, "head": fp8_head}
        options |= {"attention": fp8_attention, "params": fp8_params, "fast_gradients": fp8_fast_gradients}
        options |= {"first_layers_bf16": ends[0], "last_layers_bf16": ends[1]}
        self.fp8 = None if fp8 is None else Fp8Options(recipe=fp8, **options)
        """What is multiplied in 8 bits."""
        if fp8 is not None and self.param_dtype != torch.bfloat16:
            raise ValueError(f"fp8={fp8!r} goes with bf16-mixed or bf16-true, not with precision={precision!r}.")
        if fp8_params and not self.main_params_in_fp32:
            raise ValueError(f"fp8_params=True needs fp32 main parameters: use bf16-mixed, not precision={precision!r}.")
        self._scales: list[Scales] = []
        self._reduce_max: Callable[[Tensor], Tensor] = _alone

    @classmethod
    def from_lightning(cls, plugin: Precision) -> MegatronPrecision:
        """Translate the plugin that ``Trainer(precision=...)`` made.

        Raises:
            ValueError: a precision that this strategy does not train in; the message names it.
        """
        if isinstance(plugin, MegatronPrecision):
            return plugin
        if isinstance(plugin, TransformerEnginePrecision):
            return cls("bf16-mixed", **translated(plugin))
        plain = type(plugin) in (Precision, HalfPrecision, MixedPrecision, DoublePrecision)
        if not plain or plugin.precision not in get_args(PrecisionName):
            raise ValueError(
                f"Trainer(precision={plugin.precision!r}) ({type(plugin).__name__}) is not supported by MegatronStrategy yet; "
                f"use one of {', '.join(get_args(PrecisionName))}."
            )
        return cls(plugin.precision, loss_scale=_chosen_scale(plugin))  # type: ignore[arg-type]

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the parameters that the model computes with."""
        return _PARAM_DTYPES.get(str(self.precision), torch.bfloat16)

    @property
    def main_params_in_fp32(self) -> bool:
        """Whether the optimizer steps fp32 copies of 16-bit parameters."""
        return self._is_mixed

    @property
    def _is_mixed(self) -> bool:
        return str(self.precision).endswith("-mixed")

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating-point parameters, and buffers unless the mode is mixed, to the parameter dtype, in place.

        In the mixed mode norms with running statistics stay as they are: statistics and parameters must be of one dtype.
        """
        if self.precision == "32-true":
            return module
        for child in module.modules():
            if self._is_mixed and isinstance(child, nn.modules.batchnorm._NormBase):
                continue
            for name, param in child.named_parameters(recurse=False):
                if param.is_floating_point():
                    getattr(child, name).data = param.data.to(self.param_dtype)
            for name, buffer in child.named_buffers(recurse=False):
                if buffer.is_floating_point() and not self._is_mixed and not _is_metric(child):
                    setattr(child, name, buffer.to(self.param_dtype))
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs in the ``true`` modes; in the ``mixed`` ones autocast does where an operation wants it."""
        if self._is_mixed or self.precision == "32-true":
            return data
        return apply_to_collection(data, Tensor, _convert_fp_tensor, dst_type=self.param_dtype)

    @contextmanager
    @override
    def forward_context(self) -> Generator[None, None, None]:
        """Run a step of the user's; entered once for each action of the schedule."""
        with torch.autocast(self._device_type, self.param_dtype) if self._is_mixed else nullcontext():
            yield

    @property
    def _device_type(self) -> str:
        return "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]

    # Loss scale and the step

    @property
    def loss_scale(self) -> float | None:
        """What losses are multiplied by now; ``None`` without fp16."""
        return None if self.scaler is None else self.scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to differentiate: ``loss`` times the scale, in fp32 so that the product does not overflow."""
        return loss if self.scaler is None else loss.float() * self.scaler.scale

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Steppable | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """``manual_backward``: the schedule runs the backward of automatic optimization, and scales there."""
        super().backward(self.scale_loss(tensor), model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the backward, the hooks and the clipping, and then the step, unless it is to be skipped."""
        result = closure()
        self._after_closure(model, optimizer)
        self.take_step(self._finisher(optimizer), **kwargs)
        return result

    def take_step(self, finisher: GradientFinisher, **kwargs: Any) -> None:
        """The step alone, on gradients that are final, unless it is to be skipped."""
        finisher.apply_scaling()
        skip = finisher.should_skip
        if self.scaler is not None:
            self.scaler.update(overflow=skip)
        if not skip:
            finisher.step(**kwargs)
        for scales in self._scales:
            scales.advance(self._reduce_max)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The loss scale, in fp16, and what ``delayed`` FP8 remembers."""
        state = {} if self.scaler is None else self.scaler.state_dict()
        memory = [scales.state_dict() for scales in self._scales]
        return {**state, "fp8": memory} if memory else state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the loss scale of a checkpoint, in fp16, and with what ``delayed`` FP8 remembers."""
        state = dict(state_dict)
        memory = state.pop("fp8", [])
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
        for index, scales in enumerate(self._scales):
            scales.load_state_dict(memory[index] if index < len(memory) else {})

    def use_scales(self, scales: list[Scales], reduce_max: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """The FP8 factors of the model that is trained; they move with the optimizer's steps. All ranks call it alike.

        Args:
            scales: of the whole model, on every rank.
            reduce_max: the largest of each element over all ranks.
            device: where they live.
        """
        self._scales, self._reduce_max = scales, reduce_max
        for one in scales:
            one.prepare(device)
            one.weights_changed()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the global norm, counted once for each parameter element over all ranks."""
        self._finisher(optimizer).clip_by_norm(float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp each gradient element."""
        self._finisher(optimizer).clip_by_value(float(clip_val))

    def _finisher(self, optimizer: Any) -> GradientFinisher:
        return self.finishers[id(getattr(optimizer, "_optimizer", optimizer))]


def _chosen_scale(plugin: Precision) -> DynamicLossScale | None:
    """The user's own ``GradScaler`` of a ``MixedPrecision``, if it is not torch's default one."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    chosen = (scaler._init_scale, scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    if chosen == (2.0**16, 2.0, 0.5, 2000):
        return None
    init_scale, growth_factor, backoff_factor, growth_interval = chosen
    factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
    return DynamicLossScale(init_scale, **factors, growth_interval=growth_interval, hysteresis=1)


def _refuse_without(fp8: str | None, **options: object) -> None:
    """Refuse options that say what FP8 does where there is no FP8.

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if value and fp8 is None:
            raise ValueError(f"{name}={value!r} says what is in 8 bits, but fp8=None; give fp8='delayed', or leave out {name}.")


def _both_ends(layers: int | tuple[int, int]) -> tuple[int, int]:
    """Layers at the first and at the last end.

    Raises:
        ValueError: not one or two whole numbers.
    """
    ends = [layers] * 2 if isinstance(layers, int) else list(layers) if isinstance(layers, (tuple, list)) else []
    if len(ends) != 2 or not all(isinstance(end, int) for end in ends):
        raise ValueError(f"first_last_layers_bf16={layers!r} must be a whole number, or two: at the first and the last end.")
    return ends[0], ends[1]


RECIPES = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "blockwise",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
"""Transformer Engine's recipes, by the names that they have here."""


def translated(plugin: TransformerEnginePrecision) -> dict[str, Any]:
    """The arguments that Lightning's Transformer Engine plugin comes down to.

    Raises:
        ValueError: fp16 weights, a recipe or an option that this strategy does not have.
    """
    if plugin.weights_dtype != torch.bfloat16:
        raise ValueError(
            f"TransformerEnginePrecision with {plugin.weights_dtype} weights is not supported by MegatronStrategy: FP8 goes "
            f"with bf16. Use precision='transformer-engine', or MegatronPrecision('bf16-mixed', fp8='delayed')."
        )
    if plugin.fallback_compute_dtype != torch.bfloat16:
        raise _no_counterpart(f"fallback_compute_dtype={plugin.fallback_compute_dtype}")
    if plugin.replace_layers:  # it would make te.Linear of the user's nn.Linear, which this strategy would not shard
        raise _no_counterpart("replace_layers=True")
    recipe: Any = plugin.recipe
    name = RECIPES.get(type(recipe).__name__)
    if name is None:
        raise _no_counterpart(f"recipe={type(recipe).__name__}")
    return {"fp8": name, **_recipe_options(recipe, is_delayed=name == "delayed")}


def _recipe_options(recipe: Any, *, is_delayed: bool) -> dict[str, Any]:
    """What differs from the recipe's defaults, as options of ``MegatronPrecision``."""
    default, names = type(recipe)(), [field.name for field in dataclasses.fields(recipe) if not field.name.startswith("_")]
    changed = {name: getattr(recipe, name) for name in names if getattr(recipe, name) != getattr(default, name)}
    options: dict[str, Any] = {}
    if changed.pop("fp8_dpa", False) | changed.pop("fp8_mha", False):
        options["fp8_attention"] = True
    if is_delayed:
        same = {"margin": "fp8_margin", "amax_history_len": "fp8_history_steps"}
        options |= {ours: int(changed.pop(theirs)) for theirs, ours in same.items() if theirs in changed}
        if changed.get("amax_compute_algo") == "most_recent":
            options["fp8_history_steps"] = 1
            del changed["amax_compute_algo"]
    if changed:
        shown = ", ".join(f"{name}={value}" for name, value in changed.items())
        raise _no_counterpart(f"recipe={type(recipe).__name__}({shown})")
    return options


def _no_counterpart(what: str) -> ValueError:
    return ValueError(
        f"TransformerEnginePrecision({what}) has no counterpart under MegatronStrategy. Leave it out, or give "
        f"plugins=[MegatronPrecision('bf16-mixed', fp8=...)] with one of {', '.join(RECIPES.values())}; see docs/precision.md."
    )


def _is_metric(module: nn.Module) -> bool:
    from torchmetrics import Metric

    return isinstance(module, Metric)


def _alone(numbers: Tensor) -> Tensor:
    """The maximum over one rank."""
    return numbers
