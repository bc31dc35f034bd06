"""CUDA graphs for the layers of a model: which, and when. What a graph is here: ``layers/graph_capture.py``.

Layers run without graphs for a few micro-batches first, so that everything they need (kernels, plans, workspaces, factors) is
there. Then the whole stack is captured for micro-batches of that shape, and replayed whenever one comes. Other shapes, packed
rows, evaluation, and a second forward before the backward of the first run without graphs: the same kernels on the same
numbers, launched one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lightning_megatron.layers.core_attention import CoreAttention
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.graph_capture import CapturedLayers, CudaRecorder, Lease, Recorder
from lightning_megatron.layers.instead import Instead, layers_of
from lightning_megatron.layers.norm import LayerNorm
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend import Scales, scales_of
from lightning_megatron.layers.transformer import TransformerLayer
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.guard import ForwardWait
from lightning_megatron.weight_gradients import is_summed, settled_sum

WARM_UP = 3
"""Micro-batches of one shape, in a row, before layers are captured."""
_MOST = 8  # captures of one stack; parameters that are moved more often than that are not worth it


class LayerGraphs:
    """Runs the layers of one stack, one after the other, by graphs where it can.

    Args:
        layers: in the order in which the model calls them, with what each is called by.
        scales: the FP8 factors that layers use.
        recorder: makes graphs; made when it is needed if not given.

    Attributes:
        num_replayed: micro-batches whose forwards were replayed.
    """

    def __init__(
        self, layers: Sequence[_Graphed] = (), *, scales: Sequence[Scales] = (), recorder: Recorder | None = None
    ) -> None:
        self._layers, self._scales, self._recorder = list(layers), list(scales), recorder
        self._captured: CapturedLayers | None = None
        self._key: Hashable = None
        self._num_seen = self._num_captures = 0
        self._running: tuple[CapturedLayers, Lease, SequenceContext] | None = None
        self._next = 0
        self._has_warned = False
        self._children: list[nn.Module] | None = None
        self._num_hooks = (0, False)
        self.num_replayed = 0

    def __deepcopy__(self, memo: dict[int, object]) -> LayerGraphs:
        return LayerGraphs()  # layers of a copied model run without

    def __reduce__(self) -> tuple[type[LayerGraphs], tuple[()]]:
        return LayerGraphs, ()

    def run(self, index: int, eager: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run the layer of that index, by its graph if the stack is being run by graphs.

        Args:
            index: of the layer.
            eager: runs it without a graph.
            args: what it is called with.
            kwargs: the same, by name.
        """
        if index == 0:
            self._running, self._next = self._begin(args, kwargs), 0
        running = self._running
        if running is None or index != self._next or kwargs or len(args) != 2 or args[1] is not running[2]:
            self._running = None
            return eager(*args, **kwargs)
        self._next += 1
        if self._next == len(self._layers):
            self._running = None  # the graph of autograd keeps the lease from here on
        return running[0].run(index, args[0], running[1])

    def release(self) -> None:
        """Let graphs and their memory go; later micro-batches start over, as the first ones did."""
        self._captured = self._running = None
        self._num_seen = self._num_captures = 0

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CapturedLayers, Lease, SequenceContext] | None:
        if not self._layers or kwargs or len(args) != 2 or not torch.is_grad_enabled() or not self._layers[0].module.training:
            return None
        hidden, context = args
        if not isinstance(hidden, Tensor) or not isinstance(context, SequenceContext):
            return None
        if not context.is_plain:
            self._warn("rows hold several documents, or attention has a window or no causal mask")
            return None
        key = _key(hidden, context)
        if self._captured is not None and not self._captured.is_valid:
            self._captured, self._num_seen = None, 0
        if not all(scales.is_warm or not scales.keeps_history for scales in self._scales):
            self._num_seen = 0  # without a history of magnitudes layers do other things than with one
            return None
        if self._captured is None:
            self._num_seen = self._num_seen + 1 if key == self._key else 1
            self._key = key
            if self._num_seen <= WARM_UP or not self._can_capture():
                return None
            self._num_captures += 1
            self._captured, self._num_hooks = self._capture(hidden, context), self._count_hooks()
        elif self._count_hooks() != self._num_hooks:
            self._warn("modules inside of layers have got hooks since, which a replay would not run")
            return None
        lease = self._captured.begin(context) if key == self._key else None
        if lease is None:
            return None
        self.num_replayed += 1
        return self._captured, lease, context

    def _count_hooks(self) -> tuple[int, bool]:
        """Of the modules inside of layers, what stands in their ``forward`` included; whether any are of all modules."""
        if self._children is None:
            modules = (child for layer in self._layers for child in layer.module.modules() if child is not layer.module)
            self._children = list(modules)
        count = 0
        for child in self._children:
            count += len(child._forward_hooks) + len(child._forward_pre_hooks) + ("forward" in vars(child))
            count += len(child._backward_hooks) + len(child._backward_pre_hooks)
        return count, bool(_has_any_global_hook())  # type: ignore[no-untyped-call]

    def _can_capture(self) -> bool:
        if self._num_captures == _MOST:
            self._warn(f"parameters or their gradients were moved {_MOST} times")
            return False
        modules = [layer.module for layer in self._layers]
        params = [param for module in modules for param in module.parameters() if param.requires_grad]
        if any(settled_sum(param) is None for param in params):
            self._warn("gradients of parameters have hooks of their own, or no sum in an optimizer")
            return False
        hook = next((name for module in modules for name in _foreign_hooks(module)), None)
        if hook is not None:
            self._warn(f"{hook} has hooks of its own, which a replay would not run")
            return False
        if params and not any(is_summed(param) for param in params):
            return False  # there has been no backward yet
        if any(param.is_cuda and not is_summed(param) for param in params):
            # Seen with torch 2.11: such a stack's weights were not those of a run without graphs.
            self._warn("autograd adds up the gradients of biases or LayerNorms, which a graph has been seen to get wrong")
            return False
        return True

    def _capture(self, hidden: Tensor, context: SequenceContext) -> CapturedLayers:
        if self._recorder is None:
            self._recorder = CudaRecorder(hidden.device)
        modules, calls = [layer.module for layer in self._layers], [layer.__wrapped__ for layer in self._layers]
        return CapturedLayers(modules, calls, hidden=hidden, context=context, recorder=self._recorder)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"cuda_graphs=True, but layers run without graphs: {why}.", stacklevel=2)


class _Graphed(Instead):
    """Of a layer."""

    def __init__(self, module: nn.Module, index: int) -> None:
        super().__init__(module)
        self.index, self.graphs = index, LayerGraphs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.graphs.run(self.index, self.__wrapped__, args, kwargs)


def graph_layers(module: nn.Module, mesh: Mesh, *, recorder: Recorder | None = None) -> list[LayerGraphs]:
    """Run a model's layers by CUDA graphs from now on, in place; ``instead.take_back`` undoes it.

    Args:
        module: the user's module, all of whose layers are on this rank.
        mesh: the running layout.
        recorder: see ``LayerGraphs``.

    Raises:
        ValueError: layers that cannot be captured; saying why.
    """
    if recorder is None and mesh.device.type != "cuda":
        raise ValueError(f"cuda_graphs=True needs a CUDA device, but the model runs on {mesh.device}; set cuda_graphs=False.")
    layers = layers_of(module)
    others = [layer for layer in layers if not isinstance(layer.module, TransformerLayer)]
    if others or not layers:
        found = f"{others[0].name} is a {type(others[0].module).__name__}" if others else "it has no layers"
        raise ValueError(
            f"cuda_graphs=True captures the layers of lightning_megatron models, but of {type(module).__name__} {found}: what "
            f"it does may not be the same each time. Set cuda_graphs=False."
        )
    if any(isinstance(child, LayerNorm) and child.compiled for child in module.modules()):
        raise ValueError(
            "cuda_graphs=True does not go with compile_pointwise=True in this version: what is compiled has one backward for "
            "each forward, and graphs are captured with two. Leave out one of them."
        )
    scales = scales_of(module)
    for recipe in (one.options.recipe for one in scales if not one.options.is_per_tensor):
        raise ValueError(
            f"cuda_graphs=True goes with fp8='delayed' and 'current' in this version, not with {recipe!r}; choose one of them, "
            f"or set cuda_graphs=False."
        )
    if mesh.tp.size > 1 and any(_drops(layer.module) for layer in layers):
        raise ValueError(
            f"cuda_graphs=True does not go with dropout under tp={mesh.tp.size}: tensor-parallel ranks seed their generators "
            f"inside of layers, which a graph cannot. Set the dropouts to 0, tp=1 or cuda_graphs=False."
        )
    made: dict[str, list[_Graphed]] = {}
    for layer in layers:
        stack = made.setdefault(layer.name.rpartition(".")[0], [])
        stack.append(_Graphed(layer.module, len(stack)))
    found_graphs = []
    for stack in made.values():
        graphs = LayerGraphs(stack, scales=scales, recorder=recorder)
        for graphed in stack:
            graphed.graphs = graphs
            graphed.put()
        found_graphs.append(graphs)
    return found_graphs


def graphs_of(module: nn.Module) -> list[LayerGraphs]:
    """What runs the layers of a model by graphs, one for each stack of layers."""
    found = (child.__dict__.get("forward") for child in module.modules())
    return list({id(one.graphs): one.graphs for one in found if isinstance(one, _Graphed)}.values())


def release_graphs(module: nn.Module) -> None:
    """Let a model's graphs go: a communicator of NCCL, and with it a process, does not end while a graph holds work of it."""
    for graphs in graphs_of(module):
        graphs.release()


def _key(hidden: Tensor, context: SequenceContext) -> Hashable:
    tables = None if context.rope is None else (context.rope.cos.shape, context.rope.cos.dtype)
    form = (hidden.shape, hidden.stride(), hidden.dtype, hidden.device, hidden.requires_grad)
    return form, context.seq_len, context.padded_len, tables


def _foreign_hooks(layer: nn.Module) -> Iterable[str]:
    """Names of modules inside a layer that have hooks which are not ours."""
    for name, child in layer.named_modules():
        before = [hook for hook in child._forward_pre_hooks.values() if not isinstance(hook, ForwardWait)]
        if child is not layer and (before or child._forward_hooks or child._backward_hooks or child._backward_pre_hooks):
            yield name


def _drops(layer: nn.Module) -> bool:
    for child in layer.modules():
        if (isinstance(child, Dropout) and child.p > 0.0) or (isinstance(child, CoreAttention) and child.dropout > 0.0):
            return True
    return False
