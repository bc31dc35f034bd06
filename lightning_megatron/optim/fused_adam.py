"""Adam and AdamW of torch.optim in one pass over memory, whatever main values and moments are kept as.

Note [What a fused step leaves out]
A step of torch's fused AdamW with fp32 copies reads and writes 50 bytes a parameter: the factor of clipping (8), the update
(28), the copy into the 16-bit parameter (6), the norm (4) and clearing (4). The factor and the copy belong into the update,
which leaves 38. Remainders and 16-bit moments are widened in registers, so that nothing but them is ever in memory.
The optimizer stays the user's: its groups, its state and its step hooks are as torch has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron import kernels
from lightning_megatron.optim.mains import MainStore, RemainderStore
from lightning_megatron.optim.remainder import Remainder
from lightning_megatron.optim.shards import Shard

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class AdamUpdate(Protocol):
    """Updates one flat shard ``[n]`` in place, with arithmetic in fp32."""

    def __call__(
        self,
        value: Tensor,
        main: Tensor | None,
        ties: Tensor | None,
        *,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scale: Tensor | None,
        rates: Tensor,
        weight_decay: float,
        lr: float,
        decoupled: bool,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Step.

        Args:
            value: the parameter, in any dtype; it gets the rounded new value.
            main: its fp32 copy; with ``ties``, the int16 remainders; ``None`` if ``value`` is all there is.
            ties: one bit an element, ``[n / 8]`` bytes, see ``optim/remainder.py``.
            grad: the gradient in fp32.
            exp_avg: first moment.
            exp_avg_sq: second moment.
            scale: what the gradient is multiplied by first (0-dim fp32).
            rates: ``[2]`` fp32: lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t).
            weight_decay: see ``decoupled``.
            lr: learning rate.
            decoupled: AdamW (Loshchilov and Hutter 2019); otherwise weight decay is added to the gradient.
            betas: of the moments.
            eps: added to the denominator.
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
        state_dtype: what moments of fp32 values are kept in.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[tuple[Shard, Tensor, Tensor]],
        *,
        stores: Mapping[Tensor, MainStore],
        state_dtype: torch.dtype,
    ) -> None:
        self._optimizer, self._state_dtype = optimizer, state_dtype
        self._places: dict[Tensor, tuple[Tensor, Tensor]] = {shard.main: (value, gradient) for shard, value, gradient in shards}
        self._rests: dict[Tensor, Remainder] = {
            main: store.rest for main, store in stores.items() if isinstance(store, RemainderStore)
        }

    def __contains__(self, main: Tensor) -> bool:
        return main in self._places

    @torch.no_grad()
    def step(self, scale: Tensor | None, **kwargs: Any) -> None:
        """Step.

        Args:
            scale: what gradients are to be multiplied by first (0-dim).
            kwargs: for the optimizer's own ``step``, which runs its hooks on groups without parameters.
        """
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
        for group in groups:
            mains = [main for main in group["params"] if main in self._places]
            self._step_group(group, mains, scale)

    def _step_group(self, group: dict[str, Any], mains: list[Tensor], scale: Tensor | None) -> None:
        if not mains:
            return
        device = self._places[mains[0]][0].device
        update: AdamUpdate = _kernel() if device.type == "cuda" else plain_update
        states = [self._state(main, group) for main in mains]
        lr, betas = float(group["lr"]), (float(group["betas"][0]), float(group["betas"][1]))
        rates = _rates([state["step"] for state in states], lr, betas, device)
        for main, state, own_rates in zip(mains, states, rates.unbind(), strict=True):
            value, gradient = self._places[main]
            rest = self._rests.get(main)
            copied = main.dtype != value.dtype
            update(
                value,
                rest.low if rest is not None else main.detach() if copied else None,
                rest.ties if rest is not None else None,
                grad=gradient,
                exp_avg=state["exp_avg"],
                exp_avg_sq=state["exp_avg_sq"],
                scale=scale,
                rates=own_rates,
                weight_decay=float(group["weight_decay"]),
                lr=lr,
                decoupled=group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)),
                betas=betas,
                eps=float(group["eps"]),
            )

    def _state(self, main: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state of a shard, as its first step would make it, its moments in our dtype."""
        state: dict[str, Any] = self._optimizer.state[main]
        dtype = self._state_dtype if main.dtype == torch.float32 else main.dtype
        place = main.device if group.get("fused") else torch.device("cpu")
        state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device=place)
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros(main.shape, dtype=dtype, device=main.device)
            elif state[name].dtype != dtype:
                state[name] = state[name].to(dtype)
        return state


def _rates(steps: list[Tensor], lr: float, betas: tuple[float, float], device: torch.device) -> Tensor:
    """Count the steps up, and give ``[len(steps), 2]``: see ``AdamUpdate``. Powers are taken in fp64."""
    torch._foreach_add_(steps, 1.0)
    count = torch.stack(steps).double()
    rates = torch.stack([lr / (1.0 - betas[0] ** count), (1.0 - betas[1] ** count).rsqrt()], dim=1)
    return rates.to(device, torch.float32, non_blocking=True)


def _kernel() -> AdamUpdate:
    from lightning_megatron.kernels.adam import adam_

    return adam_


def runs_on(device: torch.device) -> bool:
    """Whether there is a kernel for the device."""
    return device.type == "cuda" and kernels.available()


def plain_update(
    value: Tensor,
    main: Tensor | None,
    ties: Tensor | None,
    *,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scale: Tensor | None,
    rates: Tensor,
    weight_decay: float,
    lr: float,
    decoupled: bool,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """``AdamUpdate`` in plain torch, for machines without the kernel."""
    rest = None if main is None or ties is None else Remainder.of(main, ties)
    wide = rest.join(value, 0, value.numel()) if rest is not None else (value if main is None else main).float().clone()
    grad = grad.float() if scale is None else grad.float() * scale
    if weight_decay and not decoupled:
        grad = grad + weight_decay * wide
    first = exp_avg.float().mul_(betas[0]).add_(grad * (1.0 - betas[0]))
    second = exp_avg_sq.float().mul_(betas[1]).add_(grad * grad * (1.0 - betas[1]))
    wide.mul_(1.0 - lr * weight_decay if decoupled else 1.0)
    wide.sub_(rates[0] * first / (second.sqrt() * rates[1] + eps))
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if rest is not None:
        rest.split(wide, value, 0, value.numel())
        return
    value.copy_(wide)
    if main is not None:
        main.copy_(wide)
