"""Parameters in 8 bits: the model holds bytes and a factor of each weight; wide values are the optimizer's alone.

Note [Weights in 8 bits]
The buffer of such parameters holds e4m3 bytes, and each weight has one factor, a power of two by its largest magnitude over
the ranks that share it. After a step each rank rounds its shard of the main values, first to the parameter's 16-bit dtype and
then to 8 bits (a ``Rounding``), and the bytes are gathered: half of what 16-bit values take. A layer that rounds its 16-bit
weight by the weight's own magnitude before it multiplies comes to the same bytes, so training is the same bit for bit.

The ``Parameter`` itself keeps its shape, dtype and gradient, but no values: it reads as NaN, so that whoever uses it unaware
of this is noticed. The layers get bytes and factor through ``hold``. Inside ``wide()`` parameters have values, for those who
save, load or show them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, nan
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from lightning_megatron import kernels
from lightning_megatron.comm import all_gather_single, all_reduce
from lightning_megatron.optim.buffers import Bucket
from lightning_megatron.optim.shards import Shard

DTYPE = torch.float8_e4m3fn
_LARGEST = 448.0


class WeightHolder(Protocol):
    """A layer's side of a weight in 8 bits."""

    def hold(self, rows: Tensor, scale_inv: Tensor) -> None:
        """Multiply by these from now on: uint8 ``[*shape]``, which may be in flight, and the factor's inverse, fp32 ``[1]``."""

    def let_go(self) -> None:
        """Multiply by the parameter's own values from now on."""


Holders = Mapping[nn.Parameter, Sequence[WeightHolder]]


class Rounding(Protocol):
    """Rounds this rank's main values, times a power of two, to bf16 and then to e4m3: ``round``, then ``round_again``."""

    def round(self, before: Tensor) -> Tensor:
        """The largest magnitude of each weight, fp32 ``[weights]``, 0 without a part here.

        ``before``: the factors of the step before, in whose hope it may round already.
        """

    def round_again(self, factors: Tensor, before: Tensor) -> None:
        """Round by ``factors`` whatever has not been rounded by the same number ``before``."""


class PlainRounding:
    """``Rounding`` in plain torch, for machines without the kernel: it waits for the factors.

    Args:
        parts: the fp32 values, ``[n]``, the bytes, ``[n]``, and the number of the weight, of each shard.
        num_weights: how many weights there are.
        device: where they are.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, int]], num_weights: int, device: torch.device) -> None:
        self._parts, self._largest = parts, torch.zeros(num_weights, device=device)
        self._numbers = torch.tensor([number for *_, number in parts], dtype=torch.long, device=device)

    def round(self, before: Tensor) -> Tensor:
        """See ``Rounding``."""
        if self._parts:
            found = torch.stack(torch._foreach_norm([wide for wide, *_ in self._parts], inf))
            self._largest.zero_().scatter_reduce_(0, self._numbers, found, "amax")
        return self._largest

    def round_again(self, factors: Tensor, before: Tensor) -> None:
        """See ``Rounding``."""
        for wide, narrow, number in self._parts:
            rounded = torch.empty_like(wide, dtype=torch.bfloat16)
            torch.mul(wide, factors[number], out=rounded)  # a power of two: it does not matter when it is rounded
            narrow.view(DTYPE).copy_(rounded)


@dataclass(frozen=True)
class _Weight:
    """A parameter's place: ``[start, stop)`` of its bucket, and its number among the factors."""

    param: nn.Parameter
    bucket: Bucket
    start: int
    stop: int
    number: int


@dataclass(frozen=True)
class _Part:
    """What this rank's shard holds of a weight: fp32 ``[n]``, its range of the bucket, and the weight's number."""

    main: Tensor
    bucket: Bucket
    start: int
    stop: int
    number: int


class NarrowParameters:
    """The parameters of the narrow buckets. See Note [Weights in 8 bits].

    Args:
        buckets: all buckets.
        shards: this rank's shards; their main values are fp32 and held by ``shard.main``.
        holders: the layers that multiply by each parameter.

    Raises:
        ValueError: an expert's parameter.
    """

    def __init__(self, buckets: Sequence[Bucket], shards: Sequence[Shard], holders: Holders) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.is_narrow]
        self._holders = holders
        self._weights: list[_Weight] = []
        self._parts: list[_Part] = []
        self._is_wide, self._is_closed = True, False
        mains = {shard.param: shard.main.detach().view(-1) for shard in shards}
        for bucket in self._buckets:
            if bucket.plan.expert:
                raise ValueError("fp8_params=True: parameters of experts are not there in 8 bits; set fp8_params=False.")
            for placement, param in zip(bucket.plan.placements, bucket.params, strict=True):
                weight = _Weight(param, bucket, placement.start, placement.stop, len(self._weights))
                self._weights.append(weight)
                start, stop = max(weight.start, bucket.own_range[0]), min(weight.stop, bucket.own_range[1])
                if start < stop:
                    self._parts.append(_Part(mains[param], bucket, start, stop, weight.number))
        if self._weights:
            device = self._buckets[0].values.device
            # 16 bytes from each other: cuBLAS wants the address of a factor to be a multiple of that.
            self._scale_inv = torch.ones((len(self._weights), 4), device=device)
            self._scale = torch.ones(len(self._weights), device=device)
            parts = [(part.main, part.bucket.values[part.start : part.stop], part.number) for part in self._parts]
            self._rounding: Rounding = _rounding(device)(parts, len(self._weights), device)
            self._held = [
                (holder, weight.bucket.values[weight.start : weight.stop].view(weight.param.shape), inverse[:1])
                for weight, inverse in zip(self._weights, self._scale_inv.unbind(), strict=True)
                for holder in holders[weight.param]
            ]

    @property
    def is_in_use(self) -> bool:
        """Whether there are weights that the model holds in 8 bits."""
        return bool(self._weights) and not self._is_closed

    @torch.no_grad()
    def publish(self) -> None:
        """Round this rank's main values into its shards of the buckets, for the gathers that follow. Collective."""
        if not self.is_in_use:
            return
        before = self._scale
        largest = all_reduce(self._rounding.round(before).bfloat16().float(), self._buckets[0].axis, op=ReduceOp.MAX)
        self._scale = _factors(largest)
        self._rounding.round_again(self._scale, before)
        torch.reciprocal(self._scale, out=self._scale_inv[:, 0])
        for holder, rows, scale_inv in self._held:
            holder.hold(rows, scale_inv)

    @contextmanager
    def wide(self) -> Iterator[None]:
        """Inside the ``with`` block parameters hold their main values, rounded to their dtype. Collective."""
        was_wide = self._is_wide
        self.widen()
        try:
            yield
        finally:
            if not was_wide:
                self.narrow()

    @torch.no_grad()
    def widen(self) -> None:
        """Give the parameters values of their own. Collective."""
        if self._is_wide:
            return
        self._is_wide = True
        for bucket in self._buckets:
            values = torch.zeros(bucket.plan.numel, dtype=bucket.params[0].dtype, device=bucket.values.device)
            for part in self._parts:
                if part.bucket is bucket:
                    values[part.start : part.stop].copy_(part.main)
            if bucket.axis.group is not None:
                all_gather_single(values, bucket.own(values), group=bucket.axis.group)
            for placement, param in zip(bucket.plan.placements, bucket.params, strict=True):
                param.data = values[placement.start : placement.stop].view(param.shape)

    def narrow(self) -> None:
        """Take the values off the parameters."""
        self._is_wide = not self.is_in_use
        if self._is_wide:
            return
        for weight in self._weights:
            param = weight.param
            param.data = torch.full((), nan, dtype=param.dtype, device=param.device).expand(param.shape)

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the main values from the parameters, which are wide."""
        assert self._is_wide
        starts = {weight.number: (weight.start, weight.param) for weight in self._weights}
        for part in self._parts:
            first, param = starts[part.number]
            part.main.copy_(param.detach().reshape(-1)[part.start - first : part.stop - first])

    def close(self) -> None:
        """Give the parameters back as they were before, with values of their own. Collective."""
        self.widen()
        self._is_closed = True
        for weight in self._weights:
            for holder in self._holders[weight.param]:
                holder.let_go()


def _rounding(device: torch.device) -> Callable[[Sequence[tuple[Tensor, Tensor, int]], int, torch.device], Rounding]:
    if device.type != "cuda" or not kernels.available():
        return PlainRounding
    from lightning_megatron.kernels.main_narrow import NarrowMains

    return NarrowMains


def _factors(largest: Tensor) -> Tensor:
    """The factor of each weight, ``[weights]``: the largest power of two that keeps its largest value in range."""
    wanted = torch.where(largest > 0.0, _LARGEST / largest, 1.0)
    mantissa, exponent = torch.frexp(wanted)
    return torch.where(mantissa > 0.0, torch.ldexp(torch.full_like(wanted, 0.5), exponent), wanted)
