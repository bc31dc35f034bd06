"""Checks of ``MegatronStrategy``'s arguments that need no process group: each failure is one readable message."""

from __future__ import annotations

import os
from itertools import product
from typing import Any, get_args

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_megatron.context_parallel.block import Kernel
from lightning_megatron.layers.backend import Backend
from lightning_megatron.layers.choice import BackendName
from lightning_megatron.layers.recompute import Recompute
from lightning_megatron.layers.te_backend import Fp8Options, Scales, TeBackend, scales_of
from lightning_megatron.layers.te_backend.attention import NarrowCoreAttention
from lightning_megatron.layers.te_backend.modules import NarrowHead
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.choice import Schedule, lists_for
from lightning_megatron.pipeline.model import PipelineModel, check_sharing
from lightning_megatron.pipeline.partition import layers_of_stages
from lightning_megatron.pipeline.schedule import Placement, schedule_for
from lightning_megatron.pipeline.simulate import ScheduleError
from lightning_megatron.pipeline.stage import check_pipeline_model

SCHEDULES = ("auto", "1f1b", "interleaved", "gpipe", "zbh1", "zbv")


def check_options(
    parallelism: Parallelism,
    *,
    schedule: Schedule,
    micro_batch_size: int | None,
    num_microbatches: int | None,
) -> None:
    """Refuse what cannot work, or does not work yet, by name.

    Raises:
        ValueError: with the numbers, the rule and the fix.
    """
    for name, capability in (("ep", "expert parallelism"), ("etp", "expert tensor parallelism")):
        if (size := getattr(parallelism, name)) != 1:
            raise ValueError(f"{name}={size}: {capability} is not there yet in this version; set {name}=1.")
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; use one of {', '.join(SCHEDULES)}, or lists of your own.")
    if schedule in ("1f1b", "zbh1") and parallelism.vpp > 1:
        raise ValueError(
            f"schedule={schedule!r} runs one stage a rank, but vpp={parallelism.vpp}; use 'interleaved' (or 'zbv' with vpp=2), "
            f"or set vpp=1."
        )
    if schedule == "zbv" and parallelism.vpp != 2:
        raise ValueError(f"schedule='zbv' runs two stages a rank, but vpp={parallelism.vpp}; set vpp=2 or use 'zbh1'.")
    if schedule == "interleaved" and parallelism.vpp == 1:
        raise ValueError("schedule='interleaved' needs vpp >= 2 stages a rank, but vpp=1; raise vpp or use '1f1b'.")
    if micro_batch_size is not None and num_microbatches is not None:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} and num_microbatches={num_microbatches} fix the same thing; give one of them."
        )
    for name, value in (("micro_batch_size", micro_batch_size), ("num_microbatches", num_microbatches)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be 1 or more.")
    if num_microbatches is not None:
        placement = Placement(parallelism.pp, parallelism.vpp, parallelism.placement)
        _check_schedule(schedule, placement, num_microbatches, f"num_microbatches={num_microbatches}")


def refuse_names(*, backend: str, attention_kernel: str, plan: object) -> None:
    """Refuse names that are unknown, and options whose capability is yet to come, unless they are neutral.

    Raises:
        ValueError: naming the option.
    """
    if backend not in get_args(BackendName):
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(get_args(BackendName))}.")
    if attention_kernel not in get_args(Kernel):
        raise ValueError(f"attention_kernel={attention_kernel!r} is unknown; use one of {', '.join(get_args(Kernel))}.")
    if plan is not None:
        raise ValueError(
            "plan=... is not there yet in this version: modules of plain nn.Linear layers stay whole on each tensor-parallel "
            "rank. Build the model from lightning_megatron.tensor_parallel layers, or leave plan=None."
        )


def check_overlap(parallelism: Parallelism, backend: Backend) -> None:
    """Check that the layers to be built can do what ``tp_overlap`` asks for.

    Raises:
        ValueError: they cannot.
    """
    options = backend.scales.options if isinstance(backend, TeBackend) and backend.scales is not None else None
    if parallelism.tp_overlap > 1 and parallelism.tp > 1 and options is not None and not options.is_per_tensor:
        raise ValueError(
            f"tp_overlap={parallelism.tp_overlap} does not go with fp8={options.recipe!r} in this version: pieces of a matrix "
            f"are multiplied by one factor that all of it has. Set tp_overlap=1, or fp8='delayed' or 'current'."
        )


def activation_options(
    parallelism: Parallelism, recompute: str | list[str] | Recompute | None, *, offload: bool, graphs: bool
) -> dict[str, Any]:
    """How layers keep what their backward needs, as ``PreparedModule`` takes it.

    Raises:
        ValueError: CUDA graphs do not go with another option, which is named; see also ``layers.graphs.graph_layers``.
    """
    for name in ("pp", "cp") if graphs else ():
        if (size := getattr(parallelism, name)) > 1:
            raise ValueError(
                f"cuda_graphs=True does not go with {name}={size} in this version: graphs hold one micro-batch between its "
                f"forward and its backward, and whole sequences. Set {name}=1 or cuda_graphs=False."
            )
    for name, value in (("recompute", recompute), ("offload_activations", offload)) if graphs else ():
        if value:
            raise ValueError(
                f"cuda_graphs=True does not go with {name}={value!r} in this version: graphs keep what layers save in memory "
                f"of their own. Leave out {name}, or set cuda_graphs=False."
            )
    return {"recomputed": Recompute.of(recompute), "offloads": offload, "graphs": graphs}


def check_fp8(module: LightningModule, fp8: Fp8Options | None, earlier: list[Scales] | None = None) -> None:
    """Check that a model has layers that multiply in 8 bits if that was asked for, in the way that was asked for.

    ``earlier``: the factors of all its layers, if it was prepared before, and cut to what this rank has of it.

    Raises:
        ValueError: it has not.
    """
    built = [scales.options for scales in (scales_of(module) if earlier is None else earlier)]
    if fp8 is not None and built != [fp8]:
        raise ValueError(
            f"fp8={fp8.recipe!r}: {type(module).__name__} has no layers that were built for it. Build a lightning_megatron "
            f"model in configure_model, for this Trainer; modules of your own stay in 16 bits."
        )
    if fp8 is not None and fp8.head and earlier is None:
        _check_narrow_head(module)
    if fp8 is not None and fp8.attention and earlier is None:
        _check_narrow_attention(module)
    if fp8 is None and built:
        raise ValueError(
            f"{type(module).__name__} was built by an earlier Trainer for fp8={built[0].recipe!r}; give this Trainer the same "
            f"precision, or make a new module and load the weights from a checkpoint."
        )


def _check_narrow_head(module: LightningModule) -> None:
    configs = [getattr(child, "config", None) for child in module.modules()]
    if any(isinstance(config, GPTConfig) and config.loss_chunks > 1 for config in configs):
        raise ValueError(
            "fp8_head=True multiplies all tokens at once, which loss_chunks > 1 is to avoid; give one of them: 8 bits take "
            "less time, chunks less memory."
        )
    if not any(isinstance(child, NarrowHead) for child in module.modules()):
        raise ValueError(
            f"fp8_head=True, but {type(module).__name__} has no head of its own: its logits come from the embedding, which "
            f"stays in 16 bits. Set tied_embeddings=False, or fp8_head=False."
        )


def _check_narrow_attention(module: LightningModule) -> None:
    configs = [getattr(child, "config", None) for child in module.modules()]
    cores = [child for child in module.modules() if isinstance(child, NarrowCoreAttention)]
    for config in (config for config in configs if isinstance(config, GPTConfig)):
        if config.sliding_window is not None or not config.causal:
            raise ValueError(
                f"fp8_attention=True is causal over whole rows, but sliding_window={config.sliding_window} and "
                f"causal={config.causal}; set fp8_attention=False for them."
            )
        for core in cores:
            core.check_head_dim(config.head_size)


def check_num_microbatches(schedule: Schedule, placement: Placement, *, batch_size: int, micro_batch_size: int) -> None:
    """Check that a schedule can run the micro-batches of a full batch.

    Raises:
        ValueError: it cannot; with the sizes.
    """
    number = -(-batch_size // micro_batch_size)
    _check_schedule(schedule, placement, number, f"batch_size={batch_size} / micro_batch_size={micro_batch_size}")


def _check_schedule(schedule: Schedule, placement: Placement, num_microbatches: int, origin: str) -> None:
    try:
        if isinstance(schedule, str):
            schedule_for(schedule, rank=0, placement=placement, num_microbatches=num_microbatches, strict=True)
        else:
            lists_for(schedule, placement, num_microbatches)
    except ScheduleError as error:
        raise ScheduleError(f"{origin}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{origin} does not fit the pipeline: {error}") from error


def check_devices(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
    """Check that the Trainer and the launcher that started this process mean the same ranks.

    Args:
        environment: who this process is in the job, by the launcher.
        num_processes: ranks on this machine, by ``Trainer(devices=...)``.
        num_nodes: machines, by ``Trainer(num_nodes=...)``.

    Raises:
        ValueError: with both counts.
    """
    if not environment.creates_processes_externally:
        return
    world_size, name = environment.world_size(), type(environment).__name__.removesuffix("Environment")
    if world_size != num_processes * num_nodes:
        raise ValueError(
            f"{name} started {world_size} ranks, but Trainer(devices={num_processes}, num_nodes={num_nodes}) means "
            f"{num_processes} * {num_nodes} = {num_processes * num_nodes}; set devices to the ranks on each machine and "
            f"num_nodes to the machines, so that their product is {world_size}."
        )
    local = os.environ.get("LOCAL_WORLD_SIZE") if isinstance(environment, TorchElasticEnvironment) else None
    if local is not None and int(local) != num_processes:
        raise ValueError(
            f"torchrun started {local} ranks on this machine (--nproc-per-node), but Trainer(devices={num_processes}, "
            f"num_nodes={num_nodes}) means {num_processes}; set devices={local} and num_nodes={world_size // int(local)}."
        )
    environment.validate_settings(num_devices=num_processes, num_nodes=num_nodes)  # SLURM: tasks on each node


def check_process_group(world_size: int) -> None:
    """Check that a process group which is there already has the ranks that the Trainer means.

    Raises:
        RuntimeError: it has not; with both counts.
    """
    if dist.is_initialized() and dist.get_world_size() != world_size:
        raise RuntimeError(
            f"this process is in a process group of {dist.get_world_size()} ranks already, from an earlier Trainer or from "
            f"your own code, but this Trainer means {world_size}; one process can be in one job: start a new one (restart the "
            f"notebook), or call torch.distributed.destroy_process_group() first."
        )


def check_plugins(checkpoint_io: object, layer_sync: object) -> None:
    """Refuse plugins that would be ignored.

    Args:
        checkpoint_io: what ``Trainer(plugins=...)`` brought, ``None`` if nothing.
        layer_sync: what ``Trainer(sync_batchnorm=True)`` brought.

    Raises:
        ValueError: naming the plugin.
    """
    if checkpoint_io is not None and type(checkpoint_io) is not TorchCheckpointIO:
        raise ValueError(
            f"{type(checkpoint_io).__name__} would be ignored: MegatronStrategy writes checkpoint directories itself, each "
            f"rank its own shards. Remove the plugin from Trainer(plugins=...)."
        )
    if layer_sync is not None:
        raise ValueError(
            f"sync_batchnorm=True ({type(layer_sync).__name__}) is not there yet in this version: batch statistics stay on "
            f"each rank. Remove it, or use a norm that does not look over the batch."
        )


def check_module(module: LightningModule, parallelism: Parallelism) -> None:
    """Check, before any process group exists, that what is known of the model fits the layout.

    A module may define ``check_parallelism(parallelism)`` for this; a ``PipelineModel`` built in its constructor is
    looked at directly.

    Raises:
        ValueError: sizes that do not divide, fewer layers than stages, manual optimization with ``pp > 1``.
    """
    own = getattr(module, "check_parallelism", None)
    if callable(own):
        own(parallelism)
    name = type(module).__name__
    if parallelism.pp > 1 and not module.automatic_optimization:
        raise ValueError(
            f"{name} uses manual optimization, which cannot be cut into pipeline stages (pp={parallelism.pp}): "
            f"set self.automatic_optimization = True, or pp=1."
        )
    if parallelism.cp > 1 and not module.automatic_optimization:
        raise ValueError(
            f"{name} uses manual optimization, whose batches are not cut over context-parallel ranks (cp={parallelism.cp}): "
            f"set self.automatic_optimization = True, or cp=1."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise ValueError(
                f"{name}.{step}(dataloader_iter) fetches its own batches, which MegatronStrategy cannot cut into "
                f"micro-batches; write {step}(batch, batch_idx)."
            )
    _check_built_model(module, parallelism)


def _check_built_model(module: LightningModule, parallelism: Parallelism) -> None:
    """Look at what the constructor has built; the rest is looked at after ``configure_model``."""
    model = find_pipeline_model(module) if parallelism.pp > 1 else None
    if model is not None:
        check_layers(model, parallelism)
    if parallelism.pp > 1 and not is_overridden("configure_model", module):
        require_pipeline_model(module, parallelism)
    for name, child in module.named_modules():
        mesh = getattr(child, "mesh", None)
        if isinstance(mesh, Mesh) and (mesh.parallelism.tp, mesh.parallelism.cp) != (parallelism.tp, parallelism.cp):
            raise ValueError(
                f"self.{name} ({type(child).__name__}) was built outside of configure_model, so it is not cut over the "
                f"tp={parallelism.tp} * cp={parallelism.cp} ranks. Build it in LightningModule.configure_model."
            )


def check_layers(model: PipelineModel, parallelism: Parallelism) -> None:
    """Check that a pipelined model has a layer for each stage, or the layers that ``pipeline_layout`` gives out.

    A parameter that several layers share must be on one rank.

    Raises:
        ValueError: it has not; with the numbers.
    """
    if parallelism.pp == 1 or model._stage_runner is not None:
        return
    owned = check_pipeline_model(model, parallelism.num_stages)
    num_layers, num_stages, layout = len(model.layers), parallelism.num_stages, parallelism.pipeline_layout
    if layout is None and num_layers < num_stages:
        raise ValueError(
            f"{type(model).__name__} has {num_layers} layers for pp({parallelism.pp}) * vpp({parallelism.vpp}) = "
            f"{num_stages} pipeline stages; each stage needs at least one. Lower pp or vpp, or add layers; a pipeline_layout "
            f"may have zeros."
        )
    layers = layers_of_stages(num_layers, num_stages, layout, first_cost=model.first_cost, last_cost=model.last_cost)
    places = product(range(parallelism.pp), range(parallelism.vpp))
    rank_of = {parallelism.stage_of(rank, local): rank for rank, local in places}
    ranks = [rank_of[stage] for stage, held in enumerate(layers) for _ in held]
    check_sharing(model, owned, ranks=ranks, ends=(rank_of[0], rank_of[num_stages - 1]))


def check_trainer(trainer: Trainer, parallelism: Parallelism, fp8: Fp8Options | None = None) -> None:
    """Refuse callbacks whose way of working a pipeline, ZeRO-1 or parameters in 8 bits break.

    Raises:
        ValueError: naming the callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        averages = isinstance(callback, (StochasticWeightAveraging, WeightAveraging))
        if averages and fp8 is not None and fp8.params:
            raise ValueError(
                f"{type(callback).__name__} averages the model's own parameters, which have no values with fp8_params=True; "
                f"remove the callback, or set fp8_params=False."
            )
        if averages and parallelism.pp > 1:
            raise ValueError(
                f"{type(callback).__name__} averages a full copy of the model, which no rank has with pp={parallelism.pp}; "
                f"remove the callback or set pp=1."
            )
        if isinstance(callback, BatchSizeFinder) and trainer.world_size > 1:
            raise ValueError(
                f"{type(callback).__name__} tries sizes until one rank runs out of memory, which the other "
                f"{trainer.world_size - 1} would wait for; remove the callback and set batch_size yourself."
            )


def find_pipeline_model(module: LightningModule) -> PipelineModel | None:
    """The one ``PipelineModel`` inside a LightningModule, if there is any.

    Raises:
        ValueError: there are several, outside of each other.
    """
    found = [(name, child) for name, child in module.named_modules() if isinstance(child, PipelineModel)]
    outer = [pair for pair in found if not any(pair[0].startswith(other + ".") for other, _ in found if other != pair[0])]
    if len(outer) > 1:
        names = ", ".join(f"self.{name}" for name, _ in outer)
        raise ValueError(f"{type(module).__name__} holds several PipelineModels ({names}); a strategy pipelines one.")
    return outer[0][1] if outer else None


def require_pipeline_model(module: LightningModule, parallelism: Parallelism) -> PipelineModel:
    """The module's ``PipelineModel``, which ``pp > 1`` needs.

    Raises:
        ValueError: there is none, or the module trains parameters outside of it.
    """
    model = find_pipeline_model(module)
    if model is None:
        raise ValueError(
            f"pp={parallelism.pp} needs self.model of {type(module).__name__} to be a lightning_megatron.PipelineModel (first, "
            f"layers, last), built in __init__ or configure_model; none was found. See docs/pipeline-models.md, or set pp=1."
        )
    inside = {id(param) for param in model.parameters()}
    outside = [name for name, param in module.named_parameters() if id(param) not in inside and param.requires_grad]
    if outside:
        raise ValueError(
            f"{type(module).__name__}.{outside[0]} is trained outside the PipelineModel, so no pipeline stage owns it "
            f"(pp={parallelism.pp}). Move it into the model's first(), layers or last()."
        )
    return model
