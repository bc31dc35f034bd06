"""Cross entropy over a vocabulary that is cut over the tensor-parallel axis; full logits are never held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import all_gather, gather_from
from lightning_megatron.kernels import runs_on
from lightning_megatron.mesh import Axis

# Logits are worked on in blocks of rows of about this many elements: 128 MiB of fp32 scratch, whatever the batch.
_BLOCK_NUMEL = 1 << 25


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    tp: Axis,
    vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reuse_logits: bool = False,
) -> Tensor:
    """Loss of each token, ``[.., V_padded/tp], [..] -> [..]``, the same on every tp rank.

    With ``lse`` the log-sum-exp over the real vocabulary, the loss is ``(1 - label_smoothing) * (lse - logit[label]) +
    label_smoothing * (lse - mean(logits)) + z_loss * lse**2``: ``torch.nn.functional.cross_entropy(reduction="none")``
    plus the z-loss of Chowdhery et al. 2022, section 5. Computed in fp32 (fp64 for fp64 logits) and returned so; the
    gradient has the dtype of the logits. One collective forward, none backward. Besides the logits only a few numbers a
    token are kept for the backward. Logits that are not contiguous are copied.

    Args:
        logits: this rank's columns, padding included.
        labels: global token ids, ``ignore_index`` where a token does not count (loss and gradient exactly 0).
        tp: the axis over which the vocabulary is cut.
        vocab_size: real vocabulary V; columns from V on are padding and take no part.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-sum-exp.
        ignore_index: the label of tokens that do not count.
        reuse_logits: let the backward write the gradient over the logits, which saves memory of their size. Whoever else has
            kept them for a backward of their own gets torch's error about it.

    Raises:
        ValueError: shapes that do not match, fewer columns than V, or ``label_smoothing`` out of range.
        RuntimeError: a label is neither in ``[0, V)`` nor ``ignore_index`` (on CUDA a device-side assertion, raised later).
    """
    terms = Terms(tp, vocab_size, label_smoothing, z_loss, reuse_logits)
    valid = check_loss(tuple(logits.shape), labels, terms, ignore_index=ignore_index)
    losses: Tensor = _CrossEntropy.apply(logits, labels, valid, terms)  # type: ignore[no-untyped-call]
    return losses


def gather_logits(logits: Tensor, *, tp: Axis, vocab_size: int) -> Tensor:
    """Real full logits for a user, differentiable: ``[S, B, V_padded/tp] -> [B, S, V]``, contiguous, padding cut off."""
    return gather_from(logits.transpose(0, 1), tp, dim=-1)[..., :vocab_size].contiguous()


@dataclass(frozen=True)
class Terms:
    """What the loss consists of, and whether the backward may overwrite the logits."""

    tp: Axis
    vocab_size: int
    label_smoothing: float
    z_loss: float
    reuse_logits: bool = False

    def num_real(self, columns: int) -> int:
        """How many of this rank's columns are words; the rest is padding."""
        return max(0, min(columns, self.vocab_size - self.tp.rank * columns))


def check_loss(shape: tuple[int, ...], labels: Tensor, terms: Terms, *, ignore_index: int) -> Tensor:
    """Check labels ``[..]`` against logits of ``shape`` ``[.., V_padded/tp]``; returns which labels count. Waits for nothing.

    Raises:
        ValueError: shapes that do not match, fewer columns than V, or ``label_smoothing`` out of range.
        RuntimeError: a label is neither in ``[0, V)`` nor ``ignore_index`` (on CUDA a device-side assertion, raised later).
    """
    columns, tp, vocab_size = shape[-1], terms.tp, terms.vocab_size
    if shape[:-1] != tuple(labels.shape):
        raise ValueError(f"logits {shape} need labels {shape[:-1]}, got {tuple(labels.shape)}.")
    if columns * tp.size < vocab_size:
        raise ValueError(f"{columns} columns on each of tp={tp.size} ranks hold fewer than vocab_size={vocab_size} words.")
    if not 0.0 <= terms.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={terms.label_smoothing} must lie between 0 and 1.")
    valid = labels != ignore_index
    inside = (labels >= 0) & (labels < vocab_size)
    torch._assert_async((inside | ~valid).all(), f"a label is neither in [0, {vocab_size}) nor ignore_index={ignore_index}.")
    return valid


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, valid: Tensor, terms: Terms) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1]).contiguous()
        losses, rows = losses_of(flat, labels.reshape(-1), valid.reshape(-1), terms)
        ctx.terms, ctx.shape = terms, logits.shape
        ctx.save_for_backward(flat, *rows)
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, None]:
        flat, *rows = ctx.saved_tensors
        grad = gradient_of(flat, grad_losses.reshape(-1), RowStats(*rows), ctx.terms)
        return grad.view(ctx.shape), None, None, None


class RowStats(NamedTuple):
    """What the backward needs to know of each row of logits, ``[N]`` each.

    Args:
        target: a column: the label's, where it is one of this rank's.
        mine: whether it is.
        valid: whether the row counts.
        lse: log-sum-exp over the whole vocabulary.
    """

    target: Tensor
    mine: Tensor
    valid: Tensor
    lse: Tensor


def losses_of(flat: Tensor, labels: Tensor, valid: Tensor, terms: Terms) -> tuple[Tensor, RowStats]:
    """Losses of rows of logits ``[N, V_padded/tp]`` with labels ``[N]``, and what their gradient needs besides. Collective."""
    columns = flat.shape[-1]
    local = labels - terms.tp.rank * columns
    mine = valid & (local >= 0) & (local < columns)
    target = local.remainder(columns)  # of other ranks' labels: any column, not used
    stats = all_gather(_local_stats(flat, target, mine, terms).unsqueeze(0), terms.tp)  # [tp, 3, N]
    lse = torch.logsumexp(stats[:, 0], dim=0)
    losses = lse - (1.0 - terms.label_smoothing) * stats[:, 1].sum(0)
    if terms.label_smoothing:
        losses -= stats[:, 2].sum(0) * (terms.label_smoothing / terms.vocab_size)
    if terms.z_loss:
        losses += terms.z_loss * lse.square()
    return losses.masked_fill_(~valid, 0.0), RowStats(target, mine, valid, lse)


def losses_with_gradient(flat: Tensor, labels: Tensor, valid: Tensor, terms: Terms, *, ignore_index: int) -> Tensor:
    """Losses of rows of logits ``[N, V_padded/tp]``, which become the gradient of each row's own loss. Collective."""
    if terms.tp.size == 1 and runs_on(flat):
        from lightning_megatron.kernels import cross_entropy, cross_entropy_held

        labels = labels.contiguous()
        held = cross_entropy_held.fits(flat, labels, ignore_index=ignore_index)
        compute = cross_entropy_held.losses_with_gradient if held else cross_entropy.losses_with_gradient
        return compute(
            flat,
            labels,
            num_real=terms.num_real(flat.shape[-1]),
            ignore_index=ignore_index,
            label_smoothing=terms.label_smoothing,
            z_loss=terms.z_loss,
        )
    losses, rows = losses_of(flat, labels, valid, terms)
    gradient_of(flat, torch.ones_like(losses), rows, replace(terms, reuse_logits=True))
    return losses


def gradient_of(flat: Tensor, grad_losses: Tensor, rows: RowStats, terms: Terms) -> Tensor:
    """The gradient of rows of logits ``[N, V_padded/tp]`` by that of their losses ``[N]``; see ``Terms.reuse_logits``."""
    smoothing, num_real = terms.label_smoothing, terms.num_real(flat.shape[-1])
    weight = grad_losses.masked_fill(~rows.valid, 0.0)
    of_softmax = (weight * (1.0 + 2.0 * terms.z_loss * rows.lse)).masked_fill_(~rows.valid, 0.0)
    of_target = (weight * (smoothing - 1.0)).masked_fill(~rows.mine, 0.0)
    of_all = weight * (smoothing / terms.vocab_size) if smoothing else None
    out = flat if terms.reuse_logits else torch.empty_like(flat)
    if runs_on(flat):
        from lightning_megatron.kernels.cross_entropy import gradient

        gradient(
            flat,
            rows.target,
            lse=rows.lse,
            of_softmax=of_softmax,
            of_target=of_target,
            of_all=of_all,
            num_real=num_real,
            out=out,
        )
        if terms.reuse_logits:
            torch.autograd.graph.increment_version(flat)
        return out
    out[:, num_real:] = 0.0
    for some in _blocks(flat):
        work = flat[some].to(rows.lse.dtype, copy=True)
        work.sub_(rows.lse[some].unsqueeze(-1)).exp_().mul_(of_softmax[some].unsqueeze(-1))
        if of_all is not None:
            work.sub_(of_all[some].unsqueeze(-1))
        work.scatter_add_(1, rows.target[some].unsqueeze(-1), of_target[some].unsqueeze(-1))
        out[some, :num_real] = work[:, :num_real]
    return out


def _local_stats(flat: Tensor, target: Tensor, mine: Tensor, terms: Terms) -> Tensor:
    """``[N, V_padded/tp] -> [3, N]``: log-sum-exp of own real columns, own label's logit or 0, sum of own real columns."""
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    num_real = terms.num_real(flat.shape[-1])
    if runs_on(flat):
        from lightning_megatron.kernels.cross_entropy import local_stats

        return local_stats(flat, target, mine, num_real=num_real, sums=terms.label_smoothing > 0.0)
    stats = flat.new_zeros((3, flat.shape[0]), dtype=dtype)
    for rows in _blocks(flat):
        real = flat[rows, :num_real].to(dtype)
        stats[0, rows] = torch.logsumexp(real, dim=-1)  # -inf where a rank has only padding: adds exp(-inf) = 0
        if terms.label_smoothing:
            stats[2, rows] = real.sum(-1)
    stats[1] = flat.gather(1, target.unsqueeze(-1)).squeeze(-1).to(dtype).masked_fill_(~mine, 0.0)
    return stats


def _blocks(flat: Tensor) -> Iterator[slice]:
    """Slices of rows, each of about ``_BLOCK_NUMEL`` elements."""
    step = max(1, _BLOCK_NUMEL // max(1, flat.shape[-1]))
    for start in range(0, flat.shape[0], step):
        yield slice(start, start + step)
