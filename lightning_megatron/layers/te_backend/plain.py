"""``PlainOperations``: the same operations in plain torch, 8-bit rounding included; for tests without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.kernels.products import current_products
from lightning_megatron.layers.activation import gelu, swiglu
from lightning_megatron.layers.backend import Activation
from lightning_megatron.layers.te_backend.operations import Heads, Rotation
from lightning_megatron.layers.te_backend.options import Fp8Options
from lightning_megatron.layers.te_backend.scales import (
    LARGEST,
    WEIGHTS_SCALE,
    AttentionSlots,
    Slot,
    own_factor,
    power_of_two,
    remember,
)


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

    def with_fp32_sums(self) -> PlainOperations:
        """See ``Operations``."""
        return self

    def quantize(self, x: Tensor, slot: Slot | None, *, record: bool) -> Tensor | Rounded:
        """See ``Operations``."""
        if self._options is None or slot is None:
            return x
        amax = x.detach().abs().amax().float().view(1)
        if record:
            torch.maximum(slot.amax, amax, out=slot.amax)
        if self._options.recipe == "delayed" and slot.is_known:
            return _rounded(x, slot.scale, slot.dtype)
        return _rounded(x, own_factor(amax, slot.dtype), slot.dtype)

    def round_rows(self, x: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor) -> Rounded:
        """See ``Operations``."""
        torch.maximum(amax, x.detach().abs().amax().float().view(1), out=amax)
        return _rounded(x, scale, dtype)

    def rows(self, x: Tensor | Rounded) -> Tensor:
        """See ``Operations``."""
        if isinstance(x, Tensor):
            return x
        assert x.values is not None
        return x.values.view(torch.uint8)

    def with_rows(self, x: Tensor | Rounded, rows: Tensor) -> Tensor | Rounded:
        """See ``Operations``."""
        if isinstance(x, Tensor):
            return rows
        assert x.values is not None
        return Rounded(rows.view(x.values.dtype), x.scale_inv)

    def quantize_weight(self, weight: Tensor) -> Tensor | Rounded:
        """See ``Operations``."""
        weight = weight.detach()
        if self._options is None:
            return weight
        amax = weight.abs().amax().float().view(1)
        # Finer than ``own_factor``: it is the factor of weights that the optimizer holds in 8 bits, and theirs seldom changes.
        scale = power_of_two(torch.where(amax > 0.0, LARGEST[torch.float8_e4m3fn] / amax, 1.0))
        return _rounded(weight, scale, torch.float8_e4m3fn)

    def held_weight(self, rows: Tensor, scale_inv: Tensor) -> Rounded:
        """See ``Operations``."""
        return Rounded(rows.view(torch.float8_e4m3fn), scale_inv)

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

    def turned_back_quantized(self, parts: Heads, rotation: Rotation, slot: Slot | None) -> Tensor | Rounded:
        """See ``Operations``."""
        return self.quantize(rotation.turned_back(*parts).flatten(0, 1), slot, record=True)

    def product(
        self,
        weight: Tensor | Rounded,
        x: Tensor | Rounded,
        bias: Tensor | None,
        like: Tensor,
        *,
        added: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``Operations``."""
        result = F.linear(_wide(x), _wide(weight), None if bias is None else bias.to(_wide(x).dtype))
        return _placed(result if added is None else added + result, like, out)

    def product_gated(
        self, weight: Tensor | Rounded, x: Tensor | Rounded, like: Tensor, slot: Slot | None, *, record: bool
    ) -> tuple[Tensor, Tensor | Rounded] | None:
        """See ``Operations``."""
        if self._options is None or slot is None:
            return None
        both = self.product(weight, x, None, like)
        return both, self.activate_quantized(both, "swiglu", slot, record=record)

    def product_rotated(self, weight: Tensor | Rounded, x: Tensor | Rounded, like: Tensor, rotation: Rotation) -> Tensor | None:
        """See ``Operations``."""
        if self._options is None:
            return None
        return rotation.turned_whole(self.product(weight, x, None, like).view(*like.shape[:-1], -1)).flatten(0, 1)

    def adds_to(self, added: Tensor, weight: Tensor) -> bool:
        """See ``Operations``. Where the products of 16 bits do, so that tests can have both."""
        return current_products().adds_to(added, weight)

    def input_gradient(
        self, weight: Tensor | Rounded, grad: Tensor | Rounded, like: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """See ``Operations``."""
        return _placed(_wide(grad) @ _wide(weight), like, out)

    def weight_gradient(self, x: Tensor | Rounded, grad: Tensor | Rounded, like: Tensor) -> Tensor:
        """See ``Operations``."""
        return (_wide(grad).t() @ _wide(x)).to(like.dtype)

    def add_weight_gradient(self, x: Tensor | Rounded, grad: Tensor | Rounded, total: Tensor, *, add: bool = True) -> None:
        """See ``Operations``."""
        gradient = _wide(grad).t() @ _wide(x)
        total.add_(gradient) if add else total.copy_(gradient)

    def keep_columns(self, x: Tensor | Rounded) -> Tensor | Rounded:
        """See ``Operations``."""
        return x

    @property
    def attention_head_dim(self) -> int | None:
        """See ``Operations``."""
        return None

    @property
    def attention_multiple(self) -> int:
        """See ``Operations``."""
        return 1

    def attend(
        self, given: Tensor | Heads, slots: AttentionSlots, *, rotation: Rotation | None, record: bool
    ) -> tuple[Rounded, list[Tensor]]:
        """See ``Operations``."""
        q, k, v = given if isinstance(given, tuple) else _rotated(given, rotation)
        narrow = [_rounded(x, slots.qkv.scale, slots.qkv.dtype) for x in (q, k, v)]
        weights = _attention_weights(*narrow[:2])
        out = torch.einsum("bhst,tbhd->sbhd", _narrow_weights(weights), _of_heads(narrow[2].wide(), q.shape[2]))
        result = _rounded(out, slots.out.scale, slots.out.dtype)
        if record:
            met = torch.stack([x.detach().abs().amax().float() for x in (q, k, v)]).amax().view(1)
            remember([slots.qkv, slots.out], [met, out.abs().amax().view(1)])
        kept = [part for rounded in (*narrow, result) for part in rounded.prepare_for_saving()[0] if part is not None]
        return Rounded(kept[6].reshape(-1, q.shape[2] * q.shape[3]), kept[7]), kept

    def attend_backward(
        self, grad: Tensor, kept: list[Tensor], slots: AttentionSlots, *, rotation: Rotation | None
    ) -> Tensor | Heads:
        """See ``Operations``."""
        q, k, v, out = (Rounded(values, inverse) for values, inverse in zip(kept[::2], kept[1::2], strict=True))
        heads, groups, scale = grad.shape[2], kept[2].shape[2], grad.shape[3] ** -0.5
        weights = _attention_weights(q, k)
        narrow = _rounded(grad, slots.grad_out.scale, slots.grad_out.dtype).wide()
        of_weights = torch.einsum("sbhd,tbhd->bhst", narrow, _of_heads(v.wide(), heads))
        of_scores = weights * (of_weights - (narrow * out.wide()).sum(-1).permute(1, 2, 0).unsqueeze(-1))
        rounded = _rounded(of_scores, slots.grad_scores.scale, slots.grad_scores.dtype).wide()
        of_q = torch.einsum("bhst,tbhd->sbhd", rounded, _of_heads(k.wide(), heads)) * scale
        of_k = torch.einsum("bhst,sbhd->tbhd", rounded, q.wide()) * scale
        of_v = torch.einsum("bhst,sbhd->tbhd", _narrow_weights(weights), narrow)
        grads = [of_q, *(x.unflatten(2, (groups, -1)).sum(3) for x in (of_k, of_v))]
        met = torch.stack([x.abs().amax() for x in grads]).amax().view(1)
        largest = [grad.detach().abs().amax().float().view(1), of_scores.abs().amax().view(1), met]
        remember([slots.grad_out, slots.grad_scores, slots.grad_qkv], largest)
        of_q, of_k, of_v = (_rounded(x, slots.grad_qkv.scale, slots.grad_qkv.dtype).wide().to(grad.dtype) for x in grads)
        return (of_q, of_k, of_v) if rotation is None else rotation.turned_back(of_q, of_k, of_v)

    def widened(self, x: Rounded, like: Tensor) -> Tensor:
        """See ``Operations``."""
        return x.wide().to(like.dtype)


def _rotated(fused: Tensor, rotation: Rotation | None) -> Heads:
    assert rotation is not None
    return rotation.turned(fused)


def _attention_weights(q: Rounded, k: Rounded) -> Tensor:
    """Causal softmax of ``[S, B, h, d]`` and ``[S, B, g, d]``, ``[B, h, S, S]``."""
    wide = q.wide()
    scores = torch.einsum("sbhd,tbhd->bhst", wide, _of_heads(k.wide(), wide.shape[2])) / sqrt(wide.shape[3])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -inf).softmax(-1)


def _narrow_weights(weights: Tensor) -> Tensor:
    """Attention weights in 8 bits: the largest is 1, so their factor never moves."""
    narrow: Tensor = (weights * WEIGHTS_SCALE).to(torch.float8_e4m3fn)
    return narrow.float() / WEIGHTS_SCALE


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """``[S, B, g, d] -> [S, B, h, d]``: for each query head the key or value head that it uses."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


_ACTIVATIONS = {"swiglu": swiglu, "gelu": gelu}


def _wide(x: Tensor | Rounded) -> Tensor:
    return x.wide() if isinstance(x, Rounded) else x


def _placed(x: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
    return x.to(like.dtype) if out is None else out.copy_(x)


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Rounded:
    limit = LARGEST[dtype]
    return Rounded((x.detach().float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal())
