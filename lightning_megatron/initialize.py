"""Give parameters their values: first draws that are the same at every layout, and the cut of a full state dict."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_megatron.rng import named_generator, seeded_rng
from lightning_megatron.sharding import copy_sharding, has_sharding, sharding_of


def materialize(module: nn.Module, *, device: torch.device, seed: int) -> None:
    """Replace every meta parameter of ``module`` by real memory on ``device`` with its first values, in place.

    A parameter of our layers is drawn in full from a generator seeded by ``(seed, its name inside module)`` and cut to
    this rank's shard, so the values depend on neither the layout nor the other parameters. A module of the user's is
    given its values by its own ``reset_parameters``, under generators seeded by its name. Sharing of parameters is kept.

    Raises:
        ValueError: a module on the meta device has parameters or buffers and no ``reset_parameters``.
    """
    made: dict[int, nn.Parameter] = {}
    for prefix, child in module.named_modules():
        own = [(name, p) for name, p in child.named_parameters(recurse=False) if p.is_meta]
        if not own and not any(b.is_meta for b in child.buffers(recurse=False)):
            continue
        if all(has_sharding(p) for _, p in own) and own:
            for name, param in own:
                full_name = f"{prefix}.{name}" if prefix else name
                if id(param) not in made:
                    made[id(param)] = _drawn(param, full_name, device, seed)
                child.register_parameter(name, made[id(param)])
        else:
            _reset(child, prefix, device, seed, made)


def _drawn(param: nn.Parameter, name: str, device: torch.device, seed: int) -> nn.Parameter:
    sharding = sharding_of(param)
    full = sharding.init.draw(sharding.global_shape, named_generator(device, seed, "init", name), device)
    local = sharding.cut(full, param.shape).to(param.dtype)
    return copy_sharding(param, nn.Parameter(local, requires_grad=param.requires_grad))


def _reset(child: nn.Module, prefix: str, device: torch.device, seed: int, made: dict[int, nn.Parameter]) -> None:
    reset = getattr(child, "reset_parameters", None)
    if not callable(reset):
        raise ValueError(
            f"{prefix or 'the model'} ({type(child).__name__}) was built on the meta device and has no reset_parameters() to "
            f"give its parameters and buffers values; define one, or build the module without torch.device('meta')."
        )
    for name, param in list(child.named_parameters(recurse=False)):
        if param.is_meta:
            if id(param) not in made:
                made[id(param)] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
            child.register_parameter(name, made[id(param)])
    for name, buffer in list(child.named_buffers(recurse=False)):
        if buffer.is_meta:
            child.register_buffer(name, torch.empty_like(buffer, device=device), name not in child._non_persistent_buffers_set)
    with seeded_rng(device, seed, "init", prefix):
        reset()


@torch.no_grad()
def load_unsharded(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Copy this rank's part of a full state dict (name -> unsharded tensor) into parameters and buffers.

    Names of layers that are on other stages are skipped. Padding rows are set to zero.

    Raises:
        KeyError: ``strict`` and a local parameter or persistent buffer has no entry.
        ValueError: an entry has another shape than the unsharded parameter; the message names it and both shapes.
    """
    local = module.state_dict(keep_vars=True)
    missing = [name for name in local if name not in state]
    if strict and missing:
        raise KeyError(f"the state dict lacks {missing[:5]}{' and more' if len(missing) > 5 else ''}.")
    for name, target in local.items():
        if name not in state:
            continue
        try:
            target.copy_(sharding_of(target).cut(state[name], target.shape))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
