"""Run a function on N ranks in a test: forked, on gloo, with a time limit, tracebacks passed up and no process left behind.

Note [Fork per test]
A rank is forked from a parent that has already imported torch, which costs a few hundredths of a second, against seconds
for a spawned one. Closures and fixtures need no pickling. The parent must hold no process group and must not have run a
multi-threaded OpenMP region: set ``OMP_NUM_THREADS=1`` before torch is imported (a ``conftest.py`` is the place).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_GRACE_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def run_distributed(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    collective_timeout_seconds: float = 20.0,
    init_process_group: bool = True,
) -> list[T]:
    """Call ``fn(*args)`` on ``world_size`` forked ranks and return what each returned, in rank order.

    Args:
        fn: any callable, closures included. What it returns must be picklable.
        world_size: number of ranks.
        args: passed to ``fn``.
        timeout_seconds: after this the ranks are killed and the stacks of all threads that still ran are reported.
        collective_timeout_seconds: limit of each collective; a mismatch fails after it instead of hanging.
        init_process_group: start gloo on a file store before ``fn`` (Lightning reuses the group that it finds).

    Raises:
        AssertionError: a rank raised, died or did not finish; the message holds the tracebacks, root cause first.
    """
    context = multiprocessing.get_context("fork")
    folder = tempfile.mkdtemp(prefix="lightning_megatron_")
    processes, pending = [], {}
    for rank in range(world_size):
        receiver, sender = context.Pipe()
        job = _Job(rank, world_size, folder, collective_timeout_seconds if init_process_group else None)
        process = context.Process(target=_child, args=(job, sender, fn, args))
        process.start()
        sender.close()
        processes.append(process)
        pending[receiver] = rank
    results, errors = _collect(pending, processes, folder, world_size, timeout_seconds)
    for process in processes:
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()
    shutil.rmtree(folder, ignore_errors=True)
    if errors:
        raise AssertionError("\n".join(sorted(errors.values(), key=lambda text: "gloo" in text)))
    return results


@dataclass(frozen=True)
class _Job:
    rank: int
    world_size: int
    folder: str
    collective_timeout_seconds: float | None


def _collect(
    pending: dict[Any, int], processes: list[Any], folder: str, world_size: int, timeout_seconds: float
) -> tuple[list[Any], dict[int, str]]:
    results: list[Any] = [None] * world_size
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout_seconds
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            rank = pending.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join()
                succeeded, value = False, f"--- rank {rank} died, exit code {processes[rank].exitcode} ---"
            if succeeded:
                results[rank] = value
            else:
                errors[rank] = value
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for connection in pending:
        _ask_for_stacks(connection)
    time.sleep(0.3 if pending else 0.0)
    for rank in pending.values():
        stacks = Path(folder, f"stacks{rank}")
        errors[rank] = f"--- rank {rank} still running ---\n" + (stacks.read_text() if stacks.exists() else "(no stacks)")
    return results, errors


def _ask_for_stacks(connection: Any) -> None:
    with suppress(OSError):
        connection.send_bytes(b"stacks")


def _answer_with_stacks(connection: Connection, path: str) -> None:
    """Wait to be asked, on a thread: a signal would not do, since Lightning resets them all when a Trainer is done."""
    with suppress(EOFError, OSError):
        connection.recv_bytes()
        with open(path, "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)


def _child(job: _Job, connection: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # a collection would write to every page that is shared with the parent
    os.setpgrp()  # its own group, so that its DataLoader workers are killed with it
    stacks = (connection, f"{job.folder}/stacks{job.rank}")
    threading.Thread(target=_answer_with_stacks, args=stacks, daemon=True, name="stacks").start()
    _set_environment(job)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    exit_code = 1
    try:
        if job.collective_timeout_seconds is not None:
            _init_gloo(job)
        result = pickle.dumps((True, fn(*args)))
        if dist.is_initialized():
            dist.barrier()  # a rank that exits early closes sockets that its peers still use
        connection.send_bytes(result)
        exit_code = 0
    except BaseException:
        connection.send_bytes(pickle.dumps((False, f"--- rank {job.rank} ---\n{traceback.format_exc()}")))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # skip the parent's atexit handlers


def _set_environment(job: _Job) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_GLOO_LAZY_INIT="1",
    )


def _init_gloo(job: _Job) -> None:
    assert job.collective_timeout_seconds is not None
    timeout = timedelta(seconds=job.collective_timeout_seconds)
    dist.distributed_c10d.default_pg_timeout = timeout  # new groups do not inherit it
    store = dist.FileStore(f"{job.folder}/store", job.world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout)
