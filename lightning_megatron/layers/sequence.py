"""How a sequence lies between tensor-parallel blocks, and what layers know of it besides the hidden state."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.context_parallel.tiles import Pattern
from lightning_megatron.layers.rope import RopeTables
from lightning_megatron.mesh import Axis, Mesh


@dataclass(frozen=True)
class SequenceContext:
    """What every layer gets besides the hidden state.

    Args:
        seq_len: tokens of a sequence as the caller gave it: under context parallelism those of this rank.
        padded_len: tokens after padding to a multiple of the tensor-parallel ranks that cut the sequence further.
        rope: rotary tables of the padded positions; ``None`` where positions are learned.
        layout: how rows lie over context-parallel ranks and which documents they hold; ``None``: whole, one document each.
        pattern: which tokens of its document a token attends to.
    """

    seq_len: int
    padded_len: int
    rope: RopeTables | None = None
    layout: SequenceLayout | None = None
    pattern: Pattern = field(default_factory=Pattern)

    @property
    def is_plain(self) -> bool:
        """Whether rows are whole, each one document, and attention is causal over all of it."""
        whole = self.layout is None or (self.layout.size == 1 and self.layout.cu_seqlens is None)
        return whole and self.pattern == Pattern()

    @cached_property
    def rows(self) -> SequenceLayout:
        """``layout``, made up where there is none."""
        return self.layout or SequenceLayout(self.seq_len, self.seq_len)


def sequence_axis(mesh: Mesh) -> Axis:
    """The axis that cuts hidden states along the sequence: tp under sequence parallelism, else one of a single rank."""
    return mesh.tp if mesh.sequence_parallel else Axis("uncut", (mesh.rank,))
