"""Hidden states between neighbouring stages: who sends what to whom is read off the schedules, so both sides agree.

Note [One channel for each edge and direction]
Every directed edge (source rank, destination rank) of a pipeline has a communicator for activations, and the reverse edge
one for gradients. A channel carries messages one way only. The sender posts them in the order of its own action list;
the receiver knows that list and posts its receives in the same order, when plan.py says. Neither side can wait
for the other's order, which is what makes two neighbours of a ring of two, or interleaved stages, safe.

Note [New shapes travel through the host]
A receiver must know a shape before it can post a receive, and a message that waits for its receive occupies the sender's
device (plan.py: Note [When a receive is posted]). So the hidden states of a signature (shapes of the user's batch, on
which all stages agree) that is new in a run go through host memory over gloo in that run, with their shapes before them:
they wait for nobody's device. From the next run on their shapes are known, and they go directly.

Note [Receives have a stream of their own]
NCCL lets a transfer wait for what the current stream holds when it is posted. A receive needs nothing of that, so on CUDA
it is posted on a stream that is always empty, and its buffers are allocated there: memory that the compute stream has
just let go may still be in use on it. The compute stream waits for the transfer where the message is taken, and the
buffers are recorded on it.
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
from lightning_megatron.pipeline.plan import Key, Message, RunPlan
from lightning_megatron.pipeline.schedule import Placement

_META_BYTES = 16384


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
        if isinstance(hidden, Tensor):
            return cls(None, ((tuple(hidden.shape), hidden.dtype),)), [hidden]
        leaves, spec = tree_flatten(hidden)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"a hidden state must be a tensor or a pytree of tensors; it holds a {type(leaf).__name__}. Give layers "
                    f"what is not a tensor through context()."
                )
        return cls(spec, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)), leaves

    def rebuilt(self, leaves: list[Tensor]) -> Any:
        """The hidden state of this form with the given leaves."""
        return leaves[0] if self.spec is None else tree_unflatten(leaves, self.spec)

    def empty(self, device: torch.device, *, only_float: bool = False) -> list[Tensor]:
        """Fresh buffers for the leaves, or for those that have a gradient."""
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in self.leaves
            if dtype.is_floating_point or not only_float
        ]


@dataclass
class _Channel:
    """Messages of one direction on one directed edge, in the sender's order."""

    group: dist.ProcessGroup
    peer: int
    order: deque[Message] = field(default_factory=deque)
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
        self._arrived: Sequence[Sequence[tuple[str, Key]]] = ()
        self._stream: Any = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._signatures: Sequence[Hashable] = ()
        self._known: frozenset[tuple[int, Hashable]] = frozenset()

    def begin(self, plan: RunPlan, signatures: Sequence[Hashable]) -> None:
        """Start a run: take its message orders.

        Args:
            plan: this rank's plan.
            signatures: for each micro-batch, what its shapes depend on.
        """
        assert not self._sent, "the last run was not drained"
        self._signatures, self._arrived = signatures, plan.arrived
        self._known = frozenset(self._shapes)
        for message in plan.incoming:
            self._in[message.direction, self._mesh.pp.ranks[message.source]].order.append(message)

    def before_action(self, issued: int) -> None:
        """Let go of what has arrived, and post every receive that is due, once ``issued`` own actions are under way."""
        for message in self._arrived[issued]:
            works, _ = self._sent.pop(message)
            _wait(works)
        for channel in self._in.values():
            while channel.order and self._may_post(channel.order[0], issued):
                self._post_next(channel)

    def _may_post(self, message: Message, issued: int) -> bool:
        return message.after <= issued and (message.direction == "backward" or self._is_known(message.key))

    def _is_known(self, key: Key) -> bool:
        return (key[0], self._signatures[key[1]]) in self._known

    def _source(self, direction: str, stage: int) -> int:
        sender = stage - 1 if direction == "forward" else stage + 1
        return self._mesh.pp.ranks[self._placement.rank_of(sender)]

    # Activations

    def send_hidden(self, stage: int, microbatch: int, hidden: Any) -> None:
        """Send the output of ``stage`` on to the next one. Its storage is kept until it has arrived.

        Raises:
            RuntimeError: its form differs from what this signature had before.
        """
        meta, leaves = HiddenMeta.of(hidden)
        leaves = [leaf.detach() for leaf in leaves]
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
        elif self._is_known(key):
            leaves = [leaf.contiguous() for leaf in leaves]
            self._sent["forward", key] = (_isend(leaves, self._out["forward", destination]), leaves)
        else:
            self._sent["forward", key] = self._send_through_host(meta, leaves, destination)

    def receive_hidden(self, stage: int, microbatch: int) -> Any:
        """The hidden state that enters ``stage``; its floating-point leaves ask for a gradient while grad mode is on."""
        key = (stage, microbatch)
        source = self._source("forward", stage)
        leaves = (
            self._sent.pop(("forward", key))[1] if source == self._mesh.rank else self._take(self._in["forward", source], key)
        )
        meta = self._shapes[stage, self._signatures[microbatch]]
        if torch.is_grad_enabled():
            leaves = [leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
        return meta.rebuilt(leaves)

    def _take(self, channel: _Channel, key: Key) -> list[Tensor]:
        while key not in channel.posted:
            self._post_next(channel)
        works, buffers = channel.posted.pop(key)
        _wait(works)
        if self._stream is not None and works:
            for buffer in buffers:
                buffer.record_stream(torch.cuda.current_stream(self._mesh.device))
        return buffers

    def _post_next(self, channel: _Channel) -> None:
        message = channel.order.popleft()
        stage, microbatch = message.key
        forward = message.direction == "forward"
        if forward and not self._is_known(message.key):
            meta, leaves = self._receive_through_host(channel.peer)
            self._shapes[stage, self._signatures[microbatch]] = meta
            channel.posted[message.key] = ([], leaves)
            return
        meta = self._shapes[stage if forward else stage + 1, self._signatures[microbatch]]
        with torch.cuda.stream(self._stream):  # of None: where we are
            buffers = meta.empty(self._mesh.device, only_float=not forward)
            channel.posted[message.key] = (_irecv(buffers, channel), buffers)

    # Gradients

    def send_grads(self, stage: int, microbatch: int, grads: list[Tensor]) -> None:
        """Send the gradients of the floating-point leaves that entered ``stage`` back to the stage before."""
        key = (stage - 1, microbatch)
        destination = self._mesh.pp.ranks[self._placement.rank_of(stage - 1)]
        if destination == self._mesh.rank:
            self._sent["backward", key] = ([], grads)
            return
        grads = [grad.contiguous() for grad in grads]
        self._sent["backward", key] = (_isend(grads, self._out["backward", destination]), grads)

    def receive_grads(self, stage: int, microbatch: int) -> list[Tensor]:
        """The gradients of the floating-point leaves that ``stage`` sent on, in order."""
        key = (stage, microbatch)
        source = self._source("backward", stage)
        if source == self._mesh.rank:
            return self._sent.pop(("backward", key))[1]
        return self._take(self._in["backward", source], key)

    # See Note [New shapes travel through the host]

    def _send_through_host(
        self, meta: HiddenMeta, leaves: list[Tensor], destination: int
    ) -> tuple[list[dist.Work], list[Tensor]]:
        payload = pickle.dumps(meta)
        if len(payload) > _META_BYTES - 8:
            raise RuntimeError(
                f"the form of a hidden state takes {len(payload)} bytes, more than {_META_BYTES}: it has too many leaves."
            )
        header = torch.zeros(_META_BYTES, dtype=torch.uint8)
        data = len(payload).to_bytes(8, "little") + payload
        header[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        messages = [header, *(_bytes_of(leaf.cpu().contiguous()) for leaf in leaves)]
        works = [dist.isend(message, destination, group=self._mesh.pp.group) for message in messages]
        return [work for work in works if work is not None], messages

    def _receive_through_host(self, source: int) -> tuple[HiddenMeta, list[Tensor]]:
        header = torch.empty(_META_BYTES, dtype=torch.uint8)
        dist.recv(header, source, group=self._mesh.pp.group)
        data = header.numpy().tobytes()
        meta: HiddenMeta = pickle.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        leaves = meta.empty(torch.device("cpu"))
        for leaf in leaves:
            dist.recv(_bytes_of(leaf), source, group=self._mesh.pp.group)
        return meta, [leaf.to(self._mesh.device) for leaf in leaves]

    def drain(self) -> None:
        """Wait until everything sent in this run has left, and let go of it."""
        for works, _ in self._sent.values():
            _wait(works)
        self._sent.clear()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's memory as a flat view of bytes: gloo does not send every dtype."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _isend(tensors: list[Tensor], channel: _Channel) -> list[dist.Work]:
    works = [dist.isend(tensor, channel.peer, group=channel.group) for tensor in tensors]
    return [work for work in works if work is not None]


def _irecv(tensors: list[Tensor], channel: _Channel) -> list[dist.Work]:
    works = [dist.irecv(tensor, channel.peer, group=channel.group) for tensor in tensors]
    return [work for work in works if work is not None]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
