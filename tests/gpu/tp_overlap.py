"""Tensor-parallel layers in pieces on GPUs: the same as one after the other, within rounding, and what the pieces save.

torchrun --nproc-per-node 2 tests/gpu/tp_overlap.py --time                                              # two GPUs
torchrun --no-python --nproc-per-node 2 bash tests/gpu/one_gpu_ranks.sh tests/gpu/tp_overlap.py         # right results only
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.initialize import materialize
from lightning_megatron.layers.graphs import graph_layers
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


def built(config: GPTConfig, pieces: int, *, sequence_parallel: bool = True) -> GPT:
    """A model of these pieces, whose gradients have sums in fp32."""
    parallelism = Parallelism(tp=dist.get_world_size(), sequence_parallel=sequence_parallel, tp_overlap=pieces)
    mesh = Mesh.create(parallelism, device=torch.device("cuda", torch.cuda.current_device()))
    with use_mesh(mesh):
        model = GPT(config, dtype=torch.bfloat16)
    materialize(model, device=mesh.device, seed=0)
    for param in model.parameters():
        param.grad_dtype = torch.float32
        param.grad = torch.zeros(param.shape, device=param.device)
        open_sum(param, param.grad)
    return model


def run(model: GPT, tokens: Tensor) -> Tensor:
    """Forward and backward."""
    loss: Tensor = model(tokens, labels=tokens).mean()
    loss.backward()
    return loss.detach()


def outcome(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    """Loss and gradients."""
    loss = run(model, tokens)
    return {"loss": loss, **{name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}}


def compare(sequence_parallel: bool) -> bool:
    """Pieces against none; whether all is well."""
    tokens = torch.randint(1024, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
    expected = outcome(built(SMALL, 1, sequence_parallel=sequence_parallel), tokens)
    fine = True
    for pieces in (2, 3, 4):
        found = outcome(built(SMALL, pieces, sequence_parallel=sequence_parallel), tokens)
        worst = max(float((found[n] - v).norm() / v.norm().clamp(min=1e-12)) for n, v in expected.items())
        fine = fine and worst < 0.02
        if dist.get_rank() == 0:
            word = "passed" if worst < 0.02 else "FAILED"
            print(f"{word} {pieces} pieces, sequence_parallel={sequence_parallel}: gradients within {worst:.1e}", flush=True)
    return fine


def milliseconds(config: GPTConfig, pieces: int, *, graphs: bool = False) -> float:
    """Forward and backward of one layer of Llama 8B at sequence 8192, the ends of the model included."""
    model = built(config, pieces)
    if graphs:
        graph_layers(model, model._mesh)
    tokens = torch.randint(1024, (1, 8192), generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(6):
        run(model, tokens)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(10):
        run(model, tokens)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 100 / config.num_layers


def main() -> int:
    """Print a line for each case; the number of failures."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    failed = sum(not compare(sequence_parallel) for sequence_parallel in (True, False))
    if "--time" in sys.argv:
        lines: list[Any] = [(f"{pieces} pieces", milliseconds(LLAMA_8B, pieces)) for pieces in (1, 2, 3, 4, 1, 2)]
        lines += [(f"{pieces} pieces, graphs", milliseconds(LLAMA_8B, pieces, graphs=True)) for pieces in (1, 2)]
        if dist.get_rank() == 0:
            print("milliseconds a layer: " + ", ".join(f"{name} {each:.2f}" for name, each in lines), flush=True)
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
