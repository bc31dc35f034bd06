"""Bytes a parameter of the distributed optimizer, measured, against the formula.

One process is dp=1; for more of them::

    torchrun --no-python --nproc-per-node 4 bash tests/gpu/one_gpu_ranks.sh benchmarks/optimizer_memory.py --shape 1b

On a GPU "held" is what the allocator has handed out between steps and "peak" the most during a step, gradients, norm,
clipping and gathering included. On a CPU both are the sizes of the tensors between steps.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.optimizer_shapes import SIZES, make_mesh, make_parameters
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig

BF16, FP32 = torch.bfloat16, torch.float32
# name: parameters, options, replicated bytes (weights and gradients), bytes over dp (main values and two moments)
VARIANTS: dict[str, tuple[torch.dtype, dict[str, Any], float, float]] = {
    "bf16, fp32 mains": (BF16, {}, 6, 12),
    "bf16, remainders": (BF16, {"main_param": "remainder"}, 6, 10.125),
    "bf16, fp32 mains, bf16 moments": (BF16, {"state_dtype": "bf16"}, 6, 8),
    "bf16, remainders, bf16 moments": (BF16, {"main_param": "remainder", "state_dtype": "bf16"}, 6, 6.125),
    "bf16, remainders, fp8 moments": (BF16, {"main_param": "remainder", "state_dtype": "fp8"}, 6, 5.141),
    "bf16, half on the host": (BF16, {"offload_fraction": 0.5}, 6, 6),
    "bf16, no mains": (BF16, {"main_param": "none"}, 6, 4),
    "fp32": (FP32, {}, 8, 8),
}


def tensors_of(sharded: DistributedOptimizer) -> Iterator[Tensor]:
    """What an optimizer keeps between steps."""
    for bucket in sharded._buckets:
        yield from (bucket.values, bucket.gradients)
    for shard in sharded.shards:
        yield shard.main
        yield from (value for value in sharded.optimizer.state.get(shard.main, {}).values() if isinstance(value, Tensor))
    for store in sharded._cut.stores.values():
        for value in vars(store).values():
            yield from (part for part in ([value] if isinstance(value, Tensor) else vars(value).values()))


def held_bytes(sharded: DistributedOptimizer, device: torch.device) -> int:
    """Bytes on the device between steps."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_of(sharded)}
    return sum(storages.values())


def step(sharded: DistributedOptimizer) -> None:
    """One step on given gradients."""
    for bucket in sharded._buckets:
        bucket.gradients.normal_()
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=torch.ones((), device=sharded.mesh.device), defer=True)
    sharded.clip_by_norm(1.0)
    sharded.step()
    sharded.update_parameters()
    sharded.wait_parameters()


def measure(name: str, shape: str, mesh: Mesh) -> tuple[int, int, int]:
    """Number of parameters, bytes held, bytes at the peak, on this rank."""
    dtype, options, _, _ = VARIANTS[name]
    base = torch.cuda.memory_allocated(mesh.device) if mesh.device.type == "cuda" else 0
    named = make_parameters(shape, dtype=dtype, device=mesh.device)
    numel = sum(param.numel() for _, param in named)
    optimizer = torch.optim.AdamW([param for _, param in named], lr=1e-4, fused=True)
    sharded = DistributedOptimizer(optimizer, named, mesh=mesh, config=DistributedOptimizerConfig(**options))
    step(sharded)  # makes the states
    if mesh.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(mesh.device)
    step(sharded)
    held = held_bytes(sharded, mesh.device) - base
    peak = torch.cuda.max_memory_allocated(mesh.device) - base if mesh.device.type == "cuda" else held
    sharded.close()
    return numel, held, peak


def main() -> None:
    """Print one line a variant; fail if the peak of one is more than the given tolerance above the formula."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SIZES, default="1b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--tolerance", type=float, help="fail above this relative difference, such as 0.02")
    parser.add_argument("--only", default="", help="part of the names of the variants to measure")
    options = parser.parse_args()
    mesh = make_mesh()
    failed = []
    for name, (_, config, replicated, sharded) in VARIANTS.items():
        if options.only not in name:
            continue
        if mesh.device.type == "cpu" and "offload_fraction" in config:
            continue  # there is no other memory
        numel, held, peak = measure(name, options.shape, mesh)
        gc.collect()
        expected = replicated + sharded / mesh.dp.size
        off = peak / numel / expected - 1
        failed += [name] if options.tolerance is not None and off > options.tolerance else []
        if mesh.rank == 0:
            print(
                f"{name:32s} dp={mesh.dp.size}  {numel / 1e6:.0f} M  "
                f"formula {replicated:g} + {sharded:g}/dp = {expected:6.3f}  "
                f"held {held / numel:6.3f}  peak {peak / numel:6.3f}  {100 * off:+.1f} %",
                flush=True,
            )
    if dist.is_initialized():
        dist.barrier()
    if failed:
        raise SystemExit(f"more than the formula allows: {', '.join(failed)}")


if __name__ == "__main__":
    main()
