"""Cut the sequences of a batch over context-parallel ranks, before the user's step sees it, and put outputs together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_megatron.comm import all_gather
from lightning_megatron.context_parallel.layout import SequenceLayout, end_borders
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.micro_batch import MicroBatches, leaves, open_container
from lightning_megatron.pipeline.model import PipelineModel

PACKING = ("cu_seqlens", "max_seqlen", "real_lengths", "cp_blocks")
"""Entries of a batch that describe its documents; they stay as they are."""
_IGNORED_LABEL = -100

ShardBatch = Callable[[Any, "SequenceCut"], Any]


class SequenceCut:
    """Cuts one micro-batch; what ``shard_batch(batch, cut)`` is given. Call it: ``cut(batch)`` is the default rule.

    Args:
        size, rank: ranks that share a sequence, and which of them this is.
        multiple: what the length of a sequence must be a multiple of: ``2 * cp``, times tp under sequence parallelism.
        checks: look at documents on a device too, which waits for it.

    Attributes:
        layout: how the sequences lie, once the cut has been called.
    """

    def __init__(self, size: int, rank: int, *, multiple: int, checks: bool = True) -> None:
        self.size, self.rank, self.multiple, self._checks = size, rank, multiple, checks
        self.layout: SequenceLayout | None = None
        self._block: slice | None = None

    def __call__(self, batch: Any, *, length: int | None = None, padding: Mapping[str, float] | None = None) -> Any:
        """This rank's part of a batch: every tensor ``[B, S, ...]`` becomes ``[B, S/cp, ...]``; the rest stays.

        With ``cu_seqlens`` in the batch (``[B, n + 1]``, or ``[n + 1]`` of a single row) each document is cut on its own;
        ``real_lengths``, of the same shape, then tell how much of the document at each border is no padding.
        A length that does not divide is padded at the end: labels and targets by -100, tokens, positions and masks by 0.
        With ``cp_blocks`` in the batch, pairs ``(ranks, tokens)``, a row is laid end to end of parts of so many tokens, each of
        which so many neighbouring ranks share; no document reaches from one into another.

        Args:
            batch: tensors in any nest of dicts, lists, tuples and dataclasses.
            length: S; by default dim 1 of ``tokens`` or ``input_ids``, or of the first tensor that has one.
            padding: what to pad other tensors by, by their names in the batch.

        Raises:
            ValueError: no tensor has a sequence dim; a length needs padding, and it is not known by what; documents do not
                divide, or are none; blocks are not those of the row or of the ranks.
        """
        if isinstance(batch, Mapping) and batch.get("cp_blocks") is not None and self.size > 1:
            return self._in_block(batch, padding)
        length = sequence_length(batch) if length is None else length
        padded = length + -length % self.multiple if self.size > 1 else length
        borders, longest, real = self._documents(batch, padded)
        self.layout = SequenceLayout(padded, length, self.size, self.rank, borders, longest, real_lengths=real)
        if self.size == 1:
            return batch
        return self._cut(batch, length, dict(padding or {}), name=None)

    def tensor(self, tensor: Tensor, *, padding: float = 0) -> Tensor:
        """This rank's part of one tensor: ``[B, S, ...] -> [B, S/cp, ...]``. After the cut of the batch.

        Raises:
            RuntimeError: the batch has not been cut.
        """
        if self.layout is None:
            raise RuntimeError("cut.tensor(...) was called before cut(batch), which finds out how the sequences lie.")
        if self._block is not None:
            tensor = tensor[:, self._block]
        missing = self.layout.length - tensor.shape[1]
        if missing:
            tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing), value=padding)
        index = self.layout.own_index(tensor.device)
        if index.shape[0] == 1:
            return tensor.index_select(1, index[0])
        return tensor[torch.arange(len(tensor), device=tensor.device)[:, None], index]

    def _in_block(self, batch: Mapping[str, Any], padding: Mapping[str, float] | None) -> Any:
        """This rank's part of its block's part of the rows: ``[B, S, ...] -> [B, tokens / ranks, ...]``."""
        blocks = tuple((int(ranks), int(tokens)) for ranks, tokens in batch["cp_blocks"])
        length = sequence_length(batch)
        first, place, (ranks, tokens) = block_of(blocks, self.rank, num_ranks=self.size, length=length)
        self._block = slice(place, place + tokens)
        part = _narrowed(batch, length, self._block)
        part["cp_blocks"] = None
        if "cu_seqlens" in batch:
            borders = batch["cu_seqlens"]
            if borders.device.type == "cpu":
                _check_blocks(borders, blocks)
            part |= {"cu_seqlens": (borders - place).clamp(0, tokens), "real_lengths": batch.get("real_lengths")}
        inner = SequenceCut(ranks, self.rank - first, multiple=2 * ranks, checks=self._checks)
        part = inner(part, length=tokens, padding=padding)
        assert inner.layout is not None
        self.layout = replace(inner.layout, blocks=blocks)
        return part

    def _documents(self, batch: Any, padded: int) -> tuple[Tensor | None, int | None, Tensor | None]:
        """Borders, the longest and what is real of each document, as a layout takes them."""
        borders = batch.get("cu_seqlens") if isinstance(batch, Mapping) else None
        if borders is None:
            return None, None, None
        num_rows = next(leaf.shape[0] for leaf in _named(batch) if leaf is not borders and leaf.dim() > 1)
        borders = end_borders(borders, num_rows, padded)
        longest, real = batch.get("max_seqlen"), batch.get("real_lengths")
        if longest is not None:
            longest = max(int(longest), padded - sequence_length(batch))  # what is added is a document of padding
        if borders.device.type == "cpu" or self._checks:
            _check_borders(borders, longest)
            self._check_chunks(borders)
        return borders, longest, None if real is None else _real_lengths(real, borders)

    def _check_chunks(self, borders: Tensor) -> None:
        sizes = borders.diff(dim=1)
        if self.size > 1 and len(wrong := sizes[sizes % (2 * self.size) != 0]):
            raise ValueError(
                f"a packed document has {int(wrong[0])} tokens, which do not divide by 2 * cp({self.size}) = {2 * self.size}: "
                f"each document is cut into that many chunks. Pad each to a multiple of {2 * self.size}: "
                f"lightning_megatron.data.PackingCollator(..., multiple_of={2 * self.size}) does."
            )

    def _cut(self, node: Any, length: int, padding: dict[str, float], *, name: str | None) -> Any:
        if isinstance(node, Tensor):
            if name in PACKING or node.dim() < 2 or node.shape[1] != length:
                return node
            return self.tensor(node, padding=self._padding(name, length, padding))
        opened = open_container(node)
        if opened is None:
            return node
        names = _names(node, len(opened.children))
        return opened.rebuild([self._cut(c, length, padding, name=n) for n, c in zip(names, opened.children, strict=True)])

    def _padding(self, name: str | None, length: int, padding: dict[str, float]) -> float:
        assert self.layout is not None
        if self.layout.length == length:
            return 0
        if name in padding:
            return padding[name]
        known = (name or "").lower()
        if "label" in known or "target" in known:
            return _IGNORED_LABEL
        if any(part in known for part in ("token", "input_ids", "mask", "position")):
            return 0
        what = "a tensor without a name" if name is None else repr(name)
        raise ValueError(
            f"sequences of {length} tokens do not divide by {self.multiple} (2 * cp({self.size}), times tp under sequence "
            f"parallelism), and by what {what} is to be padded to {self.layout.length} is not known: pad in the collate "
            f"function, or return cut(batch, padding={{name: value}}) from shard_batch(batch, cut)."
        )


class SequenceCutter:
    """Cuts the micro-batches of a step and tells the models how their sequences lie.

    Args:
        module: the LightningModule; its method ``shard_batch(batch, cut)``, if it has one, cuts.
        mesh: the job's axes.
        shard_batch: a function that does so instead; by default ``cut(batch)``.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, shard_batch: ShardBatch | None = None) -> None:
        own = shard_batch or getattr(module, "shard_batch", None)
        if own is None and mesh.cp.size > 1:
            _check_knows_layouts(module, mesh)
        self._shard: ShardBatch = own or (lambda batch, cut: cut(batch))
        self._module, self._mesh = module, mesh
        self._multiple = 2 * mesh.cp.size * (mesh.tp.size if mesh.sequence_parallel else 1)
        self._has_checked = False

    def __call__(self, batch: MicroBatches) -> tuple[MicroBatches, list[SequenceLayout | None]]:
        """Cut each micro-batch; with how its sequences lie, ``None`` where they are whole and hold one document each."""
        layouts: list[SequenceLayout | None] = []
        parts = []
        for part in batch:
            packed = isinstance(part, Mapping) and "cu_seqlens" in part
            cut = SequenceCut(self._mesh.cp.size, self._mesh.cp.rank, multiple=self._multiple, checks=not self._has_checked)
            if self._mesh.cp.size > 1:
                part = self._shard(part, cut)
                if cut.layout is None:
                    raise RuntimeError("shard_batch(batch, cut) did not call cut(...), which says how the sequences lie.")
            elif packed:
                part = cut(part)
            parts.append(part)
            layouts.append(cut.layout)
        self._has_checked = True
        return MicroBatches(parts, batch.sizes), layouts

    @contextmanager
    def telling(self, layout: SequenceLayout | None) -> Iterator[None]:
        """Models that are called inside the block get ``sequence_layout=layout`` if they take it."""
        models = [] if layout is None else [child for child in self._module.modules() if isinstance(child, PipelineModel)]
        for model in models:
            model._step_named = {"sequence_layout": layout}
        try:
            yield
        finally:
            for model in models:
                del model._step_named


def _check_knows_layouts(module: nn.Module, mesh: Mesh) -> None:
    """Refuse models whose attention would see a rank's own part of a sequence and take it for the whole."""
    for model in (child for child in module.modules() if isinstance(child, PipelineModel)):
        methods = [*(getattr(model, name, None) for name in ("context", "first", "last")), *model.layers]
        functions = [method.forward if isinstance(method, nn.Module) else method for method in methods if callable(method)]
        if any("sequence_layout" in signature(function).parameters for function in functions):
            return
    raise ValueError(
        f"cp={mesh.cp.size} cuts sequences, but {type(module).__name__} holds no model that asks how they lie: a PipelineModel "
        f"with an argument sequence_layout, such as GPT. Attention of its own would see one rank's tokens alone. Set cp=1; or, "
        f"if no layer looks at other tokens, say so with MegatronStrategy(shard_batch=lambda batch, cut: cut(batch))."
    )


def joined(output: Any, layout: SequenceLayout | None, axis: Axis) -> Any:
    """Per-token outputs of all ranks in order, without padding: ``[B, S/cp, ...] -> [B, S, ...]``; the rest stays."""
    if layout is None or (layout.size == 1 and not layout.blocks):
        return output

    def whole(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != layout.local_length:
            return tensor
        index = layout.own_index(tensor.device).expand(len(tensor), -1)
        gathered, places = _of_all(tensor, layout, axis), _of_all(index + _place(layout, axis), layout, axis)
        rows = torch.arange(len(tensor), device=tensor.device)[:, None]
        ordered = torch.empty_like(gathered)
        ordered[rows, places] = gathered
        return ordered[:, : layout.num_real] if not layout.blocks else ordered

    return tree_map_only(Tensor, whole, output)


def _place(layout: SequenceLayout, axis: Axis) -> int:
    """Where in a row this rank's block begins."""
    if not layout.blocks:
        return 0
    length = sum(tokens for _, tokens in layout.blocks)
    return block_of(layout.blocks, axis.rank, num_ranks=axis.size, length=length)[1]


def _of_all(tensor: Tensor, layout: SequenceLayout, axis: Axis) -> Tensor:
    """Tokens of all ranks one after the other, however many each has: ``[B, own, ...] -> [B, S, ...]``."""
    held = [tokens // ranks for ranks, tokens in layout.blocks for _ in range(ranks)] or [tensor.shape[1]] * axis.size
    longest = max(held)
    padded = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, longest - tensor.shape[1]))
    parts = all_gather(padded, axis, dim=1).split(longest, dim=1)  # type: ignore[no-untyped-call]
    return torch.cat([part[:, :number] for part, number in zip(parts, held, strict=True)], dim=1)


def block_of(
    blocks: tuple[tuple[int, int], ...], rank: int, *, num_ranks: int, length: int
) -> tuple[int, int, tuple[int, int]]:
    """The block of a rank among ``cp_blocks``: its first rank, its first token, and itself.

    Raises:
        ValueError: ranks or tokens do not add up; a block does not divide the ranks, begins in the middle of such a block,
            or cannot be cut into ``2 * ranks`` chunks.
    """
    first, place, found = 0, 0, None
    for ranks, tokens in blocks:
        if ranks < 1 or num_ranks % ranks or first % ranks or tokens < 1 or tokens % (2 * ranks if ranks > 1 else 1):
            raise ValueError(
                f"cp_blocks={list(blocks)}: block ({ranks}, {tokens}) at rank {first} of cp={num_ranks}. Its ranks must divide "
                f"cp and the number of the rank it begins at, and its tokens be a multiple of 2 * ranks."
            )
        if first <= rank < first + ranks:
            found = (first, place, (ranks, tokens))
        first, place = first + ranks, place + tokens
    if first != num_ranks or place != length or found is None:
        raise ValueError(
            f"cp_blocks={list(blocks)} are {first} ranks and {place} tokens, but the rows have {length} tokens "
            f"and cp={num_ranks}."
        )
    return found


def _real_lengths(given: Tensor, borders: Tensor) -> Tensor:
    """As a layout takes them: int64 ``[B, n]``, of documents that lie on other ranks nothing."""
    sizes = borders.diff(dim=1)
    if given.numel() != sizes.numel():
        raise ValueError(
            f"real_lengths have shape {tuple(given.shape)}; give the tokens of the document at each border, as cu_seqlens are: "
            f"{tuple(sizes.shape)}."
        )
    return torch.minimum(given.long().view_as(sizes), sizes)


def _check_borders(borders: Tensor, longest: int | None) -> None:
    """Refuse borders ``[B, n + 1]``, the last one S, that are not those of documents of up to ``longest`` tokens."""
    rows = borders.cpu()
    sizes = rows.diff(dim=1)
    if len(wrong := rows[(rows[:, 0] != 0) | (sizes < 0).any(dim=1)]):
        raise ValueError(
            f"cu_seqlens of a row are {wrong[0, :-1].tolist()}, which do not rise from 0 to S={int(rows[0, -1])}: give the "
            f"borders of the documents in each row, repeating S where a row has fewer."
        )
    if longest is not None and int(sizes.max()) > longest:
        raise ValueError(
            f"max_seqlen={longest}, but a document has {int(sizes.max())} tokens (what follows the last border is one too): "
            f"kernels would leave some of it out. Give the length of the longest, or none."
        )


def _check_blocks(borders: Tensor, blocks: tuple[tuple[int, int], ...]) -> None:
    ends = torch.tensor([tokens for _, tokens in blocks]).cumsum(0)
    rows = borders.view(-1, borders.shape[-1])
    missing = ends[~(rows[:, :, None] == ends).any(dim=1).all(dim=0)]
    if len(missing):
        raise ValueError(
            f"cp_blocks={list(blocks)} end at token {int(missing[0])}, where cu_seqlens have no border: a document would "
            f"lie on ranks that do not attend to each other."
        )


def _narrowed(node: Any, length: int, places: slice) -> Any:
    """Every tensor ``[B, S, ...]`` of a batch at some places, ``[B, n, ...]``; the rest stays."""
    if isinstance(node, Tensor):
        return node[:, places] if node.dim() > 1 and node.shape[1] == length else node
    opened = open_container(node)
    return node if opened is None else opened.rebuild([_narrowed(child, length, places) for child in opened.children])


def sequence_length(batch: Any) -> int:
    """S of a batch: dim 1 of ``tokens`` or ``input_ids``, or of the first tensor that has one.

    Raises:
        ValueError: no tensor has one.
    """
    opened = open_container(batch)
    children = () if opened is None else opened.children
    by_name = dict(zip(_names(batch, len(children)), children, strict=True))
    for leaf in (by_name.get("tokens"), by_name.get("input_ids"), *_named(batch)):
        if isinstance(leaf, Tensor) and leaf.dim() > 1:
            return int(leaf.shape[1])
    raise ValueError(
        f"a batch of type {type(batch).__name__} holds no tensor [B, S, ...], so it cannot be cut over context-parallel "
        f"ranks; give one, or cut the batch in shard_batch(batch, cut) with cut(batch, length=S)."
    )


def _named(batch: Any) -> Iterator[Tensor]:
    """Tensors of a batch, those apart that describe its documents."""
    packing = [batch[name] for name in PACKING if name in batch] if isinstance(batch, Mapping) else []
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and not any(leaf is other for other in packing):
            yield leaf


def _names(node: Any, number: int) -> list[str | None]:
    """Names of a container's children: keys and fields; nothing for places in a list."""
    if isinstance(node, Mapping):
        return [str(key) for key in node]
    if dataclasses.is_dataclass(node):
        return [field.name for field in dataclasses.fields(node)]
    fields = getattr(node, "_fields", None)
    return list(fields) if fields is not None else [None] * number
