"""Every schedule on CUDA over NCCL against a plain loop, then what a step costs. Started by torchrun; prints a line a case.

torchrun --nproc-per-node 2 tests/gpu/schedules.py
torchrun --no-python --nproc-per-node 3 bash tests/gpu/one_gpu_ranks.sh tests/gpu/schedules.py   (parity alone)
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.pipeline_model import make_pipeline
from tests.parity.test_schedules import LAYOUTS, VARIANTS, plain_loop, train

EPOCHS = 3  # shapes are known from the second on


def parity(world_size: int) -> int:
    """Number of layouts of this world size that do not train like the loop."""
    failed = 0
    devices = {"devices": 1, "num_nodes": world_size} if torch.cuda.device_count() == 1 else {"devices": world_size}
    for variant in ("tied", "first stage frozen"):
        reference, _ = plain_loop(VARIANTS[variant], EPOCHS)
        expected = {name: value.detach() for name, value in reference.named_parameters()}
        for name, layout in LAYOUTS.items():
            if layout["pp"] != world_size:
                continue
            faulthandler.dump_traceback_later(40, exit=True)
            found = train(VARIANTS[variant], layout, max_epochs=EPOCHS, accelerator="gpu", **devices).final
            error = max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())
            failed += error > 1e-9
            if dist.get_rank() == 0:
                print(f"{'FAILED' if error > 1e-9 else 'passed'} {variant:20s} {name:22s} {error:.1e}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return failed


def cost(name: Any, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    """Print the time and the peak memory of a step of 8 blocks of width 4096 on 4096 tokens a micro-batch."""
    pipeline = make_pipeline(
        name, num_ranks, stages_per_rank, num_microbatches=num_microbatches, layers=8, size=4096, tokens=4096
    )
    times = []
    for index in range(6):
        torch.cuda.synchronize()
        dist.barrier()
        if index == 2:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        start = time.monotonic()
        pipeline.run()
        host = time.monotonic() - start
        torch.cuda.synchronize()
        times.append((time.monotonic() - start, host))
    best = min(times[2:])
    gib = (torch.cuda.max_memory_allocated() - base) / 2**30
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, (pipeline.mesh.pp.rank, round(best[0] * 1000, 1), round(best[1] * 1000, 1), round(gib, 2)))
    if dist.get_rank() == 0:
        print(f"{name} M={num_microbatches} (pp rank, step ms, host ms, activations GiB): {sorted(gathered)}", flush=True)


def main() -> None:
    """Parity, then costs."""
    world_size = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    failed = parity(world_size)
    if torch.cuda.device_count() == 1:  # ranks that share a GPU measure nothing
        sys.exit(failed > 0)
    faulthandler.dump_traceback_later(60, exit=True)
    for name, stages in (("1f1b", 1), ("zbh1", 1), ("interleaved", 2), ("zbv", 2)):
        for num_microbatches in (4, 16):
            cost(name, world_size, stages, num_microbatches)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
