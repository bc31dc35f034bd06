"""Model shapes that speed is measured on, as ``GPTConfig``s, and the peak that utilization is a share of."""

from __future__ import annotations

from typing import Any

from lightning_megatron.models import GPTConfig

PEAK_NAME, PEAK_FLOPS = "H200/H100 SXM, bf16 dense, by the data sheet", 989e12

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 4,
        "vocab_size": 1024,
    },
    "llama-1b": {
        "num_layers": 16,
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_heads": 32,
        "num_kv_heads": 8,
        "vocab_size": 128256,
        "tied_embeddings": True,
    },
    "llama-3b": {
        "num_layers": 28,
        "hidden_size": 3072,
        "ffn_hidden_size": 8192,
        "num_heads": 24,
        "num_kv_heads": 8,
        "vocab_size": 128256,
        "tied_embeddings": True,
    },
    "llama-8b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "vocab_size": 128256,
    },
}
SHAPES["llama-8b-8l"] = {**SHAPES["llama-8b"], "num_layers": 8}


def config_of(shape: str, seq_len: int, **options: Any) -> GPTConfig:
    """The shape at sequences of ``seq_len`` tokens, with further fields of ``GPTConfig``."""
    return GPTConfig(**{**SHAPES[shape], "max_seq_len": seq_len, "rope_theta": 500000.0, **options})
