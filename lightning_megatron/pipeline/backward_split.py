"""A stage's backward in two parts: gradients of the input first (I), weight gradients of matrix products later (W).

Note [What waits]
The weight gradient of a matrix product costs as much as its input gradient, and nothing in the pipeline waits for it. The
rest (norms, biases added on their own, embeddings, scalars) costs next to nothing beside the pass that makes the input
gradient anyway, and putting it off would keep more activations. So these wait: the weights of torch's own matrix products
and convolutions, and those of Functions that can (weight_gradients.py), if every use of the weight is such a product and
the weight reaches it by a plain chain of casts and views. All other gradients are made by I, in the usual way: a weight
that is also an embedding, what lies inside an activation checkpoint (W would recompute it all once more), Functions that
cannot wait. Either way each gradient is computed once, and each parameter's gradient is added once, by its own
``AccumulateGrad`` or by the Function that made it, so hooks of tensors and of accumulation run as they do in a whole backward.

Note [One product, half its gradients]
A node of the graph computes the gradients of those inputs only that the running backward pass will use. I names what it
wants, so a product makes its input gradient alone; a hook keeps the gradient that came to it. W starts a pass that wants
the weights' edges and nothing else, and inside of it calls the products again: each now makes its weight gradients alone.
The kept gradient has gone through the hooks of the product's output, which a direct call does not run again.

Note [What I lets go]
Of what the forward saved, W needs the waiting products' part. I must keep the graph, and with it autograd would keep all
of the rest; so before I every saved tensor is put into a ``Held``. What W does not need is let go by its first use, which
is the only one that torch's own nodes make, or when its node, if that is a Function's, has run. Saved-tensor hooks of the
forward's that hold their tensors in a ``Held`` too change nothing; what is behind other hooks (an activation checkpoint's)
is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from lightning_megatron.weight_gradients import Compute, ask_to_wait, weight_input_of

_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Addmv", "Mv", "Linear", "MkldnnLinear", "Convolution", "GroupedMm")
_VIEWS = (
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "ViewAs", "ToCopy", "Clone", "Expand"),
    *("Squeeze", "Unsqueeze", "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Movedim", "Contiguous"),
)
_BYTES_AT_ONCE = 1 << 28  # weight gradients that W holds before it adds them


@dataclass(eq=False)
class Held:
    """A saved tensor that can be let go, as saved-tensor hooks keep it. See Note [What I lets go]."""

    tensor: Tensor | None
    is_used_once: bool = False

    def get(self) -> Tensor:
        """The tensor; for ``is_used_once`` the only time."""
        tensor = self.tensor
        assert tensor is not None, "a saved tensor was let go before its last use"
        if self.is_used_once:
            self.let_go()
        return tensor

    def let_go(self) -> None:
        """It is not used again."""
        self.tensor = None


@dataclass(eq=False)
class _Product:
    """A matrix product whose weight gradients wait.

    Args:
        node: its node in the graph.
        edges: index among its inputs, and the edge, of each weight.
        grads: the gradient of its output, once I has been there.
        computes: instead of ``grads``, what a Function left to be called.
    """

    node: Node
    edges: list[tuple[int, GradientEdge]]
    grads: tuple[Tensor | None, ...] = ()
    computes: list[Compute] | None = None


@dataclass
class _Graph:
    """The part of the autograd graph below some edges."""

    children: dict[Node, tuple[tuple[Node | None, int], ...]] = field(default_factory=dict)
    leaves: dict[Node, Tensor] = field(default_factory=dict)

    @classmethod
    def below(cls, roots: Iterable[Node]) -> _Graph:
        graph, pending = cls(), list(roots)
        while pending:
            node = pending.pop()
            if node in graph.children:
                continue
            graph.children[node] = node.next_functions
            if (leaf := getattr(node, "variable", None)) is not None:
                graph.leaves[node] = leaf
            pending += [child for child, _ in node.next_functions if child is not None]
        return graph

    def chain(self, node: Node) -> list[Node]:
        """The nodes from here to a leaf if nothing but casts and views lies between; else nothing."""
        nodes = [node]
        while nodes[-1] not in self.leaves:
            below = [child for child, _ in self.children[nodes[-1]] if child is not None]
            if len(below) != 1 or not _is_kind(type(nodes[-1]), _VIEWS):
                return []
            nodes.append(below[0])
        return nodes


class SplitBackward:
    """The backward of one forward, in two parts. See Note [What waits].

    Args:
        roots: edges of the forward's results (of its loss), with their gradients.
        inputs: leaves that the stage received: their ``grad`` is set by the first part.
        widest: elements in the gradient of a product's output beyond which its weights do not wait, because keeping that
            (logits over a large vocabulary) would cost too much memory. A Function that keeps it in another form says of how
            many elements (``ctx.num_kept``). ``None``: no limit.
    """

    def __init__(
        self, roots: Sequence[tuple[GradientEdge, Tensor]], inputs: Sequence[Tensor], *, widest: int | None = None
    ) -> None:
        self._roots, self._inputs, self._widest = list(roots), list(inputs), widest
        self._late: list[_Product] = []  # in the order in which I came to them

    @property
    def num_late(self) -> int:
        """Products whose weight gradients wait for the second part."""
        return len(self._late)

    def run_input_part(self) -> None:
        """I: everything but what waits. Sets ``grad`` of the inputs, adds the other gradients, frees what W does not need."""
        edges, grads = [edge for edge, _ in self._roots], [grad for _, grad in self._roots]
        self._roots = []
        if not edges:
            return
        graph = _Graph.below(edge.node for edge in edges)
        if _has_reentrant_checkpoint(graph):
            torch.autograd.backward(edges, grads)
            return
        holders, foreign = _hold_saved(graph.children)
        found = self._find_late(graph, edges, foreign)
        if not found:
            torch.autograd.backward(edges, grads)
            return
        waiting = {node for product in found for _, edge in product.edges for node in graph.chain(edge.node)}
        wanted: list[Any] = [leaf for node, leaf in graph.leaves.items() if node not in waiting]
        wanted += [GradientEdge(product.node, 0) for product in found]
        hooks = [product.node.register_prehook(self._prepare(product)) for product in found]
        hooks += _let_go_once_used(holders, {product.node for product in found if product.computes is None} | waiting)
        del graph, holders
        torch.autograd.backward(edges, grads, inputs=wanted, retain_graph=True)
        for hook in hooks:
            hook.remove()
        self._inputs = []

    def _prepare(self, product: _Product) -> Callable[[tuple[Tensor, ...]], None]:
        """Set a product up for I; what is returned is to be called with the gradient that comes to it."""
        if isinstance(product.node, BackwardCFunction):
            product.computes = ask_to_wait(product.node)

        def keep(grads: tuple[Tensor, ...]) -> None:
            product.grads = grads if product.computes is None else ()
            self._late.append(product)

        return keep

    def run_weight_part(self) -> None:
        """W: the gradients that waited, each added to its parameter once. Frees the rest of the graph as it goes."""
        uses: dict[Node, int] = {}
        ends = {edge: _leaf_below(edge.node) for product in self._late for _, edge in product.edges}
        for product in self._late:
            for _, edge in product.edges:
                uses[ends[edge]] = uses.get(ends[edge], 0) + 1
        pending: dict[Node, list[tuple[GradientEdge, Tensor]]] = {}
        products, self._late = self._late[::-1], []
        while products:
            chunk = _chunk(products)
            for edge, grad in _weight_gradients(chunk):
                end = ends[edge]
                uses[end] -= 1
                if grad is not None:
                    pending.setdefault(end, []).append((edge, grad))
            del chunk
            done = [end for end in pending if uses[end] == 0]
            _add([pair for end in done for pair in pending.pop(end)])

    def _find_late(self, graph: _Graph, roots: Sequence[GradientEdge], foreign: set[Node]) -> list[_Product]:
        """The products that wait. One that turns out not to may keep others from waiting, so look again until none does."""
        candidates = [node for node in graph.children if node not in foreign and self._may_wait(node)]
        while True:
            late = self._waiting_edges(graph, roots, candidates, foreign)
            if len(late) == len(candidates):
                return [_Product(node, edges) for node, edges in late.items()]
            candidates = list(late)

    def _waiting_edges(
        self, graph: _Graph, roots: Sequence[GradientEdge], candidates: Sequence[Node], foreign: set[Node]
    ) -> dict[Node, list[tuple[int, GradientEdge]]]:
        """For each product its edges to weights that nothing else uses, if there are any that are worth waiting."""
        chains: dict[Node, Node] = {}  # node of a chain -> the leaf at its end
        edges = {node: list(_weight_edges(graph, node)) for node in candidates}
        for edge in (edge for some in edges.values() for _, edge in some):
            nodes = graph.chain(edge.node)
            if nodes and not foreign.intersection(nodes):
                chains.update(dict.fromkeys(nodes, nodes[-1]))
        given = {id(leaf) for leaf in self._inputs}
        early = {node for node, leaf in graph.leaves.items() if id(leaf) in given}
        early |= {chains[edge.node] for edge in roots if edge.node in chains}
        for node in graph.children.keys() - chains.keys():
            allowed = {index for index, _ in edges.get(node, ())}
            early |= {chains[c] for i, (c, _) in enumerate(graph.children[node]) if c in chains and i not in allowed}
        late = {node: [(i, e) for i, e in some if chains.get(e.node) not in (None, *early)] for node, some in edges.items()}
        return {node: some for node, some in late.items() if some and _is_worth_it(node, some)}

    def _may_wait(self, node: Node) -> bool:
        kept = [*(prod(meta.shape) for meta in node._input_metadata), getattr(node, "num_kept", 0)]
        if self._widest is not None and max(kept) > self._widest:
            return False
        return weight_input_of(node) is not None or _is_kind(type(node), _PRODUCTS)


@lru_cache(maxsize=1024)
def _is_kind(kind: type, names: tuple[str, ...]) -> bool:
    """Whether a node's class is that of one of torch's own operations of these names."""
    return kind.__name__.rstrip("0123456789").removesuffix("Backward") in names and not issubclass(kind, BackwardCFunction)


def _is_worth_it(node: Node, edges: Sequence[tuple[int, GradientEdge]]) -> bool:
    """Not for a product's bias alone."""
    return weight_input_of(node) is not None or any(len(_meta(edge).shape) > 1 for _, edge in edges)


def _weight_edges(graph: _Graph, node: Node) -> Iterator[tuple[int, GradientEdge]]:
    """Inputs of a product that could be weights: all of one of torch's own, the named one of a Function."""
    place = weight_input_of(node)
    for index, (child, number) in enumerate(graph.children[node]):
        if child is not None and (place is None or place == index):
            yield index, GradientEdge(child, number)


def _has_reentrant_checkpoint(graph: _Graph) -> bool:
    """A reentrant checkpoint runs a backward of its own, and refuses to be in one that wants only some gradients."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph.children)


def _leaf_below(node: Node) -> Node:
    while getattr(node, "variable", None) is None:
        node = next(child for child, _ in node.next_functions if child is not None)
    return node


# Saved tensors


@lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _hold_saved(nodes: Iterable[Node]) -> tuple[dict[Node, list[Held]], set[Node]]:
    """Put what the nodes saved into holders; and the nodes whose saved tensors somebody else's hooks hold."""
    holders: dict[Node, list[Held]] = {}
    foreign = set()
    for node in nodes:
        mine: list[Held] = []
        for name in _saved_names(type(node)):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                if not _hold(one, mine):
                    foreign.add(node)
        holders[node] = mine
    return holders, foreign


def _hold(saved: Any, holders: list[Held]) -> bool:
    def pack(tensor: Tensor) -> Held:
        holders.append(Held(tensor))
        return holders[-1]

    try:
        if saved is not None:
            saved.register_hooks(pack, Held.get)
    except RuntimeError as error:
        if "already been set" not in str(error):
            return True  # nothing was saved
        if not isinstance(saved.data, Held):
            return False
        holders.append(saved.data)
    return True


def _let_go_once_used(holders: dict[Node, list[Held]], needed: set[Node]) -> list[RemovableHandle]:
    """Make the next run of the nodes let go of what they saved, except for the needed ones. The hooks are to be removed."""
    hooks: list[RemovableHandle] = []
    for node, held in holders.items():
        if node in needed or not held:
            continue
        if isinstance(node, BackwardCFunction):
            hooks.append(node.register_hook(_emptier(held)))  # its code may look at what it saved more than once
            continue
        for one in held:
            one.is_used_once = True
    return hooks


def _emptier(held: list[Held]) -> Callable[..., None]:
    def empty(*_: Any) -> None:
        for one in held:
            one.let_go()

    return empty


# Weight gradients


def _chunk(products: list[_Product]) -> list[_Product]:
    """Take products off the end of the list, as many as make ``_BYTES_AT_ONCE`` of gradients (at least one)."""
    chunk: list[_Product] = []
    num_bytes = 0
    while products and (not chunk or num_bytes < _BYTES_AT_ONCE):
        chunk.append(products.pop())
        num_bytes += sum(prod(_meta(edge).shape) * _meta(edge).dtype.itemsize for _, edge in chunk[-1].edges)
    return chunk


def _meta(edge: GradientEdge) -> Any:
    return edge.node._input_metadata[edge.output_nr]


def _weight_gradients(products: list[_Product]) -> list[tuple[GradientEdge, Tensor | None]]:
    """Each weight's edge with its gradient, ``None`` if it has been added. See Note [One product, half its gradients]."""
    result: list[tuple[GradientEdge, Tensor | None]] = []
    native = [product for product in products if product.computes is None]
    wanted = list(dict.fromkeys(edge for product in native for _, edge in product.edges))

    def compute() -> None:
        for product in native:
            grads = product.node(*product.grads)  # type: ignore[operator]
            grads = grads if isinstance(grads, tuple) else (grads,)
            result.extend((edge, grads[index]) for index, edge in product.edges)

    if native:
        start = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            root = _InsidePass.apply(start, compute)  # type: ignore[no-untyped-call]
        # A root's gradient must have its shape; these are never looked at and take no memory.
        unused = [torch.zeros((), dtype=_meta(e).dtype, device=_meta(e).device).expand(tuple(_meta(e).shape)) for e in wanted]
        outputs, inputs = (root, *wanted), (start, *wanted)
        torch.autograd.grad(outputs, inputs, (torch.ones(()), *unused), allow_unused=True)  # type: ignore[arg-type]
    with torch.no_grad():
        for product in products:
            for compute_one in product.computes or ():
                result.append((product.edges[0][1], compute_one()))
    return result


class _InsidePass(torch.autograd.Function):
    """Calls a function inside of a backward pass."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return start.view_as(start)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def _add(pairs: list[tuple[GradientEdge, Tensor]]) -> None:
    """Send gradients down their chains into the parameters; those of one edge are summed first."""
    if not pairs:
        return
    grads = [grad if grad.shape == _meta(edge).shape else grad.sum_to_size(tuple(_meta(edge).shape)) for edge, grad in pairs]
    torch.autograd.backward([edge for edge, _ in pairs], grads)
