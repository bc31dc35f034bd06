"""``ThroughputMonitor``: tokens a second, TFLOP/s and their share of the GPU's peak.

Note [Time without waiting]
A window is some optimizer steps. At the end of each the device's clock is noted by an event in its stream, and those of a
window are read one batch after it: the host then waits for work that lies behind a batch that it has queued already, so the
device never runs dry. On the host the clock is read as it is. Evaluation, checkpoints and the time between epochs are left
out: a window that one falls into goes on with the step after the next one, which may have to start workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_megatron.callbacks.ranks import counts_samples, gathered, log
from lightning_megatron.micro_batch import MicroBatches, batch_size_of, open_container

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
    """What has been done, on this rank's replica."""

    samples: int = 0
    tokens: int = 0
    flops: float = 0.0
    steps: int = 0

    def add(self, other: _Work) -> None:
        """Count what another has done."""
        self.samples += other.samples
        self.tokens += other.tokens
        self.flops += other.flops
        self.steps += other.steps


@dataclass
class _Window:
    """Some optimizer steps: what they have done, and the times between which they did it."""

    work: _Work
    spans: list[tuple[Any, Any]]


class ThroughputMonitor(Callback):
    """Logs how fast a run is, every ``interval_steps`` optimizer steps, the same on every rank.

    ``throughput/tokens_per_second`` (all GPUs), ``throughput/tokens_per_second_per_gpu``, ``throughput/tflops_per_gpu``,
    ``throughput/mfu`` (share of the peak), ``throughput/samples_per_second`` and ``throughput/seconds_per_step``.

    FLOPs are the model's, forward and backward, without what recompute does again. What cannot be known is left out: tokens
    of batches without token ids, FLOPs of a model without ``config.flops_per_token``, the share of an unknown peak.

    Args:
        interval_steps: optimizer steps in a window. The first step of a run, which compiles and allocates, is in none, nor is
            the first one after an evaluation, a checkpoint or the begin of an epoch.
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
        self._step = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._window = _Window(_Work(), [])
        self._ended: _Window | None = None  # whose time is not read yet
        self._start: Any = None  # where those steps begin that are in no span of the window yet
        self._latest: Any = None  # where the latest of them ends
        self._since = _Work()  # what has been done after that

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = pl_module.device
        self._clock = _DeviceClock(device) if device.type == "cuda" else _HostClock()
        self._begin_anew()
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
        now, since, self._since = self._clock.now(), self._since, _Work()
        if self._start is None:
            self._start = now
            return
        self._latest, since.steps = now, num_steps
        self._window.work.add(since)
        if self._window.work.steps >= self.interval_steps:
            self._interrupt()
            self._ended, self._window, self._start = self._window, _Window(_Work(), []), now
            if not self._clock.is_late:
                self._report(trainer, pl_module)

    def _add(self, batch: Any) -> None:
        self._since.samples += _samples_in(batch)
        tokens, length = self._count(batch)
        self._since.tokens += tokens
        if tokens and self._flops_per_token is not None:
            per_token = self._flops_per_token
            self._since.flops += tokens * (per_token(length) if callable(per_token) else per_token)

    def _report(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._ended is not None
        work, spans = self._ended.work, self._ended.spans
        self._ended = None
        mine = float(counts_samples(trainer))
        took = sum(self._clock.seconds(start, end) for start, end in spans)
        numbers = [took, work.samples * mine, work.tokens * mine, work.flops * mine]
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
        """Leave out what comes, until the end of the next optimizer step."""
        if self._latest is not None:
            self._window.spans.append((self._start, self._latest))
        self._start, self._latest, self._since = None, None, _Work()

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
    """Tokens in a batch, and the length of its sequences, by its first integer tensor ``[B, S]``; (0, 0) without one.

    In dicts and dataclasses those called ``tokens`` or ``input_ids`` go first.
    """
    if isinstance(batch, MicroBatches):
        parts = [count_tokens(part) for part in batch]
        tokens = sum(number for number, _ in parts)
        return tokens, round(sum(number * length for number, length in parts) / max(tokens, 1))
    if isinstance(batch, Tensor):
        is_tokens = batch.dim() == 2 and batch.dtype in (torch.int64, torch.int32)
        return (batch.numel(), batch.shape[1]) if is_tokens else (0, 0)
    opened = open_container(batch)
    if opened is None:
        return 0, 0
    fields = batch if isinstance(batch, Mapping) else vars(batch) if is_dataclass(batch) else {}
    named = [fields[name] for name in ("tokens", "input_ids") if name in fields]
    return next((found for found in map(count_tokens, named or opened.children) if found[0]), (0, 0))


def _samples_in(batch: Any) -> int:
    try:
        return batch_size_of(batch)
    except ValueError:
        return 1  # nothing with a batch dim


def _flops_of(module: LightningModule) -> Flops | None:
    for child in module.modules():
        found = getattr(getattr(child, "config", None), "flops_per_token", None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None
