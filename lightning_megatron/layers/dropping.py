"""Outputs that are not kept for the backward: whoever saves one keeps what it takes to make it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron.pipeline.backward_split import Held

Keep = Callable[[Tensor], Held]

_KEEP: ContextVar[Keep | None] = ContextVar("lightning_megatron_keep", default=None)


@contextmanager
def saved_by(keep: Keep) -> Iterator[None]:
    """Inside the ``with`` block ``keep`` holds what autograd saves, also inside of layers with dropped outputs."""
    token = _KEEP.set(keep)
    try:
        with saved_tensors_hooks(keep, _get):
            yield
    finally:
        _KEEP.reset(token)


def _get(held: Held) -> Tensor:
    return held.get()


class DroppedOutputs:
    """The outputs of one layer that are dropped."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] | None = None  # by storage; nothing outside of the layer's forward
        self._keep: Keep = Kept

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Around the layer's forward: what is saved in it is saved without the dropped outputs."""
        if not torch.is_grad_enabled():
            yield
            return
        outer, self._sources = self._sources, {}
        self._keep = _KEEP.get() or Kept
        try:
            with saved_tensors_hooks(self._pack, _get):
                yield
        finally:
            self._sources = outer

    def drop(self, output: Tensor, again: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        """From now on in this forward, save ``again(*inputs)`` instead of the output. Without random numbers.

        Args:
            output: made by nothing but ``again(*inputs)``.
            again: makes it.
            inputs: tensors, and what else it takes.
        """
        if self._sources is not None and output.requires_grad and _is_plain(output):
            kept = tuple(self._pack(one.detach()) if isinstance(one, Tensor) else one for one in inputs)
            self._sources[output.untyped_storage()._cdata] = _Source(output, again, kept)

    def _pack(self, tensor: Tensor) -> Held:
        source = None
        if self._sources and _is_plain(tensor):
            source = self._sources.get(tensor.untyped_storage()._cdata)
        if source is None or tensor._version != source.version:
            return self._keep(tensor)
        return _Again(source, tensor)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor


class Kept(Held):
    """A tensor as it is. torch does not look at versions where there are hooks."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._version = tensor._version

    def get(self) -> Tensor:
        """The tensor, if nobody has changed it."""
        tensor = super().get()
        if tensor._version != self._version:
            raise RuntimeError(
                f"a tensor {list(tensor.shape)} that the backward of a recomputed layer needs has been changed in place since: "
                f"it is at version {tensor._version} instead of {self._version}."
            )
        return tensor


class _Again(Held):
    """A view of a dropped output."""

    def __init__(self, source: _Source, view: Tensor) -> None:
        super().__init__(None)
        self._source: _Source | None = source
        self._geometry = view.size(), view.stride(), view.storage_offset()
        source.num_uses += 1

    def get(self) -> Tensor:
        """The view, made again."""
        source = self._source
        assert source is not None, "a saved tensor was let go before its last use"
        base = source.made_for_one()
        if self.is_used_once:
            self._source = None
        return base.as_strided(*self._geometry)

    def let_go(self) -> None:
        """It is not used again."""
        self._source = None


class _Source:
    """How to make one output again.

    Args:
        output: with its storage and version known, it is let go.
        again, inputs: see ``DroppedOutputs.drop``; tensors as they are held.
    """

    def __init__(self, output: Tensor, again: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        self.version = output._version
        # While it is here no other storage has the same address.
        self._storage = StorageWeakRef(output.untyped_storage())  # type: ignore[no-untyped-call]
        self._geometry = output.size(), output.stride(), output.storage_offset(), output.untyped_storage().nbytes()
        self._again, self._autocast, self._inputs = again, _autocast_state(), inputs
        self.num_uses = 0
        self._made: Tensor | None = None

    def made_for_one(self) -> Tensor:
        """The output, made once for all that have saved it."""
        self.num_uses -= 1
        made = self._made if self._made is not None else self._make()
        self._made = made if self.num_uses > 0 else None
        return made

    def _make(self) -> Tensor:
        inputs = [one.get() if isinstance(one, Held) else one for one in self._inputs]
        with torch.no_grad(), ExitStack() as stack:
            for then, now in zip(self._autocast, _autocast_state(), strict=True):
                if then != now:
                    stack.enter_context(torch.autocast(then[0], enabled=then[1], dtype=then[2]))
            made = self._again(*inputs)
        size, stride, offset, num_bytes = self._geometry
        same = (made.size(), made.stride(), made.storage_offset(), made.untyped_storage().nbytes()) == self._geometry
        if not same:  # a view, say, of something larger: lay it out as it was
            laid_out = made.new_empty(num_bytes // made.element_size()).as_strided(size, stride, offset)
            made = laid_out.copy_(made)
        return made


def _autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]
