"""Start jobs as a user would, and see what they leave behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_MARKER = "LIGHTNING_MEGATRON_TEST_JOB"


@dataclass(frozen=True)
class Ended:
    """How a job ended. ``seconds_after`` counts from the line "about to fail"."""

    code: int
    output: str
    seconds_after: float
    orphans: list[int]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher sets."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    clean = {name: value for name, value in os.environ.items() if name not in launcher and not name.startswith("PL_")}
    # Without the resolver options the launcher's look-ups of names wait for a name server that is not there.
    quick = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    return {**clean, **quick, "PYTHONPATH": str(ROOT), **extra}


def run_jobs(*commands: list[str], timeout_seconds: float = 110.0) -> list[Ended]:
    """Run commands side by side, as the machines of one job, to their end."""
    marker = uuid.uuid4().hex
    jobs = []
    for command in commands:
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        process = subprocess.Popen(
            command, env=environment(**{_MARKER: marker}), stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, text=True
        )
        jobs.append((process, out))
    deadline, failed_at = time.monotonic() + timeout_seconds, 0.0
    while any(process.poll() is None for process, _ in jobs) and time.monotonic() < deadline:
        time.sleep(0.1)
        if not failed_at and any("about to fail" in _text(out) for _, out in jobs):
            failed_at = time.monotonic()
    after = time.monotonic() - failed_at
    orphans = alive(marker)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    return [Ended(process.wait(), _text(out), after, orphans) for process, out in jobs]


def _text(file: tempfile._TemporaryFileWrapper) -> str:  # type: ignore[type-arg]
    return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")


def alive(marker: str) -> list[int]:
    """Processes that run in the environment of a job."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_forked(main: Callable[[], None], world_size: int, *, timeout_seconds: float = 40.0) -> tuple[list[int], list[str]]:
    """Run ``main`` on forked ranks as if a launcher had started scripts: no supervision, exceptions reach ``sys.excepthook``.

    Returns exit codes (negative for a signal; -99 for a rank that had to be killed) and outputs, by rank.
    """
    port, files, pids = free_port(), [], []
    for rank in range(world_size):
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pid = os.fork()
        if pid == 0:
            _forked(main, rank, world_size, port=port, out=out.fileno())
        files.append(out)
        pids.append(pid)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(codes) < world_size:
        for rank, pid in enumerate(pids):
            if rank not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(status[1])
        if time.monotonic() > deadline:
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[rank] = -99
        time.sleep(0.02)
    return [codes[rank] for rank in range(world_size)], [_text(file) for file in files]


def run_agent(worker: Callable[[], None], folder: Path, *, num_nodes: int = 1, endpoint: str = "localhost:0") -> None:
    """Do what torchrun does on a machine of two ranks. Its workers are forked, which spares them the imports.

    What they write is in files named ``stdout.log`` and ``stderr.log`` below ``folder``; first their process id.
    """
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=2,
        max_restarts=0,  # torchrun's own default
        run_id="7",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
    )
    elastic_launch(config, _end_with_agent)(worker)


def _end_with_agent(worker: Callable[[], None]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: an agent that is killed leaves nothing behind
    print(f"pid={os.getpid()}", flush=True)
    worker()


def _forked(main: Callable[[], None], rank: int, world_size: int, *, port: int, out: int) -> None:
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.excepthook = sys.__excepthook__
    os.environ.update(environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 0
    try:
        main()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)
