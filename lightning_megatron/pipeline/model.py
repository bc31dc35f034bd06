"""``PipelineModel``: the one thing that a model must be to train with ``pp > 1``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, MappingProxyType
from typing import Any

from torch import nn

Around = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class StagePart:
    """What one stage holds of a model: whether it begins it, which layers (global indices), whether it ends it."""

    stage: int
    num_stages: int
    layers: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Whether the stage runs ``first``."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage runs ``last``."""
        return self.stage == self.num_stages - 1


class PipelineModel(nn.Module):
    """A model that can be cut between its layers: ``first``, then each of ``layers``, then ``last``.

    Give ``self.layers`` (an ``nn.ModuleList``) and ``first`` and ``last`` (methods or submodules); call it as any other model.
    On one rank a call runs everything. Under ``pp > 1`` a rank keeps and runs its own layers only.

    What the parts are called with, for ``model(*inputs, **named)``:

    - ``first(*inputs)`` returns the hidden state: a tensor or a pytree of tensors. Only this travels between stages.
    - ``context(*inputs)`` returns a tuple of what else layers need (masks, positions). Each stage computes it from its
      own copy of the inputs. By default it is the inputs after the first.
    - each layer: ``layer(hidden, *context)`` returns the next hidden state.
    - ``last(hidden, *context)`` returns the output.
    - a keyword argument goes to those of these four whose signature names it.

    A submodule or parameter outside ``layers`` belongs to ``first``, ``last`` or both (a tied embedding), by what the
    two methods mention as ``self.NAME``, helper methods included. Where that cannot be seen from the code, list the names
    in the class attributes ``first_modules`` and ``last_modules``.

    ``first_cost`` and ``last_cost`` say what ``first`` and ``last`` cost in time, in layers, to a strategy that is to split
    by cost (``pipeline_layout="auto"``). They may be attributes of the class or of the model.
    """

    # `first` and `last` are declared, not defined, so that a submodule of that name serves as well as a method.
    first: Callable[..., Any]
    last: Callable[..., Any]
    layers: nn.ModuleList
    first_modules: tuple[str, ...] | None = None
    last_modules: tuple[str, ...] | None = None
    first_cost: float = 0.0
    last_cost: float = 0.0
    _stage_runner: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
    _step_named: Mapping[str, Any] = MappingProxyType({})  # keyword arguments that a strategy adds to calls in a step

    def context(self, *inputs: Any, **named: Any) -> tuple[Any, ...]:
        """What layers and ``last`` get besides the hidden state. Runs on every stage."""
        return inputs[1:]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model; under a strategy with ``pp > 1``, run this rank's stage of it."""
        named = {**named, **self._step_named}
        if self._stage_runner is not None:
            return self._stage_runner(inputs, named)
        whole = StagePart(0, 1, tuple(range(len(self.layers))))
        return run_part(self, whole, None, inputs, named)


def run_part(
    model: PipelineModel,
    part: StagePart,
    hidden: Any,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    around: Around = lambda unit: nullcontext(),
) -> Any:
    """Run one stage of a model: ``hidden`` (``None`` on the first stage) to the next hidden state, or the output.

    Args:
        model: the model; its ``layers`` hold at least the part's.
        part: what to run.
        hidden: the hidden state from the stage before.
        inputs: the positional arguments of the user's call.
        named: the keyword arguments of the user's call.
        around: a context for each unit, called with ``"first"``, ``"layers.17"`` or ``"last"``: random numbers are
            seeded there, so that a mask does not depend on which stage draws it.
    """
    context = model.context(*inputs, **_accepted(model.context, named))
    if part.is_first:
        with around("first"):
            hidden = model.first(*inputs, **_accepted(model.first, named))
    for index in part.layers:
        layer = layer_at(model, index)
        with around(f"layers.{index}"):
            hidden = layer(hidden, *context, **_accepted(layer.forward, named))
    if not part.is_last:
        return hidden
    with around("last"):
        return model.last(hidden, *context, **_accepted(model.last, named))


def layer_at(model: PipelineModel, index: int) -> nn.Module:
    """The layer of that global index, which must be on this rank."""
    layer = model.layers._modules[str(index)]
    assert layer is not None
    return layer


def _accepted(function: Callable[..., Any], named: dict[str, Any]) -> dict[str, Any]:
    if not named:
        return named
    function = function.forward if isinstance(function, nn.Module) else function
    names = _parameter_names(getattr(function, "__func__", function))
    return named if names is None else {name: value for name, value in named.items() if name in names}


@lru_cache(maxsize=1024)
def _parameter_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of a function's parameters; ``None`` if it takes any. Remembered: this is asked for every layer's call."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return None if takes_any else frozenset(parameters)


@dataclass(frozen=True)
class Ownership:
    """Which direct children and parameters (by name) each end of a model uses; ``shared`` ones are used by every stage."""

    first: frozenset[str]
    last: frozenset[str]
    shared: frozenset[str]

    @property
    def tied(self) -> frozenset[str]:
        """Names that both ends use."""
        return self.first & self.last


def ownership(model: PipelineModel) -> Ownership:
    """Find out which members outside ``layers`` belong to which end.

    Raises:
        ValueError: a member with parameters is mentioned by neither ``first`` nor ``last``, or trains inside ``context``.
    """
    members = {name for name in (*model._modules, *model._parameters) if name != "layers"}
    first = frozenset(model.first_modules) if model.first_modules is not None else _mentioned(model, "first") & members
    last = frozenset(model.last_modules) if model.last_modules is not None else _mentioned(model, "last") & members
    shared = _mentioned(model, "context") & members
    for name in sorted(members - first - last):
        member = getattr(model, name)
        parameters = [member] if isinstance(member, nn.Parameter) else list(member.parameters()) if member is not None else []
        if any(p.requires_grad for p in parameters):
            where = (
                "is trained inside context(), which runs on every stage"
                if name in shared
                else "is used by neither first() nor last()"
            )
            raise ValueError(
                f"{type(model).__name__}.{name} has parameters and {where}, so no pipeline stage owns it. Use it in first() "
                f"or last(), put it inside a layer, or list it in the class attribute first_modules or last_modules."
            )
        shared |= {name}
    return Ownership(first, last, shared - first - last)


def check_sharing(model: PipelineModel, owned: Ownership, *, ranks: Sequence[int], ends: tuple[int, int]) -> None:
    """Check that a parameter which stands in several places of a model would not be cut into copies that drift apart.

    Both ends may share one (it is tied, gradients are summed), and so may what is on one rank.

    Args:
        model: the whole model.
        owned: which members belong to which end.
        ranks: pipeline rank of each layer.
        ends: pipeline ranks of the first and the last stage.

    Raises:
        ValueError: naming both places and their ranks.
    """
    places = [(f"layers.{index}", layer, rank) for index, (layer, rank) in enumerate(zip(model.layers, ranks, strict=True))]
    seen: dict[int, tuple[str, int]] = {}
    for prefix, layer, rank in places:
        for name, param in layer.named_parameters(prefix):
            _check_place(model, seen.setdefault(id(param), (name, rank)), (name, rank))
    for names, rank in ((owned.first, ends[0]), (owned.last, ends[1])):
        for member in (getattr(model, name) for name in sorted(names)):
            for param in [member] if isinstance(member, nn.Parameter) else member.parameters() if member is not None else []:
                if id(param) in seen:
                    _check_place(model, seen[id(param)], (_name_of(model, param, outside="layers"), rank))


def _check_place(model: PipelineModel, first: tuple[str, int], second: tuple[str, int]) -> None:
    if first[1] != second[1]:
        raise ValueError(
            f"{type(model).__name__}.{second[0]} and .{first[0]} are one parameter, but pipeline ranks {second[1]} and "
            f"{first[1]} would each train a copy of their own. Only first() and last() may share a parameter across ranks: "
            f"give each place its own, or choose a pipeline_layout that puts both on one rank."
        )


def _name_of(model: PipelineModel, wanted: nn.Parameter, *, outside: str) -> str:
    names = (name for name, param in model.named_parameters(remove_duplicate=False) if param is wanted)
    return next(name for name in names if not name.startswith(f"{outside}."))


def _mentioned(model: PipelineModel, method: str) -> frozenset[str]:
    """Attribute names in the code of a method and of the methods that it mentions."""
    seen: set[str] = set()
    names: set[str] = set()
    pending = [method]
    while pending:
        current = pending.pop()
        function = getattr(type(model), current, None)
        if isinstance(member := model._modules.get(current), nn.Module):
            names.add(current)  # `first` or `last` may itself be a submodule
            assert member is not None
            continue
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if current in seen or code is None:
            continue
        seen.add(current)
        found = set(_names(code))
        names |= found
        pending += [name for name in found if callable(getattr(type(model), name, None)) and not hasattr(nn.Module, name)]
        pending += [name for name in found if isinstance(getattr(type(model), name, None), property)]
    return frozenset(names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
