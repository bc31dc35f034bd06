"""How an autograd ``Function`` adds the gradient of its weight to a sum by itself, and how it lets that wait.

Autograd asks a Python ``Function`` for all of its gradients at once, and adds what it gets in passes of its own. One that
names the place of its weight among the arguments of ``apply`` can be asked to give that gradient later, for pipeline
schedules that split the backward, and can add it to the parameter's sum inside of its own product::

    class Scale(torch.autograd.Function):
        weight_input = 1

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, now_or_later(ctx, lambda: (grad * x).sum(), add=lambda total: total.add_((grad * x).sum()))

Outside of a split backward, for parameters without a sum, this changes nothing.

Note [Sums of gradients]
An optimizer that keeps gradients in buffers of its own sets ``param.grad`` to a view of one and opens it as the parameter's
sum. What adds to it does as ``AccumulateGrad`` does, hooks on the parameter's accumulation included, but in one pass and in
the sum's own (wider) dtype. While ``grad`` is ``None`` the sum is zero, whatever it holds: the first gradient is written
over it, which saves clearing and reading it. A Function leaves the work to autograd where that would do something else:
``grad`` has been replaced, the parameter has hooks that want its gradient, a cast or a view lies between the parameter and
the Function, or the running pass (``torch.autograd.grad``) does not add to this parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_LATER = "_lightning_megatron_later"
_SUM = "_lightning_megatron_sum"

Compute = Callable[[], Tensor | None]


class _Sum:
    """What hangs on a parameter: not to be saved with it."""

    def __init__(self, total: Tensor) -> None:
        self.total, self.is_used = total, False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def open_sum(param: nn.Parameter, total: Tensor) -> None:
    """Let Functions add the parameter's gradient to ``total``, which is its ``grad``. See Note [Sums of gradients]."""
    before: _Sum | None = getattr(param, _SUM, None)
    if before is None or before.total is not total:
        setattr(param, _SUM, _Sum(total))
    _hooks_run_without_gradient()  # looked up here, outside of any backward


def close_sum(param: nn.Parameter) -> None:
    """Undo ``open_sum``."""
    param.__dict__.pop(_SUM, None)


def sum_of(param: Tensor) -> Tensor | None:
    """What a Function may add the gradient of this parameter to now, instead of returning it."""
    found: _Sum | None = getattr(param, _SUM, None)
    if found is None or param._backward_hooks or (param.grad is not None and param.grad is not found.total):
        return None
    return found.total


@torch.no_grad()
def settled_sum(param: Tensor) -> Tensor | None:
    """The parameter's sum, if one is open, with what autograd has put in its place brought back into it.

    Autograd of torch 2.11 makes a new tensor of a sum and a gradient that is narrower.
    """
    found: _Sum | None = getattr(param, _SUM, None)
    if found is None or param._backward_hooks:
        return None
    if param.grad is not None and param.grad is not found.total:
        found.total.copy_(param.grad)
        param.grad = found.total
    return found.total


def is_summed(param: Tensor) -> bool:
    """Whether a Function has added to the parameter's sum before, so that ``grad = None`` empties it."""
    found: _Sum | None = getattr(param, _SUM, None)
    return found is not None and found.is_used


def _add(param: Tensor, add: Callable[[Tensor], Any], put: Callable[[Tensor], Any] | None) -> None:
    """Add a gradient to the parameter's sum, which is open."""
    found: _Sum = getattr(param, _SUM)
    found.is_used = True
    if param.grad is not None:
        add(found.total)
        return
    if put is not None:
        put(found.total)
    else:
        add(found.total.zero_())
    param.grad = found.total


@cache
def _hooks_run_without_gradient() -> bool:
    """Whether torch runs the hooks of a parameter's accumulation also where Functions gave no gradient (2.13 does)."""
    param, seen = nn.Parameter(torch.zeros(())), list[Tensor]()
    param.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        _NoGradient.apply(torch.zeros((), requires_grad=True), param).backward()  # type: ignore[no-untyped-call]
    return bool(seen)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
        return x + param

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def run_hooks(param: Tensor) -> None:
    """Run what ``AccumulateGrad`` would have run: a gradient has been added to the parameter's sum."""
    hooks: dict[int, Callable[[Tensor], None]] | None = param._post_accumulate_grad_hooks
    for hook in list((hooks or {}).values()):
        hook(param)


@contextmanager
def arrivals_of(params: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Inside the ``with`` block hooks on the parameters' accumulation do not run; the list says for which they would have."""
    arrived: list[Tensor] = []
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    _hooks_run_without_gradient()
    for param in params:
        handle = param.register_post_accumulate_grad_hook(arrived.append)  # type: ignore[no-untyped-call]
        hooks: Any = param._post_accumulate_grad_hooks
        others = {key: hook for key, hook in hooks.items() if key != handle.id}
        for key in others:
            del hooks[key]
        kept.append((hooks, others))
    try:
        yield arrived
    finally:
        for hooks, others in kept:
            hooks.clear()
            hooks.update(others)


def now_or_later(
    ctx: Any,
    compute: Callable[[], Tensor],
    *,
    add: Callable[[Tensor], Any] | None = None,
    put: Callable[[Tensor], Any] | None = None,
) -> Tensor | None:
    """The gradient of the weight, or ``None`` if it has been added to the parameter's sum or was asked to wait.

    Args:
        ctx: of the ``Function`` whose ``weight_input`` says which gradient this is.
        compute: what it takes to make the gradient. It holds all that it needs; the rest of what was saved may be freed.
        add: adds the gradient to a tensor of its shape, in place of ``compute``. One of them is called once, now or later.
        put: writes the gradient over a tensor of its shape, whatever that holds; without it the tensor is zeroed for ``add``.
    """
    waiting: list[Compute] | None = getattr(ctx, _LATER, None)
    is_late = waiting is not None
    param = None if add is None else _parameter(ctx, type(ctx)._forward_cls.weight_input, is_certain=is_late)

    def make() -> Tensor | None:
        if add is None or param is None or sum_of(param) is None:
            return compute()
        _add(param, add, put)
        if is_late or not _hooks_run_without_gradient():
            run_hooks(param)
        return None

    if waiting is None:
        return make()
    waiting.append(make)  # which must not hold the list: a cycle would keep its tensors until garbage is collected
    return None


def added_to_sum(ctx: Any, place: int, add: Callable[[Tensor], Any], *, put: Callable[[Tensor], Any] | None = None) -> bool:
    """Add a gradient that never waits to the parameter's sum, if it has one that is open.

    Args:
        ctx: of the ``Function``.
        place: of the parameter among the tensors that ``apply`` got.
        add: adds the gradient to a tensor of its shape.
        put: writes it over such a tensor, see ``now_or_later``.
    """
    param = _parameter(ctx, place, is_certain=False)
    if param is None or sum_of(param) is None:
        return False
    _add(param, add, put)
    if not _hooks_run_without_gradient():
        run_hooks(param)
    return True


def _parameter(ctx: Any, place: int, *, is_certain: bool) -> Tensor | None:
    """The parameter at an input of a Function, if it has an open sum and the running pass adds to it.

    Args:
        ctx: of the ``Function``.
        place: among the tensors that ``apply`` got.
        is_certain: a later part of the backward adds to it, whatever the running pass does.
    """
    node = ctx.next_functions[place][0]
    param: Tensor | None = getattr(node, "variable", None)
    if param is None or sum_of(param) is None:
        return None
    return param if is_certain or is_accumulated(node) else None


def is_accumulated(node: Any) -> bool:
    """Whether the running pass adds to the leaf of this ``AccumulateGrad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad of this very leaf
        return False


def waits(ctx: Any) -> bool:
    """Whether ``now_or_later`` will leave the gradient for later, so that what only that one needs may be left out."""
    return getattr(ctx, _LATER, None) is not None


def weight_input_of(node: Any) -> int | None:
    """Which input of a node of the autograd graph takes a weight whose gradient can wait; ``None`` if there is none."""
    function = getattr(type(node), "_forward_cls", None)
    place: int | None = getattr(function, "weight_input", None)
    return place


def ask_to_wait(node: Any) -> list[Compute]:
    """Make a node's next backward leave out the gradient of its weight. What makes or adds it comes to be in the list."""
    waiting: list[Compute] = []
    setattr(node, _LATER, waiting)
    return waiting
