"""Checkpoints against the disk: throughput of saving and loading, the stall of a background save, and memory while loading.

    python benchmarks/checkpoint.py --gb 2 --folder /scratch

The disk's own speeds are measured with plain files of the same size in the same folder: written and flushed, and read after
the page cache has been told to forget them (``posix_fadvise``). One process, on a GPU if there is one.
"""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_megatron.checkpoint import BackgroundSaver, load, save
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism

_BLOCK = 2**24


class Job:
    """A model of square matrices with AdamW, whose whole state (parameters and two moments, fp32) has so many bytes."""

    def __init__(self, num_bytes: int, device: torch.device, bucket_mb: float) -> None:
        self.mesh = Mesh.create(Parallelism(), device=device)
        size = 2048
        number = max(1, num_bytes // (3 * 4 * size * size))
        self.module = nn.ModuleList(nn.Linear(size, size, bias=False, device=device) for _ in range(number))
        named = list(self.module.named_parameters())
        optimizer = torch.optim.AdamW([param for _, param in named], lr=1e-3)
        config = DistributedOptimizerConfig(bucket_mb=bucket_mb)
        self.optimizer = DistributedOptimizer(optimizer, named, mesh=self.mesh, config=config)
        self.num_bytes = 3 * sum(param.numel() * param.element_size() for _, param in named)

    def step(self) -> None:
        """A backward and an update of everything."""
        inputs = torch.ones(64, 2048, device=self.mesh.device)
        loss = sum(layer(inputs).square().mean() for layer in self.module)
        loss.backward()
        self.optimizer.reduce_gradients()
        self.optimizer.finish_gradients(num_tokens=None)
        self.optimizer.step()
        self.optimizer.update_parameters()

    def save(self, path: Path, background: BackgroundSaver | None = None) -> None:
        """Write a checkpoint."""
        parts = {"module": self.module, "optimizers": [self.optimizer], "meta": {}, "mesh": self.mesh}
        save(path, **parts, background=background)

    def load(self, path: Path, verify: bool) -> None:
        """Read it."""
        load(path, module=self.module, optimizers=[self.optimizer], mesh=self.mesh, verify=verify)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """How long an action takes."""
    begin = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def write_plain(file: Path, num_bytes: int) -> None:
    """Write and flush a file."""
    block = os.urandom(_BLOCK)
    with open(file, "wb", buffering=0) as stream:
        for _ in range(num_bytes // _BLOCK):
            stream.write(block)
        os.fsync(stream.fileno())


def read_plain(file: Path) -> None:
    """Read a file."""
    with open(file, "rb", buffering=0) as stream:
        while stream.read(_BLOCK):
            pass


def forget(*paths: Path) -> None:
    """Ask the page cache to forget files."""
    for file in (file for path in paths for file in ([path] if path.is_file() else path.iterdir())):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class PeakMemory:
    """The most host memory of this process above what it had at the beginning, sampled on a thread."""

    def __enter__(self) -> PeakMemory:
        self.peak, self._base, self._done = 0, self._now(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now() - self._base)

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Measure and print a table."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="state of the model, in GB")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--bucket-mb", type=float, default=128.0)
    parser.add_argument("--repeats", type=int, default=3, help="the best is shown")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    folder = options.folder / "checkpoint_benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = Job(int(options.gb * 1e9), device, options.bucket_mb)
    job.step()
    plain, path = folder / "plain", folder / "a.ckpt"
    times: dict[str, list[float]] = {}

    def measure(name: str, action: Callable[[], object]) -> float:
        times.setdefault(name, []).append(seconds(action, device))
        return times[name][-1]

    memory, device_memory = 0, 0
    for _ in range(options.repeats):
        measure("disk: write and flush", lambda: write_plain(plain, job.num_bytes))
        forget(plain)
        measure("disk: read", lambda: read_plain(plain))
        measure("save", lambda: job.save(path))
        for name, verify in (("load, checksums compared", True), ("load", False)):
            forget(path)
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with PeakMemory() as peak:
                measure(name, lambda verify=verify: job.load(path, verify))
            memory = max(memory, peak.peak)
            if device.type == "cuda":
                device_memory = max(device_memory, torch.cuda.max_memory_allocated() - before)
    stall = background(job, path, device)
    shutil.rmtree(folder)
    show(times, job.num_bytes, stall=stall, memory=memory, device_memory=device_memory, device=device)


def background(job: Job, path: Path, device: torch.device) -> tuple[float, float, float, int]:
    """Seconds: until a background save returns, until it is durable, and that it adds to the steps beside it; their number."""
    saver = BackgroundSaver(lambda: None)
    job.save(path, saver)  # makes the host copies, which later saves use again
    saver.wait()
    alone = sorted(seconds(job.step, device) for _ in range(5))[2]
    begin = time.perf_counter()
    job.save(path, saver)
    returned = time.perf_counter() - begin
    beside = []
    while saver.is_busy:
        beside.append(seconds(job.step, device))
    saver.wait()
    return returned, time.perf_counter() - begin, sum(beside) - alone * len(beside), len(beside)


def show(
    times: dict[str, list[float]],
    num_bytes: int,
    *,
    stall: tuple[float, float, float, int],
    memory: int,
    device_memory: int,
    device: torch.device,
) -> None:
    """Print the table."""
    best = {name: min(of) for name, of in times.items()}
    table = Table("what", "s", "GB/s", "of the disk", title=f"{num_bytes / 1e9:.2f} GB of state on {device}")
    for name, found in best.items():
        disk = best["disk: read" if "load" in name or "read" in name else "disk: write and flush"]
        table.add_row(name, f"{found:.2f}", f"{num_bytes / found / 1e9:.2f}", f"{disk / found:.0%}")
    returned, durable, added, number = stall
    share = f"{returned / durable:.1%} of the save"
    table.add_row("background save: call returns", f"{returned:.3f}", "", share)
    table.add_row("background save: durable", f"{durable:.2f}", f"{num_bytes / durable / 1e9:.2f}", "")
    table.add_row(f"background save: added to {number} steps", f"{added:.3f}", "", f"{added / durable:.1%} of the save")
    table.add_row("host memory while loading, above before", "", f"{memory / 1e9:.2f} GB", "")
    if device.type == "cuda":
        table.add_row("GPU memory while loading, above before", "", f"{device_memory / 1e9:.2f} GB", "")
    Console().print(table)


if __name__ == "__main__":
    main()
