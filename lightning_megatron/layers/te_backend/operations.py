"""``Operations``: what a library must do for the layers of this backend. Matrices are two-dimensional here, tokens first.

A ``Narrow`` is a matrix as the library multiplies it: in 8 bits, with its factor; for a backend without FP8 simply the
16-bit tensor. It may hold one or both of two forms: *rows*, for products over its last dim, and *columns*, for products
over its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.kernels.rotation import rotate_together, split_heads
from lightning_megatron.layers.backend import Activation
from lightning_megatron.layers.rope import RopeTables, rotate_back, rotate_fused
from lightning_megatron.layers.te_backend.scales import AttentionSlots, Slot

Narrow = Any
Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Rotation:
    """Rotary positions: of the first h and the next g of ``[S, B, (h + 2g) * d]``.

    Args:
        heads: h and g.
        tables: of the S positions.
    """

    heads: tuple[int, int]
    tables: RopeTables

    @property
    def head_dim(self) -> int:
        """The size of a head, d."""
        return self.tables.cos.shape[-1]

    def turned(self, fused: Tensor) -> Heads:
        """Rotated ``[S, B, h, d], [S, B, g, d] x 2``."""
        return rotate_fused(fused, self.heads, head_dim=self.head_dim, tables=self.tables)

    def turned_whole(self, fused: Tensor) -> Tensor:
        """The same as one tensor, ``[S, B, (h + 2g) * d]``."""
        parts = split_heads(fused, self.heads, self.head_dim)
        return rotate_together(*parts, cos=self.tables.cos, sin=self.tables.sin, inverse=False)

    def split(self, fused: Tensor) -> Heads:
        """What is rotated already, ``[S, B, (h + 2g) * d]``, as its parts."""
        return split_heads(fused, self.heads, self.head_dim)

    def turned_back(self, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> Tensor:
        """The gradient of what was rotated, of those of the parts."""
        return rotate_back(of_q, of_k, of_v, self.tables)


class Operations(Protocol):
    """Products in 8 bits, and the pointwise work around them, each fused as far as the library can."""

    @property
    def is_narrow(self) -> bool:
        """Whether products are in 8 bits at all."""
        ...

    def with_fp32_sums(self) -> Operations:
        """The same, but gradient products keep their sums in fp32 whatever the options are."""
        ...

    def quantize(self, x: Tensor, slot: Slot | None, *, record: bool) -> Narrow:
        """``[N, n]``, both forms. ``record``: remember the largest magnitude for later steps."""
        ...

    def round_rows(self, x: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor) -> Narrow:
        """``[N, n]`` by the factor ``scale``, rows alone. ``amax`` is raised to the largest magnitude. Both fp32 ``[1]``."""
        ...

    def rows(self, x: Narrow) -> Tensor:
        """What its rows consist of, ``[N, n]``: bytes of a matrix in 8 bits."""
        ...

    def with_rows(self, x: Narrow, rows: Tensor) -> Narrow:
        """Other rows, ``[N', n]``, by the factor of ``x``, without columns."""
        ...

    def quantize_weight(self, weight: Tensor) -> Narrow:
        """``[out, in]``, both forms, by the weight's own largest magnitude."""
        ...

    def held_weight(self, rows: Tensor, scale_inv: Tensor) -> Narrow:
        """What ``quantize_weight`` made elsewhere: e4m3 bytes ``[out, in]`` and the inverse of their factor, fp32 ``[1]``."""
        ...

    def add_norm_quantized(
        self, hidden: Tensor, added: Tensor | None, gain: Tensor, eps: float, *, slot: Slot | None, record: bool
    ) -> tuple[Tensor, Narrow, Tensor] | None:
        """``x = hidden + added`` (``hidden`` itself if there is nothing to add), its quantized RMSNorm, ``1 / rms(x)`` ``[N]``.

        ``None`` if that cannot be had in one pass: the norm is then computed in 16 bits, and quantized after it.
        """
        ...

    def activate_quantized(self, x: Tensor, kind: Activation, slot: Slot | None, *, record: bool) -> Narrow:
        """The activation of ``[N, m]``, quantized."""
        ...

    def activate_backward(self, grad: Tensor, x: Tensor, kind: Activation) -> Tensor:
        """Gradient of the activation's input, ``[N, m]``."""
        ...

    def activate_backward_quantized(self, grad: Tensor, x: Tensor, kind: Activation, slot: Slot | None) -> Narrow:
        """``activate_backward``, quantized."""
        ...

    def turned_back_quantized(self, parts: Heads, rotation: Rotation, slot: Slot | None) -> Narrow:
        """``Rotation.turned_back``, quantized: ``[S * B, (h + 2g) * d]``."""
        ...

    def product(
        self,
        weight: Narrow,
        x: Narrow,
        bias: Tensor | None,
        like: Tensor,
        *,
        added: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``x weight^T + bias + added``: ``[N, in], [out, in] -> [N, out]`` in the dtype of ``like``.

        ``out``: where to write it, contiguous; nothing is added then.
        """
        ...

    def product_gated(
        self, weight: Narrow, x: Narrow, like: Tensor, slot: Slot | None, *, record: bool
    ) -> tuple[Tensor, Narrow] | None:
        """``x weight^T`` and its SwiGLU, quantized: ``[N, in], [2n, in] -> [N, 2n], [N, n]``.

        ``None`` if it is not to be had at once: ``product`` and ``activate_quantized`` make the same, one after the other.
        """
        ...

    def product_rotated(self, weight: Narrow, x: Narrow, like: Tensor, rotation: Rotation) -> Tensor | None:
        """``x weight^T``, rotated: ``[S * B, in], [(h + 2g) * d, in] -> [S * B, (h + 2g) * d]``, for ``like`` ``[S, B, in]``.

        ``None`` if it is not to be had at once.
        """
        ...

    def adds_to(self, added: Tensor, weight: Tensor) -> bool:
        """Whether ``product`` by that parameter, which may be held in 8 bits, adds ``[.., out]`` without a pass for it."""
        ...

    def input_gradient(self, weight: Narrow, grad: Narrow, like: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``grad weight``: ``[N, out], [out, in] -> [N, in]`` in the dtype of ``like``. ``out``: where to write it."""
        ...

    def weight_gradient(self, x: Narrow, grad: Narrow, like: Tensor) -> Tensor:
        """``grad^T x``: ``[N, in], [N, out] -> [out, in]`` in the dtype of ``like``."""
        ...

    def add_weight_gradient(self, x: Narrow, grad: Narrow, total: Tensor, *, add: bool = True) -> None:
        """Add ``grad^T x`` to ``total``, ``[out, in]``, contiguous; or write it over that, whatever it holds."""
        ...

    def keep_columns(self, x: Narrow) -> Narrow:
        """The same without its rows, to be kept for a weight gradient. Columns are made if there are none."""
        ...

    # Attention

    @property
    def attention_head_dim(self) -> int | None:
        """The one size of heads that attention in 8 bits takes; ``None`` for any."""
        ...

    @property
    def attention_multiple(self) -> int:
        """Sequence lengths of attention in 8 bits must be multiples of this."""
        ...

    def attend(
        self, given: Tensor | Heads, slots: AttentionSlots, *, rotation: Rotation | None, record: bool
    ) -> tuple[Narrow, list[Tensor]]:
        """Causal attention in 8 bits, to ``[S * B, h * d]`` as a product takes it, and what is to be kept.

        Args:
            given: queries ``[S, B, h, d]``, keys and values ``[S, B, g, d]``; with ``rotation`` these side by side before
                they are rotated, ``[S, B, (h + 2g) * d]``.
            slots: the factors.
            rotation: how to rotate.
            record: remember largest magnitudes for later steps.
        """
        ...

    def attend_backward(
        self, grad: Tensor, kept: list[Tensor], slots: AttentionSlots, *, rotation: Rotation | None
    ) -> Tensor | Heads:
        """The gradient of what was given, from that of the result, ``[S, B, h, d]``, and what was kept."""
        ...

    def widened(self, x: Narrow, like: Tensor) -> Tensor:
        """A narrow matrix in the dtype of ``like``."""
        ...
