"""An optimizer step in pieces, for values that are not kept as the optimizer wants them.

Note [A step in pieces]
Main values as remainders, moments in bf16 and anything in host memory must be made into fp32 tensors on the device for the
step. All of them at once would take the memory that was saved, so the optimizer steps on one piece after another: its groups
hold temporary parameters for the length of a piece, with views or copies of their state. That is right for optimizers that
are elementwise and keep all they know of a parameter in its state, as those of ``torch.optim`` do; another optimizer gets one
piece, of everything. Step hooks of the optimizer run once for each piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.optim.mains import MainStore
from lightning_megatron.optim.shards import Shard

PIECE_NUMEL = 2**22  # 16 MiB in fp32: the two pieces that are under way at a time are small beside any model


@dataclass
class _Piece:
    """Elements ``[start, stop)`` of a shard, and the temporary parameter that the optimizer sees."""

    shard: Shard
    group: int
    start: int
    stop: int
    param: nn.Parameter | None = None

    @property
    def is_last(self) -> bool:
        return self.stop == self.shard.main.numel()


class PieceStepper:
    """Steps an optimizer piece by piece.

    Args:
        optimizer: its groups hold the main parameters.
        shards: the shards to step; the others stay as they are.
        stores: where the main values of a shard are kept, by its main parameter; others are updated in place.
        state_dtype: what states in fp32 are kept in between steps.
        on_host: the main parameters whose states are kept in host memory.
        numel: elements in a piece.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[Shard],
        *,
        stores: Mapping[Tensor, MainStore],
        state_dtype: torch.dtype,
        on_host: set[Tensor],
        numel: int = PIECE_NUMEL,
    ) -> None:
        self._optimizer, self._shards, self._stores = optimizer, {shard.main: shard for shard in shards}, stores
        self._state_dtype, self._on_host = state_dtype, on_host
        in_pieces = type(optimizer).__module__.startswith("torch.optim.")
        self._numel = -(-numel // 8) * 8 if in_pieces else None
        self._before: dict[Tensor, dict[str, Any]] = {}

    def step(self, **kwargs: Any) -> None:
        """Step on everything."""
        groups = self._optimizer.param_groups
        members = [group["params"] for group in groups]
        # Later pieces of a parameter must not see what earlier ones have made of its step count.
        self._before = {main: dict(self._optimizer.state.get(main, {})) for main in self._shards}
        batches = self._batches(members)
        side = _SideStream(self._optimizer_device() if self._on_host else None)
        try:
            for index, batch in enumerate(batches):
                if index == 0:
                    self._prepare(batch, side)
                side.hand_over([tensor for piece in batch for tensor in self._tensors(piece)])
                if index + 1 < len(batches):
                    self._prepare(batches[index + 1], side)  # comes from the host beside this piece's update
                for number, group in enumerate(groups):
                    group["params"] = [piece.param for piece in batch if piece.group == number]
                self._optimizer.step(**kwargs)
                side.take_back([tensor for piece in batch for tensor in self._tensors(piece)])
                with side.running():
                    for piece in batch:
                        self._end(piece)
            side.join()
        finally:
            self._before = {}
            for group, params in zip(groups, members, strict=True):
                group["params"] = params

    def _prepare(self, batch: list[_Piece], side: _SideStream) -> None:
        with side.running():
            for piece in batch:
                self._begin(piece)
        side.mark()

    def _tensors(self, piece: _Piece) -> list[Tensor]:
        """What a piece lends to the optimizer, and what the optimizer has made for it."""
        assert piece.param is not None
        return [
            piece.param.detach(),
            *(v for v in self._optimizer.state.get(piece.param, {}).values() if isinstance(v, Tensor)),
        ]

    def _optimizer_device(self) -> torch.device | None:
        devices = {main.device for main in self._on_host if main.device.type == "cuda"}
        return next(iter(devices), None)

    def _batches(self, members: list[list[nn.Parameter]]) -> list[list[_Piece]]:
        """Pieces with a gradient, put together up to the size of one."""
        batches: list[list[_Piece]] = [[]]
        room = self._numel
        for number, params in enumerate(members):
            for main in params:
                for piece in self._cut(self._shards[main], number) if main in self._shards and main.grad is not None else []:
                    size = piece.stop - piece.start
                    if room is not None and batches[-1] and size > room:
                        batches.append([])
                        room = self._numel
                    batches[-1].append(piece)
                    room = None if room is None else room - size
        return batches if batches[0] else []

    def _cut(self, shard: Shard, group: int) -> list[_Piece]:
        numel = shard.main.numel()
        step = numel if self._numel is None or shard.main.dim() != 1 else self._numel
        return [_Piece(shard, group, start, min(start + step, numel)) for start in range(0, numel, max(step, 1))]

    def _begin(self, piece: _Piece) -> None:
        main, store = piece.shard.main, self._stores.get(piece.shard.main)
        start, stop = piece.start, piece.stop
        values = main.detach().view(-1)[start:stop] if store is None else store.read(start, stop)
        shape = main.shape if main.dim() != 1 else values.shape
        piece.param = nn.Parameter(values.view(shape))
        assert main.grad is not None
        piece.param.grad = main.grad.view(-1)[start:stop].view(shape)
        if given := self._before[main]:
            lent = {key: self._lent(value, piece, shape) for key, value in given.items()}
            self._optimizer.state[piece.param] = lent

    def _lent(self, value: Any, piece: _Piece, shape: torch.Size) -> Any:
        main = piece.shard.main
        if not isinstance(value, Tensor):
            return value
        if value.shape != main.shape or (value.dim() == 0):
            return value.clone()  # a step count: each piece counts on from the same number
        part = value.view(-1)[piece.start : piece.stop].view(shape)
        widened = main.dtype == torch.float32 and part.dtype == self._state_dtype
        return part.to(main.device, torch.float32 if widened else part.dtype, non_blocking=True)

    def _end(self, piece: _Piece) -> None:
        main, param = piece.shard.main, piece.param
        assert param is not None
        if (store := self._stores.get(main)) is not None:
            store.write(param.detach().view(-1), piece.start, piece.stop)
        kept = self._optimizer.state.setdefault(main, {})
        for key, value in self._optimizer.state.pop(param, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0:
                self._keep(kept, key, value, piece)
            elif piece.is_last:
                kept[key] = value
        if not kept:
            del self._optimizer.state[main]
        piece.param = None

    def _keep(self, kept: dict[str, Any], key: str, value: Tensor, piece: _Piece) -> None:
        """Store one state of a piece where that of the whole shard is kept."""
        main = piece.shard.main
        dtype = self._state_dtype if value.dtype == torch.float32 else value.dtype
        place = torch.device("cpu") if main in self._on_host else main.device
        whole = kept.get(key)
        if whole is None or whole.dtype != dtype or whole.device != place:
            pinned = place.type == "cpu" and torch.cuda.is_available()
            fresh = torch.zeros(main.shape, dtype=dtype, device=place, pin_memory=pinned)
            whole = kept[key] = fresh if whole is None else fresh.copy_(whole)
        part = whole.view(-1)[piece.start : piece.stop]
        if part.data_ptr() != value.data_ptr():
            part.copy_(value.view(-1), non_blocking=True)


class _SideStream:
    """Where pieces come from the host and go back to it, in order, beside the updates; without a GPU, nothing.

    Args:
        device: the GPU; ``None`` to do everything where it is called.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready: list[torch.cuda.Event] = []
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def running(self) -> AbstractContextManager[Any]:
        """Work inside the ``with`` block goes onto the side."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> None:
        """Remember that a piece has been prepared."""
        if self._stream is not None:
            self._ready.append(self._stream.record_event())

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Let the updates use the piece that was marked first."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._ready.pop(0))
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(current)

    def take_back(self, tensors: Sequence[Tensor]) -> None:
        """Let the side use what the updates have written."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)

    def join(self) -> None:
        """Let all that comes after see what the side has done."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
