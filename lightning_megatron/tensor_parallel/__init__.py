"""Layers and the loss cut over the tensor-parallel axis, with sequence parallelism."""

from lightning_megatron.tensor_parallel.cross_entropy import gather_logits, vocab_parallel_cross_entropy
from lightning_megatron.tensor_parallel.embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
    padded_vocab_size,
    vocab_logits,
)
from lightning_megatron.tensor_parallel.linear import (
    ColumnParallelLinear,
    OutPart,
    RowParallelLinear,
    column_linear,
    make_parameter,
)

__all__ = [
    "ColumnParallelLinear",
    "OutPart",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "column_linear",
    "gather_logits",
    "make_parameter",
    "padded_vocab_size",
    "vocab_logits",
    "vocab_parallel_cross_entropy",
]
