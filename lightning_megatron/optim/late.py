"""Parameters that come to an optimizer after its others have been cut into shards, as ``add_param_group`` gives them.

Layers that were frozen at first are trained later by ``optimizer.add_param_group({"params": layer.parameters()})``, in a hook
that all ranks run alike. On the optimizer that method then lays the parameters out as well: from the next backward on their
gradients are reduced, and the optimizer holds this rank's shards of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Extend = Callable[[Sequence[tuple[str, nn.Parameter]], dict[str, Any]], None]


class LateGroups:
    """Stands in for the ``add_param_group`` of one optimizer.

    Args:
        optimizer: its groups hold shards.
        named: all parameters of the module.
        trained: those that it trains now.
        extend: lays parameters out and puts their shards into the group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, nn.Parameter]],
        trained: Iterable[tuple[str, nn.Parameter]],
        extend: Extend,
    ) -> None:
        self._optimizer, self._extend = optimizer, extend
        self._names: dict[nn.Parameter, str] = {}
        for name, param in named:
            self._names.setdefault(param, name)
        self._held = {param for _, param in trained}
        optimizer.__dict__["add_param_group"] = self.add

    def add(self, group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; parameters that require no gradient leave the group.

        Every rank that holds the parameters calls it at the same point between two backwards.

        Raises:
            ValueError: a parameter is not one of the module's, or is trained already.
        """
        given: Any = group["params"]
        listed: list[Any] = [given] if isinstance(given, Tensor) else list(given)
        params: list[nn.Parameter] = [pair[1] if isinstance(pair, tuple) else pair for pair in listed]
        for param in params:
            if param not in self._names:
                raise ValueError(
                    f"add_param_group was given a parameter of shape {tuple(param.shape)} that is not one of the module's "
                    f"{len(self._names)}; give it the module's own, made in configure_model or before."
                )
            if param in self._held:
                raise ValueError(f"parameter {self._names[param]!r} is in a param group of this optimizer already.")
        type(self._optimizer).add_param_group(self._optimizer, group | {"params": params})
        wanted = {param for param in params if param.requires_grad}
        self._held |= wanted
        trainable = [(name, param) for param, name in self._names.items() if param in wanted]
        self._extend(trainable, self._optimizer.param_groups[-1])
