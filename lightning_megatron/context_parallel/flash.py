"""Flash attention of one tile (Dao 2023): by torch's copy of the kernels, or by the package flash-attn.

Kernels take [B, S, h, d], or packed rows laid end to end, [B * S, h, d].

Note [Windows of flash]
Flash takes a bound that reaches as far as the longest keys for no bound, and then bounds by the longest keys all the same.
A block with more queries than keys would lose pairs, so it is given longer "longest keys"; that needs the packed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.context_parallel.tiles import Lengths, Tile

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""


@dataclass(frozen=True)
class Form:
    """A tile as flash takes it. See Note [Windows of flash].

    Args:
        lengths: of packed documents; ``None`` for whole rows.
        causal: a query sees keys up to its own place, counted from the end.
        left, right: how many keys before and behind its own place it sees; ``None`` for all.
        max_q, max_k: longest queries and keys.
    """

    lengths: Lengths | None
    causal: bool
    left: int | None
    right: int | None
    max_q: int
    max_k: int

    @classmethod
    def of(cls, tile: Tile, q: Tensor, k: Tensor) -> Form:
        """Of queries and keys ``[n, B, h, d]``."""
        lengths, banded = tile.lengths, tile.form == "band"
        if banded and lengths is None and q.shape[0] > k.shape[0]:
            rows = torch.arange(q.shape[1] + 1, device=q.device, dtype=torch.int32)
            lengths = Lengths(rows * q.shape[0], rows * k.shape[0], q.shape[0], q.shape[0])
        longest = (q.shape[0], k.shape[0]) if lengths is None else (lengths.max_q, lengths.max_k)
        return cls(lengths, tile.form == "causal", tile.left if banded else None, tile.right if banded else None, *longest)

    def rows(self, tensor: Tensor) -> Tensor:
        """``[n, B, h, d]`` to ``[B, n, h, d]``, or to ``[B * n, h, d]`` where documents are packed."""
        rows = tensor.transpose(0, 1)
        return rows if self.lengths is None else rows.flatten(0, 1)

    def back(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of ``rows``."""
        return rows.reshape(like.shape[1], like.shape[0], *rows.shape[-2:]).transpose(0, 1)


class FlashCalls(Protocol):
    """Whose kernels. Log-sum-exps are ``[B, h, n]``, or ``[h, B * n]`` where packed; +inf stands for a query without keys."""

    def forward(self, heads: Heads, form: Form, *, dropout: float) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The output, the log-sum-exp, and the random state."""
        ...

    def backward(
        self, grad: Tensor, heads: Heads, form: Form, *, out: Tensor, lse: Tensor, random: tuple[Tensor, ...], dropout: float
    ) -> Heads:
        """The gradients."""
        ...


class TorchFlash:
    """``FlashCalls`` by torch."""

    def forward(self, heads: Heads, form: Form, *, dropout: float) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See ``FlashCalls``."""
        windows = {"window_size_left": form.left, "window_size_right": form.right}
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            *heads, *self._sizes(form), dropout, form.causal, False, **windows
        )
        return out, lse, (state, unused)

    def backward(
        self, grad: Tensor, heads: Heads, form: Form, *, out: Tensor, lse: Tensor, random: tuple[Tensor, ...], dropout: float
    ) -> Heads:
        """See ``FlashCalls``."""
        windows = {"window_size_left": form.left, "window_size_right": form.right}
        grads: Heads = torch.ops.aten._flash_attention_backward(
            grad, *heads, out, lse, *self._sizes(form), dropout, form.causal, *random, **windows
        )
        return grads

    @staticmethod
    def _sizes(form: Form) -> tuple[Tensor | None, Tensor | None, int, int]:
        if form.lengths is None:
            return None, None, form.max_q, form.max_k
        return form.lengths.cu_q, form.lengths.cu_k, form.max_q, form.max_k


class PackageFlash:
    """``FlashCalls`` by the package flash-attn, version 2.7 or later."""

    def forward(self, heads: Heads, form: Form, *, dropout: float) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """See ``FlashCalls``."""
        options = {**self._options(heads[0], form, dropout), "return_softmax": False}
        if form.lengths is None:
            out, lse, _, state = flash_attn_interface()._flash_attn_forward(*heads, **options)
        else:
            borders = form.lengths.cu_q, form.lengths.cu_k, form.max_q, form.max_k
            out, lse, _, state = flash_attn_interface()._flash_attn_varlen_forward(*heads, *borders, **options)
        return out, lse, (state,)

    def backward(
        self, grad: Tensor, heads: Heads, form: Form, *, out: Tensor, lse: Tensor, random: tuple[Tensor, ...], dropout: float
    ) -> Heads:
        """See ``FlashCalls``."""
        q, k, v = heads
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = {**self._options(q, form, dropout), "deterministic": insists_on_order()}
        options["rng_state"] = random[0]
        if form.lengths is None:
            flash_attn_interface()._flash_attn_backward(grad, *heads, out, lse, *grads, **options)
        else:
            borders = form.lengths.cu_q, form.lengths.cu_k, form.max_q, form.max_k
            flash_attn_interface()._flash_attn_varlen_backward(grad, *heads, out, lse, *grads, *borders, **options)
        return grads

    @staticmethod
    def _options(q: Tensor, form: Form, dropout: float) -> dict[str, Any]:
        left, right = (-1 if bound is None else bound for bound in (form.left, form.right))
        windows = {"window_size_left": left, "window_size_right": right, "softcap": 0.0, "alibi_slopes": None}
        return {"dropout_p": dropout, "softmax_scale": 1.0 / sqrt(q.shape[-1]), "causal": form.causal, **windows}


def insists_on_order() -> bool:
    """Whether sums must have the same order in every run; not where torch only warns, whose own flash has no order then."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def flash_attn_interface() -> Any:
    """The package's functions.

    Raises:
        ImportError: it is not installed, or was built for another torch.
    """
    return import_module("flash_attn.flash_attn_interface")


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, *, dropout: float, calls: FlashCalls
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """See ``BlockAttention.forward``."""
    form = Form.of(tile, q, k)
    out, lse, random = calls.forward((form.rows(q), form.rows(k), form.rows(v)), form, dropout=dropout)
    rows = lse.permute(2, 0, 1) if form.lengths is None else lse.view(lse.shape[0], q.shape[1], -1).permute(2, 1, 0)
    return form.back(out, q).float(), rows.masked_fill(rows == float("inf"), float("-inf")), random


def flash_backward(
    grad: Tensor,
    heads: Heads,
    tile: Tile,
    *,
    out: Tensor,
    lse: Tensor,
    random: tuple[Tensor, ...],
    dropout: float,
    calls: FlashCalls,
) -> Heads:
    """See ``BlockAttention.backward``."""
    q, k, v = heads
    form = Form.of(tile, q, k)
    rows = lse.permute(1, 2, 0) if form.lengths is None else lse.permute(2, 1, 0).flatten(1)
    of_q, of_k, of_v = calls.backward(
        form.rows(grad).contiguous(),
        (form.rows(q), form.rows(k), form.rows(v)),
        form,
        out=form.rows(out).contiguous(),
        lse=rows.contiguous(),
        random=random,
        dropout=dropout,
    )
    return form.back(of_q, q), form.back(of_k, k), form.back(of_v, v)
