"""Cut a batch into micro-batches, and put what the micro-batches gave back together. Pure; nothing here knows about ranks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class MicroBatches(list[Any]):
    """The micro-batches of one step, a list.

    A batch that is a ``MicroBatches`` already is used as it is, so a collate function or ``on_after_batch_transfer`` can
    return one where the rule of ``split_batch`` does not fit.

    Args:
        parts: the micro-batches, in order.
        sizes: samples in each; found by ``batch_size_of`` when not given.

    Raises:
        ValueError: not one size for each micro-batch.
    """

    def __init__(self, parts: Iterable[Any], sizes: list[int] | None = None) -> None:
        super().__init__(parts)
        # Without sizes, because moving a batch to the device makes sequences anew as `type(batch)(parts)`.
        self.sizes = [batch_size_of(part) for part in self] if sizes is None else list(sizes)
        if len(self) != len(self.sizes):
            raise ValueError(f"{len(self)} micro-batches came with {len(self.sizes)} sizes; give one size for each.")


def batch_size_of(batch: Any) -> int:
    """Samples in a batch: dim 0 of its first tensor that has dims, whatever dicts, lists or dataclasses it sits in.

    Raises:
        ValueError: no such tensor.
    """
    if isinstance(batch, MicroBatches):
        return sum(batch.sizes)
    borders = batch.get("cu_seqlens") if isinstance(batch, Mapping) else None  # of a single row it has no batch dim
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf is not borders:
            return int(leaf.shape[0])
    kinds = sorted({type(leaf).__name__ for leaf in leaves(batch)}) or ["nothing"]
    raise ValueError(
        f"the batch size cannot be found: a batch of type {type(batch).__name__} holds {', '.join(kinds)} and no tensor with "
        f"a batch dim. Give tensors [B, ...] in a dict, list, tuple or dataclass, or cut the batch yourself and return a "
        f"lightning_megatron.micro_batch.MicroBatches from the collate function or on_after_batch_transfer."
    )


def split_batch(batch: Any, *, micro_batch_size: int | None = None, num_microbatches: int | None = None) -> MicroBatches:
    """Cut a batch of B samples along dim 0: ``[B, ...] -> M times [size_m, ...]``, sizes adding up to B. Views, no copies.

    Tensors and arrays whose dim 0 is B are cut, and so are lists and tuples of B things that are not tensors (strings,
    one dict for each sample). Everything else is shared by all micro-batches, and so is a nested list of B parts whose
    tensors are themselves batched.

    Args:
        batch: tensors in any nest of dicts, lists, tuples and dataclasses.
        micro_batch_size: samples in each micro-batch; the last may have fewer.
        num_microbatches: M, with sizes that differ by at most one; M = B when B is smaller. With neither, M = 1.

    Raises:
        ValueError: both sizes given, one below 1, an empty batch, or a batch without a tensor.
    """
    if isinstance(batch, MicroBatches):
        return batch
    num_samples = batch_size_of(batch)
    sizes = _sizes(num_samples, micro_batch_size, num_microbatches)
    if len(sizes) == 1:
        return MicroBatches([batch], sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    ranges = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return MicroBatches([rows_of(batch, rows, num_samples) for rows in ranges], sizes)


def _sizes(num_samples: int, micro_batch_size: int | None, num_microbatches: int | None) -> list[int]:
    if micro_batch_size is not None and num_microbatches is not None:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} and num_microbatches={num_microbatches} are both given; each follows from "
            f"the other and the batch of {num_samples} samples: give one."
        )
    for name, number in (("micro_batch_size", micro_batch_size), ("num_microbatches", num_microbatches)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}: give 1 or more.")
    if num_samples < 1:
        raise ValueError("the batch has 0 samples; a step needs at least 1. Drop empty batches in the data loader.")
    if micro_batch_size is not None:
        full, rest = divmod(num_samples, micro_batch_size)
        return [micro_batch_size] * full + [rest] * (rest > 0)
    number = min(num_microbatches or 1, num_samples)
    return [num_samples // number + (i < num_samples % number) for i in range(number)]


def rows_of(batch: Any, rows: slice, num_samples: int) -> Any:
    """Some of the samples of a batch that holds ``num_samples``, by the rule of ``split_batch``. Views, no copies."""
    return _part(batch, rows, num_samples, is_root=True)


def _part(node: Any, rows: slice, num_samples: int, *, is_root: bool = False) -> Any:
    """The given rows of one node of a batch."""
    shape = getattr(node, "shape", None)  # tensors, and arrays of other libraries
    if isinstance(shape, tuple) and shape[:1] == (num_samples,):
        return node[rows]
    if not is_root and _is_list_of_samples(node, num_samples):
        return node[rows]
    opened = open_container(node)
    if opened is None:
        return node
    return opened.rebuild([_part(child, rows, num_samples) for child in opened.children])


def _is_list_of_samples(node: Any, num_samples: int) -> bool:
    # A list of B dicts may be one dict for each sample (detection targets) or B inputs of a whole batch each: it is the
    # latter when all of its tensors are batched. A root is never a list of samples: default collation makes [x, y].
    if type(node) not in (list, tuple) or len(node) != num_samples or any(isinstance(child, Tensor) for child in node):
        return False
    tensors = [leaf for leaf in leaves(node) if isinstance(leaf, Tensor)]
    return not tensors or any(leaf.shape[:1] != (num_samples,) for leaf in tensors)


def merge_outputs(outputs: list[Any], sizes: list[int]) -> Any:
    """Put together what a step returned for each of its micro-batches; the inverse of ``split_batch``, where there is one.

    - tensors ``[size_m, ...]`` are concatenated: ``[B, ...]``;
    - 0-dim tensors and floats: their mean, weighted by size;
    - lists are joined; dicts, tuples and dataclasses of one structure are merged entry by entry;
    - ``None`` everywhere stays ``None``; what is left (strings, tensors of unlike shapes) becomes a list with one entry
      for each micro-batch. With one micro-batch its output is returned as it is.

    Args:
        outputs: one for each micro-batch, in order.
        sizes: samples in each micro-batch.
    """
    if len(outputs) != len(sizes):
        raise ValueError(f"{len(outputs)} outputs came with {len(sizes)} micro-batch sizes; give one size for each output.")
    if not outputs or all(output is None for output in outputs):
        return None
    if len(outputs) == 1:
        return outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        return _merge_tensors(outputs, sizes)
    if all(type(output) is float for output in outputs):
        return sum(output * size for output, size in zip(outputs, sizes, strict=True)) / sum(sizes)
    if all(type(output) is list for output in outputs):
        return [entry for output in outputs for entry in output]
    opened = [node for node in map(open_container, outputs) if node is not None]
    if len(opened) < len(outputs) or any(node.structure != opened[0].structure for node in opened):
        return list(outputs)
    columns = zip(*(node.children for node in opened), strict=True)
    return opened[0].rebuild([merge_outputs(list(column), sizes) for column in columns])


def _merge_tensors(tensors: list[Tensor], sizes: list[int]) -> Any:
    if all(tensor.dim() == 0 for tensor in tensors):
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())
        weighted = [tensor.to(dtype) * (size / sum(sizes)) for tensor, size in zip(tensors, sizes, strict=True)]
        return torch.stack(weighted).sum()
    batched = all(tensor.shape[:1] == (size,) for tensor, size in zip(tensors, sizes, strict=True))
    if batched and len({tensor.shape[1:] for tensor in tensors}) == 1:
        return torch.cat(tensors)
    return list(tensors)


@dataclass(frozen=True)
class Opened:
    """One level of a container: its children, what two containers must share to be merged, and how to make it again."""

    children: list[Any]
    structure: Any
    rebuild: Callable[[list[Any]], Any]


def open_container(node: Any) -> Opened | None:
    """One level of a container that ``leaves`` looks into; ``None`` for a leaf."""
    children, spec = tree_flatten(node, is_leaf=lambda other: other is not node)
    if not (len(children) == 1 and children[0] is node):
        return Opened(children, spec, lambda new: tree_unflatten(new, spec))
    # Containers that pytree does not know: UserDicts such as Hugging Face's BatchEncoding, and plain dataclasses.
    if isinstance(node, Mapping):
        keys = list(node)
        return Opened([node[key] for key in keys], (type(node), keys), lambda new: _with_items(node, keys, new))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        children = [getattr(node, name) for name in names]
        return Opened(children, (type(node), names), lambda new: _with_fields(node, names, new))
    return None


def _with_items(mapping: Any, keys: list[Any], values: list[Any]) -> Any:
    clone = copy.copy(mapping)
    for key, value in zip(keys, values, strict=True):
        clone[key] = value
    return clone


def _with_fields(instance: Any, names: list[str], values: list[Any]) -> Any:
    clone = copy.copy(instance)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(clone, name, value)  # a frozen dataclass refuses plain assignment
    return clone


def leaves(node: Any) -> Iterator[Any]:
    """What a batch holds, whatever dicts, lists or dataclasses it sits in, in order."""
    opened = open_container(node)
    if opened is None:
        yield node
        return
    for child in opened.children:
        yield from leaves(child)
