"""Layers captured as CUDA graphs: one graph for the forward of each, two for its backward, replayed inside of autograd.

Note [What a graph fixes]
A replay runs the same kernels on the same addresses. What a layer reads and writes must therefore stay where it is: parameters
and their gradient sums lie in flat buffers that an optimizer keeps; the first layer's input, the rotary tables and the
gradient that comes in at the end are copied into tensors of the graphs' own; between layers one graph's output is the next
one's input. Activations lie in the graphs' memory pool, where a backward's temporaries take the place of what it has let go
of, as they would without graphs; so all forwards are captured first, in order, and then all backwards in the opposite order,
and at most one micro-batch can be between its forward and its backward. ``Lease`` says which.

Note [Gradients in a graph]
Weight gradients go into their sums by the products that make them (weight_gradients.py), which write over a sum that counts
as zero and add to any other: Python decides that while it captures, so there is a backward of each kind. If neither fits (a
parameter got a gradient elsewhere), sums that count as zero are zeroed and everything is added. Hooks on the parameters'
accumulation, which start reductions, do not run in a capture, and all run after each replay.

Note [Random numbers in a graph]
A graph takes seed and offset of the default generator when it is replayed, and draws from there as its layer would. Layers are
seeded by name before each is called (pipeline/model.py), so masks are those of a run without graphs, bit by bit.

Note [8 bits in a graph]
Factors and largest magnitudes lie in place (te_backend/scales.py). A weight in 8 bits is made once for an optimizer step: not
in the graph, but before the first replay of the step, where the graph looks for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.layers.rope import RopeTables
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend.functions import Job
from lightning_megatron.optim.guard import ForwardWait
from lightning_megatron.weight_gradients import arrivals_of, is_accumulated, is_summed, run_hooks, settled_sum

Replay = Callable[[], None]


class Recorder(Protocol):
    """Turns what is called once into what can be run again."""

    def recording(self) -> AbstractContextManager[None]:
        """Around all that is recorded together."""
        ...

    def record(self, body: Callable[[], Tensor | None]) -> tuple[Tensor | None, Replay]:
        """What ``body`` returned, and what does its work again, into that same tensor."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share a memory pool. They have to be replayed in the order in which they were recorded.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Work on a stream of its own, which a capture needs, with the memory that is free given back before."""
        # Nodes of an earlier backward that only garbage keeps alive would pull the stream of their time into the capture.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            if collects:
                gc.enable()

    def record(self, body: Callable[[], Tensor | None]) -> tuple[Tensor | None, Replay]:
        """See ``Recorder``. Nothing is computed yet.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = body()
        except Exception as error:
            with suppress(RuntimeError):
                graph.capture_end()  # fails too: the capture is invalid
            raise RuntimeError(
                f"cuda_graphs=True: a layer did something that a CUDA graph cannot hold, such as waiting for the device "
                f"({type(error).__name__}: {error}). Set cuda_graphs=False."
            ) from error
        graph.capture_end()
        return result, graph.replay


class Lease:
    """One use of captured layers, from the first forward to the last backward."""

    def __init__(self) -> None:
        self.is_over = False


class CapturedLayers:
    """A stack of layers in graphs. See Note [What a graph fixes].

    Args:
        layers: the modules, in the order in which they are called.
        calls: what to call for each: its ``forward`` as it is without graphs.
        hidden: an input of the first, as all later ones will be: ``[S/tp, B, H]``.
        context: what all are called with besides.
        recorder: makes the graphs.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        calls: Sequence[Callable[..., Tensor]],
        *,
        hidden: Tensor,
        context: SequenceContext,
        recorder: Recorder,
    ) -> None:
        self._anchor = torch.zeros((), device=hidden.device, requires_grad=True)
        self._context, self._seen = _own(context), context
        self._lease: ref[Lease] | None = None
        static = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        self._layers = [_CapturedLayer(layer, call) for layer, call in zip(layers, calls, strict=True)]
        for layer in self._layers:
            layer.prepare()
        with torch.enable_grad(), recorder.recording():
            for layer in self._layers:
                static = layer.record_forward(recorder, static, self._context)
            incoming = torch.zeros_like(static) if static.requires_grad else None
            for layer in reversed(self._layers):
                if incoming is not None:
                    incoming = layer.record_backward(recorder, incoming)
        trained = [layer for layer in self._layers if layer.has_backward]
        if trained:
            trained[0].is_last_backward = True

    @property
    def is_valid(self) -> bool:
        """Whether all that the graphs read and write is where it was."""
        return all(layer.is_valid for layer in self._layers)

    def begin(self, context: SequenceContext) -> Lease | None:
        """Take the graphs for a micro-batch of that context; ``None`` while another one is to come back for its backward."""
        before = None if self._lease is None else self._lease()
        if before is not None and not before.is_over:
            return None
        if context is not self._seen:
            _copy(context, self._context)
            self._seen = context
        lease = Lease()
        self._lease = ref(lease)
        return lease

    def run(self, index: int, hidden: Tensor, lease: Lease) -> Tensor:
        """Forward of one layer: ``[S/tp, B, H] -> [S/tp, B, H]``. What is returned is written over by the next micro-batch."""
        layer = self._layers[index]
        layer.prepare()
        anchor = self._anchor if layer.has_backward else None
        result: Tensor = _Replayed.apply(hidden, anchor, layer, lease)  # type: ignore[no-untyped-call]
        return result


class _CapturedLayer:
    def __init__(self, module: nn.Module, call: Callable[..., Tensor]) -> None:
        self._call = call
        jobs: list[tuple[Any, Any]] = [(child, getattr(child, "job", None)) for child in module.modules()]
        self._narrow = [child for child, job in jobs if isinstance(job, Job) and job.operations.is_narrow]
        for child in self._narrow:
            child.job.cache.is_pinned = True
        in_cache = {id(child.weight) for child in self._narrow}  # the graph reads the cache's 8 bits, not the parameter
        self._params = list(module.parameters())
        self._read = [param for param in self._params if id(param) not in in_cache]
        self._places = self._find()
        self._trained = [param for param in self._params if param.requires_grad]
        self._totals = [_total(param) for param in self._trained]
        hooks = [(child, hook) for child in module.modules() for hook in child._forward_pre_hooks.values()]
        self._waits = [(child, hook) for child, hook in hooks if isinstance(hook, ForwardWait)]
        self.has_backward = self.is_last_backward = False

    @property
    def is_valid(self) -> bool:
        return self._find() == self._places and all(
            settled_sum(param) is total for param, total in zip(self._trained, self._totals, strict=True)
        )

    def _find(self) -> tuple[list[int], list[bool]]:
        # Unseen by the guard of parameters that are on their way (optim/guard.py): it would wait for all of them.
        with torch._C.DisableTorchFunction():
            return [param.data_ptr() for param in self._read], [param.requires_grad for param in self._params]

    def prepare(self) -> None:
        """Wait for parameters on their way, as the hooks do that a replay leaves out, and make 8 bits of those that changed."""
        for child, hook in self._waits:
            hook(child, ())
        for child in self._narrow:
            child.job.cache.get(child.weight, child.job.operations, child.scales.epoch)

    # Capture

    def record_forward(self, recorder: Recorder, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Record the forward on that input; its output, as the next layer's input."""
        self._input, self._context = hidden, context
        _, self._forward = recorder.record(self._compute)
        self._result = self._output.detach()
        self.has_backward = self._output.requires_grad
        return self._output.detach().requires_grad_(self.has_backward)

    def _compute(self) -> Tensor:
        self._output = self._call(self._input, self._context)
        return self._output

    def record_backward(self, recorder: Recorder, incoming: Tensor) -> Tensor | None:
        """Record both backwards from that gradient; the gradient of the input, by the one that adds."""
        self._incoming = incoming
        self._written = [param for param in self._trained if is_summed(param)]
        before = [param.grad for param in self._trained]
        with arrivals_of(self._trained) as arrived:
            self._count()
            outgoing, self._add = recorder.record(partial(self._differentiate, retain=True))
            self._arrived = list(arrived)
            for param in self._written:
                param.grad = None
            self._outgoing_of_put, self._put = recorder.record(partial(self._differentiate, retain=False))
        for param, grad in zip(self._trained, before, strict=True):
            param.grad = grad
        self._outgoing = outgoing
        self._written = [param for param in self._written if any(param is one for one in self._arrived)]
        del self._output  # and with it the graph of autograd
        return outgoing

    def _count(self) -> None:
        for param, total in zip(self._trained, self._totals, strict=True):
            param.grad = total

    def _differentiate(self, *, retain: bool) -> Tensor | None:
        self._input.grad = None
        torch.autograd.backward(self._output, self._incoming, retain_graph=retain)
        for param in self._trained:
            settled_sum(param)
        outgoing, self._input.grad = self._input.grad, None
        return outgoing

    # Replay

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the output, which lies where it always lies."""
        _put(hidden, self._input.detach())
        self._forward()
        return self._result.detach()

    def backward(self, grad: Tensor) -> Tensor | None:
        """The gradient of the input; those of parameters are in their sums. See Note [Gradients in a graph]."""
        if not self.is_valid:
            raise RuntimeError(
                "cuda_graphs=True: between the forward of a layer and its backward its parameters or their gradients were "
                "moved or replaced, which a CUDA graph cannot follow. Set cuda_graphs=False."
            )
        _put(grad, self._incoming)
        if all(param.grad is None for param in self._written):
            self._put()
            outgoing = self._outgoing_of_put
        else:
            for param, total in zip(self._trained, self._totals, strict=True):
                if param.grad is None:
                    total.zero_()
            self._add()
            outgoing = self._outgoing
        self._count()
        for arrived in self._arrived:
            run_hooks(arrived)
        return outgoing


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor | None, layer: _CapturedLayer, lease: Lease) -> Tensor:
        ctx.layer, ctx.lease = layer, lease
        return layer.forward(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        layer, lease = ctx.layer, ctx.lease
        if lease.is_over:
            raise RuntimeError("cuda_graphs=True: a second backward through the same layers. Set cuda_graphs=False.")
        if not is_accumulated(ctx.next_functions[1][0]):
            raise RuntimeError(
                "cuda_graphs=True: torch.autograd.grad reached layers that are CUDA graphs, whose backward adds to the "
                "gradients of all their parameters. Set cuda_graphs=False."
            )
        lease.is_over = layer.is_last_backward
        return layer.backward(grad), None, None, None


def _total(param: Tensor) -> Tensor:
    total = settled_sum(param)
    assert total is not None, "layers are captured when an optimizer keeps the sums of their gradients"
    return total


def _put(tensor: Tensor, place: Tensor) -> None:
    """Copy what is not there already."""
    if tensor.data_ptr() != place.data_ptr() or tensor.stride() != place.stride():
        place.copy_(tensor)


def _own(context: SequenceContext) -> SequenceContext:
    """The same with tensors of its own."""
    rope = context.rope
    return context if rope is None else replace(context, rope=RopeTables(rope.cos.clone(), rope.sin.clone()))


def _copy(context: SequenceContext, own: SequenceContext) -> None:
    if context.rope is not None and own.rope is not None:
        torch._foreach_copy_([own.rope.cos, own.rope.sin], [context.rope.cos, context.rope.sin])
