"""Putting shards into the user's own optimizer: which optimizers allow it, their param groups, and state they already have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.optim.shards import Shard

_SHAPE = "its update of an element depends on the whole matrix"
_NORM = "it scales a parameter's update by the norm of the whole parameter"
# By class name, so that a subclass and another package's implementation are recognised without importing it.
WANTS_WHOLE = {
    "Adafactor": "it keeps row and column means of each matrix",
    "CAME": "it keeps row and column means of each matrix",
    "SM3": "it keeps row and column maxima of each matrix",
    "Muon": _SHAPE,
    "MuonWithAuxAdam": _SHAPE,
    "SingleDeviceMuon": _SHAPE,
    "SingleDeviceMuonWithAuxAdam": _SHAPE,
    "Shampoo": _SHAPE,
    "SOAP": _SHAPE,
    "LARS": _NORM,
    "FusedLARS": _NORM,
    "LAMB": _NORM,
    "Lamb": _NORM,
    "FusedNovoGrad": _NORM,
    "NovoGrad": _NORM,
}
REFUSED = {
    "LBFGS": "it flattens all parameters and searches along one direction",
    "SparseAdam": "it takes sparse gradients, and gradients here lie in dense flat buffers",
    "FusedLAMB": "it clips by the norm of all gradients, of which a rank has a part",
    "DistributedShampoo": "it distributes its work over ranks itself",
    "ZeroRedundancyOptimizer": "it shards its parameters over ranks itself; give the optimizer that it wraps",
}


def wants_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer must see whole parameters, because it does not update each element on its own.

    A class of the user's says so by an attribute ``wants_whole_parameters = True``.

    Raises:
        ValueError: it can be given neither slices nor whole parameters, by the class name of it or of a base class.
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    for name in names:
        if (reason := REFUSED.get(name)) is not None:
            raise ValueError(
                f"{type(optimizer).__name__} cannot be sharded over ranks: {reason}. Use an elementwise optimizer such as "
                f"torch.optim.AdamW or SGD, or one that works on one parameter at a time, such as torch.optim.Muon."
            )
    if (told := getattr(optimizer, "wants_whole_parameters", None)) is not None:
        return bool(told)
    return any(name in WANTS_WHOLE for name in names)


def trainable_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[tuple[str, nn.Parameter]]:
    """The optimizer's parameters that require a gradient, with their names, in the order of ``named_parameters``.

    Raises:
        ValueError: the optimizer has a parameter that is not among ``named_parameters``.
    """
    names: dict[nn.Parameter, str] = {}
    for name, param in named_parameters:
        names.setdefault(param, name)  # a shared parameter is laid out once, under its first name
    held = set()
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in names:
                raise ValueError(
                    f"param group {index} of {type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that "
                    f"is not one of the module's {len(names)} parameters. Make the optimizer in configure_optimizers from "
                    f"self.parameters(), and do not replace parameters afterwards."
                )
            held.add(param)
    return [(name, param) for param, name in names.items() if param in held and param.requires_grad]


def install_shards(
    optimizer: torch.optim.Optimizer, shards: Sequence[Shard], *, groups: Sequence[dict[str, Any]] | None = None
) -> None:
    """Replace each group's parameters by this rank's shards, in the group's order, and cut the state that exists.

    Parameters without a shard on this rank leave their group; a group may end up empty.

    Args:
        optimizer: holds the groups.
        shards: of the groups' parameters.
        groups: which of its groups; all of them if not given.

    Raises:
        ValueError: an existing state tensor has neither the parameter's shape nor one element.
    """
    by_param = {shard.param: shard for shard in shards}
    state: dict[Tensor, Any] = {
        shard.main: {key: _cut(optimizer, shard, key=key, value=value) for key, value in optimizer.state[shard.param].items()}
        for shard in shards
        if shard.param in optimizer.state
    }
    for group in optimizer.param_groups if groups is None else groups:
        kept = [position for position, param in enumerate(group["params"]) if param in by_param]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][position] for position in kept]
        for param in group["params"]:
            optimizer.state.pop(param, None)
        group["params"] = [by_param[group["params"][position]].main for position in kept]
    optimizer.state.update(state)


def _cut(optimizer: torch.optim.Optimizer, shard: Shard, *, key: Any, value: Any) -> Any:
    """The shard's part of one entry of a parameter's state; a step count or another single value stays as it is."""
    single = shard.param.dim() == 0 and key != "step"  # the element of a 0-dim parameter, which the shard holds as [1]
    if not isinstance(value, Tensor) or (value.dim() == 0 and not single):
        return value
    if shard.main.dim() > 1 and value.shape != shard.param.shape and not shard.gathered:
        return value.detach().clone()  # whatever it keeps of a whole matrix
    if value.shape != shard.param.shape or shard.gathered:
        raise ValueError(
            f"{type(optimizer).__name__} keeps a state {key!r} of shape {tuple(value.shape)} for parameter {shard.name!r} of "
            f"shape {tuple(shard.param.shape)}, so it is not elementwise and cannot be sharded into flat slices. If it works "
            f"on one parameter at a time, give its class an attribute wants_whole_parameters = True."
        )
    dtype = shard.main.dtype if value.dtype == shard.param.dtype else value.dtype
    return value.detach().reshape(-1)[shard.start : shard.stop].to(dtype, copy=True).view(shard.main.shape)
