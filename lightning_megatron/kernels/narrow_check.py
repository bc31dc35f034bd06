"""Whether the kernels of ``narrow.py`` are right as this machine compiles them: see Note [Four tokens in a word] there."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels.narrow import Narrow, add_rms_norm_narrow, swiglu_backward_narrow, swiglu_narrow


@cache
def are_right(device: torch.device) -> bool:
    """Whether the kernels, as this machine compiles them, write the right numbers, in both forms. Waits for the device."""
    generator = torch.Generator(device).manual_seed(0)
    gate_up = torch.randn(256, 512, device=device, dtype=torch.bfloat16, generator=generator)
    grad, gain = gate_up[:, :256].contiguous(), gate_up[0, :256].contiguous()
    scale = torch.full((1,), 16.0, device=device)
    known: dict[str, Any] = {"scale": scale, "scale_inv": scale.reciprocal()}
    wide = gate_up.float().requires_grad_()
    with torch.enable_grad():
        gate, up = wide.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate) * up
    (of_gate_up,) = torch.autograd.grad(activated, wide, grad.float())
    for options in (known, {}):
        amax = torch.zeros(2, 1, device=device)
        if not _is_rounded(swiglu_narrow(gate_up, amax=amax[0], **options), activated.detach(), torch.float8_e4m3fn):
            return False
        if not _is_rounded(swiglu_backward_narrow(grad, gate_up, amax=amax[1], **options), of_gate_up, torch.float8_e5m2):
            return False
    for added, options in ((None, known), (grad, known), (None, {}), (grad, {})):
        summed, normed, _ = add_rms_norm_narrow(grad, added, gain, eps=1e-5, amax=torch.zeros(1, device=device), **options)
        x = summed.float()
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain.float()
        if not _is_rounded(normed, expected, torch.float8_e4m3fn):
            return False
    return True


def _is_rounded(made: Narrow, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether both forms hold ``expected``, a last bit of fp32 apart: which rounds to another number now and then."""
    limit = torch.finfo(dtype).max
    rounded = (expected / made.scale_inv).clamp(-limit, limit).to(dtype).view(torch.uint8)
    same = (rounded == made.rows).float().mean() > 0.99
    return bool(same) and torch.equal(made.rows.t(), made.columns)
