"""One rank failing ends the job, with its error in sight.

Note [How a failure travels]
A rank that waits for a failed peer may wait long: NCCL until its watchdog, gloo for as long as the peer's process lives.
So failures travel through the job's key-value store, beside all collectives. The first rank to fail writes what happened;
a thread on every other rank reads it there, gives the main thread a moment to come to an end by itself, and then ends the
process. An uncaught exception ends its process without the interpreter's clean-up, which could wait for peers as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""What a rank gets to end by itself once a peer has failed."""
GATHER_SECONDS = 8.0
"""How long a rank that was interrupted waits to see whether all others were, too."""

_MAX_TEXT = 4096
_LOST = "the process that holds the job's store is gone"


class FailureWatch:
    """Tells every rank of a job when one has failed.

    Args:
        coordinate: where this rank stands, for messages: ``[pp=1 tp=0]``.
        world_size: ranks in the job.
        end_process: ends this process, and what it has started, at once.
    """

    def __init__(self, coordinate: str, world_size: int, *, end_process: Callable[[], None]) -> None:
        self._coordinate, self._world_size, self._end_process = coordinate, world_size, end_process
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._run = ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: str | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread is watching."""
        return self._thread is not None

    def start(self, run: str) -> None:
        """Watch one run of the Trainer.

        Args:
            run: a name that all ranks share and no earlier run of the job has had: what those left in the store stays unread.
        """
        self.stop()
        self._run, self._seen, self._stopped = run, None, threading.Event()
        # A client of its own: another thread may block on the one that torch uses.
        arguments = (self._store.clone(), self._key("failed"), self._stopped)
        self._thread = threading.Thread(target=self._watch, args=arguments, daemon=True, name="failure-watch")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and wait for the thread: it must not run when the interpreter shuts down."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def report(self, exception: BaseException) -> str | None:
        """Write down that this rank has failed. Returns what the first to fail wrote, ``None`` if that is this rank."""
        text = describe(exception, self._coordinate)[:_MAX_TEXT]
        try:
            first: str = self._store.compare_set(self._key("failed"), "", text).decode(errors="replace")
        except RuntimeError:
            return self._seen or _LOST
        return None if first == text else first

    def all_interrupted(self) -> bool:
        """Whether every rank comes here within ``GATHER_SECONDS``: only then can they still do something together."""
        key, deadline = self._key("interrupted"), time.monotonic() + GATHER_SECONDS
        try:
            self._store.add(key, 1)
            while (arrived := self._store.add(key, 0)) < self._world_size and time.monotonic() < deadline:
                time.sleep(0.1)
        except RuntimeError:
            return False
        return bool(arrived >= self._world_size)

    def _key(self, name: str) -> str:
        return f"lightning_megatron/{name}/{self._run}"

    def _watch(self, store: Any, key: str, stopped: threading.Event) -> None:
        while self._seen is None and not stopped.wait(POLL_SECONDS):
            self._seen = _read(store, key)
        if self._seen is not None and not stopped.wait(GRACE_SECONDS):
            say(f"{self._coordinate} is ended, because a peer failed: {self._seen}")
            self._end_process()


def _read(store: Any, key: str) -> str | None:
    try:
        return store.get(key).decode(errors="replace") if store.check([key]) else None
    except RuntimeError:
        return _LOST


class ChildWatch(threading.Thread):
    """Ends the first process of a machine when one that it has started fails.

    Args:
        children: processes of local ranks 1, 2, ...
        end_process: ends this process and its children at once.
    """

    def __init__(self, children: Sequence[subprocess.Popen[Any]], *, end_process: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="child-watch")
        self._children, self._end_process = children, end_process

    def run(self) -> None:
        """Poll until all children have ended well, or one has not."""
        while any(child.poll() is None for child in self._children):
            if failed := [(rank, child) for rank, child in enumerate(self._children, 1) if child.poll()]:
                break
            time.sleep(POLL_SECONDS)
        else:
            failed = [(rank, child) for rank, child in enumerate(self._children, 1) if child.poll()]
        if failed:
            rank, child = failed[0]
            say(f"local rank {rank} (process {child.pid}) {_ending(child.returncode)}; the other ranks are ended.")
            time.sleep(GRACE_SECONDS)
            self._end_process()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the kernel does so when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def end_process(children: Sequence[subprocess.Popen[Any]]) -> None:
    """End this process with exit code 1, after the children, which get a moment to read what happened and end themselves."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(2 * POLL_SECONDS)  # peers may be reading the failure from a store that lives in this process
    deadline = time.monotonic() + 2 * GRACE_SECONDS
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in children:
        child.kill()
    os._exit(1)


def end_if_uncaught(exception: BaseException, *, summary: str | None, end_process: Callable[[], None]) -> None:
    """If this exception reaches the top of the program, print it and end the process at once.

    Args:
        exception: what has just failed; others are left to the hook that was there before.
        summary: printed instead of the traceback, for a failure that only follows another rank's.
        end_process: ends the process.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is not exception or summary is None:
            previous(kind, value, traceback)
        else:
            say(summary)
        if value is exception:
            end_process()

    sys.excepthook = hook


def describe(exception: BaseException, coordinate: str) -> str:
    """``[pp=1 tp=0] ValueError: message``; for a lost connection with what that usually means."""
    text = f"{coordinate} {type(exception).__name__}: {str(exception).removeprefix(coordinate).lstrip()}"
    if isinstance(exception, RuntimeError) and any(sign in text for sign in _LOST_CONNECTION):
        text += "\nA peer went away without a word: it was killed (out of memory?), or its error stands further up."
    return text


_LOST_CONNECTION = ("onnection closed by peer", "onnection reset by peer", "roken pipe")


def say(text: str) -> None:
    """Print to standard error, at once."""
    print(text, file=sys.stderr, flush=True)
