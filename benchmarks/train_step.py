"""How fast a training step is, through the Trainer, and beside megatron-core in the same call.

    python benchmarks/train_step.py --shape llama-8b-8l --seq 8192 --mbs 1 --gbs 8 --vs-megatron path/to/peer_megatron_core.py
    torchrun --nproc-per-node 2 benchmarks/train_step.py --shape llama-8b --tp 2

Trains on random tokens with AdamW and clipping at 1.0 and prints one JSON line: the median time of a step, tokens/s/GPU,
model TFLOP/s/GPU (``GPTConfig.flops_per_token``: causal attention at half, recompute not counted), its share of the named
peak, and peak memory. With ``--profile``, one more step's kernels by kind. With ``--bare``, the Trainer runs with a logger,
monitors and the progress bar, its steps are not timed one by one but all together, and a plain loop over the same model and
optimizer follows: the ratio of their times is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
if "--te-cudnn" in sys.argv:  # that of the system, which Transformer Engine finds when it is imported first
    with contextlib.suppress(ImportError, OSError):
        import transformer_engine.pytorch  # noqa: F401

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.bare_loop import seconds_per_step
from benchmarks.kernel_kinds import table_of
from benchmarks.model_shapes import PEAK_FLOPS, PEAK_NAME, SHAPES, config_of
from lightning_megatron import DistributedOptimizerConfig, MegatronStrategy
from lightning_megatron.callbacks import MemoryMonitor, ThroughputMonitor
from lightning_megatron.models import GPTConfig, GPTModule
from lightning_megatron.precision import MegatronPrecision


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Samples of random tokens and labels, drawn once and repeated, so that reading costs nothing.

    Args:
        config: for the vocabulary.
        seq_len: tokens in a sample.
        num_samples: how many there seem to be.
    """

    def __init__(self, config: GPTConfig, *, seq_len: int, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1234)
        self._drawn = torch.randint(config.vocab_size, (32, 2, seq_len), generator=generator)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, labels = self._drawn[index % len(self._drawn)]
        return {"tokens": tokens, "labels": labels}


class Module(GPTModule):
    """Pretraining with the optimizer that the peer uses."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW as the peer's: one learning rate, 0.1 of weight decay, betas 0.9 and 0.95."""
        on_gpu = torch.cuda.is_available()
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=on_gpu)


class Clock(Callback):
    """Times each step from start to start, with the device at rest in between, as the peer's script does.

    Args:
        profiled: the step to profile; -1 for none.
        together: the first and the last step to time together, the device at rest at both ends only; by default each.
    """

    def __init__(self, profiled: int, together: tuple[int, int] | None = None) -> None:
        self.profiled, self.seconds, self.losses = profiled, list[float](), list[float]()
        self.together = together
        self.profile: Any = None
        self._start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start the clock, and the profiler for the last step."""
        if self.together is not None and trainer.global_step != self.together[0]:
            return
        _rest()
        if trainer.global_step == self.profiled:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profile = torch.profiler.profile(activities=kinds)
            self.profile.start()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Stop the clock."""
        if self.together is not None:
            first, last = self.together
            if trainer.global_step == last + 1:
                _rest()
                self.seconds = [(time.perf_counter() - self._start) / (last + 1 - first)] * (last + 1)
                self.losses = [float(outputs["loss"])] * 2
            return
        _rest()
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(float(outputs["loss"]))
        if self.profile is not None:
            self.profile.stop()


class SyncFinder(Callback):
    """Says where a step of the middle makes the host wait for the device."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Let torch warn."""
        if trainer.global_step == 2 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        """Let torch be quiet."""
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def _rest() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


_NARROW = ("fp8_head", "fp8_attention", "fp8_params", "fp8_fast_gradients")


def _strategy(options: argparse.Namespace) -> MegatronStrategy:
    """As a user would write it with these options."""
    backend: dict[str, Any] = {"backend": options.backend} if options.backend else {}
    backend |= {"recompute": options.recompute.split(",")} if options.recompute else {}
    backend |= {"offload_activations": options.offload, "cuda_graphs": options.graphs, "tp_overlap": options.tp_overlap}
    backend["optimizer"] = DistributedOptimizerConfig(main_param="remainder") if options.remainders else None
    layout = {name: getattr(options, name) for name in ("tp", "pp", "vpp", "cp")}
    return MegatronStrategy(**layout, micro_batch_size=options.mbs, tune_products=options.tune, **backend)


def _precision(options: argparse.Namespace) -> MegatronPrecision:
    narrow = {name: getattr(options, name) for name in _NARROW}
    return MegatronPrecision("bf16-mixed", **({"fp8": options.fp8, **narrow} if options.fp8 else {}))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train and time; the result on rank 0 is complete."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    dp = world // (options.tp * options.pp * options.cp)
    config = config_of(options.shape, options.seq, **json.loads(options.config))
    together = (options.warmup, options.warmup + options.steps - 1) if options.bare else None
    clock = Clock(options.warmup + options.steps if options.profile else -1, together)
    num_steps = options.warmup + options.steps + options.profile
    strategy, precision = _strategy(options), _precision(options)
    trainer = L.Trainer(
        strategy=strategy,
        plugins=[precision],
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=num_steps,
        gradient_clip_val=1.0,
        logger=CSVLogger(tempfile.mkdtemp()) if options.bare else False,
        log_every_n_steps=1 if options.bare else 50,
        enable_checkpointing=False,
        enable_progress_bar=options.bar or options.bare,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*_monitors(options), clock],
    )
    per_replica = options.gbs // dp
    data = RandomTokens(config, seq_len=options.seq, num_samples=per_replica * num_steps)
    module = Module(config)
    loader = DataLoader(data, batch_size=per_replica)
    trainer.fit(module, loader)
    seconds = statistics.median(clock.seconds[options.warmup : options.warmup + options.steps])
    bare = {}
    if options.bare:
        batches = list(loader)[: options.warmup + options.steps]
        alone = seconds_per_step(strategy, module, batches, mbs=options.mbs, warmup=options.warmup)
        bare = {"bare_step_s": round(alone, 4), "trainer_to_bare": round(seconds / alone, 4)}
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0)
    if dist.is_initialized() and world > 1:
        peak = peak.to(strategy.root_device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    rate = options.gbs * options.seq / seconds / world
    flops = rate * config.flops_per_token(options.seq)
    names = ("tp", "pp", "vpp", "cp", "seq", "mbs", "gbs", "fp8", *_NARROW, "backend")
    layout = {name: getattr(options, name) for name in names}
    if trainer.global_rank == 0 and clock.profile is not None:
        print(table_of(clock.profile), flush=True)
    return {
        **{"package": "lightning_megatron", "shape": options.shape, "world": world, "dp": dp, **layout},
        **{"step_s": round(seconds, 4), "tokens_s_gpu": round(rate, 1), "tflops_gpu": round(flops / 1e12, 1)},
        **{"mfu": round(flops / PEAK_FLOPS, 4), "peak": PEAK_NAME, "mem_gib": round(float(peak), 2)},
        "all_s": [round(each, 4) for each in clock.seconds],
        "loss": [round(each, 3) for each in clock.losses[:2] + clock.losses[-1:]],
        **bare,
        "is_main": trainer.global_rank == 0,
    }


def _monitors(options: argparse.Namespace) -> list[Callback]:
    found: list[Callback] = [SyncFinder()] if options.syncs else []
    return [*found, ThroughputMonitor(2), MemoryMonitor(2), LearningRateMonitor("step")] if options.bare else found


def measure_peer(options: argparse.Namespace) -> dict[str, Any]:
    """Run the peer's script on the same shape, layout and steps, one process a GPU."""
    world = int(os.environ.get("WORLD_SIZE", "1"))  # data parallelism too
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", "29655"]
    command.append(options.vs_megatron)
    for name in ("shape", "tp", "pp", "vpp", "cp", "seq", "mbs", "gbs", "steps", "warmup"):
        command += [f"--{name}", str(getattr(options, name))]
    if options.fp8:
        command += ["--fp8", {"current": "tensorwise"}.get(options.fp8, options.fp8)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{' '.join(command)} gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    """Print one JSON line, and with ``--vs-megatron`` the peer's and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b-8l" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--tp-overlap", type=int, default=1, help="pieces of products beside their communication, with --tp")
    sizes = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "seq": 8192, "mbs": 1, "gbs": 8, "steps": 8, "warmup": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fp8", default="", help="delayed, current, blockwise, mxfp8, nvfp4")
    parser.add_argument("--fp8-head", action="store_true", help="the vocabulary head in 8 bits as well, which the peer has not")
    parser.add_argument("--fp8-attention", action="store_true", help="attention in 8 bits as well")
    parser.add_argument("--fp8-params", action="store_true", help="parameters in 8 bits")
    parser.add_argument("--backend", default="", help="torch, te or auto; the strategy's own choice if not given")
    parser.add_argument("--te-cudnn", action="store_true", help="attention by the cuDNN of the system instead of that of torch")
    parser.add_argument("--recompute", default="", help="names with commas between them: full, selective, mlp, ...")
    parser.add_argument("--offload", action="store_true", help="what layers save waits on the host")
    parser.add_argument("--config", default="{}", help="further fields of GPTConfig, as JSON")
    parser.add_argument("--graphs", action="store_true", help="layers as CUDA graphs")
    parser.add_argument("--bare", action="store_true", help="against a plain loop, with monitors, logger and progress bar on")
    parser.add_argument("--bar", action="store_true", help="show the progress bar")
    parser.add_argument("--fp8-fast-gradients", action="store_true", help="gradient products sum as forward products do")
    parser.add_argument("--remainders", action="store_true", help="16 bits of main values beside the parameters: same bits")
    parser.add_argument("--tune", nargs="?", const=True, default=False, help="tune_products, or the path of its file")
    parser.add_argument("--profile", action="store_true", help="kernels of one more step, by kind")
    parser.add_argument("--syncs", action="store_true", help="say where the third step makes the host wait")
    parser.add_argument("--vs-megatron", default="", metavar="PATH", help="the peer's script, run afterwards")
    options = parser.parse_args()
    if options.bare and options.tp * options.pp * options.cp * int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("--bare is for one rank: the plain loop has no schedule")
    warnings.filterwarnings("default" if options.syncs else "ignore")
    result = measure(options)
    if not result.pop("is_main"):
        return
    print(json.dumps(result), flush=True)
    if options.vs_megatron:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        peer = measure_peer(options)
        print(json.dumps(peer), flush=True)
        ratio = result["tokens_s_gpu"] / peer["tokens_s_gpu"]
        print(json.dumps({"ratio": round(ratio, 4), "memory_ratio": round(result["mem_gib"] / peer["mem_gib"], 3)}), flush=True)


if __name__ == "__main__":
    main()
