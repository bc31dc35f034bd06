"""Attention over cut sequences by Transformer Engine, in place of this project's own (``cp_kernel="te"``).

Note [One layout]
The library cuts each sequence as this project does (layout: Note [Zig-zag]): into ``2 * size`` chunks, of which rank r holds
r and ``2 * size - 1 - r``, document by document where rows are packed. So tensors are handed over as they lie. Its lengths of
documents are those of whole rows, laid end to end, without empty documents.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.context_parallel.attention import Comm, ContextParallelAttention
from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.context_parallel.tiles import Pattern
from lightning_megatron.context_parallel.tiling import Tiling
from lightning_megatron.layers.te_backend.library import why_unavailable

_DTYPES = (torch.bfloat16, torch.float16)
_SHAPES_STEP = 128
"""Longest documents are rounded up to a multiple of so many tokens a chunk: kernels are planned anew for each number."""


class TeContextAttention:
    """As ``ContextParallelAttention``, by ``transformer_engine.pytorch.DotProductAttention``.

    Args:
        routes: which ranks share a sequence, and how they communicate.
        dropout: probability of dropping an attention weight in training.

    Raises:
        ValueError: Transformer Engine cannot be used here; the message says why.
    """

    def __init__(self, routes: ContextParallelAttention, *, dropout: float) -> None:
        # It must load before torch's own cuDNN does, so not as late as it is needed.
        if (reason := why_unavailable()) is not None:
            raise ValueError(f"cp_kernel='te' needs Transformer Engine: {reason}. Use cp_kernel='torch' without it.")
        self._routes, self._dropout = routes, dropout
        self._modules: dict[tuple[int, int, int], Any] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, layout: SequenceLayout, pattern: Pattern, training: bool) -> Tensor:
        """Queries ``[S/cp, B, h, d]``, keys and values ``[S/cp, B, g, d]`` with g dividing h, to ``[S/cp, B, h, d]``.

        Raises:
            ValueError: a form that the library has not, by name.
        """
        comm, axis = self._routes.route(layout)
        window = Tiling(layout, pattern, q.device).window
        reason = why_not(comm, layout, pattern, heads=q.shape[2], kv_heads=k.shape[2], dtype=q.dtype, window=window)
        if reason is not None:
            raise ValueError(f"cp_kernel='te': {reason}; cp_kernel='torch' does.")
        module = self._module(q, k).train(training)
        ring = [self._routes.inner.group, self._routes.outer.group]
        module.set_context_parallel_group(ring if comm == "a2a+p2p" else axis.group, list(axis.ranks), _stream(q.device), comm)
        near = -1 if window is None else window - 1
        reach = (near, 0 if pattern.causal else near)
        try:
            return self._attended(module, (q, k, v), layout, causal=pattern.causal, reach=reach)
        except (AssertionError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"cp_kernel='te': Transformer Engine refuses attention with cp_comm={comm!r}, {pattern}, packed="
                f"{layout.cu_seqlens is not None}, {q.shape[2]} heads, {k.shape[2]} key/value heads of {q.shape[3]}: {error} "
                f"(NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 make it say more). Use cp_kernel='torch'."
            ) from error

    @staticmethod
    def _attended(
        module: Any,
        tensors: tuple[Tensor, Tensor, Tensor],
        layout: SequenceLayout,
        *,
        causal: bool,
        reach: tuple[int, int],
    ) -> Tensor:
        q = tensors[0]
        if layout.cu_seqlens is None:
            mask = "causal" if causal else "no_mask"
            parts = (tensor.contiguous() for tensor in tensors)
            attended: Tensor = module(*parts, qkv_format="sbhd", attn_mask_type=mask, window_size=reach)
            return attended.view_as(q)
        step = 2 * layout.size * _SHAPES_STEP
        longest, borders = -(-layout.longest // step) * step, _borders(layout)
        attended = module(
            *(tensor.transpose(0, 1).flatten(0, 1).contiguous() for tensor in tensors),
            qkv_format="thd",
            attn_mask_type="padding_causal" if causal else "padding",
            window_size=reach,
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            cu_seqlens_q_padded=borders,
            cu_seqlens_kv_padded=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            pad_between_seqs=False,
        )
        return attended.view(q.shape[1], q.shape[0], *q.shape[2:]).transpose(0, 1)

    def _module(self, q: Tensor, k: Tensor) -> Any:
        """The library's module for these heads. It holds no parameters, and stays out of the model's own modules."""
        key = (q.shape[2], k.shape[2], q.shape[3])
        if key not in self._modules:
            te = import_module("transformer_engine.pytorch")
            self._modules[key] = te.DotProductAttention(
                key[0], key[2], num_gqa_groups=key[1], attention_dropout=self._dropout, qkv_format="sbhd", layer_number=1
            )
        return self._modules[key]


def why_not(
    comm: Comm,
    layout: SequenceLayout,
    pattern: Pattern,
    *,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    window: int | None,
) -> str | None:
    """What Transformer Engine (2.20) does not do under context parallelism, or ``None``.

    Args:
        comm: how ranks communicate.
        layout: how sequences lie over them.
        pattern: which tokens a query sees.
        heads: query heads of a tensor-parallel rank.
        kv_heads: its key/value heads.
        dtype: of the tensors.
        window: that of the pattern, if a document is longer.
    """
    if dtype not in _DTYPES:
        return f"Transformer Engine attends in 16 bits, and these tensors are {dtype}: it takes no other"
    if window is not None and comm not in ("a2a", "all_gather"):
        return f"Transformer Engine has no sliding window with cp_comm={comm!r}, only with 'a2a' and 'all_gather'"
    if not pattern.causal and layout.cu_seqlens is None and layout.num_real < layout.length:
        return (
            f"rows of {layout.num_real} tokens are padded to {layout.length}, and without a causal mask Transformer Engine "
            f"does not tell the padding apart; give lengths that divide, or documents (cu_seqlens)"
        )
    if not pattern.causal and layout.real_lengths is not None:
        return (
            "documents may end with padding (real_lengths), which Transformer Engine does not tell apart without a causal "
            "mask; leave real_lengths out of a batch that has none"
        )
    if comm == "a2a" and (heads % layout.size or kv_heads % layout.size):
        return f"{layout.size} ranks exchange heads, and Transformer Engine does not share {heads} and {kv_heads} over them"
    return None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which every other step of a ring runs, the same for all layers."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _borders(layout: SequenceLayout) -> Tensor:
    """Borders of all documents of all rows, end to end: int32 ``[n + 1]``. Found once a micro-batch, which waits for it."""
    key = "borders without empty documents"
    if key not in layout.cache:
        assert layout.cu_seqlens is not None
        sizes = layout.cu_seqlens.diff(dim=1).flatten()
        layout.cache[key] = torch.nn.functional.pad(sizes[sizes > 0].cumsum(0), (1, 0)).int()
    borders: Tensor = layout.cache[key]
    return borders
