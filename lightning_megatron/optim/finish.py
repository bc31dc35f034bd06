"""From reduced gradients to what the optimizer steps on: one pass for the norm, one for every multiplication.

Note [One multiplication]
The norm pass reads each gradient once; its result also tells whether any is not finite, and every rank gets the same answer
from the one all-reduce. The division by the token count and by the loss scale and the factor of clipping are then one
multiplication. Whoever reads gradients between the norm and the clipping wants them divided, so ``finish`` divides at once,
unless it is told that nobody reads them (``defer``): then the factor waits for the clipping, or for ``apply``.

Note [Gradients that hooks change]
Between ``finish`` without ``defer`` and the step the user's code may write into ``param.grad``, or put another tensor in its
place, or ``None``, which takes the parameter out of the step. Clipping and the step therefore look first (``_collect``): what
was put beside the buffer is copied into it, and a parameter without a gradient is left out. The norm that clips is then taken
again, as it also is after an earlier clipping; ``grad_norm`` stays the one that ``finish`` has found.

Note [Looking while the step runs]
To raise on a gradient that is not finite the host must see the norm, and while it waits for it nothing new reaches the device.
A step that takes the factor from here is therefore started first: the factor is NaN where the norm is not finite, with which
the update changes nothing. The host looks (``confirm``) when all of the update is on its way, and steps are not yet counted
nor gradients cleared. Skipping a step is decided before it, so ``nonfinite="skip"`` and a loss scale wait as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.comm import all_gather_object, all_reduce
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.buffers import HAS_GRAD_DTYPE, Bucket
from lightning_megatron.optim.config import NonFinitePolicy
from lightning_megatron.optim.norm import clamp, clip_coefficient, counted_ranges, multiply, squared_norms
from lightning_megatron.optim.shards import Shard


class GradientFinisher:
    """Norm, finite check, normalisation and clipping of one optimizer's shards.

    Args:
        shards: this rank's shards.
        gradients: each shard's range of the gradient buffer.
        buckets: for finding out where a gradient that is not finite came from.
        mesh: the running layout.
        nonfinite: what to do about gradients that are not finite.
        direct: the step reads the gradient buffer itself and multiplies by ``take_factor()``.
        confirms: the step changes nothing if the factor is NaN, and calls ``confirm`` afterwards.

    Attributes:
        grad_norm: norm of the whole gradient (0-dim fp64), the same on every rank.
        should_skip: whether this step must not be taken.
        num_skipped: steps that were not taken.
        left_out: main parameters that have no gradient, because a hook has taken it away; the step leaves them alone.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        gradients: Sequence[Tensor],
        *,
        buckets: Sequence[Bucket],
        mesh: Mesh,
        nonfinite: NonFinitePolicy,
        direct: bool = False,
        confirms: bool = False,
    ) -> None:
        self._confirms = direct and confirms
        self._finite: _Answer | None = None
        self._direct, self._deferred = direct, False
        self._shards, self._gradients, self._buckets, self._mesh = shards, gradients, buckets, mesh
        self._policy = nonfinite
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.should_skip, self.num_skipped = False, 0
        self.left_out: set[Tensor] = set()
        self._is_watched = self._has_stale_norm = False
        self._factor: Tensor | None = None
        self._divisor: Tensor | None = None
        counted = [
            (index, gradient[start:stop])
            for index, (shard, gradient) in enumerate(zip(shards, gradients, strict=True))
            for start, stop in counted_ranges(shard, mesh)
        ]
        self._owners = [index for index, _ in counted]
        self._counted = [part for _, part in counted]
        self._sum_squares = squared_norms(self._counted, mesh.device)
        self._squares = torch.zeros(len(counted), dtype=torch.float64, device=mesh.device)

    def finish(self, num_tokens: Tensor | None, *, loss_scale: float | None, defer: bool) -> None:
        """See ``DistributedOptimizer.finish_gradients``."""
        self._squares = self._sum_squares()
        squares = self._squares.sum()
        # fp64, because fp32 cannot count beyond 2**24 tokens.
        tokens = torch.zeros_like(squares) if num_tokens is None else num_tokens.detach().reshape(()).to(squares)
        squares, tokens = all_reduce(torch.stack([squares, tokens]), self._mesh.world).unbind()
        self._divisor = None
        if num_tokens is not None or loss_scale is not None:
            self._divisor = (tokens.clamp(min=1.0) if num_tokens is not None else torch.ones_like(tokens)) * (loss_scale or 1.0)
        self.grad_norm = squares.sqrt() if self._divisor is None else squares.sqrt() / self._divisor
        self._factor = None if self._divisor is None else 1.0 / self._divisor
        self._give_wide()
        if defer and self._confirms and self._policy == "raise" and not _may_overflow(loss_scale):
            self._finite = _Answer(torch.isfinite(squares))
            self._factor = squares * 0.0 + (1.0 if self._factor is None else self._factor)
        else:
            self._check(squares, loss_scale)
        self._deferred = defer and self._direct
        if not defer:
            self.apply()
        self._is_watched = self._has_stale_norm = not defer

    def _check(self, squares: Tensor, loss_scale: float | None) -> None:
        if (self._policy == "ignore" and loss_scale is None) or bool(torch.isfinite(squares)):
            return
        if self._policy == "raise" and not _may_overflow(loss_scale):
            raise RuntimeError(self._describe())
        self.should_skip = True
        self.num_skipped += 1

    def confirm(self) -> None:
        """Raise now what ``finish`` has left to a later look. See Note [Looking while the step runs]."""
        finite, self._finite = self._finite, None
        if finite is not None and not finite.get():
            raise RuntimeError(self._describe())

    def apply(self) -> None:
        """Divide by what ``finish`` was told to, if that has not happened yet, and give every shard its ``grad``."""
        self._collect()
        self._multiply(None)

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale so that the norm over the whole model is at most ``max_norm``. All ranks call it together."""
        self._collect()
        self._multiply(clip_coefficient(self._norm(), max_norm))
        self._has_stale_norm = True

    def clip_by_value(self, value: float) -> None:
        """Clamp each element to ``[-value, value]``."""
        self.confirm()
        self._deferred = False
        self.apply()
        clamp(self._gradients, value)
        self._has_stale_norm = True
        self._give_narrow(anew=True)

    def _collect(self) -> None:
        """See Note [Gradients that hooks change]."""
        if not self._is_watched:
            return
        without = set()
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.param.grad is not None:
                    slot.collect()
                elif HAS_GRAD_DTYPE or slot.view.dtype == slot.param.dtype:  # else it never shows one
                    slot.view.zero_()
                    without.add(slot.param)
        if without or self.left_out:
            self.left_out = {shard.main for shard in self._shards if shard.param in without}
            self._give_wide()
        self._give_narrow(anew=True)

    def _norm(self) -> Tensor:
        """Of the gradients as they are now."""
        if not self._has_stale_norm:
            return self.grad_norm
        norm = all_reduce(self._sum_squares().sum(), self._mesh.world).sqrt()
        return norm if self._factor is None else norm * self._factor

    def take_factor(self) -> Tensor | None:
        """What gradients are still to be multiplied by (0-dim), for a step that does it; ``None`` if it is done."""
        factor, self._factor = self._factor, None
        return factor

    def _multiply(self, coefficient: Tensor | None) -> None:
        factor, self._factor = self._factor, None
        if factor is not None and coefficient is not None:
            coefficient = coefficient * factor
        elif factor is not None:
            coefficient = factor
        if self._deferred:
            self._factor = coefficient
            return
        if coefficient is not None:
            multiply(self._gradients, coefficient)
        self._give_narrow(anew=coefficient is not None)

    def _give_wide(self) -> None:
        """Let main parameters see their gradients, those of the same dtype: views."""
        for shard, gradient in zip(self._shards, self._gradients, strict=True):
            if shard.main in self.left_out:
                shard.main.grad = None
            elif shard.main.dtype == gradient.dtype:
                shard.main.grad = gradient.view_as(shard.main)

    def _give_narrow(self, *, anew: bool) -> None:
        """Round gradients for an optimizer that wants them in 16 bits; ``anew``: they may have changed since."""
        if self._direct:
            return
        for shard, gradient in zip(self._shards, self._gradients, strict=True):
            if self._is_narrow(shard) and shard.main not in self.left_out and (anew or shard.main.grad is None):
                shard.main.grad = gradient.to(shard.main.dtype).view_as(shard.main)

    @staticmethod
    def _is_narrow(shard: Shard) -> bool:
        """Whether the optimizer wants the gradient in a 16-bit copy: torch's kernels take one dtype."""
        return shard.main.dtype in (torch.bfloat16, torch.float16)

    def clear(self) -> None:
        """Forget the step."""
        self.should_skip, self._factor, self._deferred, self._finite = False, None, False, None
        self.left_out, self._is_watched, self._has_stale_norm = set(), False, False
        for shard in self._shards:
            shard.main.grad = None

    # What can be logged

    def module_norms(self, depth: int) -> dict[str, Tensor]:
        """See ``DistributedOptimizer.module_norms``."""
        local: dict[str, Tensor] = {}
        for index, square in zip(self._owners, self._squares.unbind(), strict=True):
            name = ".".join(self._shards[index].name.split(".")[:-1][:depth])
            local[name] = local[name] + square if name in local else square
        gathered = all_gather_object(sorted(local), self._mesh.world)
        names = sorted({name for of_rank in gathered for name in of_rank})
        if not names:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        norms = all_reduce(torch.stack([local.get(name, zero) for name in names]), self._mesh.world).sqrt()
        if self._divisor is not None:
            norms = norms / self._divisor
        return dict(zip(names, norms.unbind(), strict=True))

    def num_zero_gradients(self) -> Tensor:
        """See ``DistributedOptimizer.num_zero_gradients``."""
        counts = [part.numel() - torch.count_nonzero(part) for part in self._counted]
        zero = torch.zeros((), dtype=torch.int64, device=self._mesh.device)
        return all_reduce(torch.stack([zero, *counts]).sum(), self._mesh.world)

    def _describe(self) -> str:
        """Which parameter's gradient is not finite, and whose. All ranks call it and get the same text."""
        bad = (~torch.isfinite(self._squares)).nonzero().flatten().tolist()
        mine = sorted({self._shards[self._owners[index]].name for index in bad})
        order = [placement.name for bucket in reversed(self._buckets) for placement in reversed(bucket.plan.placements)]
        first = min(((self._mesh.pp.rank, order.index(name), name) for name in mine), default=None)
        gathered = all_gather_object(first, self._mesh.world)
        (_, _, name), owner = min((found, rank) for rank, found in enumerate(gathered) if found is not None)
        state = (self._mesh.coordinate, self._is_bad_here(name), len(mine))
        everyone = all_gather_object(state, self._mesh.world)
        origins = [where for where, is_bad, _ in everyone if is_bad] or [everyone[owner][0]]
        count = sum(number for _, _, number in everyone)
        return (
            f"{origins[0]} the gradient of {name!r} is not finite (nan or inf); {count} parameter shards in all hold such "
            f"gradients. Look at the loss and the data of this step, lower the learning rate or clip gradients; or take it "
            f"by DistributedOptimizerConfig(nonfinite='skip') or 'ignore'."
        )

    def _is_bad_here(self, name: str) -> bool:
        """Whether this rank's own part of the gradient, as far as the reduction has left it alone, is not finite."""
        for bucket in self._buckets:
            for placement in bucket.plan.placements:
                if placement.name == name:
                    flat = bucket.gradients[placement.start : placement.stop].clone()
                    start, stop = bucket.own_range
                    first, last = max(start, placement.start), min(stop, placement.stop)
                    if first < last:
                        flat[first - placement.start : last - placement.start] = 0.0
                    return not bool(torch.isfinite(flat).all())
        return False


def _may_overflow(loss_scale: float | None) -> bool:
    return loss_scale is not None and loss_scale > 1.0


class _Answer:
    """A truth value on its way to the host.

    Args:
        flag: 0-dim bool.
    """

    def __init__(self, flag: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._flag = flag
        if flag.is_cuda:
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def get(self) -> bool:
        """Wait until it is here."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._flag)
