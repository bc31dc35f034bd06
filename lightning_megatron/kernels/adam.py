"""Adam's update of one flat shard in one pass over memory: main value, moments and the new 16-bit parameter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.kernels.adam_shard import AdamOptions, AdamShard

_BLOCK = 2048
_WARPS = 8
_IN_PLACE, _COPY, _REMAINDER = 0, 1, 2


@triton.jit
def _load_main(value_ptr, main_ptr, ties_ptr, at, inside, KIND: tl.constexpr):
    if KIND == 2:
        high = tl.load(value_ptr + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(main_ptr + at, mask=inside, other=0).to(tl.int32)
        tie = (tl.load(ties_ptr + at // 8, mask=inside, other=0).to(tl.int32) >> (at % 8).to(tl.int32)) & 1
        main = ((high << 16) + low + (tie << 16)).to(tl.float32, bitcast=True)
    elif KIND == 1:
        main = tl.load(main_ptr + at, mask=inside, other=0.0)
    else:
        main = tl.load(value_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return main


@triton.jit
def _store_main(value_ptr, main_ptr, ties_ptr, main, first, at, inside, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    value = main.to(value_ptr.dtype.element_ty)
    tl.store(value_ptr + at, value, mask=inside)
    if KIND == 1:
        tl.store(main_ptr + at, main, mask=inside)
    if KIND == 2:
        rest = main.to(tl.int32, bitcast=True) - (value.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        tl.store(main_ptr + at, rest.to(tl.int16), mask=inside)
        flags = tl.reshape((rest == 32768).to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
        byte = first // 8 + tl.arange(0, BLOCK // 8)
        tl.store(ties_ptr + byte, tl.sum(flags, axis=1).to(tl.uint8), mask=byte * 8 < numel)


@triton.jit
def _store_in_fp8(exp_avg_ptr, exp_avg_scale_ptr, exp_avg, first, at, inside, numel, BLOCK: tl.constexpr):
    blocks = tl.reshape(tl.where(inside, exp_avg, 0.0), (BLOCK // 256, 256))
    largest = tl.div_rn(tl.max(tl.abs(blocks), axis=1), 448.0)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23, 1)
    scale = tl.where(largest == 0.0, 1.0, (exponent << 23).to(tl.float32, bitcast=True))
    block = first // 256 + tl.arange(0, BLOCK // 256)
    tl.store(exp_avg_scale_ptr + block, scale, mask=block * 256 < numel)
    kept = tl.reshape(blocks / scale[:, None], (BLOCK,))
    tl.store(exp_avg_ptr + at, kept.to(exp_avg_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _adam(
    value_ptr,
    main_ptr,
    ties_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_scale_ptr,
    exp_avg_sq_ptr,
    scale_ptr,
    rates_ptr,
    numel,
    keep,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    lr,
    eps,
    KIND: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    IN_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    if HAS_SCALE:
        scale = tl.load(scale_ptr)
        numel = tl.where(scale == scale, numel, 0)  # NaN: nothing is changed
    inside = at < numel
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if IN_FP8:
        exp_avg *= tl.load(exp_avg_scale_ptr + at // 256, mask=inside, other=1.0)
    main = _load_main(value_ptr, main_ptr, ties_ptr, at, inside, KIND)
    if HAS_SCALE:
        grad = grad * scale
    if HAS_DECAY:
        grad = grad + decay * main
    rate = lr * tl.load(rates_ptr)
    widen = tl.load(rates_ptr + 1)
    main = main * keep
    exp_avg = beta1 * exp_avg + rest1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + rest2 * grad * grad
    main = main - rate * tl.div_rn(exp_avg, tl.sqrt_rn(exp_avg_sq) * widen + eps)
    if IN_FP8:
        _store_in_fp8(exp_avg_ptr, exp_avg_scale_ptr, exp_avg, first, at, inside, numel, BLOCK)
    else:
        tl.store(exp_avg_ptr + at, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=inside)
    _store_main(value_ptr, main_ptr, ties_ptr, main, first, at, inside, numel, KIND, BLOCK)


def adam_(shard: AdamShard, options: AdamOptions, *, scale: Tensor | None, rates: Tensor) -> None:
    """Update in place; arithmetic in fp32; nothing if ``scale`` is NaN. See ``optim.fused_adam.AdamUpdate``."""
    value, numel = shard.value, shard.value.numel()
    if numel == 0:
        return
    kind = _IN_PLACE if shard.main is None else _COPY if shard.ties is None else _REMAINDER
    decay, betas = options.weight_decay, options.betas
    with torch.cuda.device(value.device):
        _adam[(triton.cdiv(numel, _BLOCK),)](
            value,
            value if shard.main is None else shard.main,
            value if shard.ties is None else shard.ties,
            shard.grad,
            shard.exp_avg,
            rates if shard.exp_avg_scale is None else shard.exp_avg_scale,
            shard.exp_avg_sq,
            rates if scale is None else scale,
            rates,
            numel,
            1.0 - options.lr * decay if options.decoupled else 1.0,
            0.0 if options.decoupled else decay,
            betas[0],
            1.0 - betas[0],
            betas[1],
            1.0 - betas[1],
            options.lr,
            options.eps,
            KIND=kind,
            HAS_SCALE=scale is not None,
            HAS_DECAY=bool(decay) and not options.decoupled,
            IN_FP8=shard.exp_avg_scale is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
