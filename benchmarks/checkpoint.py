"""Checkpoints against the disk: throughput of saving and loading, the stall of a background save, and memory while loading.

    python benchmarks/checkpoint.py --gb 2 --folder /scratch

The disk's own speeds are measured in the same process with plain files of the same size in the same folder, by one thread and
by four, of which the faster counts: written and flushed, and read after the page cache has been told to forget them, as the
checkpoint is before it is loaded. One process, on a GPU if there is one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import shutil
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_megatron.checkpoint import BackgroundSaver, load, save
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism

_BLOCK = 2**24
_WIDTH = 2048


class Job:
    """A model of square matrices with AdamW, whose whole state (parameters and two moments, fp32) has so many bytes."""

    def __init__(self, num_bytes: int, device: torch.device, bucket_mb: float) -> None:
        self.mesh = Mesh.create(Parallelism(), device=device)
        number = max(1, num_bytes // (3 * 4 * _WIDTH * _WIDTH))
        self.module = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False, device=device) for _ in range(number))
        named = list(self.module.named_parameters())
        optimizer = torch.optim.AdamW([param for _, param in named], lr=1e-3)
        config = DistributedOptimizerConfig(bucket_mb=bucket_mb)
        self.optimizer = DistributedOptimizer(optimizer, named, mesh=self.mesh, config=config)
        self.num_bytes = 3 * sum(param.numel() * param.element_size() for _, param in named)
        self.num_rows = 8192 if device.type == "cuda" else 64

    def step(self) -> None:
        """A backward and an update of everything."""
        inputs = torch.ones(self.num_rows, _WIDTH, device=self.mesh.device)
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


class Plain:
    """A plain file, written and read block by block."""

    def __init__(self, path: Path, num_bytes: int, num_threads: int) -> None:
        self._path, self._num_threads = path, num_threads
        self._offsets = range(0, num_bytes, _BLOCK)
        self._blocks = [bytearray(os.urandom(_BLOCK)) for _ in range(num_threads)]

    def write(self) -> None:
        """Write and flush it."""
        self._each(os.pwrite, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)

    def read(self) -> None:
        """Read it."""
        self._each(lambda descriptor, block, offset: os.preadv(descriptor, [block], offset), os.O_RDONLY)

    def _each(self, action: Callable[[int, bytearray, int], object], flags: int) -> None:
        descriptor = os.open(self._path, flags, 0o600)

        def some(thread: int) -> None:
            for offset in self._offsets[thread :: self._num_threads]:
                action(descriptor, self._blocks[thread], offset)

        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(some, range(self._num_threads)))
        if flags & os.O_WRONLY:
            os.fsync(descriptor)
        os.close(descriptor)


def forget(path: Path) -> float:
    """Ask the page cache to forget a file, or those in a directory. Returns the part of them that it has kept all the same."""
    kept = total = 0
    for file in [path] if path.is_file() else path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(descriptor).st_size
        with mmap.mmap(descriptor, size, mmap.MAP_PRIVATE) as content:
            flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            here = ctypes.c_char.from_buffer(content)
            ctypes.CDLL(None).mincore(ctypes.byref(here), ctypes.c_size_t(size), flags)
            del here
        os.close(descriptor)
        kept, total = kept + sum(flag & 1 for flag in flags), total + len(flags)
    return kept / max(total, 1)


class PeakMemory:
    """The most host and device memory above what was in use at the beginning; that of the host sampled on a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.host, self.device = device, 0, 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what happens in the block."""
        on_gpu = self._device.type == "cuda"
        base, before, done = self._now(), torch.cuda.memory_allocated() if on_gpu else 0, threading.Event()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

        def watch() -> None:
            while not done.wait(0.002):
                self.host = max(self.host, self._now() - base)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if on_gpu:
            self.device = max(self.device, torch.cuda.max_memory_allocated() - before)

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass
class Stall:
    """What a background save takes: seconds."""

    first_call: float
    call: float
    durable: float
    alone: float
    beside: list[float] = field(default_factory=list)

    @property
    def added(self) -> float:
        """To the steps beside it, by their mean: the time that training has lost."""
        return sum(self.beside) - self.alone * len(self.beside)

    @property
    def share(self) -> float:
        """Of the save's time that training has lost."""
        return (self.call + max(0.0, self.added)) / self.durable


def in_background(job: Job, path: Path, device: torch.device) -> Stall:
    """Train beside a save."""
    saver = BackgroundSaver(lambda: None)
    first = seconds(lambda: job.save(path, saver), device)  # makes the host copies, which later saves use again
    saver.wait()
    os.sync()
    begin, alone = time.perf_counter(), []
    while time.perf_counter() < begin + 2.0 or len(alone) < 5:
        alone.append(seconds(job.step, device))
    begin = time.perf_counter()
    job.save(path, saver)
    stall = Stall(first, time.perf_counter() - begin, 0.0, sum(alone) / len(alone))
    while saver.is_busy:
        stall.beside.append(seconds(job.step, device))
    saver.wait()
    stall.durable = time.perf_counter() - begin
    return stall


def measure(
    job: Job, folder: Path, options: Namespace, device: torch.device
) -> tuple[dict[str, list[float]], PeakMemory, float]:
    """Seconds of everything but background saves, memory while loading, and the part of files that stayed in the page cache."""
    path, memory, cached = folder / "a.ckpt", PeakMemory(device), 0.0
    plains = [Plain(folder / "plain", job.num_bytes, threads) for threads in (1, 4)]
    times: dict[str, list[float]] = {}

    def take(name: str, action: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(action, device))

    begin = time.perf_counter()
    for number in range(1, options.repeats + 1):
        for plain in plains:
            take("disk: write and flush", plain.write)
            cached = max(cached, forget(folder / "plain"))
            take("disk: read", plain.read)
        (folder / "plain").unlink()
        take("save", lambda: job.save(path))
        for name, verify in (("load, checksums compared", True), ("load", False)):
            cached = max(cached, forget(path))
            with memory.watching():
                take(name, lambda verify=verify: job.load(path, verify))
        if (time.perf_counter() - begin) * (number + 1) / number > options.seconds:
            break
    return times, memory, cached


def main() -> None:
    """Measure and print a table."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="state of the model, in GB")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--bucket-mb", type=float, default=128.0)
    parser.add_argument("--repeats", type=int, default=3, help="the best is shown")
    parser.add_argument("--seconds", type=float, default=60.0, help="no repetition begins that would end later")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    folder = options.folder / "checkpoint_benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        job = Job(int(options.gb * 1e9), device, options.bucket_mb)
        job.step()
        times, memory, cached = measure(job, folder, options, device)
        stalls = [in_background(job, folder / "a.ckpt", device) for _ in range(2)]
    finally:
        shutil.rmtree(folder)
    show(times, job.num_bytes, stall=min(stalls, key=lambda one: one.share), memory=memory, device=device)
    if cached > 0.01:
        print(f"up to {cached:.0%} of a file stayed in the page cache: reads are partly of memory, the disk's and ours alike.")


def show(times: dict[str, list[float]], num_bytes: int, *, stall: Stall, memory: PeakMemory, device: torch.device) -> None:
    """Print the table."""
    best = {name: min(of) for name, of in times.items()}
    table = Table("what", "s", "GB/s", "share", "target", title=f"{num_bytes / 1e9:.2f} GB of state on {device}")
    for name, found in best.items():
        disk = best["disk: read" if "load" in name or "read" in name else "disk: write and flush"]
        target = "" if name.startswith("disk") else ">= 70 % of the disk"
        table.add_row(name, f"{found:.2f}", f"{num_bytes / found / 1e9:.2f}", f"{disk / found:.0%}", target)
    table.add_row("background save: durable", f"{stall.durable:.2f}", f"{num_bytes / stall.durable / 1e9:.2f}")
    table.add_row("  first call, which makes host memory", f"{stall.first_call:.3f}")
    table.add_row("  call returns", f"{stall.call:.3f}", "", f"{stall.call / stall.durable:.1%}")
    added = f"  added to {len(stall.beside)} steps of {stall.alone * 1e3:.0f} ms"
    table.add_row(added, f"{stall.added:.3f}", "", f"{stall.added / stall.durable:.1%}")
    longest = (
        f"  longest step beside it, of median {median(stall.beside) * 1e3:.0f} ms" if stall.beside else "  no step beside it"
    )
    table.add_row(longest, f"{max(stall.beside, default=0.0):.3f}")
    table.add_row("  stall", f"{stall.call + max(0.0, stall.added):.3f}", "", f"{stall.share:.1%}", "< 5 % of the save")
    table.add_row("host memory while loading, above before", "", f"{memory.host / 1e9:.3f} GB")
    if device.type == "cuda":
        table.add_row("GPU memory while loading, above before", "", f"{memory.device / 1e9:.3f} GB")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
