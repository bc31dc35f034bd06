"""What hooks see as ``checkpoint["state_dict"]``, and what comes of their changes.

Note [A state_dict that hooks change]
Hooks get this rank's own tensors: its shards and stages under global names, in local shapes. When they are done, tensors that
they replaced or wrote to are found by identity and by torch's counter of writes. What they leave is saved in place of the
model's own (averaged weights, say), while main values stay those of training. A run that loads it can therefore find
parameters that its main values do not round to. Parameters count, as they do with a stock Trainer: main values are read from
them again when training starts, unless a callback has put the weights of training back until then, which the main values
then round to, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_megatron.checkpoint import Edits
from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, Shard
from lightning_megatron.sharding import sharding_of


def is_seen(trainer: Trainer, hook: str) -> bool:
    """Whether the module or a callback defines ``on_save_checkpoint`` or ``on_load_checkpoint``."""
    return any(is_overridden(hook, one) for one in (trainer.lightning_module, *trainer.callbacks))  # type: ignore[attr-defined]


class HandedOut:
    """A state dict that hooks are given.

    Args:
        state: ``name -> tensor``, or another value.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._given = dict(state)
        self._writes = {name: _writes(value) for name, value in state.items() if isinstance(value, Tensor)}

    def edits(self, state: Mapping[str, Any]) -> Edits:
        """What hooks have made of it; ``state`` is what they left."""
        values = {name: value for name, value in state.items() if not self._is_unchanged(name, value)}
        return Edits(values, frozenset(self._given.keys() - state.keys()))

    def _is_unchanged(self, name: str, value: Any) -> bool:
        given = self._given.get(name)
        if not isinstance(given, Tensor) or not isinstance(value, Tensor):
            return name in self._given and value is given
        is_same = (value.data_ptr(), value.shape, value.stride(), value.dtype) == (
            given.data_ptr(),
            given.shape,
            given.stride(),
            given.dtype,
        )
        return is_same and _writes(given) == self._writes[name]


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # buffers that a validation has made are not counted


def names_of_all(edits: Edits, mesh: Mesh) -> list[str]:
    """The names that hooks have changed or removed on any rank. All ranks call it together, also where there are no hooks."""
    return sorted(set().union(*all_gather_object(sorted({*edits.values, *edits.removed}), mesh.world)))


@torch.no_grad()
def apply_edits(module: nn.Module, edits: Edits, *, strict: bool, unsharded: bool) -> None:
    """Put what ``on_load_checkpoint`` has made of the state dict into the module, which holds the checkpoint's values.

    Args:
        module: holds this rank's stages.
        edits: values of the local shapes, or ``unsharded``; of names that the module does not have they are passed over.
        strict: whether names may be missing or left over.
        unsharded: see ``edits``.

    Raises:
        ValueError: a value has another shape, or a name was removed.
    """
    local = module.state_dict(keep_vars=True)
    gone, added = sorted(edits.removed & local.keys()), sorted(edits.values.keys() - local.keys())
    if gone:
        raise ValueError(
            f"on_load_checkpoint has removed {gone[0]} from checkpoint['state_dict'], which has been loaded already: give it "
            f"the values that it should have instead, checkpoint['state_dict'][{gone[0]!r}] = ..."
        )
    if added and strict and not unsharded:
        raise ValueError(f"on_load_checkpoint has put {added[0]} into checkpoint['state_dict'], which is not in the model.")
    for name, value in edits.values.items():
        target = local.get(name)
        if not isinstance(target, Tensor):
            continue
        if unsharded:
            value = sharding_of(target).cut(value, target.shape)
        if value.shape != target.shape:
            raise ValueError(
                f"on_load_checkpoint has made {name} of checkpoint['state_dict'] {tuple(value.shape)}, where this rank holds "
                f"{tuple(target.shape)}."
            )
        target.copy_(value)


class ParametersCount:
    """Makes main values follow parameters. See Note [A state_dict that hooks change].

    Args:
        module: holds this rank's stages.
        optimizers: whose main values.
        changed: names of parameters that main values may not round to.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[DistributedOptimizer], changed: Collection[str]) -> None:
        params = {id(value) for name, value in module.state_dict(keep_vars=True).items() if name in changed}
        shards = [shard for one in optimizers for shard in one.shards if id(shard.param) in params]
        self._writes = {shard: shard.param._version for shard in shards}
        self._optimizers = optimizers

    def __call__(self) -> None:
        """Read main values again where they are others. All ranks call it together, with parameters that have values."""
        for distributed in self._optimizers:
            for shard in distributed.shards:
                if shard in self._writes and self._is_stale(distributed, shard):
                    distributed.refresh_shard(shard)
            distributed.mains.accept({shard.param for shard in self._writes})

    def _is_stale(self, distributed: DistributedOptimizer, shard: Shard) -> bool:
        main = distributed.kept.main(shard)
        if shard.gathered or not isinstance(main, Tensor):  # remainders round to the parameter whatever it is
            return shard.param._version == self._writes[shard]
        own = shard.param.detach().reshape(-1)[shard.start : shard.stop]
        return not torch.equal(main.reshape(-1).to(own.device, own.dtype), own)
