"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lightning_megatron.layers.activation import swiglu
from lightning_megatron.layers.residual import can_take, is_bare, onto
from lightning_megatron.tensor_parallel.gated import gated_linears, gates
from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear, OutPart, RowParallelLinear


def check_ffn(ffn_hidden_size: int, tp: int) -> None:
    """Refuse a feed-forward width that ``tp`` ranks cannot share.

    Raises:
        ValueError: tp does not divide it.
    """
    if ffn_hidden_size % tp:
        raise ValueError(
            f"ffn_hidden_size={ffn_hidden_size} does not divide by tp={tp}: each rank holds the same number of columns; "
            f"choose tp among its divisors, or pad ffn_hidden_size to {-(-ffn_hidden_size // tp) * tp}."
        )


def gate_up_parts(ffn_hidden_size: int) -> tuple[OutPart, OutPart]:
    """The parts ``[gate; up]`` of a gated feed-forward block; a rank holds the same columns of both."""
    return OutPart(ffn_hidden_size), OutPart(ffn_hidden_size)


class MLP(nn.Module):
    """``down(activation(up(hidden)))``.

    Args:
        up: column-parallel ``H -> ffn``.
        down: row-parallel ``ffn -> H``.
        activation: elementwise.
    """

    def __init__(self, up: nn.Module, down: nn.Module, *, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self._activation = up, down, activation

    def takes_residual(self, residual: Tensor) -> bool:
        """See ``layers/residual.py``."""
        return can_take(self.down, residual)

    def forward(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """``[S/tp, B, H] -> [S/tp, B, H]`` under sequence parallelism, else ``[S, B, H] -> [S, B, H]``.

        ``residual`` is added to the result; it is for ``down``s that can.
        """
        transformed: Tensor = self.down(self._activation(self.up(hidden)), **onto(residual))
        return transformed


class GatedMLP(nn.Module):
    """``down(activation(gate_up(hidden)))`` with an activation that multiplies a gate into its other half.

    Args:
        gate_up: column-parallel ``H -> [gate; up]`` (see ``gate_up_parts``).
        down: row-parallel ``ffn -> H``.
        activation: ``[.., 2n] -> [.., n]``.
    """

    def __init__(self, gate_up: nn.Module, down: nn.Module, *, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up, self.down, self._activation = gate_up, down, activation

    def takes_residual(self, residual: Tensor) -> bool:
        """See ``layers/residual.py``."""
        return can_take(self.down, residual)

    def forward(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """``[S/tp, B, H] -> [S/tp, B, H]`` under sequence parallelism, else ``[S, B, H] -> [S, B, H]``.

        ``residual`` is added to the result; it is for ``down``s that can.
        """
        gate_up, down = self.gate_up, self.down
        if (
            type(gate_up) is ColumnParallelLinear
            and type(down) is RowParallelLinear
            and self._activation is swiglu
            and all(is_bare(linear) for linear in (gate_up, down))
            and gates(hidden, gate_up, down)
        ):
            return gated_linears(hidden, gate_up, down, residual)
        transformed: Tensor = down(self._activation(gate_up(hidden)), **onto(residual))
        return transformed
