"""RMSNorm and LayerNorm over the last dim, replicated over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.kernels import runs_on
from lightning_megatron.layers.compiled import compiled
from lightning_megatron.sharding import Init, replicated
from lightning_megatron.tensor_parallel.linear import make_parameter
from lightning_megatron.weight_gradients import added_to_sum

MAX_KERNEL_SIZE = 16384  # a kernel holds a row in registers


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich 2019); 16-bit inputs are computed in fp32.

    Args:
        size: extent of the last dim.
        eps: added to the mean square.
        partial: whether each tp rank sees other tokens or heads, so that the weight's gradient is summed over tp.
        device, dtype: of the weight.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        partial: bool = False,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = _parameter(size, Init("ones"), partial, device, dtype)

    def forward(self, hidden: Tensor, added: Tensor | None = None, *, keep: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of ``hidden``, or of ``hidden + added``: ``[.., size] -> [.., size]``.

        Args:
            hidden: the input.
            added: something to add to it first.
            keep: return the sum too, ``(sum, norm)``: what goes on uses that instead of its own sum, so that the gradients
                of both meet in one pass.
        """
        summed, normed = _AddNorm.apply(hidden, self.weight, added, self.eps)  # type: ignore[no-untyped-call]
        return (summed, normed) if keep else normed

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{self.size}, eps={self.eps}"


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016); 16-bit inputs are computed in fp32.

    Args:
        size: extent of the last dim.
        eps: added to the variance.
        partial: whether each tp rank sees other tokens or heads, so that the gradients are summed over tp.
        compiled: whether an addition before the norm is compiled with it: see ``layers/compiled.py``.
        device, dtype: of weight and bias.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        partial: bool = False,
        compiled: bool = False,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.compiled = size, eps, compiled
        self.weight = _parameter(size, Init("ones"), partial, device, dtype)
        self.bias = _parameter(size, Init("zeros"), partial, device, dtype)

    def forward(self, hidden: Tensor, added: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``[.., size] -> [.., size]``; with ``added`` the sum of both and the sum's norm."""
        if added is None:
            return F.layer_norm(hidden, (self.size,), self.weight, self.bias, self.eps)
        both: tuple[Tensor, Tensor] = compiled(_add_layer_norm)(hidden, added, self.weight, self.bias, self.eps)
        return both

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{self.size}, eps={self.eps}"


def _add_layer_norm(hidden: Tensor, added: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed = hidden + added
    return summed, F.layer_norm(summed, weight.shape, weight, bias, eps)


def _parameter(size: int, init: Init, partial: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    return make_parameter((size,), replicated((size,), partial=partial, init=init), device=device, dtype=dtype)


def add_and_norm(norm: nn.Module, hidden: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``hidden + added`` (``hidden`` if there is nothing to add) and its norm, in one pass if the norm can. Same shapes."""
    if isinstance(norm, RMSNorm):
        both: tuple[Tensor, Tensor] = norm(hidden, added, keep=True)
        return both
    if added is not None and isinstance(norm, LayerNorm) and norm.compiled and "forward" not in norm.__dict__:
        both = norm(hidden, added)
        return both
    hidden = hidden if added is None else hidden + added
    return hidden, norm(hidden)


class _AddNorm(torch.autograd.Function):
    """``x = hidden + added`` and ``x / rms(x) * weight``. The backward adds the gradient of x to that of the norm."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, added: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        ctx.dtypes = hidden.dtype, hidden.dtype if added is None else added.dtype
        ctx.set_materialize_grads(False)
        size = weight.shape[0]
        if _has_kernel(hidden, added, weight):
            from lightning_megatron.kernels.norm import rms_norm_forward

            flat = None if added is None else added.reshape(-1, size).contiguous()
            summed, normed, scales = rms_norm_forward(hidden.reshape(-1, size).contiguous(), flat, weight, eps=eps)
            summed = hidden if added is None else summed.view(hidden.shape)
            normed = normed.view(hidden.shape)
        else:
            summed = hidden if added is None else hidden + added
            wide = _widened(summed)
            scales = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            normed = (wide * scales * weight.to(wide.dtype)).to(torch.promote_types(summed.dtype, weight.dtype))
        ctx.save_for_backward(summed, weight, scales)
        return summed, normed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_summed: Tensor | None, of_normed: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        summed, weight, scales = ctx.saved_tensors
        of_weight = None
        if of_normed is None:
            of_x = of_summed
        elif _has_kernel(summed, of_normed, weight):
            from lightning_megatron.kernels.norm import rms_norm_backward

            rows = [None if t is None else t.reshape(-1, weight.shape[0]).contiguous() for t in (of_normed, of_summed, summed)]
            of_x, of_weight = rms_norm_backward(rows[0], rows[1], summed=rows[2], weight=weight, scales=scales)  # type: ignore[arg-type]
            of_x = of_x.view(summed.shape)
        else:
            x, grad = _widened(summed) * scales, of_normed.to(scales.dtype)
            of_weight = (grad * x).flatten(0, -2).sum(0)
            grad = grad * weight.to(scales.dtype)
            of_x = (grad - x * (grad * x).mean(-1, keepdim=True)) * scales
            of_x = of_x if of_summed is None else of_x + of_summed
        if of_weight is not None:
            of_weight = _given_weight_gradient(ctx, of_weight, weight.dtype)
        if of_x is None:
            return None, of_weight, None, None
        return of_x.to(ctx.dtypes[0]), of_weight, of_x.to(ctx.dtypes[1]) if ctx.needs_input_grad[2] else None, None


def _given_weight_gradient(ctx: Any, gradient: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Add the gradient to the weight's sum, unrounded, or give it to autograd in the weight's dtype."""
    if not ctx.needs_input_grad[1]:
        return None
    if added_to_sum(ctx, 1, lambda total: total.add_(gradient), put=lambda total: total.copy_(gradient)):
        return None
    return gradient.to(dtype)


def _widened(hidden: Tensor) -> Tensor:
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))


def _has_kernel(hidden: Tensor, other: Tensor | None, weight: Tensor) -> bool:
    same = hidden.dtype == weight.dtype and (other is None or other.dtype == hidden.dtype)
    return same and runs_on(hidden) and weight.shape[0] <= MAX_KERNEL_SIZE
