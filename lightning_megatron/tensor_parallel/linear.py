"""Linear layers cut over the tensor-parallel axis: by output rows (column-parallel) or by input columns (row-parallel).

The names follow Shoeybi et al. 2019, section 3: with ``y = x A``, torch's weight is the transpose of ``A``, so a cut of
A's columns is a cut of the weight's rows. Sequence parallelism follows Korthikanti et al. 2022, section 4.2.2.

Note [Overlap in the column backward]
The backward needs two collectives and two GEMMs. Each collective runs beside the GEMM that does not depend on it: the
gathering of the saved input beside the input gradient, the reduction of the input gradient beside the weight gradient.
Only the sharded input is kept from forward to backward, which saves (1 - 1/tp) of it.

Note [Overlap in pieces]
The other collectives stand before or behind their product. With ``Parallelism(tp_overlap=n)`` both are done in pieces, beside
each other (``tensor_parallel/pieces.py``).

Note [A weight gradient that waits]
A pipeline schedule may want the input gradient alone at first (weight_gradients.py). The saved input is then gathered
when the weight gradient is made, so that until then its shard is all that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.comm import all_gather, reduce_from, reduce_scatter_to
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.rng import named_generator
from lightning_megatron.sharding import Box, Init, ParamSharding, replicated, set_sharding
from lightning_megatron.tensor_parallel.pieces import Multiplier, gathered_product, reduced_product, scattered_product
from lightning_megatron.tensor_parallel.product import (
    Pending,
    adds_to,
    autocast_dtype,
    cast,
    input_gradient,
    outside_autocast,
    product,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    weight_gradient_of,
)
from lightning_megatron.weight_gradients import waits


@dataclass(frozen=True)
class OutPart:
    """A block of output rows of the unsharded weight, cut over the tensor-parallel axis on its own.

    Args:
        size: rows in the unsharded weight.
        replicas: neighbouring tensor-parallel ranks that hold the same piece; the block is cut into ``tp / replicas``
            pieces. More than 1 for key and value rows with fewer heads than tensor-parallel ranks. Each replica then
            computes a share of the gradient; the shares are summed later, by what ``Box.partial`` says.
    """

    size: int
    replicas: int = 1

    def box(self, axis: Axis, offset: int, tail: tuple[int, ...]) -> Box:
        """This rank's piece, as a box of ``[.., *tail]``, where the block starts at row ``offset``.

        Raises:
            ValueError: ``replicas`` does not divide the axis, or the number of pieces does not divide ``size``.
        """
        if self.replicas < 1 or axis.size % self.replicas:
            raise ValueError(
                f"replicas={self.replicas} does not divide the {axis.size} ranks of axis {axis.name!r}: each piece must be "
                f"held by equally many ranks; choose a divisor of {axis.size}."
            )
        pieces = axis.size // self.replicas
        if self.size % pieces:
            raise ValueError(
                f"{self.size} output rows do not divide into {pieces} equal pieces ({axis.name}={axis.size} / "
                f"replicas={self.replicas}); make the size a multiple of {pieces} or lower {axis.name}."
            )
        rows = self.size // pieces
        shared = () if self.replicas == 1 else ("tp",) if self.replicas == axis.size else (f"tp:{self.replicas}",)
        start = offset + axis.rank // self.replicas * rows
        return Box((start, *[0] * len(tail)), (rows, *tail), replicated=shared, partial=shared)


_ALONE = Axis("alone", (0,), 0)  # of a product that needs no collective


def make_parameter(
    local_shape: tuple[int, ...], sharding: ParamSharding, *, device: torch.device | str, dtype: torch.dtype
) -> nn.Parameter:
    """A parameter ``[*local_shape]`` that carries its sharding.

    On the meta device it has no values: ``initialize.materialize`` draws them. Elsewhere the full tensor is drawn from a
    seed taken from the default CPU generator, which the ranks of a replica hold alike, and cut to this rank's part.
    """
    device = torch.device(device)
    if device.type == "meta":
        local = torch.empty(local_shape, device=device, dtype=dtype)
    else:
        drawn = int(torch.randint(2**31, (), device="cpu"))
        full = sharding.init.draw(sharding.global_shape, named_generator(device, drawn), device)
        local = sharding.cut(full, local_shape).to(dtype)
    return set_sharding(nn.Parameter(local), sharding)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are cut over tp: ``[S/tp, B, in] -> [S, B, out/tp]``.

    Without sequence parallelism the input is whole on every rank: ``[S, B, in] -> [S, B, out/tp]``.

    Args:
        in_features: input features, all of them on every rank.
        parts: output features, or the blocks that they consist of (``[q; k; v]``, ``[gate; up]``): each is cut on its
            own, and the local weight ``[out/tp, in]`` stacks the local pieces in the same order.
        mesh: the running mesh; its tp axis and ``sequence_parallel`` are used.
        bias: add a bias ``[out/tp]``, cut like the output.
        init: first values of the weight; the bias starts at zero.
        device: where the parameters are made; the meta device leaves their values to ``initialize.materialize``.
        dtype: type of the parameters.

    Raises:
        ValueError: a block does not divide by the number of its pieces.
    """

    def __init__(
        self,
        in_features: int,
        parts: int | Sequence[OutPart],
        *,
        mesh: Mesh,
        bias: bool = False,
        init: Init = Init(),  # noqa: B008  (frozen)
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        blocks = (OutPart(parts),) if isinstance(parts, int) else tuple(parts)
        self.mesh = mesh
        self.in_features = in_features
        self.out_features = sum(block.size for block in blocks)
        boxes = _stacked_boxes(blocks, mesh.tp, (in_features,))
        self.part_sizes: tuple[int, ...] = tuple(box.size[0] for box in boxes)
        rows = sum(self.part_sizes)
        sharding = ParamSharding((self.out_features, in_features), boxes, init=init)
        self.weight = make_parameter((rows, in_features), sharding, device=device, dtype=dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            sharding = ParamSharding((self.out_features,), _stacked_boxes(blocks, mesh.tp, ()), init=Init("zeros"))
            self.bias = make_parameter((rows,), sharding, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``[S/tp, B, in] -> [S, B, out/tp]`` under sequence parallelism, else ``[S, B, in] -> [S, B, out/tp]``."""
        return column_linear(x, self.weight, bias=self.bias, mesh=self.mesh)

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, local={self.part_sizes}"
        return f"{sizes}, bias={self.bias is not None}"


def _stacked_boxes(blocks: tuple[OutPart, ...], axis: Axis, tail: tuple[int, ...]) -> tuple[Box, ...]:
    boxes, offset = [], 0
    for block in blocks:
        boxes.append(block.box(axis, offset, tail))
        offset += block.size
    return tuple(boxes)


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are cut over tp: ``[S, B, in/tp] -> [S/tp, B, out]``.

    Without sequence parallelism the output is whole on every rank: ``[S, B, in/tp] -> [S, B, out]``. The bias ``[out]``
    is added once, after the reduction; each rank holds it whole. Arguments as for ``ColumnParallelLinear``.

    Raises:
        ValueError: ``in_features`` does not divide by tp; in forward, S does not divide by tp under sequence parallelism.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: Mesh,
        bias: bool = False,
        init: Init = Init(),  # noqa: B008  (frozen)
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        tp = mesh.tp
        if in_features % tp.size:
            raise ValueError(
                f"in_features={in_features} of a row-parallel linear does not divide by tp={tp.size}; make it a multiple of "
                f"{tp.size} or lower tp."
            )
        self.mesh = mesh
        self.in_features, self.out_features = in_features, out_features
        columns = in_features // tp.size
        box = Box((0, tp.rank * columns), (out_features, columns))
        sharding = ParamSharding((out_features, in_features), (box,), init=init)
        self.weight = make_parameter((out_features, columns), sharding, device=device, dtype=dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            sharding = replicated((out_features,), partial=mesh.sequence_parallel, init=Init("zeros"))
            self.bias = make_parameter((out_features,), sharding, device=device, dtype=dtype)

    def takes_residual(self, residual: Tensor) -> bool:
        """Whether ``forward`` adds this to its result without a pass over memory for it."""
        return self.bias is None and self.mesh.tp.size == 1 and adds_to(residual, self.weight)

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """``[S, B, in/tp] -> [S/tp, B, out]`` under sequence parallelism, else ``[S, B, in/tp] -> [S, B, out]``.

        Args:
            x: the input.
            residual: something like the output, to be added to it.
        """
        tp, pieces = self.mesh.tp, self.mesh.parallelism.tp_overlap
        if residual is not None and tp.size > 1:
            return residual + RowParallelLinear.forward(self, x)  # once, not on each rank
        if pieces > 1 and tp.size > 1:
            y = _row_in_pieces(x, self.weight, tp, sequence_parallel=self.mesh.sequence_parallel, num_pieces=pieces)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        partial = _linear(x, self.weight, None, axis=_ALONE, sequence_parallel=False, added=residual)
        y = reduce_scatter_to(partial, tp, dim=0) if self.mesh.sequence_parallel else reduce_from(partial, tp)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def column_linear(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, mesh: Mesh) -> Tensor:
    """``x weight^T + bias`` with the weight's rows cut over tp: ``[S/tp, B, in] -> [S, B, out/tp]``.

    Without sequence parallelism ``[S, B, in] -> [S, B, out/tp]``. The gradient of ``x`` is summed over tp. See
    Note [Overlap in the column backward].

    Args:
        x: the input; under sequence parallelism this rank's part of the sequence.
        weight: ``[out/tp, in]``.
        bias: ``[out/tp]``.
        mesh: the running mesh.
    """
    pieces = mesh.parallelism.tp_overlap
    return _linear(x, weight, bias, axis=mesh.tp, sequence_parallel=mesh.sequence_parallel, num_pieces=pieces)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    axis: Axis,
    sequence_parallel: bool,
    num_pieces: int = 1,
    added: Tensor | None = None,
) -> Tensor:
    # Cast here, where autograd sees it, so that the gathering moves the low precision and no dtype differs in backward.
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype)
        added = None if added is None else cast(added, dtype)
    call = (axis, sequence_parallel, num_pieces)
    result: Tensor = _ColumnLinear.apply(x, weight, bias, *call, added)  # type: ignore[no-untyped-call]
    return result


class _ColumnLinear(torch.autograd.Function):
    """See Note [Overlap in the column backward]."""

    weight_input = 1

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
        num_pieces: int,
        added: Tensor | None,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        if num_pieces > 1 and sequence_parallel:
            return gathered_product(x, Multiplier.of(weight.t(), bias), axis, num_pieces=num_pieces)[0]
        full = all_gather(x, axis, dim=0) if sequence_parallel else x
        return product(full, weight, bias, added=added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis, sequence_parallel = ctx.axis, ctx.sequence_parallel
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        reducing = grad_weight = grad_bias = None

        def gather() -> Pending:
            return start_all_gather(x, axis) if sequence_parallel else Pending(x)

        with outside_autocast(grad):
            rows = grad.reshape(-1, grad.shape[-1])
            gathering = gather() if needs_weight and not waits(ctx) else None
            if needs_x:
                grad_x = input_gradient(grad, weight)
            full = None if gathering is None else gathering.wait()
            if needs_x:
                reducing = (start_reduce_scatter if sequence_parallel else start_all_reduce)(grad_x, axis)
            if needs_weight:

                def whole() -> Tensor:
                    return gather().wait() if full is None else full

                grad_weight = weight_gradient_of(ctx, rows, whole)
            if needs_bias:
                grad_bias = rows.sum(0)
            of_added = grad if ctx.needs_input_grad[6] else None
            return None if reducing is None else reducing.wait(), grad_weight, grad_bias, None, None, None, of_added


def _row_in_pieces(x: Tensor, weight: Tensor, axis: Axis, *, sequence_parallel: bool, num_pieces: int) -> Tensor:
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = cast(x, dtype), cast(weight, dtype)
    result: Tensor = _RowLinear.apply(x, weight, axis, sequence_parallel, num_pieces)  # type: ignore[no-untyped-call]
    return result


class _RowLinear(torch.autograd.Function):
    """Product and reduction beside each other; in the backward the gathering, and the product of what is there already."""

    weight_input = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sequence_parallel: bool, num_pieces: int) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        multiply = scattered_product if sequence_parallel else reduced_product
        return multiply(x, Multiplier.of(weight.t()), axis, num_pieces=num_pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad_x: Tensor | None = None
        full: Tensor | None = grad
        with outside_autocast(grad):
            if ctx.sequence_parallel and weight is not None:
                grad_x, full = gathered_product(grad.contiguous(), Multiplier.of(weight), ctx.axis, num_pieces=2)
            elif ctx.sequence_parallel:
                full = start_all_gather(grad, ctx.axis).wait()
            elif weight is not None:
                grad_x = grad @ weight
            if x is None:
                return grad_x, None, None, None, None
            assert full is not None
            rows = full.reshape(-1, full.shape[-1])
            return grad_x, weight_gradient_of(ctx, rows, lambda: x), None, None, None
