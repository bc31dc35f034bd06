"""Long sequences: tokens a second and peak memory at each length, and beside megatron-core in the same call.

    python benchmarks/long_context.py --vs-megatron path/to/peer_megatron_core.py --memory-cp 2,4 --profile
    python benchmarks/long_context.py --lengths 32768 --cp 2 --profile                # on two GPUs
    python benchmarks/long_context.py --lengths 32768 --memory-cp 2,4                 # ranks on one GPU: memory, no speed

A length may say how it is to fit: ``131072:full:8`` is with ``recompute="full"`` and ``loss_chunks=8``, and the peer then
recomputes too; ``131072:norm+mlp:8`` recomputes by names, where the peer, which has no such choice, recomputes in full.
Lengths above 65536 take one step after one of warm-up. Prints a JSON line for each, then a table: ``held`` is what
parameters, gradients and the optimizer take between steps, ``activations`` what a step needs beyond it, in GiB and in bytes
for each token of a rank. With ``--memory-cp``, ranks on one GPU at the last length before 65536, beside one rank. With
``--profile``, one more step's kernels by kind, and how much of the communication ran beside other kernels (the ring's
transfers apart). ``--time-limit`` bounds all jobs together.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from benchmarks.kernel_kinds import kernel_spans, table_of
from benchmarks.model_shapes import PEAK_FLOPS, SHAPES, config_of
from benchmarks.train_step import Clock, Module, RandomTokens
from lightning_megatron import MegatronStrategy
from lightning_megatron.precision import MegatronPrecision

ONE_GPU = Path(__file__).parents[1] / "tests" / "gpu" / "one_gpu_ranks.sh"


@dataclass(frozen=True)
class Case:
    """One length, and what is done to fit it."""

    seq: int
    recompute: str = ""
    loss_chunks: int = 1

    @classmethod
    def parsed(cls, text: str) -> Case:
        """``131072``, ``131072:full`` or ``131072:full:8``."""
        seq, recompute, chunks = (text + "::").split(":")[:3]
        return cls(int(seq), recompute, int(chunks or 1))

    def __str__(self) -> str:
        """The inverse of ``parsed``."""
        return f"{self.seq}:{self.recompute}:{self.loss_chunks}".removesuffix(":1").rstrip(":")

    def steps(self, wanted: int) -> int:
        """A step of a very long sequence takes many seconds."""
        return wanted if self.seq <= 65536 else min(wanted, 1)


class HeldMemory(Callback):
    """What is allocated between two steps."""

    gib = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Look, when the last step is about to begin: the one before has made the optimizer's states."""
        self.gib = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def overlap_of(profile: Any) -> str:
    """How much of the time of communication kernels other kernels ran beside, by the trace of a step."""
    spans = [(name.lower(), start, end) for name, start, end in kernel_spans(profile)]
    computing = merged([(start, end) for name, start, end in spans if "nccl" not in name])
    lines = []
    for title, is_ring in (("ring transfers", True), ("other communication", False)):
        moving = merged([(s, e) for name, s, e in spans if "nccl" in name and ("sendrecv" in name) is is_ring])
        total = sum(end - start for start, end in moving)
        beside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in moving for b in computing)
        share = f" ({100 * beside / total:.0f} %)" if total else ""
        lines.append(f"{title} {total / 1e3:.2f} ms, of which {beside / 1e3:.2f} ms{share} beside other kernels")
    return "\n".join(lines)


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that touch, put together."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def measure(options: argparse.Namespace, case: Case) -> None:
    """Train at one length on the ranks of this job, and print one JSON line on rank 0."""
    world, seq, cp = int(os.environ.get("WORLD_SIZE", "1")), case.seq, int(options.cp)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    config = config_of(options.shape, seq, loss_chunks=case.loss_chunks)
    warmup, steps = case.steps(options.warmup), case.steps(options.steps)
    num_steps = warmup + steps + options.profile
    clock, held = Clock(num_steps - 1 if options.profile else -1), HeldMemory()
    chosen = {"backend": options.backend, "recompute": case.recompute.split("+") if "+" in case.recompute else case.recompute}
    strategy = MegatronStrategy(
        cp=cp, cp_comm=options.cp_comm, micro_batch_size=1, **{name: value for name, value in chosen.items() if value}
    )
    trainer = L.Trainer(
        strategy=strategy,
        plugins=[MegatronPrecision("bf16-mixed")],
        accelerator="gpu" if on_gpu else "cpu",
        devices=local,
        num_nodes=world // local,
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[held, clock],
        use_distributed_sampler=False,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    data = RandomTokens(config, seq_len=seq, num_samples=options.gbs * num_steps)
    trainer.fit(Module(config), DataLoader(data, batch_size=options.gbs))
    memory = torch.zeros(world, 2, dtype=torch.float64, device=strategy.root_device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    memory[trainer.global_rank] = torch.tensor([peak, held.gib])
    if world > 1:
        dist.all_reduce(memory)
    if trainer.global_rank == 0:
        if clock.profile is not None:
            print(table_of(clock.profile), overlap_of(clock.profile), sep="\n", flush=True)
        seconds = statistics.median(clock.seconds[warmup : warmup + steps])
        rate = options.gbs * seq / seconds / world
        flops = rate * config.flops_per_token(seq)
        result = {"package": "lightning_megatron", "shape": options.shape, "case": str(case), "cp": cp}
        result |= {"cp_comm": options.cp_comm, "seq": seq, "step_s": round(seconds, 4), "tokens_s_gpu": round(rate, 1)}
        result |= {"tflops_gpu": round(flops / 1e12, 1), "mfu": round(flops / PEAK_FLOPS, 4)}
        result |= dict(zip(("mem_gib", "held_gib"), memory.max(dim=0).values.tolist(), strict=True))
        print(json.dumps({**result, "all_mem_gib": memory[:, 0].tolist()}), flush=True)


def measure_all(options: argparse.Namespace) -> None:
    """Every length in this one process, so that it starts once."""
    for text in options.lengths.split(","):
        try:
            measure(options, Case.parsed(text))
        except torch.OutOfMemoryError as error:
            print(f"failed at {text}: {str(error)[:200]}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_job(options: argparse.Namespace, lengths: str, cp: int, *, one_gpu: bool = False) -> list[dict[str, Any]]:
    """Lengths on ``cp`` ranks as a job of its own: results of those that did not fail, most often for memory."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cp), "--master-port", "29667"]
    if one_gpu:
        launcher += ["--no-python", "bash", str(ONE_GPU)]
    command = [*launcher, str(Path(__file__)), "--worker", "--lengths", lengths, "--cp", str(cp)]
    for name in ("shape", "gbs", "cp_comm", "backend"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    # Several ranks on one GPU are there for their memory: one step makes the optimizer's states, one more shows the peak.
    command += ["--steps", str(1 if one_gpu else options.steps), "--warmup", str(1 if one_gpu else options.warmup)]
    return finished(command + ["--profile"] * (options.profile and cp > 1), options.deadline)


def run_peer(options: argparse.Namespace, case: Case, cp: int) -> dict[str, Any] | None:
    """The peer on the same shape, length and steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(cp), "--master-port", "29668"]
    command += [options.vs_megatron, "--cp", str(cp), "--seq", str(case.seq), "--mbs", "1", "--cp-comm", options.cp_comm]
    command += ["--shape", options.shape, "--gbs", str(options.gbs)]
    command += ["--recompute", "full" if "+" in case.recompute else case.recompute]
    command += ["--steps", str(case.steps(options.steps)), "--warmup", str(case.steps(options.warmup))]
    return next(iter(finished(command, options.deadline)), None)


def finished(command: list[str], deadline: float) -> list[dict[str, Any]]:
    """Run a job until the deadline at most, pass on what it prints, and return its JSON lines."""
    start = time.perf_counter()
    if start >= deadline:
        print("left out: no time is left", flush=True)
        return []
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, errors = job.communicate(timeout=deadline - start)
    except subprocess.TimeoutExpired:
        job.terminate()  # the launcher then ends its ranks
        out, errors = job.communicate()
    print(out, f"job of {time.perf_counter() - start:.0f} s", sep="", flush=True)
    if job.returncode:
        reasons = [line for line in errors.splitlines() if "Error" in line] or errors.splitlines()
        print("failed: " + (reasons[0][:300] if reasons else "without a message"), flush=True)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def table_row(result: dict[str, Any], peer: dict[str, Any] | None) -> str:
    """One line of the table."""
    grown = result["mem_gib"] - result["held_gib"]
    row = f"{result['case']:>16} {result['cp']:3d} {result['tokens_s_gpu']:12.0f} {result['tflops_gpu']:8.0f}"
    each = grown * 2**30 / (result["seq"] / result["cp"])
    row += f" {result['mem_gib']:9.2f} {result['held_gib']:9.2f} {grown:11.2f} {each:9.0f}"
    if peer is not None:
        row += f" {peer['tokens_s_gpu']:13.0f} {peer['mem_gib']:9.2f} {result['tokens_s_gpu'] / peer['tokens_s_gpu']:7.3f}"
    return row


def memory_rows(options: argparse.Namespace, results: list[dict[str, Any]]) -> list[str]:
    """Ranks on one GPU: what each needs, and its activations times cp over those of one rank (1 where they fall as 1/cp)."""
    shorter = [text for text in options.lengths.split(",") if Case.parsed(text).seq <= 65536]
    case = Case.parsed(shorter[-1])
    found = [result for result in results if result["case"] == str(case) and result["cp"] == 1]
    for cp in [*([] if found else [1]), *map(int, options.memory_cp.split(","))]:
        found += run_job(options, str(case), cp, one_gpu=True)
    rows = ["", f"{'cp, one GPU':>16} {'peak GiB':>9} {'held':>9} {'activations':>11} {'x cp / cp 1':>11}"]
    grown = [result["mem_gib"] - result["held_gib"] for result in found]
    for result, own in zip(found, grown, strict=True):
        ratio = own * result["cp"] / grown[0] if grown[0] else float("nan")
        rows.append(f"{result['cp']:16d} {result['mem_gib']:9.2f} {result['held_gib']:9.2f} {own:11.2f} {ratio:11.3f}")
    return rows


def main() -> None:
    """Run every length on every number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b" if on_gpu else "tiny")
    parser.add_argument("--lengths", default="8192,32768,131072:full:8" if on_gpu else "256,512", help="separated by commas")
    parser.add_argument("--cp", default="1", help="context-parallel ranks, each on a GPU of its own, separated by commas")
    parser.add_argument("--cp-comm", default="p2p", choices=("p2p", "all_gather", "a2a", "a2a+p2p"))
    for name, default in {"gbs": 1, "steps": 3, "warmup": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="", help="torch, te or auto; the strategy's own choice if not given")
    parser.add_argument("--memory-cp", default="", help="ranks that share one GPU, separated by commas: memory, no speed")
    parser.add_argument(
        "--profile", action="store_true", help="where cp > 1: kernels of one more step, and what ran beside what"
    )
    parser.add_argument("--vs-megatron", default="", metavar="PATH", help="the peer's script, run at each length")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for all jobs together")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.worker:
        measure_all(options)
        return
    options.deadline = time.perf_counter() + options.time_limit
    head = f"{'length':>16} {'cp':>3} {'tokens/s/GPU':>12} {'TFLOP/s':>8} {'peak GiB':>9} {'held':>9} {'activations':>11}"
    head += f" {'B/token':>9}" + (f" {'peer tokens/s':>13} {'peak GiB':>9} {'ratio':>7}" if options.vs_megatron else "")
    rows, results = [head], []
    for cp in map(int, options.cp.split(",")):
        found = run_job(options, options.lengths, cp)
        results += found
        for result in found:
            peer = run_peer(options, Case.parsed(result["case"]), cp) if options.vs_megatron else None
            rows.append(table_row(result, peer))
    print("\n".join(rows), flush=True)
    if options.memory_cp:
        print("\n".join(memory_rows(options, results)), flush=True)


if __name__ == "__main__":
    main()
