"""Hidden states between neighbouring stages: who sends what to whom is read off the schedules, so both sides agree.

Note [One channel for each edge and direction]
Every directed edge (source rank, destination rank) of a pipeline has a communicator for activations, and the reverse edge
one for gradients. A channel carries messages one way only. The sender posts them in the order of its own action list;
the receiver knows that list and posts its receives in the same order, early ones into buffers. Neither side can wait for
the other's order, which is what makes two neighbours of a ring of two, or interleaved stages, safe.

Note [Shapes travel once]
A receiver must know shapes and dtypes beforehand. They are sent over gloo (host memory, no device sync) with the first
micro-batch of each new signature (shapes of the user's batch, on which all stages agree) and remembered.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.schedule import Action, Kind, Placement

_META_BYTES = 16384

Key = tuple[int, int]
"""(stage that receives, micro-batch)."""


@dataclass(frozen=True)
class HiddenMeta:
    """Form of a hidden state: its pytree (``None``: a bare tensor), and shape and dtype of each leaf."""

    spec: TreeSpec | None
    leaves: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, hidden: Any) -> tuple[HiddenMeta, list[Tensor]]:
        """The form and the leaves of a hidden state.

        Raises:
            TypeError: a leaf is not a tensor.
        """
        leaves, spec = tree_flatten(hidden)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"a hidden state must be a tensor or a pytree of tensors; it holds a {type(leaf).__name__}. Give layers "
                    f"what is not a tensor through context()."
                )
        bare = isinstance(hidden, Tensor)
        return cls(None if bare else spec, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)), leaves

    def rebuilt(self, leaves: list[Tensor]) -> Any:
        """The hidden state of this form with the given leaves."""
        return leaves[0] if self.spec is None else tree_unflatten(leaves, self.spec)

    def empty(self, device: torch.device) -> list[Tensor]:
        """Fresh buffers for the leaves."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.leaves]


@dataclass
class _Channel:
    """Messages of one direction on one directed edge, in the sender's order."""

    group: dist.ProcessGroup
    peer: int
    order: deque[Key] = field(default_factory=deque)
    posted: dict[Key, tuple[list[dist.Work], list[Tensor]]] = field(default_factory=dict)


class P2P:
    """Sends and receives hidden states and their gradients of one run of a schedule.

    Args:
        mesh: for the pipeline axis and its channels.
        placement: which rank holds which stage.
        shapes: form of the hidden state that enters a stage, by (stage, signature); filled here, kept between runs.
    """

    def __init__(self, mesh: Mesh, placement: Placement, shapes: dict[tuple[int, Hashable], HiddenMeta]) -> None:
        self._mesh, self._placement, self._shapes = mesh, placement, shapes
        self._in: dict[tuple[str, int], _Channel] = {}
        self._out: dict[tuple[str, int], _Channel] = {}
        for (direction, source, destination), group in mesh.channels.items():
            if source == mesh.rank:
                self._out[direction, destination] = _Channel(group, destination)
            else:
                self._in[direction, source] = _Channel(group, source)
        self._sent: dict[tuple[str, Key], tuple[list[dist.Work], list[Tensor]]] = {}
        self._meta_sent: list[tuple[dist.Work | None, Tensor]] = []
        self._signatures: Sequence[Hashable] = ()
        self._announced: set[tuple[int, Hashable]] = set()

    def begin(self, schedules: Sequence[Sequence[Action]], signatures: Sequence[Hashable]) -> None:
        """Read the message order of every incoming channel off the neighbours' schedules.

        Args:
            schedules: the action list of every pipeline rank.
            signatures: for each micro-batch, what its shapes depend on.
        """
        assert not self._sent, "the last run was not drained"
        self._signatures = signatures
        for channel in self._in.values():
            channel.order.clear()
            channel.posted.clear()
        for pp_rank, actions in enumerate(schedules):
            source = self._mesh.pp.ranks[pp_rank]
            for action in actions:
                if (hop := self._hop(action)) is None:
                    continue
                direction, stage, destination = hop
                if destination == self._mesh.rank and source != destination:
                    self._in[direction, source].order.append((stage, action.microbatch))

    def _hop(self, action: Action) -> tuple[str, int, int] | None:
        """Where the result of an action goes: (direction, receiving stage, receiving global rank)."""
        if action.kind is Kind.F and action.stage + 1 < self._placement.num_stages:
            stage, direction = action.stage + 1, "forward"
        elif action.kind in (Kind.B, Kind.I) and action.stage > 0:
            stage, direction = action.stage - 1, "backward"
        else:
            return None
        return direction, stage, self._mesh.pp.ranks[self._placement.rank_of(stage)]

    def _source(self, direction: str, stage: int) -> int:
        sender = stage - 1 if direction == "forward" else stage + 1
        return self._mesh.pp.ranks[self._placement.rank_of(sender)]

    # Activations

    def send_hidden(self, stage: int, microbatch: int, hidden: Any) -> None:
        """Send the output of ``stage`` on to the next one. The storage is kept until ``release_hidden``.

        Raises:
            RuntimeError: its form differs from what this signature had before.
        """
        meta, leaves = HiddenMeta.of(hidden)
        leaves = [leaf.detach().contiguous() for leaf in leaves]
        key = (stage + 1, microbatch)
        signature = self._signatures[microbatch]
        destination = self._mesh.pp.ranks[self._placement.rank_of(stage + 1)]
        known = self._shapes.setdefault((stage + 1, signature), meta)
        if known != meta:
            raise RuntimeError(
                f"{self._mesh.coordinate} stage {stage} sent a hidden state of {meta.leaves} where the same input shapes "
                f"gave {known.leaves} before. The form of a hidden state must follow from the shapes of the batch; if it "
                f"depends on values, pad it."
            )
        if destination == self._mesh.rank:
            self._sent["forward", key] = ([], leaves)
            return
        if (stage + 1, signature) not in self._announced:
            self._announced.add((stage + 1, signature))
            self._send_meta(meta, destination)
        channel = self._out["forward", destination]
        if not torch.is_grad_enabled():
            self._release_arrived()
        self._sent["forward", key] = (_isend(leaves, channel), leaves)

    def receive_hidden(self, stage: int, microbatch: int) -> Any:
        """The hidden state that enters ``stage``; its floating-point leaves ask for a gradient while grad mode is on."""
        key = (stage, microbatch)
        source = self._source("forward", stage)
        if source == self._mesh.rank:
            meta = self._shapes[stage, self._signatures[microbatch]]
            leaves = [leaf.clone() for leaf in self._sent["forward", key][1]]
        else:
            channel = self._in["forward", source]
            self._post_hidden(channel, until=key)
            works, leaves = channel.posted.pop(key)
            _wait(works)
            self._post_ahead(channel)
            meta = self._shapes[stage, self._signatures[microbatch]]
        if torch.is_grad_enabled():
            leaves = [leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
        return meta.rebuilt(leaves)

    def _post_hidden(self, channel: _Channel, until: Key) -> None:
        while until not in channel.posted:
            self._post_next(channel)

    def _post_next(self, channel: _Channel) -> None:
        key = channel.order.popleft()
        shape_key = (key[0], self._signatures[key[1]])
        if shape_key not in self._shapes:
            self._shapes[shape_key] = self._receive_meta(channel.peer)
        buffers = self._shapes[shape_key].empty(self._mesh.device)
        channel.posted[key] = (_irecv(buffers, channel), buffers)

    def _post_ahead(self, channel: _Channel) -> None:
        """Post the next receive before it is needed, where its shape is known without waiting."""
        if channel.order and (channel.order[0][0], self._signatures[channel.order[0][1]]) in self._shapes:
            self._post_next(channel)

    def _release_arrived(self) -> None:
        """Without backwards nothing comes back to say that an output has arrived: ask (gloo cannot tell before a wait)."""
        arrived = [key for key, (works, _) in self._sent.items() if works and all(work.is_completed() for work in works)]
        for key in arrived:
            _wait(self._sent.pop(key)[0])

    def release_hidden(self, stage: int, microbatch: int) -> None:
        """Let go of a sent output: its gradient has come back, so it has arrived."""
        works, _ = self._sent.pop(("forward", (stage + 1, microbatch)), ([], []))
        _wait(works)

    # Gradients

    def send_grads(self, stage: int, microbatch: int, grads: list[Tensor]) -> None:
        """Send the gradients of the floating-point leaves that entered ``stage`` back to the stage before."""
        key = (stage - 1, microbatch)
        destination = self._mesh.pp.ranks[self._placement.rank_of(stage - 1)]
        grads = [grad.contiguous() for grad in grads]
        works = [] if destination == self._mesh.rank else _isend(grads, self._out["backward", destination])
        self._sent["backward", key] = (works, grads)

    def receive_grads(self, stage: int, microbatch: int) -> list[Tensor]:
        """The gradients of the floating-point leaves that ``stage`` sent on, in order."""
        key = (stage, microbatch)
        source = self._source("backward", stage)
        if source == self._mesh.rank:
            return self._sent.pop(("backward", key))[1]
        channel = self._in["backward", source]
        while key not in channel.posted:
            next_key = channel.order.popleft()
            buffers = self._grad_buffers(next_key)
            channel.posted[next_key] = (_irecv(buffers, channel), buffers)
        works, grads = channel.posted.pop(key)
        if channel.order and ("forward", (channel.order[0][0] + 1, channel.order[0][1])) in self._sent:
            ahead = channel.order.popleft()
            buffers = self._grad_buffers(ahead)
            channel.posted[ahead] = (_irecv(buffers, channel), buffers)
        _wait(works)
        return grads

    def _grad_buffers(self, key: Key) -> list[Tensor]:
        meta = self._shapes[key[0] + 1, self._signatures[key[1]]]
        return [
            torch.empty(shape, dtype=dtype, device=self._mesh.device)
            for shape, dtype in meta.leaves
            if dtype.is_floating_point
        ]

    # Shapes, see Note [Shapes travel once]

    def _send_meta(self, meta: HiddenMeta, destination: int) -> None:
        payload = pickle.dumps(meta)
        if len(payload) > _META_BYTES - 8:
            raise RuntimeError(f"the form of a hidden state takes {len(payload)} bytes, more than {_META_BYTES}: too many leaves.")
        message = torch.zeros(_META_BYTES, dtype=torch.uint8)
        data = len(payload).to_bytes(8, "little") + payload
        message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._meta_sent.append((dist.isend(message, destination, group=self._mesh.pp.group), message))

    def _receive_meta(self, source: int) -> HiddenMeta:
        message = torch.empty(_META_BYTES, dtype=torch.uint8)
        dist.recv(message, source, group=self._mesh.pp.group)
        data = message.numpy().tobytes()
        meta: HiddenMeta = pickle.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return meta

    def drain(self) -> None:
        """Wait until everything sent in this run has left, and let go of it."""
        for work, _ in self._meta_sent:
            if work is not None:
                work.wait()
        for works, _ in self._sent.values():
            _wait(works)
        self._meta_sent.clear()
        self._sent.clear()


def _isend(tensors: list[Tensor], channel: _Channel) -> list[dist.Work]:
    works = [dist.isend(tensor, channel.peer, group=channel.group) for tensor in tensors]
    return [work for work in works if work is not None]


def _irecv(tensors: list[Tensor], channel: _Channel) -> list[dist.Work]:
    works = [dist.irecv(tensor, channel.peer, group=channel.group) for tensor in tensors]
    return [work for work in works if work is not None]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
