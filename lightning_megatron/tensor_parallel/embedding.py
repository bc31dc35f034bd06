"""Embedding and output head with the vocabulary cut over the tensor-parallel axis.

Note [Padded vocabulary]
The vocabulary is padded so that each rank holds equally many rows of a size that GEMMs like. Padding rows are zero,
stand at the end (the last ranks may hold nothing else) and belong to no box, so that they are never saved or counted;
a checkpoint knows the real vocabulary only and loads at any tp. The loss leaves the padded columns out.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.comm import reduce_from, reduce_scatter_to
from lightning_megatron.kernels import available
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.sharding import Box, Init, ParamSharding
from lightning_megatron.tensor_parallel.linear import column_linear, make_parameter
from lightning_megatron.weight_gradients import added_to_sum


def padded_vocab_size(vocab_size: int, multiple: int, tp_size: int) -> int:
    """The smallest size of at least ``vocab_size`` that is a multiple of both ``multiple`` and ``tp_size``.

    Raises:
        ValueError: a number below 1.
    """
    if min(vocab_size, multiple, tp_size) < 1:
        raise ValueError(f"vocab_size={vocab_size}, multiple={multiple} and tp={tp_size} must all be 1 or more.")
    step = lcm(multiple, tp_size)
    return -(-vocab_size // step) * step


def vocab_sharding(vocab_size: int, hidden_size: int, *, axis: Axis, multiple: int, init: Init) -> tuple[int, ParamSharding]:
    """Local rows ``V_padded/tp``, padding included, and the sharding of a ``[V, H]`` weight. See Note [Padded vocabulary]."""
    rows = padded_vocab_size(vocab_size, multiple, axis.size) // axis.size
    start = min(axis.rank * rows, vocab_size)
    stop = min(start + rows, vocab_size)
    box = Box((start, 0), (stop - start, hidden_size))
    return rows, ParamSharding((vocab_size, hidden_size), (box,), init=init)


class VocabParallelEmbedding(nn.Module):
    """Token embedding, the vocabulary cut over tp: ``[B, S] -> [S/tp, B, H]``, or ``[S, B, H]`` without sequence parallelism.

    Args:
        vocab_size: real vocabulary V.
        hidden_size: H.
        mesh: the running mesh; its tp axis and ``sequence_parallel`` are used.
        vocab_multiple: V is padded to a multiple of this and of tp. See Note [Padded vocabulary].
        init: first values of the weight ``[V_padded/tp, H]``; padding rows are zero.
        device: where the weight is made; the meta device leaves its values to ``initialize.materialize``.
        dtype: type of the weight.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        mesh: Mesh,
        vocab_multiple: int = 128,
        init: Init = Init(),  # noqa: B008  (frozen)
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        rows, sharding = vocab_sharding(vocab_size, hidden_size, axis=mesh.tp, multiple=vocab_multiple, init=init)
        self.vocab_start = mesh.tp.rank * rows
        self.weight = make_parameter((rows, hidden_size), sharding, device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, S] -> [S/tp, B, H]`` under sequence parallelism, else ``[B, S] -> [S, B, H]``.

        Raises:
            ValueError: S does not divide by tp under sequence parallelism.
            RuntimeError: a token is outside ``[0, V)`` (on CUDA a device-side assertion, raised later).
        """
        tp = self.mesh.tp
        inside = ((tokens >= 0) & (tokens < self.vocab_size)).all()
        torch._assert_async(inside, f"a token id is outside the vocabulary of {self.vocab_size}: check the tokenizer.")
        hidden: Tensor = _LookUp.apply(tokens.t() - self.vocab_start, self.weight, tp.size > 1)  # type: ignore[no-untyped-call]
        return reduce_scatter_to(hidden, tp, dim=0) if self.mesh.sequence_parallel else reduce_from(hidden, tp)

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"vocab_size={self.vocab_size}, hidden_size={self.hidden_size}, local_rows={self.weight.shape[0]}"


class _LookUp(torch.autograd.Function):
    """Rows of a weight, ``[..], [rows, H] -> [.., H]``; if other ranks have the others, zero where the row is one of those.

    The gradient is added to the parameter's sum (weight_gradients.py) without ever taking the weight's size.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, weight: Tensor, is_cut: bool) -> Tensor:
        # Tokens of other ranks read some row and are zeroed. The remainder spreads them, so that a backward that sorts by
        # row meets no row with most of the batch in it.
        rows = local.remainder(weight.shape[0])
        elsewhere = (local < 0) | (local >= weight.shape[0]) if is_cut else None
        ctx.save_for_backward(rows, elsewhere)
        ctx.num_rows = weight.shape[0]
        found = F.embedding(rows, weight)
        return found if elsewhere is None else found.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        rows, elsewhere = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None

        def add(total: Tensor) -> None:
            mine = rows if elsewhere is None else rows.masked_fill(elsewhere, -1)
            add_rows(total, mine.reshape(-1), grad.reshape(-1, grad.shape[-1]))

        if added_to_sum(ctx, 1, add):
            return None, None, None
        mine = grad if elsewhere is None else grad.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return None, torch.ops.aten.embedding_dense_backward(mine, rows, ctx.num_rows, -1, False), None


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """``total[rows[i]] += values[i]`` for each i with ``rows[i] >= 0``, summed in the dtype of ``total``, always in one order.

    Args:
        total: ``[R, H]``, contiguous.
        rows: ``[N]`` integers below R; negative ones are left out.
        values: ``[N, H]``.
    """
    order = torch.argsort(rows, stable=True)
    if total.is_cuda and available():
        from lightning_megatron.kernels.rows import add_sorted_rows

        add_sorted_rows(total, rows[order], order, values)
        return
    order = order[rows[order] >= 0]
    total.index_add_(0, rows[order], values[order].to(total.dtype))


class VocabParallelHead(nn.Module):
    """Output head, the vocabulary cut over tp: ``[S/tp, B, H] -> [S, B, V_padded/tp]``.

    Arguments and weight layout as for ``VocabParallelEmbedding``; feed the result to ``vocab_parallel_cross_entropy`` or
    ``gather_logits``, which leave the padded columns out.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        mesh: Mesh,
        vocab_multiple: int = 128,
        init: Init = Init(),  # noqa: B008  (frozen)
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        rows, sharding = vocab_sharding(vocab_size, hidden_size, axis=mesh.tp, multiple=vocab_multiple, init=init)
        self.vocab_start = mesh.tp.rank * rows
        self.weight = make_parameter((rows, hidden_size), sharding, device=device, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[S/tp, B, H] -> [S, B, V_padded/tp]``; without sequence parallelism ``[S, B, H] -> [S, B, V_padded/tp]``."""
        return vocab_logits(hidden, self.weight, self.mesh)

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"vocab_size={self.vocab_size}, hidden_size={self.hidden_size}, local_rows={self.weight.shape[0]}"


def vocab_logits(hidden: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
    """Logits of this rank's part of the vocabulary, from a head's weight or, tied, an embedding's.

    ``[S/tp, B, H] -> [S, B, V_padded/tp]``; without sequence parallelism ``[S, B, H] -> [S, B, V_padded/tp]``.
    """
    return column_linear(hidden, weight, mesh=mesh)
