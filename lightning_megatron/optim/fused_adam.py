"""Adam and AdamW of torch.optim in one pass over memory, whatever main values and moments are kept as.

Note [What a fused step leaves out]
A step of torch's fused AdamW with fp32 copies reads and writes 50 bytes a parameter: the factor of clipping (8), the update
(28), the copy into the 16-bit parameter (6), the norm (4) and clearing (4). The factor and the copy belong into the update,
which leaves 38. Remainders and 16-bit moments are widened in registers, so that nothing but them is ever in memory.
The optimizer stays the user's: its groups, its state and its step hooks are as torch has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron import kernels
from lightning_megatron.kernels.adam_shard import AdamOptions, AdamShard
from lightning_megatron.optim import float8
from lightning_megatron.optim.config import StateDtype
from lightning_megatron.optim.mains import MainStore, RemainderStore
from lightning_megatron.optim.remainder import Remainder
from lightning_megatron.optim.shards import Shard

_SCALE = "exp_avg_scale"
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class AdamUpdate(Protocol):
    """Updates one flat shard in place, with arithmetic in fp32."""

    def __call__(self, shard: AdamShard, options: AdamOptions, *, scale: Tensor | None, rates: Tensor) -> None:
        """Step.

        Args:
            shard: its tensors.
            options: of its param group.
            scale: what the gradient is multiplied by first (0-dim fp32); if it is NaN, nothing is changed.
            rates: ``[2]`` fp32: 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t).
        """


def is_plain_adam(optimizer: torch.optim.Optimizer, shards: Sequence[Shard]) -> bool:
    """Whether this is torch's Adam or AdamW with options that a fused step knows, on values that it knows."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    plain_groups = not any(
        group.get(name) for group in optimizer.param_groups for name in ("amsgrad", "maximize", "differentiable", "capturable")
    )
    return plain_groups and all(shard.main.dim() == 1 and shard.main.dtype in _PLAIN for shard in shards)


class FusedAdam:
    """Steps shards of Adam or AdamW.

    Args:
        optimizer: see ``is_plain_adam``.
        shards: the shards to step, with the range of the parameter buffer and of the gradient buffer of each.
        stores: where main values are kept that the optimizer does not hold.
        state_dtype: what moments of fp32 values are kept in: ``fp32``, ``bf16`` or, the first one, ``fp8``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[tuple[Shard, Tensor, Tensor]],
        *,
        stores: Mapping[Tensor, MainStore],
        state_dtype: StateDtype,
    ) -> None:
        self._optimizer, self._in_fp8 = optimizer, state_dtype == "fp8"
        self._wide_dtype = torch.float32 if state_dtype == "fp32" else torch.bfloat16
        self._places: dict[Tensor, tuple[Tensor, Tensor]] = {shard.main: (value, gradient) for shard, value, gradient in shards}
        self._prepared: list[_Ready] | None = None
        self._rests: dict[Tensor, Remainder] = {
            main: store.rest for main, store in stores.items() if isinstance(store, RemainderStore)
        }

    @torch.no_grad()
    def prepare(self) -> None:
        """Do what a step needs before its first kernel, while the device is still busy with gradients."""
        self._prepared = [self._prepare(group) for group in self._optimizer.param_groups]

    @torch.no_grad()
    def step(self, scale: Tensor | None, *, confirm: Callable[[], None], **kwargs: Any) -> None:
        """Step.

        Args:
            scale: what gradients are to be multiplied by first (0-dim); if it is NaN, no value is changed.
            confirm: called when the device has its work and the steps are not counted yet.
            kwargs: for the optimizer's own ``step``, which runs its hooks on groups without parameters.
        """
        prepared, self._prepared = self._prepared, None
        groups = self._optimizer.param_groups
        members = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            self._optimizer.step(**kwargs)
        finally:
            for group, params in zip(groups, members, strict=True):
                group["params"] = params
        scale = None if scale is None else scale.float()
        counts: list[Tensor] = []
        for index, group in enumerate(groups):
            ready = prepared[index] if prepared is not None and prepared[index].betas == _betas(group) else self._prepare(group)
            self._step_group(group, ready, scale)
            counts += ready.steps
        confirm()
        if counts:
            torch._foreach_add_(counts, 1.0)

    def _step_group(self, group: dict[str, Any], ready: _Ready, scale: Tensor | None) -> None:
        if not ready.shards:
            return
        update: AdamUpdate = _kernel() if ready.rates.device.type == "cuda" else plain_update
        options = AdamOptions(
            lr=float(group["lr"]),
            betas=ready.betas,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)),
        )
        for shard, rates in zip(ready.shards, ready.rates.unbind(), strict=True):
            update(shard, options, scale=scale, rates=rates)

    def _prepare(self, group: dict[str, Any]) -> _Ready:
        mains = [main for main in group["params"] if main in self._places]
        states = [self._state(main, group) for main in mains]
        shards, betas = [], _betas(group)
        for main, state in zip(mains, states, strict=True):
            value, gradient = self._places[main]
            rest = self._rests.get(main)
            copy = main.detach() if main.dtype != value.dtype else None
            shards.append(
                AdamShard(
                    value=value,
                    main=rest.low if rest is not None else copy,
                    ties=rest.ties if rest is not None else None,
                    grad=gradient,
                    exp_avg=state["exp_avg"],
                    exp_avg_scale=state.get(_SCALE),
                    exp_avg_sq=state["exp_avg_sq"],
                )
            )
        steps = [state["step"] for state in states]
        return _Ready(betas, shards, steps, _rates(steps, betas, mains[0].device) if mains else torch.empty(0, 2))

    def _state(self, main: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state of a shard, as its first step would make it, its moments in our dtypes."""
        state: dict[str, Any] = self._optimizer.state[main]
        dtype = self._wide_dtype if main.dtype == torch.float32 else main.dtype
        place = main.device if group.get("fused") else torch.device("cpu")
        state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device=place)
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros(main.shape, dtype=dtype, device=main.device)
            elif state[name].dtype not in (dtype, float8.DTYPE):
                state[name] = state[name].to(dtype)
        if self._in_fp8 and _SCALE not in state:
            state["exp_avg"], state[_SCALE] = float8.narrowed(state["exp_avg"])
        return state


@dataclass(frozen=True)
class _Ready:
    """What the step of one param group needs: its shards, the step count of each, and ``rates`` of each."""

    betas: tuple[float, float]
    shards: list[AdamShard]
    steps: list[Tensor]
    rates: Tensor


def _betas(group: dict[str, Any]) -> tuple[float, float]:
    first, second = group["betas"]
    return float(first), float(second)


def _rates(steps: list[Tensor], betas: tuple[float, float], device: torch.device) -> Tensor:
    """``[len(steps), 2]`` for the steps that come next: see ``AdamUpdate``. Powers are taken in fp64."""
    count = torch.stack(steps).double() + 1.0
    rates = torch.stack([1.0 / (1.0 - betas[0] ** count), (1.0 - betas[1] ** count).rsqrt()], dim=1)
    return rates.to(device, torch.float32, non_blocking=True)


def _kernel() -> AdamUpdate:
    from lightning_megatron.kernels.adam import adam_

    return adam_


def runs_on(device: torch.device) -> bool:
    """Whether there is a kernel for the device."""
    return device.type == "cuda" and kernels.available()


def plain_update(shard: AdamShard, options: AdamOptions, *, scale: Tensor | None, rates: Tensor) -> None:
    """``AdamUpdate`` in plain torch, for machines without the kernel."""
    if scale is not None and bool(scale.isnan()):
        return
    value, main, decay, betas = shard.value, shard.main, options.weight_decay, options.betas
    rest = None if main is None or shard.ties is None else Remainder.of(main, shard.ties)
    wide = rest.join(value, 0, value.numel()) if rest is not None else (value if main is None else main).float().clone()
    grad = shard.grad.float() if scale is None else shard.grad.float() * scale
    if decay and not options.decoupled:
        grad = grad + decay * wide
    first = shard.exp_avg.float() if shard.exp_avg_scale is None else float8.widened(shard.exp_avg, shard.exp_avg_scale)
    first = first * betas[0] + grad * (1.0 - betas[0])
    second = shard.exp_avg_sq.float().mul_(betas[1]).add_(grad * grad * (1.0 - betas[1]))
    wide.mul_(1.0 - options.lr * decay if options.decoupled else 1.0)
    wide.sub_(options.lr * rates[0] * first / (second.sqrt() * rates[1] + options.eps))
    if shard.exp_avg_scale is None:
        shard.exp_avg.copy_(first)
    else:
        for kept, new in zip((shard.exp_avg, shard.exp_avg_scale), float8.narrowed(first), strict=True):
            kept.copy_(new)
    shard.exp_avg_sq.copy_(second)
    if rest is not None:
        rest.split(wide, value, 0, value.numel())
        return
    value.copy_(wide)
    if main is not None:
        main.copy_(wide)
