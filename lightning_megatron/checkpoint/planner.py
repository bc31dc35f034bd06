"""Planners that check what the stock ones let pass: a checkpoint is written and loaded whole, or refused before any I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData

from lightning_megatron.checkpoint.boxes import BoxedTensor, KeptPart

_SHOWN = 8


class StrictSavePlanner(DefaultSavePlanner):
    """Refuses tensors of which the ranks hold different ideas, or which they do not cover together.

    Equal parts on several ranks are written once, by the rank that has least to write.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check the plans of all ranks against each other, then lay them out (runs on the first rank).

        Raises:
            ValueError: the message names each tensor and what is wrong with it.
        """
        # The stock check skips a world of one rank, and in some versions of torch does not say which tensor is meant.
        _raise_all("This state cannot be saved", _conflicts(all_plans))
        return super().create_global_plan(all_plans)


def _conflicts(all_plans: list[SavePlan]) -> list[str]:
    """Tensors whose global shape, dtype or part at one offset differs between ranks, and tensors that lack parts."""
    tensors: dict[str, TensorWriteData] = {}
    chunks: dict[MetadataIndex, tuple[int, ...]] = {}
    problems = []
    for item in (item for plan in all_plans for item in plan.items):
        if (data := item.tensor_data) is None:
            continue
        key, first = item.index.fqn, tensors.setdefault(item.index.fqn, data)
        if (first.size, first.properties.dtype) != (data.size, data.properties.dtype):
            problems.append(f"{key}: {_form(first)} on one rank, {_form(data)} on another")
        size = chunks.setdefault(item.index, tuple(data.chunk.sizes))
        if size != tuple(data.chunk.sizes):
            problems.append(f"{key}: parts of sizes {size} and {tuple(data.chunk.sizes)} at {tuple(data.chunk.offsets)}")
    held: dict[str, int] = {}
    for index, size in chunks.items():
        held[index.fqn] = held.get(index.fqn, 0) + prod(size)
    problems += [
        f"{key}: the ranks hold only {held[key]} of the {prod(data.size)} elements of {tuple(data.size)}"
        for key, data in tensors.items()
        if held[key] != prod(data.size)
    ]
    return problems


def _form(data: TensorWriteData | TensorStorageMetadata) -> str:
    return f"{tuple(data.size)} {data.properties.dtype}".replace("torch.", "")


class StrictLoadPlanner(DefaultLoadPlanner):
    """Loads a flat ``key -> target`` dict where every target must be there, of the same shape and dtype, and complete.

    What does not fit is reported for all ranks in one error, before anything is read. Python values are put into the dict.

    Args:
        complete: prefix of the keys that must all have a target on some rank (``"model."``); ``None`` does not ask for it.
        optional: parts of keys that need no target (state that only some precisions have).
        allow_missing: leave targets as they are that the checkpoint does not have.
        cast: let values be cast to the dtype of the target.
        castable: a part of keys whose values may be cast anyhow (states of optimizers, which each run keeps in its own dtype).
    """

    def __init__(
        self,
        *,
        complete: str | None = None,
        optional: tuple[str, ...] = (),
        allow_missing: bool = False,
        cast: bool = False,
        castable: str | None = None,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._complete, self._optional = complete, optional
        self._allow_missing, self._cast, self._castable = allow_missing, cast, castable

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads; what does not fit travels with the plan to the first rank."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        fitting, problems = {}, []
        for key, target in self.state_dict.items():
            if key not in saved and self._allow_missing:
                continue
            cast = self._cast or (self._castable is not None and self._castable in key)
            if problem := self._problem(target, saved.get(key), cast=cast):
                problems.append(f"{key}: {problem}")
            else:
                fitting[key] = target
        plan = create_default_local_load_plan(fitting, self.metadata)
        covered: Counter[str] = Counter()
        for item in plan.items:
            covered[item.dest_index.fqn] += prod(item.lengths)
        for key, target in fitting.items():
            if isinstance(target, Tensor) and covered[key] != _wanted(target):
                problems.append(f"{key}: the checkpoint has only {covered[key]} of the {_wanted(target)} elements wanted here")
        return replace(plan, planner_data=tuple(problems))

    def kept_part(self, item: ReadItem) -> KeptPart | None:
        """Where an item goes, if its values are kept in another form than they are read in."""
        target = self.state_dict[item.dest_index.fqn]
        part = target.part_at(item.dest_index) if isinstance(target, BoxedTensor) else None
        return part if isinstance(part, KeptPart) else None

    def _problem(self, target: Any, saved: Any, *, cast: bool) -> str | None:
        is_tensor = isinstance(target, Tensor)
        if saved is None:
            shape = f" (wanted with shape {tuple(target.shape)})" if is_tensor else ""
            return f"not in the checkpoint{shape}"
        if not is_tensor:
            return None if not isinstance(saved, TensorStorageMetadata) else "a tensor in the checkpoint, a Python value here"
        if not isinstance(saved, TensorStorageMetadata):
            return "a Python value in the checkpoint, a tensor here"
        if saved.size == target.shape and (cast or saved.properties.dtype == target.dtype):
            return None
        here = f"{tuple(target.shape)} {target.dtype}".replace("torch.", "")
        return f"saved as {_form(saved)}, wanted as {here}"

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse the load if any rank has a problem (runs on the first rank).

        Raises:
            ValueError: the message names each tensor, both shapes and both dtypes.
        """
        problems = [problem for plan in global_plan for problem in plan.planner_data or ()]
        _raise_all("The checkpoint does not fit", problems + self._left_over(global_plan))
        return super().create_global_plan(global_plan)

    def _left_over(self, global_plan: list[LoadPlan]) -> list[str]:
        if self._complete is None:
            return []
        assert self.metadata is not None
        read = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        named = {problem.split(":")[0] for plan in global_plan for problem in plan.planner_data or ()}
        return [
            f"{key}: in the checkpoint with shape {tuple(saved.size)}, but not in the model"
            for key, saved in self.metadata.state_dict_metadata.items()
            if key.startswith(self._complete) and not any(part in key for part in self._optional) and key not in read | named
            if isinstance(saved, TensorStorageMetadata) and saved.size.numel()
        ]


def _wanted(target: Tensor) -> int:
    return target.num_local if isinstance(target, BoxedTensor) else target.numel()


def _raise_all(what: str, problems: list[str]) -> None:
    unique = sorted(set(problems))
    if not unique:
        return
    more = f"\n  and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else ""
    raise ValueError(f"{what}:\n  " + "\n  ".join(unique[:_SHOWN]) + more)
