"""Monitors log what was done in how long, the same on every rank."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.callbacks import MemoryMonitor, ThroughputMonitor, memory, throughput
from lightning_megatron.callbacks.throughput import count_tokens, peak_of
from lightning_megatron.micro_batch import MicroBatches
from lightning_megatron.models import GPTConfig, GPTModule
from lightning_megatron.testing import run_distributed

S = 8
CONFIG = GPTConfig(num_layers=2, hidden_size=16, ffn_hidden_size=16, num_heads=2, vocab_size=20, max_seq_len=S)


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock, at the end of a step, is a second after the one before."""
    ticks = count()
    monkeypatch.setattr(throughput, "perf_counter", lambda: float(next(ticks)))


@dataclass
class Seen:
    """What monitors log, by the number of batches that have ended, and what reaches loggers and the progress bar of it."""

    logged: dict[int, dict[str, float]] = field(default_factory=dict)
    by_loggers: dict[str, float] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)


class Module(GPTModule):
    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.seen, self.num_batches = Seen(), 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.num_batches += 1

    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(name, value, **options)
        if "/" in name:
            self.seen.logged.setdefault(self.num_batches, {})[name] = float(value)

    def on_train_end(self) -> None:
        self.seen.by_loggers = {name: float(value) for name, value in self.trainer.logged_metrics.items() if "/" in name}
        self.seen.shown = {name for name in self.trainer.progress_bar_metrics if "/" in name}


def fit(
    folder: Any,
    *monitors: Callback,
    samples: int,
    batch_size: int,
    layout: Any = None,
    is_evaluated: bool = False,
    **options: Any,
) -> Seen:
    """Train under the monitors."""
    data = TensorDataset(torch.randint(20, (samples, S), generator=torch.Generator().manual_seed(0)))
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="auto" if layout is None else MegatronStrategy(**layout),
        callbacks=list(monitors),
        logger=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=folder,
        **{"enable_checkpointing": False, **options},
    )
    module = Module()
    loader = DataLoader(data, batch_size, collate_fn=stacked)
    trainer.fit(module, loader, val_dataloaders=loader if is_evaluated else None)
    return module.seen


def stacked(rows: list[Any]) -> torch.Tensor:
    return torch.stack([tokens for (tokens,) in rows])


def expected(samples: int, steps: int, *, ranks: int = 1, peak: float = 2.0) -> dict[str, float]:
    num_seconds = steps
    tokens = samples * S
    tflops = tokens * CONFIG.flops_per_token(S) / 1e12 / num_seconds / ranks
    return {
        "throughput/samples_per_second": samples / num_seconds,
        "throughput/seconds_per_step": num_seconds / steps,
        "throughput/tokens_per_second": tokens / num_seconds,
        "throughput/tokens_per_second_per_gpu": tokens / num_seconds / ranks,
        "throughput/tflops_per_gpu": tflops,
        "throughput/mfu": tflops / peak,
    }


def assert_logged(seen: Seen, wanted: dict[int, dict[str, float]]) -> None:
    assert list(seen.logged) == list(wanted)
    for batch, values in wanted.items():
        assert seen.logged[batch] == pytest.approx(values), batch
    assert seen.by_loggers == pytest.approx(values)


def test_a_window_counts_its_own_steps_and_not_the_first(tmp_path: Any) -> None:
    monitor = ThroughputMonitor(2, peak_tflops=2.0)
    # Batches of 4, 4, 4, 4, 4, 1: the first is in no window.
    seen = fit(tmp_path, monitor, samples=21, batch_size=4, max_epochs=1)
    assert_logged(seen, {3: expected(8, 2), 5: expected(8, 2)})
    assert seen.shown == {"throughput/tokens_per_second_per_gpu", "throughput/mfu"}


def test_accumulated_and_short_batches_count_as_what_they_hold(tmp_path: Any) -> None:
    monitor = ThroughputMonitor(2, peak_tflops=2.0)
    # Steps of batches (4, 4), (4, 4), (4, 2), twice: an epoch begins anew after its first step.
    seen = fit(tmp_path, monitor, samples=22, batch_size=4, max_epochs=2, accumulate_grad_batches=2)
    assert_logged(seen, {6: expected(14, 2), 12: expected(14, 2)})
    monitor = ThroughputMonitor(1, peak_tflops=2.0)
    seen = fit(tmp_path, monitor, samples=22, batch_size=4, max_epochs=2, accumulate_grad_batches=2)
    assert_logged(seen, {4: expected(8, 1), 6: expected(6, 1), 10: expected(8, 1), 12: expected(6, 1)})


@pytest.mark.parametrize(
    ("layout", "ranks", "replicas"),
    [({"pp": 2}, 4, 2), ({"tp": 2}, 2, 1), ({"cp": 2}, 2, 1), ({"pp": 2, "tp": 2}, 4, 1)],
    ids=str,
)
def test_every_rank_logs_what_all_replicas_have_done(layout: dict[str, int], ranks: int, replicas: int, tmp_path: Any) -> None:
    def run() -> Seen:
        options: dict[str, Any] = {"devices": ranks, "max_epochs": 1, "accumulate_grad_batches": 2}
        monitor = ThroughputMonitor(2, peak_tflops=2.0)
        return fit(tmp_path, monitor, samples=22 * replicas, batch_size=4, layout=layout, **options)

    for seen in run_distributed(run, ranks):
        assert_logged(seen, {6: expected(14 * replicas, 2, ranks=ranks)})


def test_times_of_a_device_are_read_a_batch_later(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput._HostClock, "is_late", True)
    seen = fit(tmp_path, ThroughputMonitor(2, peak_tflops=2.0), samples=24, batch_size=4, max_epochs=1)
    assert_logged(seen, {4: expected(8, 2), 6: expected(8, 2)})


def test_a_checkpoint_is_in_no_window(tmp_path: Any) -> None:
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    monitor = ThroughputMonitor(3, peak_tflops=2.0)
    seen = fit(tmp_path, monitor, saving, samples=40, batch_size=4, max_epochs=1, enable_checkpointing=True)
    # Steps 2 to 4; a checkpoint after 4; 5 begins anew; 6 to 8; a checkpoint after 8; 9 begins anew.
    assert_logged(seen, {4: expected(12, 3), 8: expected(12, 3)})
    assert len(list(Path(tmp_path).iterdir())) == 2


@pytest.mark.parametrize("what", ["checkpoints", "evaluations", "epochs"])
def test_a_window_goes_on_after_what_it_leaves_out(what: str, tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "checkpoints": {"samples": 36, "enable_checkpointing": True},
        "evaluations": {"samples": 36, "val_check_interval": 3, "is_evaluated": True},
        "epochs": {"samples": 12, "max_epochs": 3},
    }[what]
    saving = [ModelCheckpoint(tmp_path, every_n_train_steps=3)] if what == "checkpoints" else []
    seen = fit(tmp_path, ThroughputMonitor(3, peak_tflops=2.0), *saving, batch_size=4, **{"max_epochs": 1, **options})
    # Steps 2, 3, 5 and 6, 8, 9: nobody knows when 1, 4 and 7 began.
    assert_logged(seen, {5: expected(12, 3), 9: expected(12, 3)})


def test_a_step_that_an_evaluation_falls_into_does_not_count(tmp_path: Any) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 5, "is_evaluated": True, "max_epochs": 1}
    seen = fit(tmp_path, ThroughputMonitor(2, peak_tflops=2.0), samples=40, batch_size=4, **options)
    # Batches (3, 4); evaluation after 5; (5, 6) is left out; (7, 8), (9, 10).
    assert_logged(seen, {8: expected(16, 2)})


def test_flops_of_a_users_own_and_batches_without_tokens(tmp_path: Any) -> None:
    def own(batch: Any) -> tuple[int, int]:
        return 100, 10

    monitor = ThroughputMonitor(1, flops_per_token=lambda length: 3e12 * length, peak_tflops=1e4, count=own)
    seen = fit(tmp_path, monitor, samples=8, batch_size=4, max_epochs=1)
    assert seen.logged[2]["throughput/tflops_per_gpu"] == pytest.approx(3000.0)
    assert seen.logged[2]["throughput/mfu"] == pytest.approx(0.3)
    monitor = ThroughputMonitor(1, count=lambda batch: (0, 0))
    seen = fit(tmp_path, monitor, samples=8, batch_size=4, max_epochs=1)
    assert set(seen.logged[2]) == {"throughput/samples_per_second", "throughput/seconds_per_step"}


def test_tokens_are_found_by_name_and_by_form() -> None:
    @dataclass
    class Batch:
        mask: torch.Tensor
        input_ids: torch.Tensor

    tokens, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)
    for batch in (tokens, {"mask": mask, "input_ids": tokens}, [torch.zeros(3, 5), tokens], (tokens, mask)):
        assert count_tokens(batch) == (15, 5)
    for batch in (Batch(mask, tokens), UserDict(mask=mask, input_ids=tokens), ({"x": tokens}, mask), ["name", (tokens,)]):
        assert count_tokens(batch) == (15, 5)
    assert count_tokens(MicroBatches([tokens, torch.zeros(5, 9, dtype=torch.int64)])) == (60, 8)
    for batch in (torch.zeros(3, 5), {"x": torch.zeros(3)}, "text", None):
        assert count_tokens(batch) == (0, 0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("Quadro", None),
    ],
)
def test_peaks_are_known_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


# Memory


def test_memory_is_the_largest_of_any_rank(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Seen, list[dict[str, float]]]:
        rank = torch.distributed.get_rank()
        readings = count(1)
        monitor = MemoryMonitor(4, each_rank=True)
        monitor._read = lambda device: {"peak_allocated_gib": 10.0 * next(readings) + rank, "num_alloc_retries": 1.0 - rank}
        seen = fit(tmp_path, monitor, samples=36, batch_size=4, layout={"pp": 2}, devices=2, max_epochs=1)
        return seen, monitor.per_rank

    for seen, per_rank in run_distributed(run, 2):
        assert list(seen.logged) == [1, 4, 8]  # after the first step, which makes optimizer states, and then every 4
        for number, values in enumerate(seen.logged.values(), 1):
            assert values == {
                "memory/peak_allocated_gib": 10.0 * number + 1,
                "memory/num_alloc_retries": 1.0,
                "memory/peak_allocated_gib/rank0": 10.0 * number,
                "memory/peak_allocated_gib/rank1": 10.0 * number + 1,
            }
        assert seen.shown == {"memory/peak_allocated_gib"}
        assert per_rank[1] == {"peak_allocated_gib": 31.0, "num_alloc_retries": 0.0}


def test_memory_is_read_when_an_optimizer_step_has_ended(tmp_path: Any) -> None:
    seen = fit(tmp_path, MemoryMonitor(2), samples=40, batch_size=4, max_epochs=1, accumulate_grad_batches=2)
    assert list(seen.logged) == [2, 4, 8]
    assert set(seen.by_loggers) == {"memory/peak_resident_gib"}


def test_memory_of_the_host_is_that_of_the_process() -> None:
    (value,) = memory.read_memory(torch.device("cpu")).values()
    assert 0.05 < value < 100.0


@pytest.mark.parametrize("monitor", [ThroughputMonitor, MemoryMonitor])
def test_an_interval_must_be_positive(monitor: Any) -> None:
    with pytest.raises(ValueError, match="interval_steps=0 must be 1 or more"):
        monitor(0)
