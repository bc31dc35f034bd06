"""Published model sizes as functions that return a ``GPTConfig``; keyword arguments replace single fields."""

from __future__ import annotations

from typing import Any

from lightning_megatron.layers.rope import RopeScaling
from lightning_megatron.models.config import GPTConfig


def _config(defaults: dict[str, Any], overrides: dict[str, Any]) -> GPTConfig:
    return GPTConfig.from_dict({**defaults, **overrides})


def _llama3(overrides: dict[str, Any], **sizes: Any) -> GPTConfig:
    shared = {"vocab_size": 128256, "num_kv_heads": 8, "max_seq_len": 8192, "rope_theta": 500000.0, "norm_eps": 1e-5}
    return _config({**shared, **sizes}, overrides)


def llama3_8b(**overrides: Any) -> GPTConfig:
    """Llama 3 8B (context 8192)."""
    return _llama3(overrides, num_layers=32, hidden_size=4096, num_heads=32, ffn_hidden_size=14336)


def llama3_70b(**overrides: Any) -> GPTConfig:
    """Llama 3 70B (context 8192)."""
    return _llama3(overrides, num_layers=80, hidden_size=8192, num_heads=64, ffn_hidden_size=28672)


def llama3_1_8b(**overrides: Any) -> GPTConfig:
    """Llama 3.1 8B (context 131072 by stretched rotary frequencies)."""
    return llama3_8b(**{"max_seq_len": 131072, "rope_scaling": RopeScaling(factor=8.0), **overrides})


def llama3_1_70b(**overrides: Any) -> GPTConfig:
    """Llama 3.1 70B (context 131072)."""
    return llama3_70b(**{"max_seq_len": 131072, "rope_scaling": RopeScaling(factor=8.0), **overrides})


def llama3_1_405b(**overrides: Any) -> GPTConfig:
    """Llama 3.1 405B (context 131072)."""
    sizes = {"num_layers": 126, "hidden_size": 16384, "num_heads": 128, "ffn_hidden_size": 53248}
    return _llama3(overrides, **sizes, max_seq_len=131072, rope_scaling=RopeScaling(factor=8.0))


def llama3_2_1b(**overrides: Any) -> GPTConfig:
    """Llama 3.2 1B (context 131072, tied embeddings)."""
    sizes = {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "ffn_hidden_size": 8192, "tied_embeddings": True}
    return _llama3(overrides, **sizes, max_seq_len=131072, rope_scaling=RopeScaling(factor=32.0))


def llama3_2_3b(**overrides: Any) -> GPTConfig:
    """Llama 3.2 3B (context 131072, tied embeddings)."""
    sizes = {"num_layers": 28, "hidden_size": 3072, "num_heads": 24, "ffn_hidden_size": 8192, "tied_embeddings": True}
    return _llama3(overrides, **sizes, max_seq_len=131072, rope_scaling=RopeScaling(factor=32.0))


def llama_tiny(**overrides: Any) -> GPTConfig:
    """A Llama-style model of some 0.3 million parameters, for tests and first steps on a laptop."""
    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": 192}
    return _config({**sizes, "vocab_size": 1024, "max_seq_len": 256}, overrides)


def _gpt2(overrides: dict[str, Any], **sizes: Any) -> GPTConfig:
    style = {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True, "tied_embeddings": True}
    shared = {"vocab_size": 50257, "max_seq_len": 1024, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    return _config({**style, **shared, **sizes}, overrides)


def gpt2(**overrides: Any) -> GPTConfig:
    """GPT-2, 124 million parameters (Radford et al. 2019), with its dropout of 0.1."""
    return _gpt2(overrides, num_layers=12, hidden_size=768, num_heads=12)


def gpt2_medium(**overrides: Any) -> GPTConfig:
    """GPT-2 medium, 355 million parameters."""
    return _gpt2(overrides, num_layers=24, hidden_size=1024, num_heads=16)


def gpt2_large(**overrides: Any) -> GPTConfig:
    """GPT-2 large, 774 million parameters."""
    return _gpt2(overrides, num_layers=36, hidden_size=1280, num_heads=20)


def gpt2_xl(**overrides: Any) -> GPTConfig:
    """GPT-2 XL, 1.56 billion parameters. Its 25 heads allow tp=1, 5 and 25 only."""
    return _gpt2(overrides, num_layers=48, hidden_size=1600, num_heads=25)


def gpt2_tiny(**overrides: Any) -> GPTConfig:
    """A GPT-2-style model of some 0.3 million parameters without dropout, for tests and first steps on a laptop."""
    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 8, "vocab_size": 1024, "max_seq_len": 256}
    return _gpt2(overrides, **sizes, hidden_dropout=0.0, attention_dropout=0.0)


_ALL = (
    *(llama3_8b, llama3_70b, llama3_1_8b, llama3_1_70b, llama3_1_405b, llama3_2_1b, llama3_2_3b, llama_tiny),
    *(gpt2, gpt2_medium, gpt2_large, gpt2_xl, gpt2_tiny),
)


def preset(name: str, **overrides: Any) -> GPTConfig:
    """The preset of that name, for command lines and configuration files.

    Raises:
        ValueError: no preset has that name; the message lists them.
    """
    for make in _ALL:
        if make.__name__ == name:
            return make(**overrides)
    raise ValueError(f"there is no preset {name!r}; choose one of {[make.__name__ for make in _ALL]}.")
