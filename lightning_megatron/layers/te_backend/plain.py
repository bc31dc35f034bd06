"""``PlainOperations``: the same operations in plain torch, 8-bit rounding included; for tests without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.layers.backend import Activation
from lightning_megatron.layers.te_backend.options import Fp8Options
from lightning_megatron.layers.te_backend.scales import LARGEST, Slot, power_of_two
from lightning_megatron.layers.torch_backend import gelu, swiglu


@dataclass
class Rounded:
    """A matrix in 8 bits. ``prepare_for_saving`` and ``restore_from_saved`` take it apart as Transformer Engine's do."""

    values: Tensor | None
    scale_inv: Tensor | None

    def wide(self) -> Tensor:
        """In fp32."""
        assert self.values is not None
        assert self.scale_inv is not None
        return self.values.float() * self.scale_inv

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Rounded]:
        """Its tensors, and the rest; it is empty afterwards."""
        tensors = [self.values, self.scale_inv]
        self.values = self.scale_inv = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take its tensors back; what is left of the list."""
        self.values, self.scale_inv = tensors[:2]
        return tensors[2:]


class PlainOperations:
    """See ``Operations``.

    Args:
        options: ``None`` multiplies in the dtype of the tensors.

    Raises:
        ValueError: a block format.
    """

    def __init__(self, options: Fp8Options | None) -> None:
        if options is not None and not options.is_per_tensor:
            raise ValueError(f"fp8={options.recipe!r} has no plain form; it needs Transformer Engine on a GPU.")
        self._options = options

    @property
    def is_narrow(self) -> bool:
        """See ``Operations``."""
        return self._options is not None

    def quantize(self, x: Tensor, slot: Slot | None, *, record: bool) -> Tensor | Rounded:
        """See ``Operations``."""
        if self._options is None or slot is None:
            return x
        amax = x.detach().abs().amax().float().view(1)
        if record:
            torch.maximum(slot.amax, amax, out=slot.amax)
        if self._options.recipe == "delayed" and slot.scales.is_warm:
            return _rounded(x, slot.scale, slot.dtype)
        return _rounded(x, _own_scale(amax, slot.dtype), slot.dtype)

    def quantize_weight(self, weight: Tensor) -> Tensor | Rounded:
        """See ``Operations``."""
        weight = weight.detach()
        if self._options is None:
            return weight
        amax = weight.abs().amax().float().view(1)
        return _rounded(weight, _own_scale(amax, torch.float8_e4m3fn), torch.float8_e4m3fn)

    def add_norm_quantized(
        self, hidden: Tensor, added: Tensor | None, gain: Tensor, eps: float, *, slot: Slot | None, record: bool
    ) -> tuple[Tensor, Tensor | Rounded, Tensor] | None:
        """See ``Operations``."""
        if self._options is None or slot is None:
            return None
        summed = hidden if added is None else hidden + added
        scales = torch.rsqrt(summed.float().square().mean(-1) + eps)
        normed = (summed.float() * scales[:, None] * gain.float()).to(hidden.dtype)
        return summed, self.quantize(normed, slot, record=record), scales

    def activate_quantized(self, x: Tensor, kind: Activation, slot: Slot | None, *, record: bool) -> Tensor | Rounded:
        """See ``Operations``."""
        return self.quantize(_ACTIVATIONS[kind](x), slot, record=record)

    def activate_backward(self, grad: Tensor, x: Tensor, kind: Activation) -> Tensor:
        """See ``Operations``."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            activated = _ACTIVATIONS[kind](x)
        return torch.autograd.grad(activated, x, grad)[0]

    def activate_backward_quantized(self, grad: Tensor, x: Tensor, kind: Activation, slot: Slot | None) -> Tensor | Rounded:
        """See ``Operations``."""
        return self.quantize(self.activate_backward(grad, x, kind), slot, record=True)

    def product(self, weight: Tensor | Rounded, x: Tensor | Rounded, bias: Tensor | None, like: Tensor) -> Tensor:
        """See ``Operations``."""
        return F.linear(_wide(x), _wide(weight), None if bias is None else bias.to(_wide(x).dtype)).to(like.dtype)

    def input_gradient(self, weight: Tensor | Rounded, grad: Tensor | Rounded, like: Tensor) -> Tensor:
        """See ``Operations``."""
        return (_wide(grad) @ _wide(weight)).to(like.dtype)

    def weight_gradient(self, x: Tensor | Rounded, grad: Tensor | Rounded, like: Tensor) -> Tensor:
        """See ``Operations``."""
        return (_wide(grad).t() @ _wide(x)).to(like.dtype)

    def add_weight_gradient(self, x: Tensor | Rounded, grad: Tensor | Rounded, total: Tensor) -> None:
        """See ``Operations``."""
        total.add_(_wide(grad).t() @ _wide(x))

    def keep_columns(self, x: Tensor | Rounded) -> Tensor | Rounded:
        """See ``Operations``."""
        return x


_ACTIVATIONS = {"swiglu": swiglu, "gelu": gelu}


def _wide(x: Tensor | Rounded) -> Tensor:
    return x.wide() if isinstance(x, Rounded) else x


def _own_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return power_of_two(torch.where(amax > 0.0, LARGEST[dtype] / amax, torch.ones_like(amax)))


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Rounded:
    limit = LARGEST[dtype]
    return Rounded((x.detach().float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal())
