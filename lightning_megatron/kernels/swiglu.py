"""``silu(gate) * up`` and its gradient, one pass each, fp32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """``[.., 2n] -> [.., n]``, gate in the first half; ``gate_up`` is contiguous."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel():
        with torch.cuda.device_of(out):
            _swiglu_forward[_grid(out, width)](gate_up, out, width, BLOCK=_block(width), num_warps=4)
    return out


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``gate_up`` ``[.., 2n]`` by that of the result ``[.., n]``; both are contiguous."""
    width = grad.shape[-1]
    out = torch.empty_like(gate_up)
    if out.numel():
        with torch.cuda.device_of(out):
            _swiglu_backward[_grid(grad, width)](gate_up, grad, out, width, BLOCK=_block(width), num_warps=4)
    return out


def _block(width: int) -> int:
    return int(min(_BLOCK, triton.next_power_of_2(width)))


def _grid(of: Tensor, width: int) -> tuple[int, int]:
    return of.numel() // width, triton.cdiv(width, _block(width))


@triton.jit
def _swiglu_forward(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(gate_up, grad, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    of_out = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = of_out * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out + row * 2 * width + columns, of_gate, mask=inside)
    tl.store(out + row * 2 * width + width + columns, of_out * gate * sigmoid, mask=inside)
