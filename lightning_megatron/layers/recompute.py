"""Activations that are computed again in the backward instead of kept: which, and how.

Note [Two ways to keep less]
A *checkpointed* module keeps its input only; its forward runs again when the backward reaches it (torch's non-reentrant
``checkpoint``: the same random numbers, the same autocast, the same graph, so that hooks and gradient sums see each
parameter once). That pays for a layer, a feed-forward block, attention that keeps its scores.

It pays nothing for a norm or an activation: what costs there is the *output*, which the matrix product behind it keeps. So
these have their output *dropped*: where something in the layer saves it for the backward, what is saved is how to make it
again, from tensors that are kept anyway (the residual stream, the activation's input). No graph is made anew for that, and a
product whose weight gradient waits (pipeline/backward_split.py) still waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_megatron.layers.core_attention import CoreAttention
from lightning_megatron.layers.dropping import DroppedOutputs
from lightning_megatron.layers.instead import Instead, Layer, layers_of, take_back
from lightning_megatron.layers.mlp import MLP, GatedMLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.te_backend.attention import NarrowCoreAttention
from lightning_megatron.layers.te_backend.modules import (
    FusedColumnLinear,
    FusedGatedMLP,
    FusedMLP,
    FusedRowLinear,
    NarrowRMSNorm,
)
from lightning_megatron.pipeline.model import PipelineModel

PRESETS: dict[str, tuple[str, ...]] = {"full": ("layer",), "selective": ("norm", "mlp_act")}
NAMES = ("layer", "mlp", "mlp_act", "norm", "attention_core")
_NORMS = (RMSNorm, LayerNorm, nn.LayerNorm, nn.RMSNorm)
_ACTIVATIONS = (nn.GELU, nn.SiLU, nn.Mish)  # they keep their input; one that keeps its output has nothing to drop
_MLPS = (MLP, GatedMLP)
_FUSED_MLPS = (FusedMLP, FusedGatedMLP)  # the activation is part of the linear behind it, where nobody looks in between


@dataclass(frozen=True)
class Recompute:
    """Which activations are computed again in the backward. See docs/memory.md for what each saves.

    Args:
        modules: ``full`` (each layer), ``selective`` (norms and activations of feed-forward blocks), or names: ``layer``,
            ``mlp``, ``mlp_act``, ``norm``, ``attention_core``, and patterns of module names of the user's own, such as
            ``layers.*.mlp``, in which ``*`` stands for (a part of) one name between dots.
        every: only in every n-th layer, beginning with layer 0.

    Raises:
        ValueError: no module is named, or ``every`` is not positive.
    """

    modules: str | Sequence[str] = "full"
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"Recompute(every={self.every}) must be 1 (every layer) or more.")
        names = self.groups if isinstance(self.modules, Sequence) else ()
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f"recompute={self.modules!r} names no module; use {', '.join((*PRESETS, *NAMES))} or patterns such as "
                f"'layers.*.mlp', or leave recompute=None."
            )

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Names and patterns as they were given, and what they stand for."""
        given = (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)
        return {name: PRESETS.get(name, (name,)) for name in given}

    @classmethod
    def of(cls, given: Recompute | str | Sequence[str] | None) -> Recompute | None:
        """What a user gave as ``recompute=``; ``None`` for nothing."""
        return given if given is None or isinstance(given, cls) else cls(given)  # type: ignore[arg-type]


class _Checkpointed(Instead):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.has_buffers = any(True for _ in module.buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(self.__wrapped__, **kwargs)
        if not torch.is_grad_enabled():
            return call(*args)
        return checkpoint(call, *args, use_reentrant=False, context_fn=self._contexts if self.has_buffers else noop_context_fn)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._buffers_kept()

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Leave running statistics as the first forward has left them."""
        buffers = list(self.module.buffers())
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


class _Dropping(Instead):
    """Of a layer: its dropped outputs are replaced where something saves them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.outputs = DroppedOutputs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.outputs.dropped():
            return self.__wrapped__(*args, **kwargs)


class _Dropped(Instead):
    """Of a norm or an activation module in a layer."""

    def __init__(self, module: nn.Module, outputs: DroppedOutputs) -> None:
        super().__init__(module)
        self.outputs = outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__(*args, **kwargs)
        again: Callable[..., Any] = self.__wrapped__
        if isinstance(self.module, RMSNorm):
            again = MethodType(RMSNorm.forward, self.module)  # which hands nothing over to anyone
        if isinstance(result, Tensor):
            self.outputs.drop(result, partial(again, **kwargs), args)
        elif isinstance(self.module, RMSNorm):
            summed, normed = result  # the sum is kept for what goes on with it, so nothing else need be
            self.outputs.drop(normed, again, (summed,))
        return result


class _DroppedActivation:
    """Of a feed-forward block of ours, whose activation is a function."""

    def __init__(self, activation: Callable[[Tensor], Tensor], outputs: DroppedOutputs) -> None:
        self.activation, self.outputs = activation, outputs

    def __call__(self, hidden: Tensor) -> Tensor:
        result = self.activation(hidden)
        self.outputs.drop(result, self.activation, (hidden,))
        return result


# Which modules


@dataclass
class _Selection:
    checkpointed: dict[str, nn.Module]
    dropped: dict[str, nn.Module]


def recompute(module: nn.Module, options: Recompute | None, *, is_whole: bool = True) -> None:
    """Make a model's modules recompute, in place; what an earlier call made of them is undone first.

    Args:
        module: the user's module.
        options: ``None`` for no recompute.
        is_whole: whether all layers are here, so that a name without a module is an error.

    Raises:
        ValueError: a name that no module has.
    """
    undo(module)
    if options is None:
        return
    layers = layers_of(module)
    selected = _select(module, layers, options, is_whole=is_whole)
    for name, child in selected.checkpointed.items():
        _part_handoffs(module, child, name)
        _Checkpointed(child).put()
    for layer in layers:
        inside = [child for name, child in selected.dropped.items() if name.startswith(f"{layer.name}.")]
        if inside:
            dropping = _Dropping(layer.module)
            dropping.put()
            for child in inside:
                _drop(child, dropping.outputs)


def undo(module: nn.Module) -> None:
    """Give all modules their own ``forward`` back."""
    take_back(module)
    for child in module.modules():
        if isinstance(child, _MLPS) and isinstance(child._activation, _DroppedActivation):
            child._activation = child._activation.activation
        if isinstance(child, _FUSED_MLPS):
            _activate_again(child, False)
        if isinstance(child, (FusedColumnLinear, FusedRowLinear)) and child.job.given is not None:
            child.job.given.slot = child.job.input_slot


def _activate_again(mlp: Any, again: bool) -> None:
    if isinstance(mlp.down, FusedRowLinear):
        mlp.down.job = replace(mlp.down.job, activates_again=again)


def _drop(module: nn.Module, outputs: DroppedOutputs) -> None:
    if isinstance(module, _FUSED_MLPS):
        _activate_again(module, True)
    if isinstance(module, _MLPS):
        module._activation = _DroppedActivation(module._activation, outputs)
    else:
        _Dropped(module, outputs).put()


def _select(module: nn.Module, layers: list[Layer], options: Recompute, *, is_whole: bool) -> _Selection:
    found = _Selection({}, {})
    for given, names in options.groups.items():
        matching = [match for name in names for match in _matching(module, layers, name)]
        if is_whole and not matching:
            raise ValueError(_nothing(module, layers, given))
        for path, child, layer, drops in matching:
            if layer is None or layer.index % options.every == 0:
                (found.dropped if drops else found.checkpointed)[path] = child
    outer = list(found.checkpointed)
    found.checkpointed = {path: child for path, child in found.checkpointed.items() if not _is_inside(path, outer)}
    found.dropped = {p: child for p, child in found.dropped.items() if p not in outer and not _is_inside(p, outer)}
    return found


def _is_inside(path: str, others: Sequence[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)


def _matching(module: nn.Module, layers: list[Layer], name: str) -> Iterator[tuple[str, nn.Module, Layer | None, bool]]:
    """Modules of that name, each with the layer that it is (in), and whether its output is dropped."""
    if name not in NAMES:
        starts = _starts(module)
        for path, child in module.named_modules():
            if any(_fits(path[len(start) :], name) for start in starts if path.startswith(start)):
                layer = next((one for one in layers if f"{path}.".startswith(f"{one.name}.")), None)
                yield path, child, layer, layer is not None and isinstance(child, (*_NORMS, *_ACTIVATIONS))
        return
    for layer in layers:
        if name == "layer":
            yield layer.name, layer.module, layer, False
            continue
        for path, child in layer.module.named_modules(prefix=layer.name):
            if isinstance(child, _KINDS[name]):
                yield path, child, layer, name in ("norm", "mlp_act")


_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "mlp": _MLPS,
    "mlp_act": (*_MLPS, *_ACTIVATIONS),
    "norm": _NORMS,
    "attention_core": (CoreAttention,),
}


def _starts(module: nn.Module) -> list[str]:
    """What names may be relative to: the user's module, its children, and its pipelined models."""
    models = [name for name, child in module.named_modules() if isinstance(child, PipelineModel)]
    return ["", *(f"{name}." for name in {*dict(module.named_children()), *models} if name)]


def _fits(path: str, pattern: str) -> bool:
    """Whether a name fits a pattern, part by part."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True))


def _nothing(module: nn.Module, layers: list[Layer], name: str) -> str:
    start = f"recompute={name!r} fits no module of {type(module).__name__}"
    if not layers:
        return (
            f"{start}: it has no layers (a PipelineModel's, or an nn.ModuleList) to look in. Give patterns of its module names "
            f"instead, such as {next((path for path, _ in module.named_modules() if path), 'encoder')!r}."
        )
    there = ", ".join(path for path, _ in layers[0].module.named_modules() if path) or "nothing"
    return f"{start}. Its layers are {layers[0].name} and so on; inside of that there is {there}."


def _part_handoffs(module: nn.Module, inner: nn.Module, name: str) -> None:
    """A norm or attention hands its result to the linear behind it in 8 bits where both are recomputed, or neither is."""
    inside = set(inner.modules())
    taking = [child for child in inside if isinstance(child, FusedColumnLinear) and child.job.given is not None]
    for norm in module.modules():
        if isinstance(norm, NarrowRMSNorm) and norm not in inside and any(one.job.given is norm.handoff for one in taking):
            norm.handoff.slot = None
    for core in module.modules():
        if isinstance(core, NarrowCoreAttention) and any((core in inside) != (linear in inside) for linear in core.takers):
            core.part()
