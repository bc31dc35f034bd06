"""Tensor-parallel layers in pieces on GPUs: the same as one after the other, within rounding, and what the pieces save.

torchrun --nproc-per-node 2 tests/gpu/tp_overlap.py --time                                              # two GPUs
torchrun --nproc-per-node 2 tests/gpu/tp_overlap.py --time delayed current                              # of these kinds
torchrun --no-python --nproc-per-node 2 bash tests/gpu/one_gpu_ranks.sh tests/gpu/tp_overlap.py         # right results only
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm import all_reduce
from lightning_megatron.initialize import materialize
from lightning_megatron.layers.backend import Backend
from lightning_megatron.layers.choice import choose_backend
from lightning_megatron.layers.graphs import graph_layers
from lightning_megatron.layers.te_backend import Fp8Options, why_unavailable
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.weight_gradients import open_sum

LLAMA_8B = GPTConfig(
    num_layers=2,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=1024,
    max_seq_len=8192,
    tied_embeddings=False,
)
SMALL = replace(LLAMA_8B, hidden_size=512, ffn_hidden_size=1024, num_heads=8, num_kv_heads=4, max_seq_len=512)


KINDS = ("torch", "te", "delayed", "current")
Made = tuple[GPT, Backend]


def built(kind: str, config: GPTConfig, pieces: int, *, sequence_parallel: bool = True) -> Made:
    """A model of these pieces, whose gradients have sums in fp32. ``kind``: backend or recipe of 8 bits."""
    parallelism = Parallelism(tp=dist.get_world_size(), sequence_parallel=sequence_parallel, tp_overlap=pieces)
    mesh = Mesh.create(parallelism, device=torch.device("cuda", torch.cuda.current_device()))
    fp8 = Fp8Options(recipe=kind) if kind in ("delayed", "current") else None  # type: ignore[arg-type]
    name: Any = "torch" if kind == "torch" else "te"
    backend = choose_backend(name, device=mesh.device, dtype=torch.bfloat16, fp8=fp8)
    with use_mesh(mesh):
        model = GPT(config, dtype=torch.bfloat16, backend=backend)
    materialize(model, device=mesh.device, seed=0)
    for param in model.parameters():
        param.grad_dtype = torch.float32
        param.grad = torch.zeros(param.shape, device=param.device)
        open_sum(param, param.grad)
    return model, backend


def run(model: GPT, tokens: Tensor) -> Tensor:
    """Forward and backward."""
    loss: Tensor = model(tokens, labels=tokens).mean()
    loss.backward()
    return loss.detach()


def step(made: Made, tokens: Tensor) -> dict[str, Tensor]:
    """Loss and gradients; the factors of 8 bits follow what was met."""
    model, backend = made
    for param in model.parameters():
        assert param.grad is not None
        param.grad.zero_()
    loss = run(model, tokens)
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    if (scales := getattr(backend, "scales", None)) is not None:
        scales.advance(partial(all_reduce, axis=model._mesh.tp, op=dist.ReduceOp.MAX))
    return {"loss": loss, **grads}


def relative(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    return float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-12))


def report(worst: float, limit: float, what: str) -> bool:
    """Print a line; whether all is well, on this rank."""
    if dist.get_rank() == 0 or not worst < limit:
        print(f"{'passed' if worst < limit else 'FAILED'} {what}: within {worst:.1e}", flush=True)
    return worst < limit


def layers(made: Made, *, rows: int) -> dict[str, Tensor]:
    """A column and a row layer on inputs that are the same at every number of pieces, and what the first one keeps."""
    block: Any = made[0].layers[0]
    generator = torch.Generator().manual_seed(7 + dist.get_rank() * made[0]._mesh.sequence_parallel)
    x = torch.randn(rows, 2, SMALL.hidden_size, generator=generator).cuda().bfloat16().requires_grad_()
    column, row = block.mlp.gate_up, block.mlp.down
    hidden = column(x)
    kept = [tensor for tensor in hidden.grad_fn.saved_tensors if tensor is not None and tensor.dtype == torch.uint8]
    fed = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(8 + dist.get_rank())).cuda().bfloat16()
    half = fed[..., : row.weight.shape[1]].contiguous().requires_grad_()
    y = row(half)
    above = torch.randn(y.shape, generator=generator).cuda().bfloat16()
    of_x, of_half = torch.autograd.grad((hidden, y), (x, half), (fed, above))
    found = {"column": hidden.detach(), "row": y.detach(), "column backward": of_x, "row backward": of_half}
    return found | {f"bytes {number}": tensor for number, tensor in enumerate(kept)}


def compare(kind: str, sequence_parallel: bool) -> int:
    """Pieces against none: single layers, their bytes, and a model's gradients; the number of failures."""
    failed = 0
    tokens = torch.randint(1024, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
    expected: dict[str, Tensor] = {}
    for pieces in (1, 2, 3, 4):
        made = built(kind, SMALL, pieces, sequence_parallel=sequence_parallel)
        cold, warm = (step(made, tokens) for _ in range(2))
        alone = layers(made, rows=512 // (dist.get_world_size() if sequence_parallel else 1))
        found = {**{f"cold {name}": value for name, value in cold.items()}, **warm, **alone}
        if pieces == 1:
            expected = found
            continue
        name = f"{kind}, {pieces} pieces, sequence_parallel={sequence_parallel}"
        unlike = [key for key in alone if key.startswith("bytes") and not torch.equal(found[key], expected[key])]
        count = sum(key.startswith("bytes") for key in alone)
        failed += not report(float(len(unlike)), 1, f"{name}, matrices of bytes that differ, of {count}")
        errors = {key: relative(found[key], expected[key]) for key in alone if not key.startswith("bytes")}
        failed += not report(max(errors.values()), 0.006, f"{name}, layers alone")  # sums in another order, once rounded
        errors = {key: relative(found[key], value) for key, value in expected.items() if key not in alone}
        # Sums that are one 16-bit rounding apart fall to another 8-bit number now and then.
        failed += not report(max(errors.values()), 0.02 if kind in ("torch", "te") else 0.15, f"{name}, gradients")
    return failed


def milliseconds(kind: str, config: GPTConfig, pieces: int, *, graphs: bool = False) -> tuple[float, float]:
    """Forward and backward of one layer of Llama 8B at sequence 8192, the ends of the model included."""
    made = model, _ = built(kind, config, pieces)
    tokens = torch.randint(1024, (1, 8192), generator=torch.Generator().manual_seed(1)).cuda()
    step(made, tokens)  # afterwards there are factors
    if graphs:
        graph_layers(model, model._mesh)
    for _ in range(6):
        run(model, tokens)
    torch.cuda.synchronize()
    dist.barrier()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(10)]
    for start, middle, end in marks:
        start.record()
        loss = model(tokens, labels=tokens).mean()
        middle.record()
        loss.backward()
        end.record()
    torch.cuda.synchronize()
    each = 1 / len(marks) / config.num_layers
    return (
        sum(start.elapsed_time(middle) for start, middle, _ in marks) * each,
        sum(middle.elapsed_time(end) for _, middle, end in marks) * each,
    )


def print_times(kinds: Sequence[str]) -> None:
    """A line for each case: milliseconds of a layer, forward and backward; by graphs at the end."""
    for pieces, graphs in [(1, False), (2, False), (4, False), (1, False), (2, False), (1, True), (2, True)]:
        for kind in kinds:
            forward, backward = milliseconds(kind, LLAMA_8B, pieces, graphs=graphs)
            if dist.get_rank() == 0:
                name = f"{kind}, {pieces} pieces{', graphs' if graphs else ''}"
                print(f"{name}: {forward:.2f} + {backward:.2f} = {forward + backward:.2f} ms a layer", flush=True)


def main() -> int:
    """Print a line for each case; the number of failures."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    reason = why_unavailable()  # before attention runs: it brings a cuDNN of its own
    dist.init_process_group("nccl")
    kinds = [kind for kind in KINDS if kind in sys.argv] or list(KINDS if reason is None else KINDS[:1])
    if reason is not None and dist.get_rank() == 0:
        print(f"torch alone: {reason}", flush=True)
    failed = sum(compare(kind, sequence_parallel) for kind in kinds for sequence_parallel in (True, False))
    if "--time" in sys.argv:
        print_times(kinds)
        gc.collect()  # a communicator does not end while a graph that uses it is alive
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
