"""``Trainer(strategy=MegatronStrategy(tp=4, pp=2))``."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron.checkpoint import CheckpointConfig
from lightning_megatron.comm import all_reduce
from lightning_megatron.context_parallel.block import Kernel
from lightning_megatron.kernels.products import set_products
from lightning_megatron.kernels.tuned_products import products_of
from lightning_megatron.layers.backend import Backend
from lightning_megatron.layers.choice import BackendName, choose_backend, use_backend
from lightning_megatron.layers.graphs import release_graphs
from lightning_megatron.layers.recompute import Recompute
from lightning_megatron.mesh import DEFAULT_TIMEOUT, use_mesh
from lightning_megatron.metrics import MetricSync
from lightning_megatron.optim.distributed import DistributedOptimizerConfig
from lightning_megatron.parallelism import DEFAULT_ORDER, ContextComm, Parallelism
from lightning_megatron.pipeline.choice import Maker, frozen, style_for
from lightning_megatron.pipeline.partition import parse_layout
from lightning_megatron.pipeline.schedule import Action
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.sequence_batch import ShardBatch
from lightning_megatron.step import TrainingEngine
from lightning_megatron.strategy import loaders, options
from lightning_megatron.strategy.environment import set_environment
from lightning_megatron.strategy.evaluation import EvaluatingStrategy
from lightning_megatron.strategy.full_state import full_state_dict
from lightning_megatron.strategy.garbage import GarbageCollection
from lightning_megatron.strategy.num_batches import same_num_batches
from lightning_megatron.strategy.prepare import PreparedModule
from lightning_megatron.strategy.report import print_layout


class MegatronStrategy(EvaluatingStrategy):
    """Train a LightningModule under tensor, sequence, context, pipeline and ZeRO-1 data parallelism.

    What is left of the world after ``tp * cp * pp`` are data-parallel replicas.

    Args:
        tp: ranks over which each weight matrix of a tensor-parallel model is cut.
        pp: ranks over which the layers are cut; the module's model must then be a ``PipelineModel``.
        cp: ranks over which each sequence is cut: attention over long contexts, see docs/context-parallelism.md.
        vpp: pipeline stages on each rank; 2 and more run the interleaved schedule.
        ep: ranks over which experts are spread. Only 1 in this version.
        etp: ranks over which one expert's matrices are cut. Only 1 in this version.
        micro_batch_size: samples in a micro-batch. By default 1 with ``pp > 1`` and the whole batch otherwise.
        num_microbatches: micro-batches in a batch, instead of their size.
        cp_comm: how attention reaches over the cuts: ``p2p`` (ring), ``all_gather``, ``a2a`` (heads against tokens) or
            ``a2a+p2p`` (that among ``cp_a2a`` neighbouring ranks, a ring across).
        cp_a2a: see ``cp_comm``.
        cp_kernel: whose attention over cut sequences: ``torch`` for this project's, ``te`` for Transformer Engine's.
        shard_batch: ``(batch, cut) -> batch``, cuts a micro-batch over cp: see ``sequence_batch.SequenceCut``. A module's
            method of this name does the same. By default every tensor whose dim 1 is the sequence length is cut.
        sequence_parallel: cut activations between tensor-parallel blocks along the sequence (with ``tp > 1``).
        tp_overlap: pieces of products beside their communication over tp. See docs/performance.md.
        schedule: ``1f1b``, ``interleaved`` (``vpp > 1``), ``gpipe``, ``zbh1``, ``zbv`` (``vpp=2``), or ``auto``, which says
            on rank 0 what it picked and why (pipeline/choice.py); a function ``(rank, placement, num_microbatches) ->
            list[Action]``, or such a list for each rank, is simulated before it runs.
        pipeline_layout: layers of each pipeline stage (``pp * vpp`` numbers, zeros allowed) as a list or a string,
            ``"5,8,8,7"`` or ``"4,7*2,4"`` for 4,7,7,4; ``"auto"`` to split by cost, head included; by default evenly.
        order: axes over ranks, the fastest first.
        backend: what our models' layers are built of: ``te`` for Transformer Engine, ``torch`` for plain torch with this
            project's kernels, ``auto`` for Transformer Engine with FP8 and plain torch without. See docs/precision.md.
        attention_kernel: whose attention in 16 bits: ``cudnn``, ``flash`` (torch's), ``flash_attn`` (the package), ``math``, or
            ``auto`` for the fastest of torch's.
        plan: how to cut a model of plain ``nn.Linear`` layers. Only ``None`` in this version.
        recompute: activations that the backward computes again: ``full`` (each layer), ``selective`` (norms and activations
            of feed-forward blocks), a list of names (``norm``, ``mlp_act``, ``attention_core``, ``mlp``, ``layer``, patterns
            such as ``layers.*.mlp``), or ``Recompute("full", every=2)`` for every n-th layer. See docs/memory.md.
        offload_activations: what layers save for the backward waits in host memory.
        cuda_graphs: layers of our models run as CUDA graphs, for models that the host holds up. See docs/performance.md.
        compile_pointwise: ``torch.compile`` fuses what this project has no kernels for. See docs/performance.md.
        tune_products: time cuBLASLt's algorithms first, then use the fastest; a path: of a file that keeps them. See the same.
        gc_interval_steps: optimizer steps between garbage collections, on all ranks at once; ``None`` leaves them to Python.
        optimizer: how gradients are laid out and reduced.
        checkpoint: how checkpoints are written and read: ``CheckpointConfig(async_save=True)`` writes beside the training.
        start_method: how processes start on one machine: ``popen`` runs the script once for each rank, ``spawn`` and
            ``fork`` start copies of the current process (for notebooks and tests).
        timeout: limit of each collective; a rank that waits longer fails.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer unless given: torchrun, SLURM, LSF, ...
        precision_plugin: a ``MegatronPrecision``; by default translated from ``Trainer(precision=...)``.

    Raises:
        ValueError: sizes or options that do not fit, before any process starts.
    """

    strategy_name = "megatron"

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        vpp: int = 1,
        ep: int = 1,
        etp: int = 1,
        *,
        micro_batch_size: int | None = None,
        num_microbatches: int | None = None,
        cp_comm: ContextComm = "p2p",
        cp_a2a: int | None = None,
        cp_kernel: Literal["torch", "te"] = "torch",
        shard_batch: ShardBatch | None = None,
        sequence_parallel: bool = True,
        tp_overlap: int = 1,
        schedule: Literal["auto", "1f1b", "interleaved", "gpipe", "zbh1", "zbv"] | Maker | list[list[Action]] = "auto",
        pipeline_layout: list[int] | str | None = None,
        order: str = DEFAULT_ORDER,
        backend: BackendName = "auto",
        attention_kernel: Kernel = "auto",
        plan: dict[str, str] | None = None,
        recompute: str | list[str] | Recompute | None = None,
        offload_activations: bool = False,
        cuda_graphs: bool = False,
        compile_pointwise: bool = False,
        tune_products: bool | str = False,
        gc_interval_steps: int | None = 100,
        optimizer: DistributedOptimizerConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        timeout: timedelta = DEFAULT_TIMEOUT,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        layers: dict[str, Any] = {"name": backend, "compiles": compile_pointwise, "attention_kernel": attention_kernel}
        self._take_model_options(layers, plan, tunes=tune_products)
        self._schedule = frozen(schedule)
        sizes: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "ep": ep, "etp": etp}
        sequence: dict[str, Any] = {"sequence_parallel": sequence_parallel, "tp_overlap": tp_overlap}
        sequence |= {"cp_comm": cp_comm, "cp_a2a": cp_a2a, "cp_kernel": cp_kernel}
        placement = style_for(self._schedule, pp, vpp, num_microbatches)
        stages = parse_layout(pipeline_layout)
        parallelism = Parallelism(**sizes, **sequence, order=order, pipeline_layout=stages, placement=placement)
        super().__init__(
            parallelism,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            start_method=start_method,
            timeout=timeout,
        )
        self._activations = options.activation_options(parallelism, recompute, offload=offload_activations, graphs=cuda_graphs)
        self._take_batch_options(micro_batch_size, num_microbatches, shard_batch=shard_batch)
        self._take_training_options(optimizer, checkpoint, gc_interval_steps=gc_interval_steps)

    def _take_model_options(self, layers: dict[str, Any], plan: dict[str, str] | None, *, tunes: bool | str) -> None:
        """What layers are built of and multiply by."""
        options.refuse_names(backend=layers["name"], attention_kernel=layers["attention_kernel"], plan=plan)
        self._tune_products, self._wanted_backend = tunes, layers
        self._backend: Backend | None = None

    def _take_batch_options(
        self, micro_batch_size: int | None, num_microbatches: int | None, *, shard_batch: ShardBatch | None
    ) -> None:
        """How a batch is cut, checked with the layout; with pp > 1 into single samples, unless something is given."""
        numbers = {"micro_batch_size": micro_batch_size, "num_microbatches": num_microbatches}
        options.check_options(self.parallelism, schedule=self._schedule, **numbers)
        whole = num_microbatches is not None or self.parallelism.pp == 1
        self._micro_batch_size = micro_batch_size if micro_batch_size is not None or whole else 1
        self._num_microbatches = num_microbatches
        self._shard_batch = shard_batch
        self._own_sampler: bool | None = None

    def _take_training_options(
        self,
        optimizer: DistributedOptimizerConfig | None,
        checkpoint: CheckpointConfig | None,
        *,
        gc_interval_steps: int | None,
    ) -> None:
        """What happens around the steps."""
        self._garbage = GarbageCollection(gc_interval_steps)
        self._optimizer_config = optimizer or DistributedOptimizerConfig()
        self._checkpoint_config = CheckpointConfig.of(checkpoint)
        self._environment: str | None = None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._environment = set_environment(self.parallelism, self.root_device)

    # What users and callbacks may ask for

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage. Global rank 0 does."""
        return self.mesh.pp.is_first if self.parallelism.placement == "v" else self.mesh.pp.is_last

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last step's gradients before clipping (0-dim, on the device), every parameter counted once."""
        norms = [optimizer.grad_norm for optimizer in self._distributed]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    @override
    def full_state_dict(self) -> dict[str, Tensor]:
        """The complete unsharded state: global name -> CPU tensor. Every rank calls it together and gets all of it."""
        with self._wide_parameters():
            return full_state_dict(self._ready)

    # Set-up of model, optimizers, data

    @override
    def model_to_device(self) -> None:
        """Parameters are made on the device, see ``strategy/prepare.py``."""

    @property
    @override
    def precision_plugin(self) -> MegatronPrecision:
        if not isinstance(self._precision_plugin, MegatronPrecision):
            self._precision_plugin = MegatronPrecision.from_lightning(self._precision_plugin or Precision())
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else MegatronPrecision.from_lightning(precision_plugin)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build what the user builds as it always is, on the host; models of ours build themselves on the meta device."""
        yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        assert self._backend is not None
        with use_mesh(self.mesh), use_backend(self._backend):
            yield

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        precision = self.precision_plugin
        self._backend = choose_backend(  # before anything runs on the GPU: it loads a library
            **self._wanted_backend, device=self.root_device, dtype=precision.param_dtype, fp8=precision.fp8
        )
        options.check_overlap(self.parallelism, self._backend)
        set_products(products_of(self._tune_products, self.root_device))
        earlier = PreparedModule.of(self.lightning_module)
        if earlier is not None and self._schedule == "auto":  # any placement will do
            self.parallelism = replace(self.parallelism, placement=earlier.mesh.parallelism.placement)
        if self._mesh is None and earlier is not None and earlier.fits(self.parallelism, device=self.root_device):
            self._mesh = earlier.mesh
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        options.check_trainer(trainer, self.parallelism, self.precision_plugin.fp8)
        module = self.lightning_module
        if self._prepared is None or self._prepared.module is not module:
            self._prepare(module)
        assert self._metrics is not None
        self._metrics.apply()
        loaders.share_generator_states(self.mesh)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop):
            loop.inference_mode = False
        # Lightning's own sampler shuffles in training whatever the user's loader did; see process_dataloader.
        connector = trainer._accelerator_connector
        if self._own_sampler is None:
            self._own_sampler = connector.use_distributed_sampler
        connector.use_distributed_sampler = self._own_sampler and trainer.state.fn == TrainerFn.PREDICTING
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _prepare(self, module: LightningModule) -> None:
        precision = self.precision_plugin
        seed = self.broadcast(_job_seed())
        earlier = PreparedModule.of(module)
        earlier = earlier if earlier is not None and earlier.mesh is self.mesh else None
        options.check_fp8(module, precision.fp8, None if earlier is None else earlier.scales)
        if earlier is not None:
            earlier.renew(convert=precision.convert_module, context=precision.forward_context, **self._activations)
            self._prepared = earlier
        else:
            self._prepared = PreparedModule(
                module,
                self.mesh,
                convert=precision.convert_module,
                context=precision.forward_context,
                seed=seed,
                **self._activations,
            )
            print_layout(self._prepared, Console())
            if self._environment is not None and self.is_global_zero:
                Console().print(self._environment, highlight=False)
        precision.use_scales(
            self._prepared.scales, partial(all_reduce, axis=self.mesh.world, op=ReduceOp.MAX), self.root_device
        )
        self._metrics = MetricSync(module, mesh=self.mesh, last_stage_rank=self._prepared.placement.last_rank)
        self._engine = TrainingEngine(
            module,
            self.mesh,
            placement=self._prepared.placement,
            executor=self._prepared.executor,
            metrics=self._metrics,
            seed=seed,
            schedule=self._schedule,
            micro_batch_size=self._micro_batch_size,
            num_microbatches=self._num_microbatches,
            shard_batch=self._shard_batch,
        )
        self._seed = seed

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if isinstance(dataloader, DataLoader):
            if self._own_sampler and trainer.state.fn != TrainerFn.PREDICTING:
                dataloader = loaders.shard_over_replicas(dataloader, trainer, mesh=self.mesh, seed=self._seed)
            loaders.seed_workers_by_replica(dataloader, self.mesh)
            if trainer.training:
                self._check_num_microbatches(dataloader)
        if trainer.training:
            dataloader = loaders.with_position(dataloader, trainer, mesh=self.mesh, seed=self._seed)
        return same_num_batches(dataloader, trainer, mesh=self.mesh)

    def _check_num_microbatches(self, loader: DataLoader[Any]) -> None:
        """Refuse batches that an interleaved schedule cannot run; short last ones may be, see ``schedule_for``."""
        batch_size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
        size = self._micro_batch_size
        if batch_size is not None and size is not None:
            options.check_num_microbatches(self._schedule, self._ready.placement, batch_size=batch_size, micro_batch_size=size)

    # Ends

    @override
    def teardown(self) -> None:
        """Leave model and process groups in place: hooks still use both, and flat buffers must not move to the host."""
        self._garbage.stop()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._end_saving()
        self._leave_together()
        if self.lightning_module is not None:
            release_graphs(self.lightning_module)
        if self._metrics is not None:
            self._metrics.restore()
        if self._own_sampler is not None and self.lightning_module is not None and self.lightning_module._trainer is not None:
            self.lightning_module.trainer._accelerator_connector.use_distributed_sampler = self._own_sampler
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _job_seed() -> int:
    """The seed of ``seed_everything``, or what torch's generator was seeded with."""
    seed = os.environ.get("PL_GLOBAL_SEED")
    return int(seed) if seed is not None else torch.initial_seed()
