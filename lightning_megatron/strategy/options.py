"""Checks of ``MegatronStrategy``'s arguments that need no process group: each failure is one readable message."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.model import PipelineModel
from lightning_megatron.pipeline.stage import check_pipeline_model

SCHEDULES = ("auto", "1f1b", "interleaved", "gpipe")


def check_options(
    parallelism: Parallelism,
    *,
    schedule: str,
    backend: str,
    plan: object,
    recompute: object,
    micro_batch_size: int | None,
    num_microbatches: int | None,
) -> None:
    """Refuse what cannot work, or does not work yet, by name.

    Raises:
        ValueError: with the numbers, the rule and the fix.
    """
    for name, capability in (("cp", "context parallelism"), ("ep", "expert parallelism"), ("etp", "expert tensor parallelism")):
        if (size := getattr(parallelism, name)) != 1:
            raise ValueError(f"{name}={size}: {capability} is not there yet in this version; set {name}=1.")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is not there yet in this version; use one of {', '.join(SCHEDULES)}.")
    if schedule == "1f1b" and parallelism.vpp > 1:
        raise ValueError(f"schedule='1f1b' runs one stage a rank, but vpp={parallelism.vpp}; use 'interleaved' or set vpp=1.")
    if schedule == "interleaved" and parallelism.vpp == 1:
        raise ValueError("schedule='interleaved' needs vpp >= 2 stages a rank, but vpp=1; raise vpp or use '1f1b'.")
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend={backend!r} is not there yet in this version; use 'torch' or 'auto'.")
    if plan is not None:
        raise ValueError(
            "plan=... is not there yet in this version: modules of plain nn.Linear layers stay whole on each tensor-parallel "
            "rank. Build the model from lightning_megatron.tensor_parallel layers, or leave plan=None."
        )
    if recompute is not None:
        raise ValueError(f"recompute={recompute!r} is not there yet in this version; set recompute=None.")
    if micro_batch_size is not None and num_microbatches is not None:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} and num_microbatches={num_microbatches} fix the same thing; give one of them."
        )
    for name, value in (("micro_batch_size", micro_batch_size), ("num_microbatches", num_microbatches)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be 1 or more.")


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
    model = find_pipeline_model(module)
    if model is not None:
        check_layers(model, parallelism)
    if parallelism.pp > 1 and not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} uses manual optimization, which cannot be cut into pipeline stages (pp={parallelism.pp}): "
            f"set self.automatic_optimization = True, or pp=1."
        )


def check_layers(model: PipelineModel, parallelism: Parallelism) -> None:
    """Check that a pipelined model has a layer for each stage.

    Raises:
        ValueError: it has fewer.
    """
    if parallelism.pp == 1 or model._stage_runner is not None:
        return
    check_pipeline_model(model, parallelism.num_stages)
    if len(model.layers) < parallelism.num_stages:
        raise ValueError(
            f"{type(model).__name__} has {len(model.layers)} layers for pp({parallelism.pp}) * vpp({parallelism.vpp}) = "
            f"{parallelism.num_stages} pipeline stages; each stage needs at least one. Lower pp or vpp, or add layers."
        )


def check_trainer(trainer: Trainer, parallelism: Parallelism) -> None:
    """Refuse callbacks whose way of working a pipeline or ZeRO-1 breaks.

    Raises:
        ValueError: naming the callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and parallelism.pp > 1:
            raise ValueError(
                f"{type(callback).__name__} averages a full copy of the model, which no rank has with pp={parallelism.pp}; remove "
                f"the callback or set pp=1."
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


