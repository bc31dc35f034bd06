"""How an optimizer is stepped: by itself, fused, or in pieces for what is not kept as it wants it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from lightning_megatron.optim.config import DistributedOptimizerConfig
from lightning_megatron.optim.cutting import Cut
from lightning_megatron.optim.frozen import left_out
from lightning_megatron.optim.fused_adam import FusedAdam, is_plain_adam, runs_on
from lightning_megatron.optim.norm import multiply
from lightning_megatron.optim.pieces import PieceStepper


class Stepper:
    """Steps an optimizer whose groups hold main shards.

    Adam and AdamW of torch are stepped in one pass over memory (``fused_adam.py``), except for what lies in host memory.
    Anything else steps itself, piece by piece (``pieces.py``) where main values or states are kept in another form.

    Args:
        optimizer: the user's.
        cut: its shards.
        config: how values are kept.
        device: where parameters are.

    Raises:
        ValueError: states in 8 bits of an optimizer that is not stepped here.

    Attributes:
        reads_buffer: gradients are read from the gradient buffer, and multiplied by the factor that ``step`` is given.
        changes_nothing_by_nan: a factor of NaN leaves all as it was.
        writes_values: the new parameters are in the parameter buffer after a step; nobody needs to copy them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, cut: Cut, *, config: DistributedOptimizerConfig, device: torch.device
    ) -> None:
        self._optimizer = optimizer
        in_fp8 = config.state_dtype == "fp8"
        wanted = runs_on(device) or in_fp8 if config.fused_adam is None else config.fused_adam
        self.reads_buffer = self.writes_values = wanted and not cut.gathered and is_plain_adam(optimizer, cut.shards)
        if in_fp8 and (not self.reads_buffer or cut.on_host):
            raise ValueError(
                f"state_dtype='fp8' is for torch's own Adam and AdamW, fused and on the device; this is "
                f"{type(optimizer).__name__} with fused_adam={config.fused_adam} and "
                f"offload_fraction={config.offload_fraction}. Use state_dtype='bf16'."
            )
        self._fused: FusedAdam | None = None
        in_pieces = cut.shards
        if self.reads_buffer:
            places = zip(cut.shards, cut.values, cut.gradients, strict=True)
            here = [place for place in places if place[0].main not in cut.on_host]
            self._fused = FusedAdam(optimizer, here, stores=cut.stores, state_dtype=config.state_dtype)
            in_pieces = [shard for shard in cut.shards if shard.main in cut.on_host]
        self._pieces: PieceStepper | None = None
        state_dtype = torch.bfloat16 if config.state_dtype == "bf16" else torch.float32
        if in_pieces and (cut.stores or cut.on_host or state_dtype != torch.float32):
            self._pieces = PieceStepper(optimizer, in_pieces, stores=cut.stores, state_dtype=state_dtype, on_host=cut.on_host)
        self._prepared_without: set[torch.Tensor] = set()
        self.changes_nothing_by_nan = self._fused is not None and self._pieces is None
        held = {shard.main for shard in in_pieces}
        self._gradients = [g for shard, g in zip(cut.local, cut.gradients, strict=True) if shard.main in held]

    def prepare(self, without: Collection[torch.Tensor] = ()) -> None:
        """Do what a step that leaves these main parameters alone needs beforehand. Nothing need be said."""
        self._prepared_without = set(without)
        if self._fused is not None:
            with left_out(self._optimizer, without):
                self._fused.prepare()

    def step(
        self, factor: torch.Tensor | None, without: Collection[torch.Tensor], *, confirm: Callable[[], None], **kwargs: Any
    ) -> None:
        """Step on everything.

        Args:
            factor: what gradients are still to be multiplied by (0-dim), if ``reads_buffer``.
            without: main parameters that are left as they are.
            confirm: called before the step counts as taken.
            kwargs: for the optimizer's ``step``.
        """
        if set(without) != self._prepared_without:  # a hook has taken gradients away since
            self.prepare(without)
        with left_out(self._optimizer, without):
            self._step(factor, confirm, **kwargs)

    def _step(self, factor: torch.Tensor | None, confirm: Callable[[], None], **kwargs: Any) -> None:
        if self._fused is not None:
            self._fused.step(factor, confirm=confirm, **kwargs)
            if self._pieces is not None and factor is not None:
                multiply(self._gradients, factor)
        if self._pieces is not None:
            self._pieces.step(**kwargs)
        elif self._fused is None:
            self._optimizer.step(**kwargs)
