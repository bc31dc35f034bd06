"""A save in two halves: what needs the training to stand still, and what can go on beside it.

Note [Saving in the background]
The first half plans (which rank writes which part; small objects over the control group) and, for a background save, copies
this rank's parts to host memory. From then on training may change everything. The second half writes files, flushes them and
lets the checkpoint take its place; in the background it runs on a thread, over a process group that nothing else uses. What
waits for a checkpoint to be durable (the removal of older ones) is queued behind it. There is one background save at a time.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from lightning_megatron.checkpoint import files, storage, writing
from lightning_megatron.checkpoint.planner import StrictSavePlanner
from lightning_megatron.checkpoint.ranks import Ranks
from lightning_megatron.checkpoint.staging import NUM_THREADS_BESIDE
from lightning_megatron.checkpoint.writing import Resolve
from lightning_megatron.comm import all_gather_object, all_reduce
from lightning_megatron.mesh import Axis

_SLAB_BYTES = 2**28
_ALIGNMENT = 64


@dataclass(frozen=True)
class PlannedSave:
    """The first half of a save on one rank.

    Args:
        path: the directory to make.
        items: what this rank writes.
        resolve: gives an item's data.
        metadata: of the whole checkpoint, on the first rank.
        meta: ``meta.pt``, on the first rank.
    """

    path: Path
    items: list[WriteItem]
    resolve: Resolve
    metadata: Metadata | None
    meta: bytes

    def write(self, ranks: Ranks, *, num_threads: int | None = None) -> None:
        """The second half, on so many threads (by default as many as suit the machine). All ranks call it together.

        Raises:
            RuntimeError: a rank could not write.
        """
        try:
            self._write(ranks, num_threads)
        except Exception:
            if ranks.is_first:
                files.discard(self.path)  # the disk may be full of it
            raise

    def _write(self, ranks: Ranks, num_threads: int | None) -> None:
        folder = ranks.on_first(lambda: files.prepare(self.path))
        name = storage.data_file(ranks.rank)
        written = ranks.together(lambda: writing.write_data(folder, name, self.items, self.resolve, num_threads=num_threads))
        everything = ranks.gather_to_first(written)

        def finish() -> None:
            assert self.metadata is not None
            storage.write_index(folder, self.metadata, [part for of_rank in everything for part in of_rank], meta=self.meta)
            files.write_file(folder, files.META_FILE, self.meta)
            files.commit(self.path)

        ranks.on_first(finish)


def plan_save(path: Path, state: dict[str, Any], meta: dict[str, Any], ranks: Ranks) -> PlannedSave:
    """Plan a save. All ranks call it together.

    Raises:
        ValueError: the ranks do not hold the whole of some tensor, or disagree about it.
    """
    planner = StrictSavePlanner()

    def local() -> SavePlan:
        planner.set_up_planner(state, is_coordinator=ranks.is_first)
        return planner.create_local_plan()

    local_plan = ranks.together(local)
    plans = ranks.gather_to_first(local_plan)
    box: list[tuple[list[SavePlan], Metadata, bytes]] = []

    def make_global() -> None:
        box.append((*planner.create_global_plan(plans), _packed(meta)))

    ranks.on_first(make_global)
    global_plans, metadata, packed = box[0] if box else ([], None, b"")
    plan = planner.finish_plan(ranks.scatter_from_first(global_plans))
    return PlannedSave(path, list(plan.items), planner.resolve_data, metadata, packed)


def _packed(meta: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(meta, buffer)
    return buffer.getvalue()


class HostCopies:
    """Copies of tensors in host memory, page-locked where there is a GPU, whose memory is used again for the next save.

    They lie close together in a few large blocks, as single ones of page-locked memory are rounded up to a power of two.
    """

    def __init__(self) -> None:
        self._kept: dict[MetadataIndex, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, planned: PlannedSave) -> PlannedSave:
        """The same save from copies. Later kernels on the current stream may change what was copied.

        The tensors of an earlier save may no longer be needed.
        """
        wanted = {item.index: data for item in planned.items if (data := item.tensor_data) is not None}
        forms = {index: (data.chunk.sizes, data.properties.dtype) for index, data in wanted.items()}
        if forms != {index: (kept.shape, kept.dtype) for index, kept in self._kept.items()}:
            self._kept.clear()  # before there is new memory
            self._kept = _places_for(forms, pinned=torch.cuda.is_available())
        others: dict[MetadataIndex, Tensor | io.BytesIO] = {}
        on_gpu = False
        for item in planned.items:
            source = planned.resolve(item)
            if isinstance(source, Tensor) and item.index in self._kept:
                on_gpu |= source.is_cuda
                self._kept[item.index].copy_(source.detach(), non_blocking=True)
            else:
                others[item.index] = source
        self._copied = torch.cuda.current_stream().record_event() if on_gpu else None
        kept = self._kept
        return replace(planned, resolve=lambda item: kept[item.index] if item.index in kept else others[item.index])

    def wait(self) -> None:
        """Wait until the copies are there."""
        if self._copied is not None:
            self._copied.synchronize()


def _places_for(forms: dict[MetadataIndex, tuple[torch.Size, torch.dtype]], *, pinned: bool) -> dict[MetadataIndex, Tensor]:
    """Memory on the host for tensors of these shapes and dtypes."""
    sizes: list[int] = [0]
    places: dict[MetadataIndex, tuple[int, int]] = {}
    for index, (shape, dtype) in forms.items():
        num_bytes = shape.numel() * dtype.itemsize
        if sizes[-1] and sizes[-1] + num_bytes > _SLAB_BYTES:
            sizes.append(0)
        places[index] = len(sizes) - 1, sizes[-1]
        sizes[-1] += num_bytes + -num_bytes % _ALIGNMENT
    slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
    found = {}
    for index, (slab, begin) in places.items():
        shape, dtype = forms[index]
        found[index] = slabs[slab][begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
    return found


class BackgroundSaver:
    """Runs the second half of saves on a thread. All ranks have one and use it alike.

    Args:
        new_group: makes a process group of all ranks on gloo; called once, by all ranks, before the first save.
        world: over which the ranks agree, through host memory, that a save has ended; ``None`` for one rank.
    """

    def __init__(self, new_group: Callable[[], dist.ProcessGroup | None], world: Axis | None = None) -> None:
        self._new_group, self._world = new_group, world
        self._ranks: Ranks | None = None
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._failed = False
        self._pending = False  # a save whose end the ranks have not agreed on: the same on all of them
        self._afterwards: list[Callable[[], None]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a save is on its way."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def failure(self) -> str | None:
        """What has failed on this rank and has not been raised yet."""
        return None if self._error is None else f"a checkpoint could not be saved in the background: {self._error}"

    def start(self, planned: PlannedSave) -> None:
        """Copy this rank's parts to host memory and write them in the background.

        Raises:
            RuntimeError: the save before has failed. It is waited for first.
        """
        self.wait()
        if self._ranks is None:
            self._ranks = Ranks(self._new_group())
        copied, ranks = self._copies.take(planned), self._ranks
        self._failed, self._pending = False, True
        self._thread = threading.Thread(target=self._run, args=(copied, ranks), daemon=True, name="checkpoint-writer")
        self._thread.start()

    def after(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the save on its way is durable: now if there is none, never if it fails."""
        with self._lock:
            if self.is_busy:
                self._afterwards.append(action)
                return
        if not self._failed:
            action()

    def check(self) -> None:
        """Raise what a background save has failed of, on all ranks or none. All ranks call it together.

        While a save is on its way they ask each other, by one small reduction over host memory; otherwise it costs nothing.

        Raises:
            RuntimeError: it has failed.
        """
        if not self._pending:
            return
        running = self.is_busy  # first: an error is there before its thread has ended
        state = torch.tensor([running, self._error is not None], dtype=torch.int64)
        still_running, failed = (state if self._world is None else all_reduce(state, self._world)).tolist()
        if still_running:
            return
        self._pending = False
        if failed:
            text, error = self.failure, self._error
            self._error = None
            texts = [text] if self._world is None else all_gather_object(text, self._world)
            raise RuntimeError(text or next(other for other in texts if other)) from error

    def wait(self) -> None:
        """Wait for the save on its way, if there is one. All ranks call it together.

        Raises:
            RuntimeError: it has failed; on all ranks.
        """
        self.wait_alone()
        while self._pending:  # for the other ranks: they come here when their part has ended
            self.check()

    def wait_alone(self, timeout_seconds: float | None = None) -> bool:
        """Wait for this rank's part, without the others. Returns whether it has ended."""
        if (thread := self._thread) is not None:  # the thread itself may set it to None
            thread.join(timeout_seconds)
            return not thread.is_alive()
        return True

    def _run(self, planned: PlannedSave, ranks: Ranks) -> None:
        try:
            self._copies.wait()
            planned.write(ranks, num_threads=NUM_THREADS_BESIDE)
            while self._run_next():
                pass
        except BaseException as error:
            self._error, self._failed = error, True
            self._afterwards.clear()

    def _run_next(self) -> bool:
        with self._lock:
            if not self._afterwards:
                self._thread = None  # what comes now need not wait
                return False
            action = self._afterwards.pop(0)
        action()
        return True
