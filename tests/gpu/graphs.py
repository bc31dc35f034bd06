"""CUDA graphs of layers on a GPU: the same bits as without, and what they are worth; one line a case.

python tests/gpu/graphs.py                                   # one rank
python tests/gpu/graphs.py --time                            # and how long a step of small models takes with them
python tests/gpu/graphs.py --only=fp8                        # cases with that in their name
torchrun --no-python --nproc-per-node 2 bash tests/gpu/one_gpu_ranks.sh tests/gpu/graphs.py        # tp2, dp2
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.graphs import graphs_of
from lightning_megatron.layers.norm import LayerNorm, add_and_norm
from lightning_megatron.layers.te_backend import why_unavailable
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.strategy.environment import set_environment

WORLD, LOCAL = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 1024, "max_seq_len": 1024}
LLAMA = GPTConfig(**SIZES, num_kv_heads=4, ffn_hidden_size=1024, init_std=0.05)
GPT2 = GPTConfig(
    **SIZES, init_std=0.05, position="learned", norm="layernorm", activation="gelu", bias=True, tied_embeddings=True
)
SMALL = GPTConfig(num_layers=24, hidden_size=512, num_heads=8, ffn_hidden_size=1408, vocab_size=8192, max_seq_len=512)
BATCH, ACCUMULATE, STEPS = 4, 3, 4
FAILED: list[str] = []


def case(name: str, run: Callable[[], str]) -> None:
    """Run one case and print its line; a failure does not stop the others."""
    only = next((arg.partition("=")[2] for arg in sys.argv if arg.startswith("--only=")), "")
    if only not in name:
        return
    begin = time.perf_counter()
    faulthandler.dump_traceback_later(100, exit=True)
    try:
        says = run()
        print(f"passed {name} in {time.perf_counter() - begin:.1f} s: {says}", flush=True)
    except Exception:
        FAILED.append(name)
        print(f"FAILED {name}: {traceback.format_exc(limit=12)}", flush=True)
    faulthandler.cancel_dump_traceback_later()


class Module(L.LightningModule):
    """Logs nothing, keeps everything.

    Args:
        config: of the model.
        short: the batch of each step whose sequences are shorter.
    """

    def __init__(self, config: GPTConfig, *, short: int | None = None) -> None:
        super().__init__()
        self.config, self.short = config, short
        self.model: GPT | None = None
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self._start = 0.0

    def configure_model(self) -> None:
        """Build it under the mesh."""
        self.model = self.model or GPT(self.config)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        """Next-token loss."""
        tokens = batch[0][:, :200] if self.short == batch_idx % ACCUMULATE else batch[0]
        loss: Tensor = self.model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        """The same, without a gradient."""
        tokens = batch[0]
        self.losses.append(self.model(tokens[:, :-1], labels=tokens[:, 1:]).mean().detach())

    def on_train_batch_start(self, *_: Any) -> None:
        """Start a clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Read it."""
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def trained(
    config: GPTConfig,
    *,
    fp8: str | None = None,
    fp8_attention: bool = False,
    fp8_params: bool = False,
    short: int | None = None,
    length: int = 256,
    **layout: Any,
) -> tuple[Module, Any]:
    """Four steps of three batches of two micro-batches, with validation between; the module and its weights."""
    L.seed_everything(3, verbose=False)
    strategy = MegatronStrategy(micro_batch_size=BATCH // 2, **layout)
    trainer = L.Trainer(
        strategy=strategy,
        plugins=[
            MegatronPrecision(
                "bf16-mixed", **({"fp8": fp8, "fp8_attention": fp8_attention, "fp8_params": fp8_params} if fp8 else {})
            )
        ],
        accelerator="gpu",
        devices=1,
        num_nodes=WORLD,
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=2 * ACCUMULATE,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    drawn = torch.randint(1024, (BATCH * ACCUMULATE * STEPS * 2, length + 1), generator=torch.Generator().manual_seed(5))
    module = Module(config, short=short)
    loaders = [DataLoader(TensorDataset(rows), batch_size=BATCH) for rows in (drawn, drawn[:8])]
    trainer.fit(module, *loaders)
    return module, strategy.full_state_dict()


def same_bits(config: GPTConfig, *, fraction: float = 0.5, **options: Any) -> str:
    """Train with and without graphs; where two runs without differ, no more than these."""
    expected = trained(config, **options)
    found = trained(config, cuda_graphs=True, **options)
    (graphs,) = graphs_of(found[0])
    differ = differences(found, expected)
    noise = differences(trained(config, **options), expected) if max(differ) > 0.0 else (0.0, 0.0)
    total = 2 * ACCUMULATE * STEPS
    says = (
        f"{graphs.num_replayed} of {total} micro-batches replayed, losses {found[0].losses[0]:.4f} to {found[0].losses[-1]:.4f}"
    )
    says += ", same bits" if max(differ) == 0.0 else f"; losses and weights differ by {differ}, without graphs by {noise}"
    assert all(mine <= 4.0 * theirs for mine, theirs in zip(differ, noise, strict=True)), says
    assert graphs.num_replayed >= fraction * total, says
    return says


def differences(one: tuple[Module, Any], other: tuple[Module, Any]) -> tuple[float, float]:
    """Of losses, and of weights."""
    losses = torch.stack(one[0].losses) - torch.stack(other[0].losses)
    weights = [float((one[1][name].double() - value.double()).abs().max()) for name, value in other[1].items()]
    return float(losses.abs().max()), max(weights)


def step_time(config: GPTConfig, **options: Any) -> str:
    """Seconds of a batch with graphs and without."""
    medians = []
    for graphs in (False, True):
        module, _ = trained(config, cuda_graphs=graphs, **options)
        medians.append(statistics.median(module.seconds[ACCUMULATE * 2 :]))
    return f"{medians[0] * 1e3:.2f} ms a batch, {medians[1] * 1e3:.2f} with graphs, ratio {medians[0] / medians[1]:.2f}"


def allocator() -> str:
    """Told after CUDA has started, as it is where Transformer Engine was imported first: new segments are expandable."""
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        return "left out: it is set in the shell"
    torch.ones(1, device="cuda")
    line = set_environment(Parallelism(), torch.device("cuda", 0))
    held = torch.empty(1 << 26, device="cuda")
    segments = torch.cuda.memory_snapshot()
    (mine,) = [one for one in segments if one["address"] <= held.data_ptr() < one["address"] + one["total_size"]]
    assert mine["is_expandable"], line
    return str(line)


def operations() -> str:
    """Which single operations, captured and replayed, give other bits than they give without: other algorithms."""
    torch.manual_seed(0)
    shapes = {"x": (256, 2, 512), "w": (1024, 512), "b": (1024,), "g": (256, 2, 1024), "n": (512,)}
    t = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()}
    total = torch.zeros(1024, 512, device="cuda")
    rows, flat = t["g"].view(-1, 1024), t["x"].view(-1, 512)
    stats = torch.ops.aten.native_layer_norm(t["x"], (512,), t["n"], t["n"], 1e-5)
    arguments = (t["x"], t["x"], (512,), *stats[1:], t["n"], t["n"], [True] * 3)
    bodies: dict[str, Callable[[], Any]] = {
        "linear": lambda: F.linear(t["x"], t["w"]),
        "linear with bias": lambda: F.linear(t["x"], t["w"], t["b"]),
        "input gradient": lambda: t["g"] @ t["w"],
        "bias gradient": lambda: rows.sum(0),
        "weight gradient": lambda: rows.t() @ flat,
        "weight gradient put": lambda: torch.mm(rows.t(), flat, out_dtype=torch.float32, out=total),
        "layer norm": lambda: F.layer_norm(t["x"], (512,), t["n"], t["n"]),
        "layer norm backward": lambda: torch.ops.aten.native_layer_norm_backward(*arguments),
        "gelu": lambda: F.gelu(t["g"], approximate="tanh"),
        "gelu backward": lambda: torch.ops.aten.gelu_backward(t["g"], t["g"], approximate="tanh"),
        "row bias": lambda: (t["x"] + t["n"]).sum((0, 1)),
    }
    stream, other = torch.cuda.Stream(), []
    for name, body in bodies.items():
        expected = [one.clone() for one in _tensors(body())]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = _tensors(body())
        graph.replay()
        torch.cuda.synchronize()
        if not all(torch.equal(one, two) for one, two in zip(result, expected, strict=True)):
            other.append(name)
    return f"other bits: {', '.join(other) or 'none'}"


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def compiled_norm() -> str:
    """An addition and a LayerNorm in one compiled function, against the two of torch, forward and backward."""
    inputs = [torch.randn(8192, 1, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    grads = [torch.randn_like(inputs[0]) for _ in range(2)]
    found, times = [], []
    for is_compiled in (False, True):
        norm = LayerNorm(4096, compiled=is_compiled, device="cuda", dtype=torch.bfloat16)
        wanted = [*inputs, norm.weight, norm.bias]
        for repeat in range(13):
            if repeat == 3:
                torch.cuda.synchronize()
                start = time.perf_counter()
            both = add_and_norm(norm, *inputs)
            results = torch.autograd.grad(both, wanted, grads)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 100)
        found.append([*both, *results])
    worst = max(float((one - other).norm() / one.norm()) for one, other in zip(*found, strict=True))
    assert worst < 0.01, worst
    return f"within {worst:.1e}; {times[0]:.3f} ms forward and backward of 8192 x 4096, {times[1]:.3f} compiled"


def one_rank() -> None:
    """What one process can show."""
    case("allocator", allocator)
    case("operations", operations)
    dropping = replace(LLAMA, hidden_dropout=0.1, attention_dropout=0.1)
    backends = ["torch", *(["te"] if why_unavailable() is None else [])]
    for backend in backends:
        case(f"llama, {backend}", partial(same_bits, LLAMA, backend=backend))
        gpt2 = replace(GPT2, hidden_dropout=0.1)  # whose layers run without graphs, with a warning
        case(f"gpt2 with dropout, {backend}", partial(same_bits, gpt2, backend=backend, fraction=0.0))
        case(f"llama of 1024 tokens, {backend}", partial(same_bits, LLAMA, backend=backend, length=1024))
    case("llama with dropout in attention too, torch", partial(same_bits, dropping, backend="torch"))
    case("every third batch shorter", lambda: same_bits(dropping, backend="torch", short=2, fraction=0.3))
    if "te" in backends:
        for recipe in ("delayed", "current"):
            case(f"llama, fp8 {recipe}", partial(same_bits, LLAMA, fp8=recipe))
        held = {"fp8": "delayed", "fp8_params": True}
        case("llama, fp8 delayed with parameters", partial(same_bits, LLAMA, **held))
        attending = replace(LLAMA, num_heads=4, num_kv_heads=2)
        case("llama, fp8 delayed with attention", partial(same_bits, attending, fp8="delayed", fp8_attention=True))
    case("addition and LayerNorm, compiled", compiled_norm)
    compiled = partial(trained, GPT2, backend="torch", compile_pointwise=True)
    case("gpt2, compiled", lambda: f"losses {[round(float(loss), 3) for loss in compiled()[0].losses[::8]]}")
    if "--time" in sys.argv:
        case("time, 24 layers of 512", lambda: step_time(SMALL, backend="torch"))


def ranks() -> None:
    """Layouts of two ranks."""
    case("dp2 with dropout", lambda: same_bits(replace(LLAMA, hidden_dropout=0.1), backend="torch"))
    case("tp2+sp", lambda: same_bits(LLAMA, backend="torch", tp=2))


if __name__ == "__main__":
    one_rank() if WORLD == 1 else ranks()
    sys.exit(len(FAILED))
