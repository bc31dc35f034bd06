"""Train LightningModules under tensor, sequence, pipeline and ZeRO-1 data parallelism: ``MegatronStrategy``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron.checkpoint import CheckpointConfig
from lightning_megatron.layers.recompute import Recompute
from lightning_megatron.mesh import Mesh, current_mesh
from lightning_megatron.optim.distributed import DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.model import PipelineModel
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.strategy import MegatronStrategy

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointConfig",
    "DistributedOptimizerConfig",
    "MegatronPrecision",
    "MegatronStrategy",
    "Mesh",
    "Parallelism",
    "PipelineModel",
    "Recompute",
    "current_mesh",
]


def _register_names() -> None:
    """Names for ``Trainer(strategy="megatron_tp2")``; a class path without arguments reaches the registry in lower case."""
    presets: dict[str, dict[str, int]] = {"megatron": {}, "megatronstrategy": {}, "lightning_megatron.megatronstrategy": {}}
    presets |= {f"megatron_tp{size}": {"tp": size} for size in (2, 4, 8)}
    presets |= {f"megatron_pp{size}": {"pp": size} for size in (2, 4, 8)}
    presets |= {f"megatron_tp{tp}_pp{pp}": {"tp": tp, "pp": pp} for tp in (2, 4, 8) for pp in (2, 4, 8)}
    for name, arguments in presets.items():
        shown = ", ".join(f"{key}={value}" for key, value in arguments.items())
        StrategyRegistry.register(name, MegatronStrategy, description=f"MegatronStrategy({shown})", override=True, **arguments)


_register_names()
