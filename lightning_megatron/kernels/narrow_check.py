"""Whether 8-bit kernels are right as this machine compiles them: see Note [Four tokens in a word] of ``narrow.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lightning_megatron.kernels.narrow import Factor, Narrow, round_narrow
from lightning_megatron.kernels.norm_narrow import add_rms_norm_narrow
from lightning_megatron.kernels.swiglu_narrow import swiglu_backward_narrow, swiglu_narrow


@cache
def are_right(device: torch.device) -> bool:
    """Whether the kernels, as this machine compiles them, write the right numbers, in both forms. Waits for the device."""
    generator = torch.Generator(device).manual_seed(0)
    gate_up = torch.randn(256, 1024, device=device, dtype=torch.bfloat16, generator=generator)
    grad, gain = gate_up[:, :512].contiguous(), gate_up[0, :512].contiguous()  # as wide as the widest tile
    wide = gate_up.float().requires_grad_()
    with torch.enable_grad():
        gate, up = wide.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate) * up
    (of_gate_up,) = torch.autograd.grad(activated, wide, grad.float())
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for factor in _factors(device):
        made = [
            (swiglu_narrow(gate_up, factor()), activated.detach(), e4m3),
            (swiglu_backward_narrow(grad, gate_up, factor()), of_gate_up, e5m2),
            (round_narrow(gate_up, e4m3, factor()), gate_up.float(), e4m3),
            (round_narrow(gate_up, e5m2, factor()), gate_up.float(), e5m2),
        ]
        for added in (None, grad):
            summed, normed, _ = add_rms_norm_narrow(grad, added, gain, factor(), eps=1e-5)
            x = summed.float()
            made.append((normed, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain.float(), e4m3))
        if not all(_is_rounded(*each) for each in made):
            return False
    return True


def _factors(device: torch.device) -> list[Callable[[], Factor]]:
    """A known factor, and two guesses of it, which are wrong for at least some matrices."""

    def zero() -> Tensor:
        return torch.zeros(1, device=device)

    scale = torch.full((1,), 16.0, device=device)
    known = Factor(zero(), scale=scale, scale_inv=scale.reciprocal())
    return [lambda: known, lambda: Factor(zero(), guess=zero()), lambda: Factor(zero(), guess=scale.clone())]


def _is_rounded(made: Narrow, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether both forms hold ``expected``, a last bit of fp32 apart: which rounds to another number now and then."""
    limit = torch.finfo(dtype).max
    rounded = (expected / made.scale_inv).clamp(-limit, limit).to(dtype).view(torch.uint8)
    same = (rounded == made.rows).float().mean() > 0.99
    return bool(same) and torch.equal(made.rows.t(), made.columns)
