"""The distributed optimizer (ZeRO-1): flat buckets, sharded main parameters, gradient reduction, norm and clipping."""

from lightning_megatron.optim.config import DistributedOptimizerConfig
from lightning_megatron.optim.distributed import DistributedOptimizer
from lightning_megatron.optim.shards import Shard

__all__ = ["DistributedOptimizer", "DistributedOptimizerConfig", "Shard"]
