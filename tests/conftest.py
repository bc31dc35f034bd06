"""Shared test set-up: one thread for each process, and everything imported before ranks are forked.

Note [Batch scheduling]
Ranks outnumber cores. A thread of gloo that wakes a peer by what it sends is then often preempted by it while it holds the
lock of its connection, and the loop of that connection polls in vain for the lock until its time slice ends: a third of all
system time. A process in the batch class does not preempt another when it wakes; ranks inherit the class.
"""

import os
from contextlib import suppress

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
if hasattr(os, "SCHED_BATCH"):
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # Note [Batch scheduling]

from collections.abc import Iterator

import lightning  # noqa: F401  (imported once here, so that forked ranks do not pay for it)
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Put environment variables back after each test: a seed that one leaves behind would seed the ranks of the next."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
