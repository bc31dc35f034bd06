"""Main values and states for whoever saves or restores them, in whatever form they are kept between steps.

Note [Piece by piece]
Remainders and 8-bit moments stand for fp32 values. All of them at once would take the memory that was saved, so they are
asked for and given back in ranges, of which a reader or writer needs one or two at a time.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.optim import float8
from lightning_megatron.optim.config import DistributedOptimizerConfig
from lightning_megatron.optim.cutting import Cut
from lightning_megatron.optim.mains import CopyStore
from lightning_megatron.optim.shards import Shard

ALIGNMENT = float8.BLOCK
_MOMENT, _SCALE = "exp_avg", "exp_avg_scale"  # as optim/fused_adam.py names them
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


class Kept(Protocol):
    """fp32 values ``[n]`` that are kept in another form."""

    def read(self, start: int, stop: int) -> Tensor:
        """A tensor of the values ``[start, stop)``; ``start`` is a multiple of ``ALIGNMENT``."""

    def write(self, values: Tensor, start: int, stop: int) -> None:
        """Keep new values; ``start`` is a multiple of ``ALIGNMENT``, ``stop`` another one or the end."""


class KeptValues:
    """What an optimizer's shards are, as any optimizer would have them.

    Args:
        optimizer: its groups hold the main parameters.
        cut: its shards.
        config: how values are kept.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, cut: Cut, config: DistributedOptimizerConfig) -> None:
        self._optimizer, self._cut = optimizer, cut
        self._state_dtype = config.state_dtype

    def settle(self) -> None:
        """Wait for copies to the host that are still running; before values that are kept there are read."""
        if self._cut.on_host and torch.cuda.is_available():
            torch.cuda.synchronize()

    def main(self, shard: Shard) -> Tensor | Kept:
        """The main values of a shard, ``[n]`` or ``[*shape]``; a tensor is what is kept, in its place."""
        store = self._cut.stores.get(shard.main)
        if store is None:
            return shard.main.detach()
        return store.wide if isinstance(store, CopyStore) else store

    def states(self, shard: Shard) -> dict[str, Any]:
        """The optimizer's states of a shard by name: tensors, other values, and what is kept otherwise."""
        state = dict(self._optimizer.state.get(shard.main, {}))
        if (scales := state.pop(_SCALE, None)) is not None:
            state[_MOMENT] = float8.Moment(state[_MOMENT], scales)
        return state

    def place_for(self, shard: Shard, name: str, dtype: torch.dtype) -> Tensor | Kept:
        """Memory for a state of the shard's shape, in the form and where it is kept: what is there, or zeros.

        Args:
            shard: whose.
            name: of the state.
            dtype: that it was saved in, which is kept if this run asks for no other.
        """
        existing = self.states(shard).get(name)
        if self._state_dtype == "fp8" and name == _MOMENT and dtype in _FLOATING:
            if isinstance(existing, float8.Moment):
                return existing
            return float8.Moment.zeros(shard.main.numel(), shard.main.device)
        if shard.main.dtype == torch.float32 and dtype in _FLOATING:
            dtype = torch.float32 if self._state_dtype == "fp32" else torch.bfloat16
        if isinstance(existing, Tensor) and existing.shape == shard.main.shape and existing.dtype == dtype:
            return existing
        place = torch.device("cpu") if shard.main in self._cut.on_host else shard.main.device
        pinned = place.type == "cpu" and shard.main.is_cuda
        return torch.zeros(shard.main.shape, dtype=dtype, device=place, pin_memory=pinned)

    def install(self, shard: Shard, states: dict[str, Any]) -> None:
        """Make these the optimizer's states of a shard; none of them: it has not stepped."""
        self._optimizer.state.pop(shard.main, None)
        kept: dict[str, Any] = {}
        for name, value in states.items():
            kept |= {name: value.narrow, _SCALE: value.scales} if isinstance(value, float8.Moment) else {name: value}
        if kept:
            self._optimizer.state[shard.main] = kept
