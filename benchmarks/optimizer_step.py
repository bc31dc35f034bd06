"""How fast an optimizer step moves its bytes, against a plain copy on the same device.

    python benchmarks/optimizer_step.py --shape llama-1b

"bytes" are those that a step has to read and write for a parameter, each pass of it counted: the norm (4), the update with
its factor of clipping and the new 16-bit parameter (30 with fp32 gradient, main value and moments), clearing the gradient (4).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.optimizer_shapes import SIZES, make_mesh, make_parameters
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig

# name: options, bytes of the update: gradient 4, main value read and written, moments read and written, parameter
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32 mains": ({}, 4 + 8 + 16 + 2),
    "fp32 mains, nonfinite=ignore": ({"nonfinite": "ignore"}, 4 + 8 + 16 + 2),
    "remainders": ({"main_param": "remainder"}, 4 + 2 * 2.125 + 16 + 4),
    "bf16 moments": ({"state_dtype": "bf16"}, 4 + 8 + 8 + 2),
    "remainders, bf16 moments": ({"main_param": "remainder", "state_dtype": "bf16"}, 4 + 2 * 2.125 + 8 + 4),
    "remainders, fp8 moments": ({"main_param": "remainder", "state_dtype": "fp8"}, 4 + 2 * 2.125 + 2 * (3 + 4 / 256) + 4),
    "no mains": ({"main_param": "none"}, 4 + 4 + 8),
    "fp32 mains, the optimizer's own step": ({"fused_adam": False}, 8 + 28 + 6),  # clipping, update, new parameter
}
PASSES = {"norm": 4.0, "clear": 4.0}


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Mean time of a run, after two to warm up."""
    for _ in range(2):
        run()
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes a second, read and written, of a large copy."""
    numel = 2**28 if device.type == "cuda" else 2**24
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device)
    return 2 * 4 * numel / seconds(lambda: target.copy_(source), device, repeats)


def main() -> None:
    """Print one line a variant, and the parts of the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SIZES, default="llama-1b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    mesh = make_mesh()
    bandwidth = copy_bandwidth(mesh.device, options.repeats)
    print(f"copy: {bandwidth / 1e9:.0f} GB/s")
    for name, (config, update) in VARIANTS.items():
        named = make_parameters(options.shape, dtype=torch.bfloat16, device=mesh.device)
        numel = sum(param.numel() for _, param in named)
        optimizer = torch.optim.AdamW([param for _, param in named], lr=1e-4, fused=True)
        sharded = DistributedOptimizer(optimizer, named, mesh=mesh, config=DistributedOptimizerConfig(**config))
        tokens = torch.ones((), device=mesh.device)

        def norm(sharded: DistributedOptimizer = sharded, tokens: torch.Tensor = tokens) -> None:
            sharded.reduce_gradients()
            sharded.finish_gradients(num_tokens=tokens, defer=True)

        def whole(sharded: DistributedOptimizer = sharded, norm: Callable[[], None] = norm) -> None:
            norm()
            sharded.clip_by_norm(1.0)
            sharded.step()
            sharded.update_parameters()
            sharded.wait_parameters()

        for bucket in sharded._buckets:
            bucket.gradients.fill_(1e-3)
        time_of_norm = seconds(norm, mesh.device, options.repeats)
        time_of_step = seconds(whole, mesh.device, options.repeats)
        moved = numel * (update + sum(PASSES.values()))
        rate = moved / time_of_step
        print(
            f"{name:36s} {numel / 1e6:.0f} M parameters  {1e3 * time_of_step:8.2f} ms (norm {1e3 * time_of_norm:.2f})  "
            f"{moved / 1e9:.1f} GB  {rate / 1e9:6.0f} GB/s = {100 * rate / bandwidth:.0f} % of copy",
            flush=True,
        )
        sharded.close()
        del sharded, optimizer, named, norm, whole


if __name__ == "__main__":
    main()
