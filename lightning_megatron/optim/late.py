"""Parameters that come to an optimizer after its others have been cut into shards, as ``add_param_group`` gives them.

Layers that were frozen at first are trained later by ``optimizer.add_param_group({"params": layer.parameters()})``, in a hook
that all ranks run alike. On the optimizer that method then lays the parameters out as well: from the next backward on their
gradients are reduced, and the optimizer holds this rank's shards of them.

Parameters that were frozen when their group came are out of it, as torch would not train them either. Once they require a
gradient (``layer.requires_grad_(True)``) they come back into it, in the first step that they have a gradient for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Extend = Callable[[Sequence[tuple[str, nn.Parameter]], Sequence[dict[str, Any]], Mapping[nn.Parameter, Tensor | None]], None]
_MEMBERS = ("params", "param_names")  # entries of a param group that list its parameters


class LateGroups:
    """Stands in for the ``add_param_group`` of one optimizer.

    Args:
        optimizer: its groups hold parameters still, which are shards later.
        named: all parameters of the module.
        trained: those that it trains now.
        extend: lays parameters out, puts their shards into the groups, in place of all that is in them, and takes over
            gradients that they have got.
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
        self._frozen: dict[nn.Parameter, tuple[int, str | None]] = {}  # the number of its group, its name there
        for index in range(len(optimizer.param_groups)):
            self._note_frozen(index)
        optimizer.__dict__["add_param_group"] = self.add

    def add(self, group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; parameters that require no gradient leave the group until they do.

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
        for param in params:
            self._frozen.pop(param, None)
        self._note_frozen(len(self._optimizer.param_groups) - 1)
        wanted = {param for param in params if param.requires_grad}
        self._extend(self._named(wanted), self._optimizer.param_groups[-1:], {})

    def thaw(self) -> None:
        """Train what was frozen when its group came and requires a gradient by now.

        Every rank that holds the parameters calls it at the same point.
        """
        thawed = {param: place for param, place in self._frozen.items() if param.requires_grad}
        if not thawed:
            return
        numbers = sorted({number for number, _ in thawed.values()})
        groups = [self._optimizer.param_groups[number] for number in numbers]
        others = [{key: group[key] for key in _MEMBERS if key in group} for group in groups]
        for number, group in zip(numbers, groups, strict=True):
            group["params"] = [param for param, (of, _) in thawed.items() if of == number]
            if "param_names" in group:
                group["param_names"] = [name for of, name in thawed.values() if of == number]
        self._frozen = {param: place for param, place in self._frozen.items() if param not in thawed}
        self._extend(self._named(thawed), groups, {param: param.grad for param in thawed})
        for group, before in zip(groups, others, strict=True):
            group.update({key: [*members, *group[key]] for key, members in before.items()})

    def zero_gradients(self) -> None:
        """Drop gradients of parameters that are not laid out."""
        for param in self._frozen:
            param.grad = None

    def close(self) -> None:
        """Train nothing more."""
        self._frozen = {}

    def _note_frozen(self, number: int) -> None:
        group = self._optimizer.param_groups[number]
        names = group.get("param_names", [None] * len(group["params"]))
        pairs = zip(group["params"], names, strict=True)
        self._frozen.update({param: (number, name) for param, name in pairs if not param.requires_grad})

    def _named(self, params: Container[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
        named = [(name, param) for param, name in self._names.items() if param in params]
        self._held.update(param for _, param in named)
        return named
