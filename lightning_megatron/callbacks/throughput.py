"""``ThroughputMonitor``: tokens a second, TFLOP/s and their share of the GPU's peak.

Note [Time without waiting]
A window is some optimizer steps. At its ends the device's clock is noted by events in its stream, which are read one batch
later: the host then waits for work that lies behind a batch that it has queued already, so the device never runs dry. On the
host the clock is read as it is. Evaluation and checkpoints are left out: a window that one falls into begins anew after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_megatron.callbacks.ranks import counts_samples, gathered, log

PEAKS: dict[str, float] = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
}
"""TFLOP/s of bf16 products, dense, by the data sheets; the first name that a GPU's name contains."""

Flops = float | Callable[[int], float]
Count = Callable[[Any], tuple[int, int]]


@dataclass
class _Work:
    """What a window has done, on this rank's replica."""

    samples: int = 0
    tokens: int = 0
    flops: float = 0.0
    steps: int = 0


class ThroughputMonitor(Callback):
    """Logs how fast a run is, every ``interval_steps`` optimizer steps, the same on every rank.

    ``throughput/tokens_per_second`` (all GPUs), ``throughput/tokens_per_second_per_gpu``, ``throughput/tflops_per_gpu``,
    ``throughput/mfu`` (share of the peak), ``throughput/samples_per_second`` and ``throughput/seconds_per_step``.

    FLOPs are the model's, forward and backward, without what recompute does again. What cannot be known is left out: tokens
    of batches without token ids, FLOPs of a model without ``config.flops_per_token``, the share of an unknown peak.

    Args:
        interval_steps: optimizer steps in a window. The first step of a run, which compiles and allocates, is in none.
        flops_per_token: of one token in training, or a function of the sequence's length; by default
            ``config.flops_per_token`` of the module or its model.
        peak_tflops: of one GPU; by default that of its bf16 products, dense, by the data sheet.
        count: ``batch -> (tokens, sequence length)``; by default by the first integer tensor ``[B, S]`` of the batch
            (``tokens`` or ``input_ids`` of a dict).

    Raises:
        ValueError: ``interval_steps`` is not positive.
    """

    def __init__(
        self,
        interval_steps: int = 10,
        *,
        flops_per_token: Flops | None = None,
        peak_tflops: float | None = None,
        count: Count | None = None,
    ) -> None:
        if interval_steps < 1:
            raise ValueError(f"interval_steps={interval_steps} must be 1 or more.")
        self.interval_steps, self.peak_tflops = interval_steps, peak_tflops
        self._flops_per_token, self._count = flops_per_token, count or count_tokens
        self._clock: _Clock = _HostClock()
        self._start: Any = None
        self._work = _Work()
        self._ended: tuple[Any, Any, _Work] | None = None  # start, end, work of a window whose time is not read yet
        self._step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = pl_module.device
        self._clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
        self._start, self._ended, self._work = None, None, _Work()
        self._step = trainer.global_step
        if self._flops_per_token is None:
            self._flops_per_token = _flops_of(pl_module)
        if self.peak_tflops is None and device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            self.peak_tflops = peak_of(name)
            if self.peak_tflops is not None and self._flops_per_token is not None:
                rank_zero_info(f"throughput/mfu is the share of {self.peak_tflops:g} TFLOP/s ({name}, bf16 dense, data sheet).")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._ended is not None:
            self._report(trainer, pl_module)
        if self._start is not None:
            self._add(batch)
        num_steps, self._step = trainer.global_step - self._step, trainer.global_step
        if not num_steps:
            return  # more batches of the same optimizer step are to come
        if self._start is None:
            self._begin()
            return
        self._work.steps += num_steps
        if self._work.steps >= self.interval_steps:
            end = self._clock.now()
            self._ended = self._start, end, self._work
            self._start, self._work = end, _Work()
            if not self._clock.is_late:
                self._report(trainer, pl_module)

    def _begin(self) -> None:
        self._start, self._work = self._clock.now(), _Work()

    def _add(self, batch: Any) -> None:
        self._work.samples += _samples_in(batch)
        tokens, length = self._count(batch)
        self._work.tokens += tokens
        if tokens and self._flops_per_token is not None:
            per_token = self._flops_per_token
            self._work.flops += tokens * (per_token(length) if callable(per_token) else per_token)

    def _report(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._ended is not None
        start, end, work = self._ended
        self._ended = None
        mine = float(counts_samples(trainer))
        numbers = [self._clock.seconds(start, end), work.samples * mine, work.tokens * mine, work.flops * mine]
        everywhere = gathered(trainer, numbers)
        seconds = float(everywhere[:, 0].max())
        samples, tokens, flops = everywhere[:, 1:].sum(0).tolist()
        values = {"samples_per_second": samples / seconds, "seconds_per_step": seconds / work.steps}
        if tokens:
            values["tokens_per_second"] = tokens / seconds
            values["tokens_per_second_per_gpu"] = tokens / seconds / trainer.world_size
        if flops:
            values["tflops_per_gpu"] = flops / seconds / trainer.world_size / 1e12
        if flops and self.peak_tflops:
            values["mfu"] = values["tflops_per_gpu"] / self.peak_tflops
        shown = ("throughput/tokens_per_second_per_gpu", "throughput/mfu")
        log(module, {f"throughput/{name}": value for name, value in values.items()}, shown=shown)

    def _interrupt(self) -> None:
        """Begin anew after the next optimizer step."""
        self._start = None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupt()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._interrupt()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupt()  # workers of the loader may have to start


class _HostClock:
    is_late = False
    """Whether times are read later than they are noted."""

    def now(self) -> Any:
        """Note the time."""
        return perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two notes."""
        return float(end - start)


class _DeviceClock(_HostClock):
    is_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


_Clock = _HostClock


def peak_of(name: str) -> float | None:
    """TFLOP/s of bf16 products of a GPU by its name; ``None`` if it is not known."""
    words = name.replace("-", " ").split()
    return next((peak for part, peak in PEAKS.items() if all(word in words for word in part.split())), None)


def count_tokens(batch: Any) -> tuple[int, int]:
    """Tokens in a batch, and the length of its sequences, by its first integer tensor ``[B, S]``; (0, 0) without one."""
    if isinstance(batch, Mapping):
        named = [batch[name] for name in ("tokens", "input_ids") if name in batch]
        return count_tokens(named or list(batch.values()))
    for tensor in [batch] if isinstance(batch, Tensor) else batch if isinstance(batch, (list, tuple)) else []:
        if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32):
            return tensor.numel(), tensor.shape[1]
    return 0, 0


def _samples_in(batch: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(batch)
    return next((int(leaf.shape[0]) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


def _flops_of(module: LightningModule) -> Flops | None:
    for child in module.modules():
        found = getattr(getattr(child, "config", None), "flops_per_token", None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None
