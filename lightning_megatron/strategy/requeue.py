"""A SLURM job that is to be requeued saves between two batches, on all ranks.

Note [Not in the signal handler]
Lightning's handler saves where the signal finds each rank, in the middle of a collective perhaps, and ranks get it at
different moments. Ours sets a flag. At the start of a batch the ranks agree whether one of them has got the signal, and save
together.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

from lightning_megatron.comm import all_reduce
from lightning_megatron.mesh import Mesh
from lightning_megatron.strategy.failure import say


class RequeueWatch:
    """Takes the place of Lightning's handler of the signal that SLURM sends before the time is up.

    Lightning puts back what was there before when the Trainer is done.

    Args:
        number: the signal.
        mesh: the running layout.
    """

    def __init__(self, number: int, mesh: Mesh) -> None:
        self._mesh, self._received = mesh, False
        signal.signal(number, self._receive)

    @classmethod
    def of(cls, environment: Any, mesh: Mesh) -> RequeueWatch | None:
        """A watch, if this is a SLURM job that Lightning would requeue; a handler of the user's stays."""
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue or environment.requeue_signal is None:
            return None
        here = signal.getsignal(environment.requeue_signal)
        if threading.current_thread() is not threading.main_thread() or not isinstance(here, _HandlersCompose):
            return None
        return cls(int(environment.requeue_signal), mesh)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def is_due(self) -> bool:
        """Whether a rank has got the signal since the last call, the same on all ranks. Collective, over host memory."""
        received, self._received = self._received, False
        return bool(all_reduce(torch.tensor(int(received)), self._mesh.world))


def save_for_requeue(trainer: Trainer) -> None:
    """Write ``hpc_ckpt_<n>.ckpt``, which a requeued job finds by itself. All ranks call it together."""
    for logger in trainer.loggers:
        logger.finalize("finished")
    path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
    trainer.save_checkpoint(trainer.strategy.broadcast(path))


def requeue() -> None:
    """Ask SLURM to run this job again. One rank calls it."""
    job = os.environ["SLURM_JOB_ID"]
    if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"[0-9_-]+", job):
        raise RuntimeError(f"SLURM calls this job {job!r}, which is no number; it is not requeued.")
    try:
        failed: int | OSError = subprocess.run(["scontrol", "requeue", job], check=False).returncode
    except OSError as error:  # the checkpoint is there, and the job may run on until its time is up
        failed = error
    say(f"SLURM job {job}: " + (f"scontrol requeue failed ({failed})" if failed else "requeued"))
