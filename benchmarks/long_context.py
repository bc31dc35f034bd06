"""Long sequences: tokens a second and peak memory at each length, and beside megatron-core in the same call.

    python benchmarks/long_context.py --shape llama-1b --lengths 8192,32768,131072 --vs-megatron path/to/peer_megatron_core.py
    python benchmarks/long_context.py --lengths 32768 --cp 2 --cp-comm p2p --profile      # on two GPUs
    python benchmarks/long_context.py --lengths 32768 --cp 1,2,4 --one-gpu                # memory of each rank; no speed

Each length and number of ranks is a job of its own. Prints a JSON line for each, then a table: ``activations`` is what the
peak of memory grows by for each token of a rank between two lengths. With ``--profile`` a step's kernels by kind, and how much
of the communication ran beside other kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.kernel_kinds import table_of
from benchmarks.model_shapes import PEAK_FLOPS, SHAPES, config_of
from benchmarks.train_step import Clock, Module, RandomTokens
from lightning_megatron import MegatronStrategy
from lightning_megatron.precision import MegatronPrecision

ONE_GPU = Path(__file__).parents[1] / "tests" / "gpu" / "one_gpu_ranks.sh"


def overlap_of(profile: Any) -> str:
    """How much of the time of communication kernels other kernels ran beside, by the trace of a step."""
    spans = [
        ("nccl" in event.name.lower(), event.time_range.start, event.time_range.end)
        for event in profile.events()
        if "cuda" in str(event.device_type).lower() and event.time_range.elapsed_us() > 0 and "#" not in event.name
    ]
    moving = merged([(start, end) for is_moving, start, end in spans if is_moving])
    computing = merged([(start, end) for is_moving, start, end in spans if not is_moving])
    total = sum(end - start for start, end in moving)
    beside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in moving for b in computing)
    share = f" ({100 * beside / total:.0f} %)" if total else ""
    return f"communication {total / 1e3:.2f} ms, of which {beside / 1e3:.2f} ms{share} beside other kernels"


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that touch, put together."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def measure(options: argparse.Namespace) -> None:
    """Train at one length on the ranks of this job, and print one JSON line on rank 0."""
    world, seq, cp = int(os.environ.get("WORLD_SIZE", "1")), int(options.lengths), int(options.cp)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    config = config_of(options.shape, seq)
    num_steps = options.warmup + options.steps + options.profile
    clock = Clock(num_steps - 1 if options.profile else -1)
    chosen = {"backend": options.backend, "recompute": options.recompute}
    strategy = MegatronStrategy(
        cp=cp, cp_comm=options.cp_comm, micro_batch_size=1, **{name: value for name, value in chosen.items() if value}
    )
    trainer = L.Trainer(
        strategy=strategy,
        plugins=[MegatronPrecision("bf16-mixed")],
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=local,
        num_nodes=world // local,
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[clock],
        use_distributed_sampler=False,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    data = RandomTokens(config, seq_len=seq, num_samples=options.gbs * num_steps)
    trainer.fit(Module(config), DataLoader(data, batch_size=options.gbs))
    peaks = [0.0] * world
    mine = torch.tensor(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, dtype=torch.float64)
    if world > 1:
        gathered = torch.zeros(world, dtype=torch.float64, device=strategy.root_device)
        gathered[trainer.global_rank] = mine
        dist.all_reduce(gathered)
        peaks = gathered.tolist()
    else:
        peaks = [float(mine)]
    seconds = statistics.median(clock.seconds[options.warmup : options.warmup + options.steps])
    rate = options.gbs * seq / seconds / world
    if trainer.global_rank == 0:
        if clock.profile is not None:
            print(table_of(clock.profile), overlap_of(clock.profile), sep="\n", flush=True)
        flops = rate * config.flops_per_token(seq)
        result = {"package": "lightning_megatron", "shape": options.shape, "seq": seq, "cp": cp, "cp_comm": options.cp_comm}
        result |= {"step_s": round(seconds, 4), "tokens_s_gpu": round(rate, 1), "tflops_gpu": round(flops / 1e12, 1)}
        result |= {"mfu": round(flops / PEAK_FLOPS, 4), "mem_gib": round(max(peaks) / 2**30, 3)}
        print(json.dumps({**result, "all_mem_gib": [round(peak / 2**30, 3) for peak in peaks]}), flush=True)


def run_job(options: argparse.Namespace, seq: int, cp: int) -> dict[str, Any] | None:
    """One length on ``cp`` ranks as a job of its own; ``None`` if it failed, most often for memory."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cp), "--master-port", "29667"]
    if options.one_gpu:
        launcher += ["--no-python", "bash", str(ONE_GPU)]
    command = [*launcher, str(Path(__file__)), "--worker", "--lengths", str(seq), "--cp", str(cp)]
    for name in ("shape", "gbs", "steps", "warmup", "cp_comm", "backend", "recompute"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return finished(command + ["--profile"] * options.profile)


def run_peer(options: argparse.Namespace, seq: int, cp: int) -> dict[str, Any] | None:
    """The peer on the same shape, length and steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cp), "--master-port", "29668"]
    command += [options.vs_megatron, "--cp", str(cp), "--seq", str(seq), "--mbs", "1", "--cp-comm", options.cp_comm]
    for name in ("shape", "gbs", "steps", "warmup", "recompute"):
        command += [f"--{name}", str(getattr(options, name))]
    return finished(command)


def finished(command: list[str]) -> dict[str, Any] | None:
    """Run a job, pass on what it prints, and return its JSON line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    reasons = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line] or done.stderr.splitlines()
    print("failed: " + (reasons[0][:300] if reasons else "without a message"), flush=True)
    return None


def table_row(result: dict[str, Any] | None, peer: dict[str, Any] | None, before: dict[str, Any] | None) -> str:
    """One line of the table; ``before`` is the result at the length before on as many ranks."""
    if result is None:
        return "failed"
    row = f"{result['tokens_s_gpu']:12.0f} {result['tflops_gpu']:8.0f} {result['mem_gib']:9.2f}"
    if before is None:
        row += f" {'':>15}"
    else:
        grown = (result["mem_gib"] - before["mem_gib"]) * 2**30 / ((result["seq"] - before["seq"]) / result["cp"])
        row += f" {grown:15.0f}"
    if peer is not None:
        row += f" {peer['tokens_s_gpu']:12.0f} {peer['mem_gib']:9.2f} {result['tokens_s_gpu'] / peer['tokens_s_gpu']:7.3f}"
    return row


def main() -> None:
    """Run every length on every number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b" if on_gpu else "tiny")
    parser.add_argument("--lengths", default="8192,32768,131072" if on_gpu else "256,512", help="tokens, separated by commas")
    parser.add_argument("--cp", default="1", help="context-parallel ranks, separated by commas")
    parser.add_argument("--cp-comm", default="p2p", choices=("p2p", "all_gather", "a2a", "a2a+p2p"))
    for name, default in {"gbs": 1, "steps": 3, "warmup": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="", help="torch, te or auto; the strategy's own choice if not given")
    parser.add_argument("--recompute", default="", help="full, selective, ...; none if not given")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU: memory is right, speed means nothing")
    parser.add_argument("--profile", action="store_true", help="kernels of one more step, by kind, and what ran beside what")
    parser.add_argument("--vs-megatron", default="", metavar="PATH", help="the peer's script, run after each length")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.worker:
        measure(options)
        return
    head = f"{'tokens':>8} {'cp':>3} {'tokens/s/GPU':>12} {'TFLOP/s':>8} {'peak GiB':>9} {'activations B':>15}"
    rows = [head + (f" {'peer tokens/s':>12} {'GiB':>9} {'ratio':>7}" if options.vs_megatron else "")]
    for cp in map(int, options.cp.split(",")):
        before = None
        for seq in map(int, options.lengths.split(",")):
            result = run_job(options, seq, cp)
            peer = run_peer(options, seq, cp) if options.vs_megatron else None
            rows.append(f"{seq:8d} {cp:3d} {table_row(result, peer, before)}")
            before = result
    print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
