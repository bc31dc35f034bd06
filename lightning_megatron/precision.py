"""``MegatronPrecision``: in which dtype parameters, main parameters, gradients and activations live."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, Protocol, get_args

import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "64-true"]


class GradientClipper(Protocol):
    """What clips the gradients of one optimizer: the distributed optimizer, which knows every shard."""

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
    ``64-true``    fp64        the parameters   fp64                       float inputs are cast to fp64
    =============  ==========  ===============  =========================  =================================

    ``Trainer(precision=...)`` with one of these names is translated to this plugin by the strategy.

    Args:
        precision: one of the names above.

    Raises:
        ValueError: another name.
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"precision={precision!r} is not supported by MegatronStrategy yet; "
                f"use one of {', '.join(get_args(PrecisionName))}."
            )
        self.precision = precision
        self.clippers: dict[int, GradientClipper] = {}

    @classmethod
    def from_lightning(cls, plugin: Precision) -> MegatronPrecision:
        """Translate the plugin that ``Trainer(precision=...)`` made.

        Raises:
            ValueError: a precision that this strategy does not train in; the message names it.
        """
        if isinstance(plugin, MegatronPrecision):
            return plugin
        plain = type(plugin) in (Precision, HalfPrecision, MixedPrecision, DoublePrecision)
        if not plain or plugin.precision not in get_args(PrecisionName):
            raise ValueError(
                f"Trainer(precision={plugin.precision!r}) ({type(plugin).__name__}) is not supported by MegatronStrategy yet; "
                f"use one of {', '.join(get_args(PrecisionName))}."
            )
        return cls(plugin.precision)  # type: ignore[arg-type]

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the parameters that the model computes with."""
        return {"32-true": torch.float32, "64-true": torch.float64}.get(str(self.precision), torch.bfloat16)

    @property
    def main_params_in_fp32(self) -> bool:
        """Whether the optimizer steps fp32 copies of 16-bit parameters."""
        return self.precision == "bf16-mixed"

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating-point parameters, and buffers unless the mode is mixed, to the parameter dtype, in place.

        In the mixed mode norms with running statistics stay as they are: statistics and parameters must be of one dtype.
        """
        if self.precision == "32-true":
            return module
        for child in module.modules():
            if self.precision == "bf16-mixed" and isinstance(child, nn.modules.batchnorm._NormBase):
                continue
            for name, param in child.named_parameters(recurse=False):
                if param.is_floating_point():
                    getattr(child, name).data = param.data.to(self.param_dtype)
            for name, buffer in child.named_buffers(recurse=False):
                if buffer.is_floating_point() and self.precision != "bf16-mixed" and not _is_metric(child):
                    setattr(child, name, buffer.to(self.param_dtype))
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        """Cast floating-point inputs in the ``true`` modes; in ``bf16-mixed`` autocast does it where an operation wants it."""
        if str(self.precision) in ("32-true", "bf16-mixed"):
            return data
        return apply_to_collection(data, Tensor, _convert_fp_tensor, dst_type=self.param_dtype)

    @contextmanager
    @override
    def forward_context(self) -> Generator[None, None, None]:
        """Run a step of the user's; entered once for each action of the schedule."""
        with torch.autocast(self._device_type, torch.bfloat16) if self.precision == "bf16-mixed" else nullcontext():
            yield

    @property
    def _device_type(self) -> str:
        return "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the global norm, counted once for each parameter element over all ranks."""
        self._clipper(optimizer).clip_by_norm(float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp each gradient element."""
        self._clipper(optimizer).clip_by_value(float(clip_val))

    def _clipper(self, optimizer: Optimizer) -> GradientClipper:
        return self.clippers[id(getattr(optimizer, "_optimizer", optimizer))]


def _is_metric(module: nn.Module) -> bool:
    from torchmetrics import Metric

    return isinstance(module, Metric)
