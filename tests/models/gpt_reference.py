"""What the tests of GPT compare with: the model written out in plain torch on unsharded fp64 weights, and shard assembly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatron.comm import all_reduce
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.sharding import sharding_of

Weights = dict[str, Tensor]
Placed = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]]


def reference_logits(config: GPTConfig, w: Weights, tokens: Tensor) -> Tensor:
    """``[B, S] -> [B, S, V]``, a head at a time, with an explicit causal mask."""
    seq_len = tokens.shape[1]
    x = w["embedding.weight"][tokens]
    if config.position == "learned":
        x = x + w["position_embedding.weight"][:seq_len]
    for i in range(config.num_layers):
        x = x + _attention(config, w, f"layers.{i}.attn", _norm(config, w, f"layers.{i}.attn_norm", x))
        x = x + _mlp(config, w, f"layers.{i}.mlp", _norm(config, w, f"layers.{i}.mlp_norm", x))
    x = _norm(config, w, "final_norm", x)
    return x @ w["embedding.weight" if config.tied_embeddings else "head.weight"].T


def reference_losses(config: GPTConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """``[B, S, V], [B, S] -> [B, S]``."""
    log_z = logits.logsumexp(-1)
    target = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    eps = config.label_smoothing
    losses = (1 - eps) * (log_z - target) + eps * (log_z - logits.mean(-1)) + config.z_loss * log_z**2
    return torch.where(labels == -100, torch.zeros_like(losses), losses)


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _norm(config: GPTConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[f"{name}.weight"]
    return x + w[f"{name}.bias"] if config.norm == "layernorm" else x


def _attention(config: GPTConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    heads, kv_heads, size, seq_len = config.num_heads, config.kv_heads, config.head_size, x.shape[1]
    fused = _linear(w, f"{name}.qkv", x)
    outputs = []
    for head in range(heads):
        kv = head * kv_heads // heads
        q = fused[..., head * size : (head + 1) * size]
        k = fused[..., (heads + kv) * size : (heads + kv + 1) * size]
        v = fused[..., (heads + kv_heads + kv) * size : (heads + kv_heads + kv + 1) * size]
        if config.qk_norm:
            q, k = _norm(config, w, f"{name}.q_norm", q), _norm(config, w, f"{name}.k_norm", k)
        if config.position == "rope":
            q, k = _rotated(config, q), _rotated(config, k)
        scores = q @ k.transpose(-1, -2) / size**0.5
        future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)
    return _linear(w, f"{name}.out", torch.cat(outputs, -1))


def _rotated(config: GPTConfig, x: Tensor) -> Tensor:
    half = config.head_size // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(half).float() * 2 / config.head_size)
    angles = torch.arange(x.shape[1]).float()[:, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(angles.cos().double(), angles.sin().double())
    return torch.cat((turned.real, turned.imag), -1)


def _mlp(config: GPTConfig, w: Weights, name: str, x: Tensor) -> Tensor:
    if config.activation == "swiglu":
        gate, up = _linear(w, f"{name}.gate_up", x).split(config.ffn_size, -1)
        return _linear(w, f"{name}.down", gate * gate.sigmoid() * up)
    up = _linear(w, f"{name}.up", x)
    gelu = 0.5 * up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))
    return _linear(w, f"{name}.down", gelu)


def placed(model: nn.Module, mesh: Mesh, *, grads: bool) -> Placed:
    """This rank's boxes of each parameter or gradient, the gradient summed over the axes where it is partial."""
    result: Placed = {}
    for name, param in model.named_parameters():
        sharding, boxes = sharding_of(param), []
        values = param.grad if grads else param.detach()
        assert values is not None, name
        for box, part in sharding.parts(values):
            for axis in box.partial if grads else ():
                part = all_reduce(part, mesh[axis])
            boxes.append((box.offset, part.clone()))
        result[name] = (sharding.global_shape, boxes)
    return result


def assembled(ranks: list[Placed]) -> Weights:
    """Unsharded tensors from the boxes of all ranks. Boxes that several ranks hold must be bitwise equal."""
    result = {}
    for name, (shape, _) in ranks[0].items():
        full = torch.full(shape, float("nan"), dtype=torch.float64)
        for rank in ranks:
            for offset, part in rank[name][1]:
                target = full[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))]
                known = ~target.isnan()
                assert torch.equal(target[known], part.double()[known]), f"{name}: replicas differ"
                target.copy_(part)
        assert not full.isnan().any(), f"{name}: not covered"
        result[name] = full
    return result


def random_weights(config: GPTConfig) -> Weights:
    """Unsharded fp64 weights; norm gains and biases are random as well, and weights large enough to matter."""
    generator = torch.Generator().manual_seed(5)
    weights = assembled([placed(GPT(config, seed=1, dtype=torch.float64), Mesh(), grads=False)])
    for name, value in weights.items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        weights[name] = value + 0.3 * noise if value.dim() == 1 else 0.2 * noise
    return weights
