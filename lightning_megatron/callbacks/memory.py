"""``MemoryMonitor``: the most memory that any rank has taken."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_megatron.callbacks.ranks import gathered, log

_GIB = 2.0**30


class MemoryMonitor(Callback):
    """Logs the peaks of memory, the largest over all ranks, every ``interval_steps`` optimizer steps, the same on every rank.

    ``memory/peak_allocated_gib`` and ``memory/peak_reserved_gib`` since the last time, and ``memory/num_alloc_retries``, how
    often in the run the allocator had to give all that it had back to the device first, which is slow. On the host
    ``memory/peak_resident_gib`` instead, since the process has started. Reading them does not wait for the device.

    Args:
        interval_steps: optimizer steps between readings.
        each_rank: log the peaks of each rank as well, as ``memory/peak_allocated_gib/rank3``.

    Raises:
        ValueError: ``interval_steps`` is not positive.
    """

    def __init__(self, interval_steps: int = 50, *, each_rank: bool = False) -> None:
        if interval_steps < 1:
            raise ValueError(f"interval_steps={interval_steps} must be 1 or more.")
        self.interval_steps, self.each_rank = interval_steps, each_rank
        self.per_rank: list[dict[str, float]] = []
        """What each rank had at the last reading."""
        self._read: Callable[[torch.device], dict[str, float]] = read_memory
        self._due = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due = trainer.global_step + 1  # after the first step optimizer states are there

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < self._due:
            return
        self._due = (trainer.global_step // self.interval_steps + 1) * self.interval_steps
        mine = self._read(pl_module.device)
        rows = gathered(trainer, list(mine.values())).tolist()
        self.per_rank = [dict(zip(mine, row, strict=True)) for row in rows]
        values = {name: max(row[name] for row in self.per_rank) for name in mine}
        if self.each_rank:
            peaks = [name for name in mine if name.startswith("peak")]
            values |= {f"{name}/rank{rank}": row[name] for rank, row in enumerate(self.per_rank) for name in peaks}
        log(pl_module, {f"memory/{name}": value for name, value in values.items()}, shown=("memory/peak_allocated_gib",))


def read_memory(device: torch.device) -> dict[str, float]:
    """Peaks since the last reading, in GiB, and the number of allocation retries."""
    if device.type != "cuda":
        return {"peak_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "peak_allocated_gib": stats["allocated_bytes.all.peak"] / _GIB,
        "peak_reserved_gib": stats["reserved_bytes.all.peak"] / _GIB,
        "num_alloc_retries": float(stats["num_alloc_retries"]),
    }
