"""Cut a ``PipelineModel`` down to the stages of one rank, keeping every parameter's global name."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_megatron.pipeline.model import Ownership, PipelineModel, StagePart, ownership
from lightning_megatron.sharding import mark_tied


class OtherStage(nn.Module):
    """Stands where a submodule was that another pipeline stage owns; using it says so."""

    def __init__(self, name: str, owner: str) -> None:
        super().__init__()
        self._name, self._owner = name, owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Always raises: the module is not here."""
        raise RuntimeError(
            f"{self._name} is on the {self._owner} pipeline stage only. Use it in {self._owner}(), or send what it computes "
            f"on as part of the hidden state."
        )


def check_pipeline_model(model: PipelineModel, num_stages: int) -> Ownership:
    """Check that a model is what ``PipelineModel`` asks for.

    Raises:
        TypeError: ``layers``, ``first`` or ``last`` is missing.
        ValueError: fewer layers than stages, or a member that no stage owns.
    """
    name = type(model).__name__
    if not isinstance(model._modules.get("layers"), nn.ModuleList):
        raise TypeError(f"{name}.layers must be an nn.ModuleList: the pipeline is cut between its entries.")
    for part in ("first", "last"):
        if not callable(getattr(model, part, None)):
            raise TypeError(f"{name} must define {part}: see the PipelineModel docstring for what it gets and returns.")
    return ownership(model)


def cut_to_stages(model: PipelineModel, parts: list[StagePart], *, ends_apart: bool) -> dict[str, str]:
    """Drop what other ranks hold, in place. Layers keep their global indices as names.

    Args:
        model: the whole model.
        parts: this rank's stages.
        ends_apart: whether the first and the last stage are on different ranks (parameters of both are then tied copies).

    Returns:
        For parameters that the whole model holds under several names: name -> the first of its names.
    """
    owned = check_pipeline_model(model, parts[0].num_stages)
    aliases = _aliases(model)
    if ends_apart:
        _mark_tied(model, owned)
    is_first, is_last = any(part.is_first for part in parts), any(part.is_last for part in parts)
    kept = {str(index) for part in parts for index in part.layers}
    model.layers._modules = {name: layer for name, layer in model.layers._modules.items() if name in kept}
    for name in (*model._modules, *model._parameters):
        here = name == "layers" or name in owned.shared
        here = here or (is_first and name in owned.first) or (is_last and name in owned.last)
        if here:
            continue
        if name in model._parameters:
            model._parameters[name] = None
        elif model._modules[name] is not None:
            owner = "first" if name in owned.first else "last"
            model._modules[name] = OtherStage(f"{type(model).__name__}.{name}", owner)
    return aliases


def _aliases(model: PipelineModel) -> dict[str, str]:
    first_name: dict[int, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        known = first_name.setdefault(id(param), name)
        if known != name:
            aliases[name] = known
    return aliases


def _mark_tied(model: PipelineModel, owned: Ownership) -> None:
    """Mark parameters that both ends use, through one member or through two that share the parameter."""

    def parameters(names: frozenset[str]) -> dict[int, nn.Parameter]:
        found = {}
        for name in names:
            member = getattr(model, name)
            members = [member] if isinstance(member, nn.Parameter) else list(member.parameters()) if member is not None else []
            found.update({id(param): param for param in members})
        return found

    first, last = parameters(owned.first), parameters(owned.last)
    for key in first.keys() & last.keys():
        mark_tied(first[key])
