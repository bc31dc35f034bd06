"""Head and cross entropy together: on all tokens at once, or a chunk of them at a time.

Note [Gradient first]
Logits are the largest tensor of a model, and each pass over them counts. The gradient of a token's loss in its logits is
known as soon as its log-sum-exp is, so the forward writes it over the logits while it has them. What comes to the losses in
the backward, ``g`` ``[N]``, is one factor a token; with the kept gradients ``D`` ``[N, V]``, hidden states ``x`` and the
weight ``W`` the products of the head are ``g * (D W)`` and ``D^T (g * x)``: ``g`` meets ``[N, H]`` only. ``D`` is rounded
where the logits' gradient would be; ``g`` rounds once more in 16 bits, unless it is a power of two or next to one, as with a
mean over tokens that is summed by their number. fp16 has no room for probabilities without the loss scale in them, so there
the gradient waits for ``g``.

Note [Logits twice]
With chunks the forward makes the logits of a chunk, takes what the losses need and forgets them; the backward makes them
again, turns them into their gradient in place and uses it up before the next chunk. That costs one more product of the head,
a third of what the head costs otherwise, and saves all but ``1 / num_chunks`` of the largest tensor of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.comm import all_gather, all_reduce, reduce_scatter
from lightning_megatron.kernels import runs_on
from lightning_megatron.mesh import Mesh
from lightning_megatron.tensor_parallel.cross_entropy import (
    RowStats,
    Terms,
    check_loss,
    gradient_of,
    losses_of,
    losses_with_gradient,
    vocab_parallel_cross_entropy,
)
from lightning_megatron.tensor_parallel.embedding import vocab_logits
from lightning_megatron.tensor_parallel.product import (
    Pending,
    add_weight_gradient,
    input_gradient,
    outside_autocast,
    product,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    weight_gradient_of,
)
from lightning_megatron.weight_gradients import added_to_sum, waits


def head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    mesh: Mesh,
    vocab_size: int,
    num_chunks: int = 1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """The losses of ``vocab_parallel_cross_entropy(vocab_logits(hidden, weight, mesh), labels, ...)``, in fewer passes.

    Exact; see Note [Gradient first], and for chunks Note [Logits twice]. ``[S/tp, B, H], [V_padded/tp, H], [S, B] -> [S, B]``
    under sequence parallelism, else hidden is ``[S, B, H]``. Without gradients nothing is kept. Autocast changes nothing.

    Args:
        hidden: input of the head.
        weight: of the head; its gradient is added to its sum where it has one.
        labels: global token ids, ``ignore_index`` where a token does not count.
        mesh: the running mesh.
        vocab_size: real vocabulary V.
        num_chunks: of tokens, in each of which logits are held; the last may be shorter.
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
    has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if num_chunks > 1 or not has_gradient:
        result: Tensor = _ChunkedLoss.apply(hidden, weight, labels, valid, terms, mesh, num_chunks)  # type: ignore[no-untyped-call]
    elif hidden.dtype == torch.float16:
        result = vocab_parallel_cross_entropy(
            *(vocab_logits(hidden, weight, mesh), labels),
            tp=mesh.tp,
            vocab_size=vocab_size,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            ignore_index=ignore_index,
            reuse_logits=True,
        )
    else:
        result = _HeadLoss.apply(hidden, weight, labels, valid, terms, mesh, ignore_index)  # type: ignore[no-untyped-call]
    return result


class _HeadLoss(torch.autograd.Function):
    """See Note [Gradient first]."""

    weight_input = 1

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, valid: Tensor, terms: Terms, mesh: Mesh, ignore_index: int
    ) -> Tensor:
        with outside_autocast(hidden):
            full = all_gather(hidden, mesh.tp) if mesh.sequence_parallel else hidden
            slopes = product(full.reshape(-1, full.shape[-1]), weight)
        losses = losses_with_gradient(slopes, labels.reshape(-1), valid.reshape(-1), terms, ignore_index=ignore_index)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(slopes, hidden if needs_weight else None, weight if needs_hidden else None)
        ctx.mesh, ctx.shape, ctx.num_kept = mesh, hidden.shape, slopes.numel()
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        slopes, hidden, weight = ctx.saved_tensors
        axis, is_cut = ctx.mesh.tp, ctx.mesh.sequence_parallel
        # Each rank scales its own tokens: hidden states before they are gathered, their gradient once it has been summed.
        own = grad_losses.chunk(axis.size)[axis.rank] if is_cut else grad_losses
        factors = own.reshape(-1).contiguous()
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        reducing = grad_hidden = grad_weight = None

        def gather() -> Pending:
            rows = _scaled(hidden.reshape(-1, hidden.shape[-1]), factors)
            return start_all_gather(rows, axis) if is_cut else Pending(rows)

        with outside_autocast(slopes):
            gathering = gather() if needs_weight and not waits(ctx) else None
            if needs_hidden:
                grad_rows = input_gradient(slopes, weight)
            full = None if gathering is None else gathering.wait()
            if needs_hidden:
                reducing = (start_reduce_scatter if is_cut else start_all_reduce)(grad_rows, axis)
            if needs_weight:

                def rows() -> Tensor:
                    return gather().wait() if full is None else full

                grad_weight = weight_gradient_of(ctx, slopes, rows)
            if reducing is not None:
                summed = reducing.wait()
                grad_hidden = _scaled(summed, factors, out=summed).view(ctx.shape)
            return grad_hidden, grad_weight, None, None, None, None, None


def _scaled(rows: Tensor, factors: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``rows * factors[:, None]``, rounded once: ``[N, H], [N] -> [N, H]``. ``out`` may be ``rows`` itself."""
    out = torch.empty_like(rows, memory_format=torch.contiguous_format) if out is None else out
    if runs_on(rows):
        from lightning_megatron.kernels.cross_entropy import scale_rows

        scale_rows(rows.contiguous(), factors, out=out)
        return out
    return torch.mul(rows, factors.unsqueeze(-1), out=out)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, valid: Tensor, terms: Terms, mesh: Mesh, num_chunks: int
    ) -> Tensor:
        with outside_autocast(hidden):
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
