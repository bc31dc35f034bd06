"""What stands in the place of a module's ``forward``, and which modules are layers.

Note [In place of forward]
A module is changed by an object in its own ``forward`` attribute. Its type, its parameters and their names stay; a copy of
the module gets an object of its own; the object says what it stands for, so that signatures stay readable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from lightning_megatron.pipeline.model import PipelineModel


class Instead:
    """What stands in a module's ``forward``; a subclass is called instead. See Note [In place of forward]."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")  # somebody else's, or another of ours

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        if self.inner is not None:
            return self.inner
        forward: Callable[..., Any] = MethodType(type(self.module).forward, self.module)
        return forward

    def put(self) -> None:
        """Take the place."""
        self.module.__dict__["forward"] = self


def take_back(module: nn.Module) -> None:
    """Give a module and all below it their own ``forward`` back."""
    for child in module.modules():
        while isinstance(instead := child.__dict__.get("forward"), Instead):
            if instead.inner is None:
                del child.__dict__["forward"]
            else:
                child.__dict__["forward"] = instead.inner


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Args:
        name: in the module that was searched.
        module: the layer.
        index: among the layers of the whole model.
    """

    name: str
    module: nn.Module
    index: int


def layers_of(module: nn.Module) -> list[Layer]:
    """The layers of a model: those of its ``PipelineModel``, or else the entries of its outermost ``nn.ModuleList``s."""
    named = list(module.named_modules())
    models = [(name, child) for name, child in named if isinstance(child, PipelineModel)]
    lists: list[tuple[str, nn.Module]] = [(f"{name}.layers".lstrip("."), child.layers) for name, child in models]
    lists = lists or [(name, child) for name, child in named if isinstance(child, nn.ModuleList)]
    lists = [(name, child) for name, child in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return [
        Layer(f"{name}.{index}", layer, int(index))
        for name, child in lists
        for index, layer in child._modules.items()
        if layer is not None
    ]
