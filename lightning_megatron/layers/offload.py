"""Saved activations wait for their backward in host memory.

Note [Streams]
What a forward saves is copied to pinned host memory on a stream of its own, and let go on the device when the copy is done;
at most ``_MAX_PENDING`` bytes wait for that, then the host waits too, for else it would run ahead and nothing would be let
go. The backward takes the copies in the opposite order: the first use of one starts the copies of the next few back to the
device, on a second stream, so that they arrive while others are used. A storage is copied once, whatever views are saved.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron.layers.dropping import Kept, saved_by
from lightning_megatron.layers.instead import Instead, layers_of
from lightning_megatron.pipeline.backward_split import Held

MIN_BYTES = 1 << 20
"""Smaller storages stay where they are: a copy costs more than it frees."""
_MAX_PENDING = 1 << 29
_AHEAD = 4  # storages that are on their way back before they are asked for


class Transfer(Protocol):
    """Copies bytes between the device and the host."""

    def to_host(self, data: Tensor) -> Tensor:
        """Start a copy of ``[n]`` bytes."""
        ...

    def to_device(self, data: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start the copy back; what is to be called before it is used."""
        ...


class PassThrough:
    """For models on the host: nothing is copied."""

    def to_host(self, data: Tensor) -> Tensor:
        """The same tensor."""
        return data

    def to_device(self, data: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The same tensor; nothing to wait for."""
        return data, lambda: None


class PinnedTransfer:
    """By pinned memory. See Note [Streams].

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pending: deque[tuple[Any, Tensor, Tensor]] = deque()  # event, from, to
        self._num_pending = 0

    def to_host(self, data: Tensor) -> Tensor:
        """Start a copy; the data stay alive until it is done."""
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(data, non_blocking=True)
            done = self._out.record_event()
        self._pending.append((done, data, host))
        self._num_pending += data.nbytes
        self._let_go()
        return host

    def _let_go(self) -> None:
        while self._pending and (self._num_pending > _MAX_PENDING or self._pending[0][0].query()):
            done, data, _ = self._pending.popleft()
            done.synchronize()
            self._num_pending -= data.nbytes

    def to_device(self, data: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start a copy; what makes the current stream wait for it."""
        self._let_go()
        current = torch.cuda.current_stream(self._device)
        copied = torch.empty(data.shape, dtype=data.dtype, device=self._device)
        self._back.wait_stream(current)  # its memory may just have been let go there
        self._back.wait_stream(self._out)
        with torch.cuda.stream(self._back):
            copied.copy_(data, non_blocking=True)
            arrived = self._back.record_event()
        copied.record_stream(self._back)  # it may be let go unused
        return copied, lambda: torch.cuda.current_stream(self._device).wait_event(arrived)


class ActivationOffload:
    """Moves what layers save to the host and back.

    Args:
        device: where they compute.
        transfer: copies; by default by pinned memory for CUDA; nothing is copied on the host.
        min_bytes: of the storages that are moved.
    """

    def __init__(self, device: torch.device, *, transfer: Transfer | None = None, min_bytes: int | None = None) -> None:
        self._device, self._min_bytes = device, MIN_BYTES if min_bytes is None else min_bytes
        self.transfer = transfer or (PinnedTransfer(device) if device.type == "cuda" else PassThrough())
        self._known: dict[int, tuple[StorageWeakRef, int, _Block]] = {}  # in the running layer
        self._fixed: set[int] = set()
        self._latest: weakref.ref[_Block] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ActivationOffload:
        return self  # a copied model may share the streams

    @contextmanager
    def saving(self, layer: nn.Module) -> Iterator[None]:
        """Around the forward of a layer, whose parameters stay where they are."""
        if not torch.is_grad_enabled():
            yield
            return
        self._fixed = {param.untyped_storage()._cdata for param in layer.parameters()}
        try:
            with saved_by(self.keep):
                yield
        finally:
            self._known.clear()

    def keep(self, tensor: Tensor) -> Held:
        """Hold a tensor that is saved."""
        if not self._is_moved(tensor):
            return Kept(tensor)
        storage, version = tensor.untyped_storage(), tensor._version
        known = self._known.get(storage._cdata)
        if known is None or known[1] != version:
            data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            block = _Block(self.transfer, self.transfer.to_host(data), self._latest)
            self._latest = weakref.ref(block)
            # With a weak reference to it around, no other storage has the same address.
            known = self._known[storage._cdata] = (StorageWeakRef(storage), version, block)  # type: ignore[no-untyped-call]
        return _Moved(known[2], tensor)

    def _is_moved(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device.type != self._device.type:
            return False
        if not tensor.is_floating_point() and tensor.dtype not in (torch.uint8, torch.bool):  # 8-bit numbers, masks
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._min_bytes and storage._cdata not in self._fixed


class _Block:
    """One storage: its bytes, on the host until they are brought back. It lives as long as something saved is a view of it.

    Args:
        transfer: copies.
        host: the bytes.
        before: what was saved before, which a backward needs next.
    """

    def __init__(self, transfer: Transfer, host: Tensor, before: weakref.ref[_Block] | None) -> None:
        self._transfer, self._before = transfer, before
        self._host: Tensor | None = host
        self._back: tuple[Tensor, Callable[[], None]] | None = None

    def get(self) -> Tensor:
        """The bytes, on the device; those that are needed next are on their way."""
        data, wait = self._start()
        wait()
        block: _Block | None = self
        for _ in range(_AHEAD):
            block = None if block is None or block._before is None else block._before()
            if block is not None:
                block._start()
        return data

    def _start(self) -> tuple[Tensor, Callable[[], None]]:
        if self._back is None:
            assert self._host is not None
            self._back, self._host = self._transfer.to_device(self._host), None
        return self._back


class _Moved(Held):
    """A view of a storage that has been moved. torch does not look at versions where there are hooks."""

    def __init__(self, block: _Block, view: Tensor) -> None:
        super().__init__(None)
        self._block: _Block | None = block
        self._dtype, self._geometry = view.dtype, (view.storage_offset(), view.size(), view.stride())
        self._version, self._counter = view._version, view.detach()
        self._counter.data = view.new_empty(0)  # the view's count of changes, without its memory

    def get(self) -> Tensor:
        """The tensor, on the device."""
        assert self._block is not None, "a saved tensor was let go before its last use"
        if self._counter._version != self._version:
            raise RuntimeError(
                f"a tensor {list(self._geometry[1])} that the backward of an offloaded layer needs has been changed in place "
                f"since it was saved: it is at version {self._counter._version} instead of {self._version}."
            )
        data = self._block.get()
        tensor = torch.empty(0, dtype=self._dtype, device=data.device)
        if self.is_used_once:
            self.let_go()
        return tensor.set_(data.untyped_storage(), *self._geometry)

    def let_go(self) -> None:
        """It is not used again."""
        self._block = None


class _Offloading(Instead):
    """Of a layer."""

    def __init__(self, module: nn.Module, offload: ActivationOffload) -> None:
        super().__init__(module)
        self._offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._offload.saving(self.module):
            return self.__wrapped__(*args, **kwargs)


def offload(module: nn.Module, options: ActivationOffload, *, is_whole: bool = True) -> None:
    """Let what the layers of a model save wait on the host, in place. ``recompute`` goes first: it undoes this.

    Args:
        module: the user's module.
        options: how.
        is_whole: whether all layers are here.

    Raises:
        ValueError: the model has no layers.
    """
    layers = layers_of(module)
    if is_whole and not layers:
        raise ValueError(
            f"offload_activations=True: {type(module).__name__} has no layers (a PipelineModel's, or an nn.ModuleList) whose "
            f"activations could be moved; leave offload_activations=False."
        )
    for layer in layers:
        _Offloading(layer.module, options).put()
