"""Head and cross entropy a chunk of tokens at a time: logits of all tokens are never held.

Note [Logits twice]
The forward makes the logits of a chunk, takes what the losses need and forgets them; the backward makes them again, turns
them into their gradient in place and uses it up before the next chunk. That costs one more product of the head, a third of
what the head costs otherwise, and saves all but ``1 / num_chunks`` of the largest tensor of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.comm import all_gather, all_reduce, reduce_scatter
from lightning_megatron.mesh import Mesh
from lightning_megatron.tensor_parallel.cross_entropy import RowStats, Terms, check_loss, gradient_of, losses_of
from lightning_megatron.tensor_parallel.linear import add_weight_gradient, outside_autocast
from lightning_megatron.weight_gradients import added_to_sum


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    mesh: Mesh,
    vocab_size: int,
    num_chunks: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """The losses of ``vocab_parallel_cross_entropy(vocab_logits(hidden, weight, mesh), labels, ...)``, by chunks of tokens.

    Exact; see Note [Logits twice]. ``[S/tp, B, H], [V_padded/tp, H], [S, B] -> [S, B]`` under sequence parallelism, else
    hidden is ``[S, B, H]``.

    Args:
        hidden: input of the head.
        weight: of the head; its gradient is added to its sum where it has one.
        labels: global token ids, ``ignore_index`` where a token does not count.
        mesh: the running mesh.
        vocab_size: real vocabulary V.
        num_chunks: how many; the last may be shorter.
        label_smoothing: see ``vocab_parallel_cross_entropy``, as the rest.
        z_loss: likewise.
        ignore_index: likewise.

    Raises:
        ValueError: shapes that do not match, fewer columns than V, or ``label_smoothing`` out of range.
        RuntimeError: a label is neither in ``[0, V)`` nor ``ignore_index`` (on CUDA a device-side assertion, raised later).
    """
    terms = Terms(mesh.tp, vocab_size, label_smoothing, z_loss, reuse_logits=True)
    rows = hidden.shape[0] * (mesh.tp.size if mesh.sequence_parallel else 1)
    valid = check_loss((rows, hidden.shape[1], weight.shape[0]), labels, terms, ignore_index=ignore_index)
    result: Tensor = _ChunkedLoss.apply(hidden, weight, labels, valid, terms, mesh, num_chunks)  # type: ignore[no-untyped-call]
    return result


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, valid: Tensor, terms: Terms, mesh: Mesh, num_chunks: int
    ) -> Tensor:
        full = all_gather(hidden, mesh.tp) if mesh.sequence_parallel else hidden
        rows = full.reshape(-1, full.shape[-1])
        size = max(1, -(-rows.shape[0] // num_chunks))
        parts = zip(*(torch.split(given, size) for given in (rows, labels.reshape(-1), valid.reshape(-1))), strict=True)
        pairs = [losses_of(F.linear(some, weight), label, count, terms) for some, label, count in parts]
        losses, stats = zip(*pairs, strict=True)
        ctx.terms, ctx.mesh, ctx.size = terms, mesh, size
        ctx.save_for_backward(hidden, weight, *(torch.cat(field) for field in zip(*stats, strict=True)))
        return torch.cat(losses).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *stats = ctx.saved_tensors
        mesh: Mesh = ctx.mesh
        with outside_autocast(hidden):
            full = all_gather(hidden, mesh.tp) if mesh.sequence_parallel else hidden
            rows, grads = full.reshape(-1, full.shape[-1]), grad_losses.reshape(-1)
            grad_rows = torch.empty_like(rows)

            def run(add_to: Callable[[Tensor, Tensor], None]) -> None:
                for start in range(0, rows.shape[0], ctx.size):
                    some = slice(start, start + ctx.size)
                    logits = F.linear(rows[some], weight)
                    of_logits = gradient_of(logits, grads[some], RowStats(*(field[some] for field in stats)), ctx.terms)
                    torch.mm(of_logits, weight, out=grad_rows[some])
                    add_to(of_logits, rows[some])

            grad_weight = _with_weight_gradient(ctx, weight, run)
            grad_hidden = grad_rows.view(full.shape)
            grad_hidden = reduce_scatter(grad_hidden, mesh.tp) if mesh.sequence_parallel else all_reduce(grad_hidden, mesh.tp)
        return grad_hidden, grad_weight, None, None, None, None, None


def _with_weight_gradient(ctx: Any, weight: Tensor, run: Callable[[Callable[[Tensor, Tensor], None]], None]) -> Tensor | None:
    """Run, and return the gradient of the weight unless it has been added to its sum."""
    if not ctx.needs_input_grad[1]:
        run(lambda of_logits, rows: None)
        return None
    if added_to_sum(ctx, 1, lambda total: run(lambda of_logits, rows: add_weight_gradient(total, of_logits, rows))):
        return None
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    run(lambda of_logits, rows: add_weight_gradient(total, of_logits, rows))
    return total.to(weight.dtype)
