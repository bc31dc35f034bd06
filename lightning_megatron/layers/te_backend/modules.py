"""The layers: parameters as the torch backend's, computation by ``Operations``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.layers.attention import Attention
from lightning_megatron.layers.backend import Activation
from lightning_megatron.layers.mlp import MLP, GatedMLP
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.layers.residual import can_take, is_bare, onto
from lightning_megatron.layers.rope import RopeTables, rotate_fused
from lightning_megatron.layers.te_backend.functions import (
    AddNarrowNorm,
    ColumnLinear,
    Job,
    RotatedCall,
    RotateNarrow,
    RowLinear,
    Turning,
    WeightCache,
)
from lightning_megatron.layers.te_backend.handoff import Handoff, goes_unheard
from lightning_megatron.layers.te_backend.operations import Heads, Operations, Rotation
from lightning_megatron.layers.te_backend.scales import Scales
from lightning_megatron.mesh import Mesh
from lightning_megatron.tensor_parallel.embedding import VocabParallelHead
from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.tensor_parallel.product import autocast_dtype


class NarrowRMSNorm(RMSNorm):
    """An RMSNorm that hands its result to the linear behind it in 8 bits, where it can. Arguments as ``RMSNorm``, and these.

    Args:
        operations: of the library.
        mesh: under sequence parallelism the norm stays in 16 bits: the linear gathers it.
    """

    def __init__(self, *args: Any, operations: Operations, mesh: Mesh, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._operations, self._is_cut = operations, mesh.sequence_parallel
        self.handoff = Handoff()
        """To the linear, whose input slot it holds."""
        self.takers: tuple[nn.Module, ...] = ()
        """That linear; in a tuple, so that it is no part of this module."""
        self._goes_to: tuple[nn.Module, ...] = ()

    def announced(self, taker: nn.Module) -> None:
        """See ``announce``."""
        self._goes_to = (taker,)

    def forward(self, hidden: Tensor, added: Tensor | None = None, *, keep: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """See ``RMSNorm.forward``; the norm may be a stand-in that only the linear behind it can use."""
        slot, goes_to = self.handoff.slot, self._goes_to
        self._goes_to, self.handoff.narrow = (), None
        hands_over = bool(goes_to) and _begin_with(goes_to, self.takers) and goes_unheard(self, *goes_to, *self.takers)
        if slot is None or self._is_cut or not is_aligned(hidden, slot.scales) or not hands_over:
            return super().forward(hidden, added, keep=keep)
        slot.scales.prepare(hidden.device)
        record = torch.is_grad_enabled()
        flat = hidden.reshape(-1, self.size).contiguous()
        beside = None if added is None else added.reshape(-1, self.size).contiguous()
        with torch.no_grad():
            made = self._operations.add_norm_quantized(flat, beside, self.weight, self.eps, slot=slot, record=record)
        if made is None:
            return super().forward(hidden, added, keep=keep)
        self.handoff.narrow = made[1]
        summed, normed = AddNarrowNorm.apply(hidden, self.weight, added, (made[0], made[2]))  # type: ignore[no-untyped-call]
        return (summed, normed) if keep else normed


class FusedColumnLinear(ColumnParallelLinear):
    """A column-parallel linear. Arguments and parameters as ``ColumnParallelLinear``, and these.

    Args:
        operations: of the library.
        scales: makes slots; ``None`` without FP8.
        given: where the norm before it may put its input.
    """

    def __init__(
        self,
        *args: Any,
        operations: Operations,
        scales: Scales | None,
        given: Handoff | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.job = _job(self, operations, scales, given)
        if given is not None:
            given.slot = self.job.input_slot
        self.scales = scales
        _check_aligned(self.weight, scales, "a weight")

    def forward(
        self,
        x: Tensor,
        handoff: Handoff | None = None,
        *,
        activated: Handoff | None = None,
        turning: Turning | None = None,
    ) -> Tensor:
        """``[S/tp, B, in] -> [S, B, out/tp]`` under sequence parallelism, else ``[S, B, in] -> [S, B, out/tp]``.

        ``activated``: where a lone rank may put the SwiGLU of the result; ``turning``: how it may rotate the result.
        """
        epoch, record = _begin(self.scales, x), torch.is_grad_enabled()
        job = self.job.called(epoch=epoch, record=record, handoff=handoff, activated=activated, turning=turning)
        if handoff is not None:
            handoff.slot = job.grad_slot
        padded = _padded(x, self.scales, job)
        result: Tensor = ColumnLinear.apply(padded, self.weight, self.bias, job)  # type: ignore[no-untyped-call]
        return result if padded is x else result[: x.shape[0]]

    def rotated(self, x: Tensor, heads: tuple[int, int], tables: RopeTables) -> Heads:
        """Its result as queries, keys and values, the first two rotated: see ``rotate_fused``.

        The gradient comes back in 8 bits, rotated and rounded in one pass. See Note [Handed over in 8 bits].
        """
        ranks = self.job.axis.size if self.job.sequence_parallel else 1
        hands_over = self.scales is not None and self.bias is None and torch.is_grad_enabled() and goes_unheard(self)
        if not hands_over or self.scales is None or not is_aligned(x, self.scales, ranks=ranks):
            return rotate_fused(self(x), heads, head_dim=tables.cos.shape[-1], tables=tables)
        handoff, turning = Handoff(), Turning(Rotation(heads, tables))
        call = RotatedCall(self.job.operations, turning, handoff)
        may_turn = type(self) is FusedColumnLinear and self.mesh.tp.size == 1 and is_bare(self)
        rotated: Heads = RotateNarrow.apply(self(x, handoff, **({"turning": turning} if may_turn else {})), call)  # type: ignore[no-untyped-call]
        return rotated


class FusedRowLinear(RowParallelLinear):
    """A row-parallel linear, with an activation before it if it is called with one.

    Arguments and parameters as ``RowParallelLinear``, and these.

    Args:
        operations: of the library.
        scales: makes slots; ``None`` without FP8.
    """

    def __init__(self, *args: Any, operations: Operations, scales: Scales | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.job = _job(self, operations, scales)
        self.scales = scales
        _check_aligned(self.weight, scales, "a weight")

    def takes_residual(self, residual: Tensor) -> bool:
        """See ``RowParallelLinear.takes_residual``."""
        if self.bias is not None or self.mesh.tp.size > 1 or autocast_dtype(residual) is not None:
            return False
        is_whole = self.scales is None or is_aligned(residual, self.scales)
        return is_whole and self.job.operations.adds_to(residual, self.weight)

    def forward(
        self,
        x: Tensor,
        activation: Activation | None = None,
        handoff: Handoff | None = None,
        *,
        activated: Handoff | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``[S, B, in/tp] -> [S/tp, B, out]`` under sequence parallelism, else ``[S, B, in/tp] -> [S, B, out]``.

        With ``activation`` the input is the activation's: ``[S, B, 2 in/tp]`` for a gated one; ``activated`` is where its
        result may be already. ``residual`` is added.
        """
        epoch, record = _begin(self.scales, x), torch.is_grad_enabled()
        given = self.job.given if activated is None else activated
        job = self.job.called(epoch=epoch, record=record, activation=activation, handoff=handoff, given=given)
        padded = _padded(x, self.scales, job)
        inside = residual if padded is x and job.axis.size == 1 else None
        result: Tensor = RowLinear.apply(padded, self.weight, job, inside)  # type: ignore[no-untyped-call]
        if padded is not x:
            result = result[: x.shape[0]]
        result = result if self.bias is None else result + self.bias.to(result.dtype)
        return result if residual is None or inside is not None else residual + result


class NarrowHead(VocabParallelHead):
    """A vocabulary head in 8 bits. Arguments and parameters as ``VocabParallelHead``, and these.

    Args:
        operations: of the library.
        scales: makes slots.
    """

    def __init__(self, *args: Any, operations: Operations, scales: Scales, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.job = _job(self, operations, scales)
        self.scales = scales
        _check_aligned(self.weight, scales, "the head")

    def forward(self, hidden: Tensor) -> Tensor:
        """``[S/tp, B, H] -> [S, B, V_padded/tp]``; without sequence parallelism ``[S, B, H] -> [S, B, V_padded/tp]``."""
        job = self.job.called(epoch=_begin(self.scales, hidden), record=torch.is_grad_enabled())
        padded = _padded(hidden, self.scales, job)
        logits: Tensor = ColumnLinear.apply(padded, self.weight, None, job)  # type: ignore[no-untyped-call]
        return logits if padded is hidden else logits[: hidden.shape[0]]


class FusedGatedMLP(GatedMLP):
    """``GatedMLP`` whose activation is computed by a linear beside it. See Note [Handed over in 8 bits]."""

    def takes_residual(self, residual: Tensor) -> bool:
        """See ``layers/residual.py``."""
        return can_take(self.down, residual)

    def forward(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """See ``GatedMLP.forward``."""
        up, down = self.gate_up, self.down
        if not isinstance(up, FusedColumnLinear) or not isinstance(down, FusedRowLinear) or not goes_unheard(up, down):
            return super().forward(hidden, residual=residual)
        # The bias's gradient is summed from the gradient in 16 bits, which a handoff never makes.
        handoff = Handoff() if up.bias is None and torch.is_grad_enabled() else None
        padded = _padded(hidden, up.scales, up.job)
        inside = residual if padded is hidden else None
        between = {"activated": Handoff(down.job.input_slot)} if _are_joined(up, down) else {}
        transformed: Tensor = down(up(padded, handoff, **between), "swiglu", handoff, **between, **onto(inside))
        if padded is hidden:
            return transformed
        transformed = transformed[: hidden.shape[0]]
        return transformed if residual is None else residual + transformed


class FusedMLP(MLP):
    """``MLP`` whose activation is computed by the linear behind it."""

    def takes_residual(self, residual: Tensor) -> bool:
        """See ``layers/residual.py``."""
        return can_take(self.down, residual)

    def forward(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """See ``MLP.forward``."""
        down = self.down
        if not isinstance(down, FusedRowLinear) or not goes_unheard(down):
            return super().forward(hidden, residual=residual)
        transformed: Tensor = down(self.up(hidden), "gelu", **onto(residual))
        return transformed


_FIRST: dict[type, str] = {Attention: "qkv", FusedGatedMLP: "gate_up", FusedMLP: "up"}


def make_weights(module: nn.Module, changed: Collection[nn.Parameter]) -> None:
    """Make in 8 bits, ahead of the next forward, the weights that layers have multiplied by and that an optimizer has changed.

    A GPU that has waited for the host between two steps would wait for each of them in the first forward.

    Args:
        module: the model.
        changed: the parameters, whose values must be there.
    """
    ids = {id(param) for param in changed}
    for child in module.modules():
        if isinstance(child, (FusedColumnLinear, FusedRowLinear, NarrowHead)) and child.scales is not None:
            cache = child.job.cache
            if cache.is_used and id(child.weight) in ids:
                cache.get(child.weight, child.job.operations, child.scales.epoch)


def narrow_weights(module: nn.Module) -> dict[nn.Parameter, list[WeightCache]]:
    """The weights that a model's layers multiply by in 8 bits and nobody else uses, and what may hold them in 8 bits."""
    uses = Counter(id(param) for child in module.modules() for param in child._parameters.values())
    found: dict[nn.Parameter, list[WeightCache]] = {}
    for child in module.modules():
        if isinstance(child, (FusedColumnLinear, FusedRowLinear, NarrowHead)) and child.scales is not None:
            found.setdefault(child.weight, []).append(child.job.cache)
    return {weight: caches for weight, caches in found.items() if len(caches) == uses[id(weight)]}


def _job(linear: Any, operations: Operations, scales: Scales | None, given: Handoff | None = None) -> Job:
    mesh = linear.mesh
    input_slot = grad_slot = None
    if scales is not None:
        input_slot, grad_slot = scales.slot(torch.float8_e4m3fn), scales.slot(torch.float8_e5m2)
    options: dict[str, Any] = {"num_pieces": mesh.parallelism.tp_overlap, "given": given}
    return Job(operations, WeightCache(), mesh.tp, mesh.sequence_parallel, input_slot, grad_slot, **options)


def _begin_with(blocks: tuple[nn.Module, ...], linears: tuple[nn.Module, ...]) -> bool:
    """Whether blocks of this package give what they are given to these linears and to nothing else."""
    name = _FIRST.get(type(blocks[0]))
    return name is not None and linears == (getattr(blocks[0], name),)


def _are_joined(up: nn.Module, down: nn.Module) -> bool:
    """Whether ``up`` may activate for ``down``: it has the whole input and nobody sees, or changes, what lies between."""
    if type(up) is not FusedColumnLinear or type(down) is not FusedRowLinear:
        return False
    waits = all(getattr(hook, "only_waits", False) for hook in down._forward_pre_hooks.values())
    are_bare = is_bare(up) and is_bare(down)
    return up.mesh.tp.size == 1 and up.bias is None and down.job.input_slot is not None and waits and are_bare


def _begin(scales: Scales | None, x: Tensor) -> int:
    """Make the factors ready; the epoch of the weights."""
    if scales is None:
        return 0
    scales.prepare(x.device)
    return scales.epoch


def is_aligned(x: Tensor, scales: Scales, *, ranks: int = 1) -> bool:
    """Whether the tokens of ``[.., n]``, on so many ranks, can be multiplied in 8 bits."""
    return x.shape[:-1].numel() * ranks % scales.options.alignment == 0


def _padded(x: Tensor, scales: Scales | None, job: Job) -> Tensor:
    """Add zero positions until the number of tokens can be multiplied in 8 bits: ``[S, B, n] -> [S', B, n]``.

    Raises:
        ValueError: under sequence parallelism, where they would come to stand between tokens.
    """
    if scales is None or is_aligned(x, scales, ranks=job.axis.size if job.sequence_parallel else 1):
        return x
    alignment = scales.options.alignment
    step = alignment // gcd(alignment, x.shape[1])
    if job.sequence_parallel:
        length = x.shape[0] * job.axis.size
        raise ValueError(
            f"fp8={scales.options.recipe!r} multiplies {alignment} tokens at a time, but under sequence parallelism "
            f"sequences of {length} tokens in micro-batches of {x.shape[1]} make {length * x.shape[1]}; make the sequence a "
            f"multiple of {step}."
        )
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % step))


def _check_aligned(weight: Tensor, scales: Scales | None, name: str) -> None:
    """Refuse sizes that cannot be multiplied in 8 bits.

    Raises:
        ValueError: with the local sizes and the multiple.
    """
    if scales is None:
        return
    multiple = scales.options.alignment
    if any(size % multiple for size in weight.shape):
        raise ValueError(
            f"fp8={scales.options.recipe!r} needs matrices whose sizes on each tensor-parallel rank are multiples of "
            f"{multiple}; {name} is {list(weight.shape)} here. Change the model's sizes, lower tp, or leave fp8=None."
        )
