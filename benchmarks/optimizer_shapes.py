"""Parameters of real model shapes, without the model, and a process group if a launcher started several ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism

SIZES = {
    # layers, hidden, ffn, key/value width, vocabulary
    "tiny": (2, 64, 192, 32, 1000),
    "llama-1b": (16, 2048, 8192, 512, 128256),
    "1b": (22, 2048, 5632, 256, 32000),
}


def make_parameters(shape: str, *, dtype: torch.dtype, device: torch.device) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a Llama of that shape with tied embeddings, by name, in the order of definition."""
    layers, hidden, ffn, key_value, vocabulary = SIZES[shape]
    sizes: list[tuple[str, tuple[int, ...]]] = [("embedding.weight", (vocabulary, hidden))]
    for i in range(layers):
        sizes += [
            (f"layers.{i}.attention_norm.weight", (hidden,)),
            (f"layers.{i}.attention.qkv.weight", (hidden + 2 * key_value, hidden)),
            (f"layers.{i}.attention.out.weight", (hidden, hidden)),
            (f"layers.{i}.mlp_norm.weight", (hidden,)),
            (f"layers.{i}.mlp.gate_up.weight", (2 * ffn, hidden)),
            (f"layers.{i}.mlp.down.weight", (hidden, ffn)),
        ]
    sizes.append(("final_norm.weight", (hidden,)))
    return [(name, nn.Parameter(torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02))) for name, size in sizes]


def make_mesh() -> Mesh:
    """Data parallel over all ranks that torchrun started; several may share one GPU, see tests/gpu/one_gpu_ranks.sh."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return Mesh.create(Parallelism(), device=device)
