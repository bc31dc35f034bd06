"""How a sequence lies between tensor-parallel blocks, and what layers know of it besides the hidden state."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.layers.rope import RopeTables
from lightning_megatron.mesh import Axis, Mesh


@dataclass(frozen=True)
class SequenceContext:
    """What every layer gets besides the hidden state.

    Args:
        seq_len: tokens of a sequence as the caller gave it.
        padded_len: tokens after padding to a multiple of the ranks that cut the sequence.
        rope: rotary tables of the padded positions; ``None`` where positions are learned.
    """

    seq_len: int
    padded_len: int
    rope: RopeTables | None = None


def sequence_axis(mesh: Mesh) -> Axis:
    """The axis that cuts hidden states along the sequence: tp under sequence parallelism, else one of a single rank."""
    return mesh.tp if mesh.sequence_parallel else Axis("uncut", (mesh.rank,))
