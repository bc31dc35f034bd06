"""Shared test set-up: one thread for each process, and everything imported before ranks are forked.

Note [Batch scheduling]
Ranks outnumber cores. A thread of gloo that wakes a peer by what it sends is then often preempted by it while it holds the
lock of its connection, and the loop of that connection polls in vain for the lock until its time slice ends: a third of all
system time. A process in the batch class does not preempt another when it wakes; ranks inherit the class.
"""

import gc
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


class Frozen:
    """Whether objects are frozen, without counting them.

    Python counts by a walk over all of them, and a rank has half a million from its parent: a tenth of the time of all ranks.
    """

    def __init__(self) -> None:
        self._freeze, self._unfreeze, self._count = gc.freeze, gc.unfreeze, gc.get_freeze_count()
        gc.freeze, gc.unfreeze, gc.get_freeze_count = self.freeze, self.unfreeze, lambda: self._count

    def freeze(self) -> None:
        self._freeze()
        self._count = 1

    def unfreeze(self) -> None:
        self._unfreeze()
        self._count = 0


Frozen()


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Put environment variables back after each test: a seed that one leaves behind would seed the ranks of the next."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
