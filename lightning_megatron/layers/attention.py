"""Self-attention: fused QKV projection, rotary positions, grouped key/value heads, output projection."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatron.layers.backend import Backend
from lightning_megatron.layers.residual import announce, can_take, is_bare, onto
from lightning_megatron.layers.rope import rotate_fused
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear, OutPart
from lightning_megatron.tensor_parallel.rotated import rotated_linear, rotates


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Refuse head counts that cannot be laid over ``tp`` ranks.

    Raises:
        ValueError: tp does not divide the query heads, or neither of tp and the key/value heads divides the other, or
            the key/value heads do not divide the query heads.
    """
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} does not divide by num_kv_heads={num_kv_heads}: each key/value head serves the same "
            f"number of query heads; choose num_kv_heads among the divisors of {num_heads}."
        )
    if num_heads % tp:
        raise ValueError(
            f"num_heads={num_heads} does not divide by tp={tp}: each rank holds the same number of query heads; "
            f"choose tp among the divisors of {num_heads}."
        )
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} and tp={tp}: one must divide the other, so that a rank holds whole key/value heads "
            f"or shares one with its neighbours; choose tp among the divisors or the multiples of {num_kv_heads}."
        )


def qkv_parts(num_heads: int, num_kv_heads: int, *, head_dim: int, tp: int) -> tuple[OutPart, OutPart, OutPart]:
    """The parts ``[q; k; v]`` of a fused projection cut over ``tp`` ranks.

    With fewer key/value heads than ranks, ``tp / num_kv_heads`` neighbouring ranks hold the same one. Query heads are cut
    in order, so a rank's query heads ``[r * h/tp, (r + 1) * h/tp)`` use key/value head ``r * kv // tp``, the one that
    block ``r // (tp / kv)`` holds.

    Raises:
        ValueError: see ``check_heads``.
    """
    check_heads(num_heads, num_kv_heads, tp)
    replicas = max(1, tp // num_kv_heads)
    keys = OutPart(num_kv_heads * head_dim, replicas=replicas)
    return OutPart(num_heads * head_dim), keys, keys


class Attention(nn.Module):
    """Causal self-attention of this rank's heads.

    Args:
        qkv: column-parallel projection to ``[q; k; v]`` (see ``qkv_parts``). One that has ``rotated`` rotates as well.
        out: row-parallel projection back to H.
        core: softmax attention (``Backend.core_attention``). One that ``rotates`` is given the fused projection and ``heads``;
            one that has ``hand_to`` may pass its result to ``out`` beside its return value.
        backend: rotates queries and keys.
        head_dim: size of a head.
        q_norm, k_norm: norms over ``head_dim``, applied before the rotation.
    """

    def __init__(
        self,
        qkv: nn.Module,
        out: nn.Module,
        *,
        core: nn.Module,
        backend: Backend,
        head_dim: int,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if (hand_to := getattr(core, "hand_to", None)) is not None:
            hand_to(out)
        self.qkv, self.q_norm, self.k_norm, self.core, self.out = qkv, q_norm, k_norm, core, out
        self.head_dim, self._backend = head_dim, backend

    def takes_residual(self, residual: Tensor) -> bool:
        """See ``layers/residual.py``."""
        return can_take(self.out, residual)

    def forward(self, hidden: Tensor, context: SequenceContext, *, residual: Tensor | None = None) -> Tensor:
        """``[S/tp, B, H] -> [S/tp, B, H]`` under sequence parallelism, else ``[S, B, H] -> [S, B, H]``.

        ``residual`` is added to the result; it is for ``out``s that can.
        """
        attended: Tensor = self.out(self._attend(hidden, context), **onto(residual))
        return attended

    def _attend(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """``[S/tp, B, H] -> [S, B, h/tp * d]``."""
        sizes: list[int] = list(self.qkv.part_sizes)  # type: ignore[arg-type]
        announce(self.core, self.out)
        if context.rope is not None and self.q_norm is None and self.k_norm is None:
            heads = (sizes[0] // self.head_dim, sizes[1] // self.head_dim)
            if getattr(self.core, "rotates", False):  # in one pass with what it does next
                return self.core(self.qkv(hidden), None, None, context, heads=heads)  # type: ignore[no-any-return]
            tables = (context.rope.cos, context.rope.sin)
            if (rotated := getattr(self.qkv, "rotated", None)) is not None:
                q, k, v = rotated(hidden, heads, context.rope)
            elif type(qkv := self.qkv) is ColumnParallelLinear and is_bare(qkv) and rotates(hidden, qkv, tables, heads):
                q, k, v = rotated_linear(hidden, qkv, tables, heads)
            else:
                q, k, v = rotate_fused(self.qkv(hidden), heads, head_dim=self.head_dim, tables=context.rope)
            return self.core(q, k, v, context)  # type: ignore[no-any-return]
        fused = self.qkv(hidden)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in fused.split(sizes, dim=-1))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if context.rope is not None:
            q = self._backend.rotate(q, context.rope.cos, context.rope.sin)
            k = self._backend.rotate(k, context.rope.cos, context.rope.sin)
        attended: Tensor = self.core(q, k, v, context)
        return attended
