"""Lightning's launchers, with every check made before a process starts, and failures of started processes seen to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_megatron.initialize import load_unsharded
from lightning_megatron.strategy.failure import ChildWatch, end_process

Check = Callable[[Trainer | None], None]


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script once for each rank of this machine, unless torchrun, SLURM or another launcher has done so.

    Args:
        cluster_environment: who this process is in the job.
        num_processes: ranks on this machine.
        num_nodes: machines.
        check: refuses what cannot run, before a process is started.
    """

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int, *, check: Check) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self._check(trainer)
        alone = self.num_processes == self.num_nodes == 1
        if not self.cluster_environment.creates_processes_externally and not alone:
            self._call_children_scripts()
            # Instead of Lightning's observer, which kills this process before it can say what happened.
            ChildWatch(self.procs, end_process=self.end_process).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def end_process(self) -> None:
        """End this process and those that it has started."""
        end_process(self.procs)


class CopyLauncher(_MultiProcessingLauncher):
    """Starts the ranks as copies of this process, and brings the whole trained model back into it.

    Args:
        strategy: what is launched.
        start_method: ``fork`` or ``spawn``.
        check: refuses what cannot run, before a process is started.
        full_state: the unsharded state on every rank of a running job.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["fork", "spawn"],
        *,
        check: Check,
        full_state: Callable[[], dict[str, Tensor]],
    ) -> None:
        super().__init__(strategy, start_method)
        self._check, self._full_state = check, full_state

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self._check(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        fitted = trainer.state.fn == TrainerFn.FITTING
        state = self._full_state() if fitted else None
        self._strategy.barrier()  # a process that ends early closes connections that its peers still use
        output = super()._collect_rank_zero_results(trainer, results)
        if output is not None and output.weights_path is not None:
            torch.save(state, output.weights_path)  # in place of rank 0's own shards
        return output

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        path = worker_output.weights_path
        if path is not None:
            state = torch.load(path, weights_only=True)
            shutil.rmtree(Path(path).parent)
            _bring_back(state, trainer.lightning_module)
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)


def _bring_back(state: dict[str, Tensor], module: LightningModule) -> None:
    load_unsharded(module, state, strict=False)
    lost = sorted(set(state) - set(module.state_dict()))
    if lost:
        rank_zero_warn(
            f"{len(lost)} of {len(state)} trained tensors ({lost[0]}, ...) stayed in the processes that have ended: "
            f"{type(module).__name__} builds them in configure_model, which has not run in this process. Give the next call "
            f"ckpt_path=..., or read the weights from a checkpoint."
        )
