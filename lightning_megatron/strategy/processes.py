"""Processes, process groups and collectives of the strategy: everything that needs no model."""

from __future__ import annotations

import atexit
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _destroy_dist_connection, _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_megatron.comm import all_gather_from, all_reduce
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.strategy.failure import FailureWatch, describe, end_if_uncaught, end_process, say
from lightning_megatron.strategy.finetuning import refuse_finetuning
from lightning_megatron.strategy.launchers import CopyLauncher, ScriptLauncher
from lightning_megatron.strategy.optimizers import check_backward
from lightning_megatron.strategy.options import check_devices, check_module, check_plugins, check_process_group, check_trainer


class ProcessesStrategy(ParallelStrategy):
    """Starts the ranks, makes the mesh, and says which ranks each of Lightning's collectives means.

    Args:
        parallelism: the layout.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer unless given.
        precision_plugin: set by the Trainer unless given.
        start_method: ``popen``, ``spawn`` or ``fork``.
        timeout: limit of each collective.
    """

    def __init__(
        self,
        parallelism: Parallelism,
        *,
        accelerator: Any | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        precision_plugin: Precision | None,
        start_method: str,
        timeout: timedelta,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
        )
        self.parallelism, self._start_method, self._timeout = parallelism, start_method, timeout
        self._num_nodes = 1
        self._mesh: Mesh | None = None
        self._watch: FailureWatch | None = None
        self._alone: bool | None = None

    @property
    def mesh(self) -> Mesh:
        """The job's axes as seen from this rank; there once the Trainer has started."""
        if self._mesh is None:
            raise RuntimeError("strategy.mesh is there only after trainer.fit, validate, test or predict has started.")
        return self._mesh

    @property
    def dp_size(self) -> int:
        """Model replicas, each reading its own share of the data."""
        return self.parallelism.data_parallel_size(self.world_size)

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.parallelism.coordinate(self.global_rank, self.world_size)["dp"]

    is_distributed = True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def num_nodes(self) -> int:
        """Machines in the job."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on each machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # The Trainer is being constructed: no process has been started, so a wrong layout is one message.
        check_plugins(self._checkpoint_io, self._layer_sync)
        check_devices(self.cluster_environment, self.num_processes, self.num_nodes)
        self.parallelism.data_parallel_size(self.world_size)
        if self.cluster_environment.creates_processes_externally or self._start_method == "popen":
            self._launcher = ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes, check=self._check_before_launch
            )
        else:
            self._launcher = CopyLauncher(
                self,
                self._start_method,  # type: ignore[arg-type]
                check=self._check_before_launch,
                full_state=self.full_state_dict,
            )

    def full_state_dict(self) -> dict[str, Tensor]:
        """The complete unsharded state: global name -> CPU tensor. Every rank calls it together and gets all of it."""
        raise NotImplementedError

    def _check_before_launch(self, trainer: Trainer | None) -> None:
        if trainer is not None:
            check_trainer(trainer, self.parallelism)
            refuse_finetuning(trainer)
        if self.lightning_module is not None:
            check_module(self.lightning_module, self.parallelism)
            if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
                check_backward(self.lightning_module)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers which rank this is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  (mypy does not know the attribute)

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if self._mesh is None:
            self._connect()
        if self._watch is None and dist.is_initialized() and self.world_size > 1:
            self._watch = FailureWatch(self.mesh.coordinate, self.world_size, end_process=self._end_process)
        if self._watch is not None:
            self._watch.start(self.broadcast(uuid.uuid4().hex))
        self._alone = None

    def _connect(self) -> None:
        """Make the process groups."""
        assert self.cluster_environment is not None
        on_gpu = self.root_device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        kwargs: dict[str, Any] = {"device_id": self.root_device} if on_gpu else {}
        if not dist.is_initialized():
            # Groups that are still there when the interpreter ends can abort the process: their threads are not joined.
            atexit.register(_destroy_dist_connection)
        check_process_group(self.world_size)
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, **kwargs)
        self._mesh = Mesh.create(self.parallelism, device=self.root_device, timeout=self._timeout)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Say which rank failed, and let the others know; an exception that nobody catches then ends the process at once."""
        where = self._mesh.coordinate if self._mesh is not None else f"[rank={self.global_rank}]"
        first = self._watch.report(exception) if self._watch is not None and self._watch.is_running else None
        if first is None:
            say(describe(exception, where))
        if self.world_size > 1:
            after = f"{describe(exception, where)}\n{where} comes after a peer's failure: {first}"
            end_if_uncaught(exception, summary=None if first is None else after, end_process=self._end_process)

    def _end_process(self) -> None:
        launcher = self._launcher
        end_process(launcher.procs if isinstance(launcher, ScriptLauncher) else ())

    @property
    def _is_interrupted(self) -> bool:
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def is_alone(self) -> bool:
        """Whether an exception has stopped this rank and not all others: no collective may start then.

        The first call after an exception waits some seconds for the other ranks.
        """
        if self._watch is None or not self._is_interrupted:
            return False
        if self._alone is None:
            self._alone = not self._watch.all_interrupted()
        return self._alone

    def _leave_together(self) -> None:
        """End the watch over a run: when all ranks are done, or at once after an exception."""
        if self._watch is not None and self._watch.is_running:
            if not self._is_interrupted:
                self.barrier("teardown")  # until then a peer that is gone has failed
            self._watch.stop()

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and not self.is_alone:
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or self.is_alone:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, device=torch.device("cpu"))
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the data-parallel replicas unless a group is given: what Lightning's metrics mean by all ranks."""
        if not isinstance(tensor, Tensor):
            return tensor
        if self.is_alone:
            return tensor
        axis = self._axis(group)
        name = str(reduce_op).rsplit(".", 1)[-1].lower() if reduce_op is not None else "sum"
        if name in ("mean", "avg"):
            tensor = tensor if tensor.is_floating_point() else tensor.float()
            return all_reduce(tensor.to(self.root_device), axis) / axis.size
        return all_reduce(tensor.to(self.root_device), axis, getattr(dist.ReduceOp, name.upper()))

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data-parallel replicas unless another group is given: ``[...] -> [replicas, ...]``."""
        axis = self._axis(None if group is dist.group.WORLD else group)
        stacked = tensor.to(self.root_device).unsqueeze(0)
        gathered = all_gather_from(stacked, axis, 0)
        return gathered if sync_grads else gathered.detach()

    def _axis(self, group: Any | None) -> Axis:
        if group is None or self._mesh is None:
            return self.mesh.dp_cp
        ranks = tuple(dist.get_process_group_ranks(group))
        return Axis("group", ranks, ranks.index(self.mesh.rank), group if len(ranks) > 1 else None)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.is_alone:
            return decision
        total = all_reduce(torch.tensor(int(decision), device=self.root_device), self.mesh.world)
        return bool(total == self.mesh.world_size) if all else bool(total)
