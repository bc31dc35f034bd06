"""Blocks whose last product adds its result to the residual stream.

Note [Addition in the product]
cuBLASLt computes ``D = A B + C``. A row-parallel linear that is given the residual as C returns the sum, so that nobody writes
the block's own result and reads it again, be it in a pass of its own or in the norm that follows; in 16 bits the sum is then
rounded once instead of twice. In the backward the gradient of the residual is that of the sum, the same tensor, and the norm
from which the residual came adds its own in one pass, as before.
That is for products that can (``Products.adds_to``), for modules of exactly our types and on one tensor-parallel rank. Whoever
looks at what a block returns, by a hook, a subclass, an adapter or a replaced ``forward``, sees the block's own result as
before, and the sum is made behind it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lightning_megatron.layers.dropout import Dropout


def into_residual(block: nn.Module, residual: Tensor, *args: Any, dropout: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Call a block, ``[.., H] -> [.., H]``; the residual stream behind it, and what is still to be added to that.

    See Note [Addition in the product].

    Args:
        block: called with ``args``, and with ``residual`` if it can take that.
        residual: the residual stream, ``[.., H]``.
        args: what the block is called with.
        dropout: of what the block returns.
    """
    if _does_nothing(dropout) and can_take(block, residual):
        return block(*args, residual=residual), None
    return residual, dropout(block(*args))


def can_take(module: nn.Module, residual: Tensor) -> bool:
    """Whether a module adds a ``residual`` to what it returns without a pass over memory, and nobody looks at that.

    A class says so by a method ``takes_residual`` of its own; one that it inherits does not count.
    """
    takes = vars(type(module)).get("takes_residual")
    return takes is not None and is_bare(module) and bool(takes(module, residual))


def onto(residual: Tensor | None) -> dict[str, Tensor]:
    """The argument for a module that may not know it: nothing where there is nothing to add."""
    return {} if residual is None else {"residual": residual}


def _does_nothing(dropout: nn.Module) -> bool:
    idle = type(dropout) is Dropout and (dropout.p == 0.0 or not dropout.training)
    return idle and is_bare(dropout) and not dropout._forward_pre_hooks


def is_bare(module: nn.Module) -> bool:
    """Whether nothing sees the module's result or its named arguments."""
    hooks = (module._forward_hooks, module._forward_pre_hooks_with_kwargs, module._backward_hooks, module._backward_pre_hooks)
    of_all = _has_any_global_hook()  # type: ignore[no-untyped-call]
    return not any(hooks) and not of_all and "forward" not in vars(module)


def announce(module: nn.Module, taker: nn.Module) -> None:
    """Tell a module whom its next result goes to, alone: one that is ``announced`` may pass that on in another form."""
    announced = getattr(module, "announced", None)
    if announced is not None:
        announced(taker)
