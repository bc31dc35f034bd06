"""Products by the fastest algorithm that cuBLASLt has for a shape, or by a kernel of this project where that is faster.

Note [Which algorithm is fastest]
cuBLASLt proposes several algorithms for a product and guesses which is best. A GPU under full load runs at its power limit,
where the guess is off by 1 % (bf16) to 2 % (8 bits) over all products of a step, some by 10 %. So the proposals are timed,
each for long enough that the clock settles, at the first product of each shape. Two runs may find differently and then round
differently: what was found is kept in a file, if one is given, and a run that finds it there times nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels import hopper_products, stream_of
from lightning_megatron.kernels.products import Products, Tables, TorchProducts
from lightning_megatron.kernels.timing import agrees, tensors_of, times_of

_DTYPES = (torch.bfloat16, torch.float16)
_MULTIPLE = 16  # of all sizes: what every algorithm takes
_ALIGNMENT = 256  # bytes, of what is added: what proposals count on unless the library is told otherwise
_SMALLEST = 2**32  # multiplications, below which nothing is gained
_CLEARLY = 0.98  # of the time of what it replaces: what is faster by less when it runs alone may not be in a step


class TunedProducts(TorchProducts):
    """``Products`` by the algorithm that was fastest here. See Note [Which algorithm is fastest].

    Args:
        device: where matrices are.
        path: file of what was found, read now and written whenever something is found; JSON.

    Raises:
        RuntimeError: cuBLASLt cannot be called.
    """

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        from lightning_megatron.kernels import cublaslt

        self._made, self._device, self._path = cublaslt, device, path
        self._maker = f"{torch.cuda.get_device_name(device)}, cuBLASLt {cublaslt.version()}"
        self._products: dict[tuple[Any, ...], tuple[str, Any]] = {}
        self._workspaces: dict[int, Tensor] = {}
        self.chosen: dict[str, int] = self._read()
        """Number of the proposal, by shape."""

    def __deepcopy__(self, memo: dict[int, object]) -> TunedProducts:
        return self  # belongs to the device, not to a model

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Products``."""
        flat = x.reshape(-1, x.shape[-1])
        if bias is not None or not self._takes(flat, weight):
            return super().forward(x, weight, bias)
        out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        self.multiply(flat, weight, out.view(-1, weight.shape[0]), transpose_b=True)
        return out

    @staticmethod
    def is_addable(added: Tensor) -> bool:
        """Whether this can be added to a product of its size, in 16 or 8 bits, whose result has its dtype."""
        return added.is_cuda and added.dtype in _DTYPES and added.is_contiguous() and added.data_ptr() % _ALIGNMENT == 0

    def adds_to(self, added: Tensor, weight: Tensor) -> bool:
        """See ``Products``."""
        return self.is_addable(added) and self._takes(added.view(-1, added.shape[-1]), weight)

    def forward_added(self, x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
        """See ``Products``."""
        flat, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], weight.shape[0])
        if added.shape != shape or not self.is_addable(added) or not self._takes(flat, weight, added.view(-1, shape[-1])):
            return super().forward_added(x, weight, added)
        out = torch.empty_like(added)
        self.multiply(flat, weight, out.view(-1, shape[-1]), transpose_b=True, added=added.view(-1, shape[-1]))
        return out

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """See ``Products``."""
        flat, size = grad.reshape(-1, grad.shape[-1]), weight.shape[1]
        if not self._takes(flat, weight):
            return super().input_gradient(grad, weight)

        def written_by(multiply: Callable[[Tensor, Tensor, Tensor], None]) -> Tensor:
            out = grad.new_empty((*grad.shape[:-1], size))
            multiply(flat, weight, out.view(-1, size))
            return out

        ways = partial(written_by, self.multiply), partial(written_by, hopper_products.input_gradient)
        fits = hopper_products.fits(flat, weight, size)
        return ways[self._way("input gradient", (*flat.shape, *weight.shape), ways) if fits else 0]()

    def weight_gradient(self, total: Tensor, rows: Tensor, x: Tensor, *, add: bool) -> None:
        """See ``Products``."""
        if not self._takes(rows, x, total):
            super().weight_gradient(total, rows, x, add=add)
            return

        def by_library() -> Tensor:
            self.multiply(rows, x, total, transpose_a=True, accumulate=add)
            return total

        def by_own() -> Tensor:
            hopper_products.weight_gradient(rows, x, total, add=add)
            return total

        ways = by_library, by_own
        key = ("weight gradient", (*rows.shape, x.shape[1]))
        fits = hopper_products.fits_weight(rows, x, total)
        ways[0 if not fits else self._found(*key) if add else self._way(*key, ways)]()

    def gates(self, x: Tensor, gate_up: Tensor) -> bool:
        """Where there are kernels for it, see ``hopper_products``; each is used if it is faster than two."""
        if not x.is_contiguous():
            return False
        flat, ffn = x.view(-1, x.shape[-1]), gate_up.shape[0] // 2
        num, size = flat.shape
        keys = ("gated forward", (num, size, 2 * ffn, size)), ("gated gradient", (num, size, size, ffn))
        # What is found to be slower in both is left to three Functions, which let go of the activated earlier.
        return self._fits(flat, gate_up, ffn) and any(self._found(*key, default=1) for key in keys)

    def forward_gated(self, x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Products``."""
        flat, ffn = x.reshape(-1, x.shape[-1]), gate_up.shape[0] // 2

        def together() -> tuple[Tensor, Tensor]:
            both, activated = x.new_empty((*x.shape[:-1], 2 * ffn)), x.new_empty((*x.shape[:-1], ffn))
            hopper_products.gated_forward(flat, gate_up, both.view(-1, 2 * ffn), activated.view(-1, ffn))
            return both, activated

        ways = (lambda: TorchProducts.forward_gated(self, x, gate_up), together)
        fits = self._fits(flat, gate_up, ffn)
        return ways[self._way("gated forward", (*flat.shape, *gate_up.shape), ways) if fits else 0]()

    def gradient_gated(self, grad: Tensor, down: Tensor, both: Tensor) -> Tensor:
        """See ``Products``."""
        flat, ffn = grad.reshape(-1, grad.shape[-1]), down.shape[1]

        def together() -> Tensor:
            of_both = torch.empty_like(both)
            hopper_products.gated_backward(flat, down, both.view(-1, 2 * ffn), of_both.view(-1, 2 * ffn))
            return of_both

        fits = both.is_contiguous() and self._fits(flat, down, ffn)
        ways = (lambda: TorchProducts.gradient_gated(self, grad, down, both), together)
        return ways[self._way("gated gradient", (*flat.shape, *down.shape), ways) if fits else 0]()

    def rotates(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> bool:
        """Where there is a kernel for it that is not known to be slower than two."""
        return self._can_rotate(x, weight, tables, heads) and self._found(*_rotated(x, weight, tables, heads), default=1) != 0

    def forward_rotated(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> Tensor:
        """See ``Products``."""

        def together() -> Tensor:
            out = x.new_empty((*x.shape[:-1], weight.shape[0]))
            flat = x.view(-1, x.shape[-1]), weight, *tables, out.view(-1, weight.shape[0])
            hopper_products.rotated_forward(*flat, turned=sum(heads) * tables[0].shape[-1])
            return out

        ways = (lambda: TorchProducts.forward_rotated(self, x, weight, tables, heads), together)
        can = self._can_rotate(x, weight, tables, heads)
        return ways[self._way(*_rotated(x, weight, tables, heads), ways) if can else 0]()

    def multiply(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
        added: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
        fast: bool = False,
    ) -> None:
        """``out = op(a) op(b)``, or added to it or to ``added``.

        All contiguous; arguments as of ``cublaslt.Product`` and its ``run``.
        """
        form = (a.shape, out.shape, a.dtype, b.dtype, out.dtype, transpose_a, transpose_b, fast)
        if form not in self._products:
            options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "scaled": scales is not None, "fast": fast}
            self._products[form] = _product_key(*form), self._made.Product(a, b, out, **options)
        key, product = self._products[form]
        workspace = self._workspace()

        def run(algorithm: int) -> None:
            adds: dict[str, Any] = {"accumulate": accumulate, "added": added}
            product.run(a, b, out, algorithm=algorithm, workspace=workspace, scales=scales, **adds)

        # Timing writes the result many times, so what is added to must have been found by a product that is not. What lies
        # elsewhere is read each time, as it will be: with it or without, the choice is that of the shape.
        if not accumulate and self._is_open(key):
            times = times_of(run, product.num_algorithms)
            self._keep(key, min(times, key=lambda algorithm: times[algorithm], default=0))
        run(self.chosen.get(key, 0))

    def _way(
        self, name: str, sizes: tuple[int, ...], ways: Sequence[Callable[[], Any]], *, wide: Callable[[Any], Any] | None = None
    ) -> int:
        """Which of several ways to the same result to go for these sizes: the first, unless another is clearly faster.

        One that is refused, or whose result is another, is out.

        Args:
            name: of what they make.
            sizes: of what it is made of.
            ways: they write nothing that they read.
            wide: what of a result is compared, a tensor or several; all of it without.
        """

        def shown(way: int) -> Any:
            return ways[way]() if wide is None else wide(ways[way]())

        key = way_key(name, sizes)
        if self._is_open(key):
            expected = [tensor.clone() for tensor in tensors_of(shown(0))]  # its own products are timed here, before it is
            usable = [0, *(way for way in range(1, len(ways)) if agrees(partial(shown, way), expected))]
            times = times_of(lambda place: ways[usable[place]](), len(usable))
            times = {usable[place]: time * (1.0 if place else _CLEARLY) for place, time in times.items()}
            self._keep(key, min(times, key=lambda way: times[way], default=0))
        return self.chosen.get(key, 0)

    def _found(self, name: str, sizes: tuple[int, ...], *, default: int = 0) -> int:
        """What ``_way`` has found; timing would write a result many times, which what is added must not."""
        return self.chosen.get(way_key(name, sizes), default)

    def _is_open(self, key: str) -> bool:
        """Whether the choice is still to be made, and can be made now."""
        return key not in self.chosen and not torch.cuda.is_current_stream_capturing()

    def _keep(self, key: str, choice: int) -> None:
        self.chosen[key] = choice
        self._write()

    def _fits(self, rows: Tensor, weight: Tensor, columns: int) -> bool:
        """Whether this project's own kernels can take the library's place."""
        return self._takes(rows, weight) and hopper_products.fits(rows, weight, columns)

    def _can_rotate(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> bool:
        if not x.is_contiguous():
            return False
        flat = x.view(-1, x.shape[-1])
        return self._takes(flat, weight) and hopper_products.fits_rotated(flat, weight, tables, heads)

    def _takes(self, *matrices: Tensor) -> bool:
        a, b = matrices[:2]
        sizes = {size for matrix in matrices for size in matrix.shape}
        return (
            all(matrix.is_contiguous() and matrix.is_cuda for matrix in matrices)
            and a.dtype == b.dtype
            and a.dtype in _DTYPES
            and all(matrix.dtype in (a.dtype, torch.float32) for matrix in matrices)
            and all(size % _MULTIPLE == 0 for size in sizes)
            and a.shape[0] * a.shape[1] * max(b.shape) >= _SMALLEST
        )

    def _workspace(self) -> Tensor:
        """Of the current stream: products on several run at once."""
        stream = stream_of(self._device)
        if stream not in self._workspaces:
            self._workspaces[stream] = torch.empty(self._made.WORKSPACE, dtype=torch.uint8, device=self._device)
        return self._workspaces[stream]

    def _read(self) -> dict[str, int]:
        if self._path is None or not self._path.exists():
            return {}
        found: dict[str, dict[str, int]] = json.loads(self._path.read_text())
        return dict(found.get(self._maker, {}))

    def _write(self) -> None:
        if self._path is None:
            return
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        found[self._maker] = self.chosen | found.get(self._maker, {})  # of several ranks the first one counts
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(found, indent=1, sort_keys=True))
        beside.replace(self._path)


def _product_key(a: torch.Size, out: torch.Size, *what: Any) -> str:
    """Under which the choice among proposals is kept."""
    *dtypes, transpose_a, transpose_b, fast = what
    turns = f"{'t' if transpose_a else 'n'}{'t' if transpose_b else 'n'}{'f' if fast else ''}"
    kinds = " ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{'x'.join(map(str, (*a, *out)))} {turns} {kinds}"


def _rotated(x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> tuple[str, tuple[int, ...]]:
    return "rotated", (*x.shape, *weight.shape, *heads, tables[0].shape[-1])


@cache
def way_key(name: str, sizes: tuple[int, ...]) -> str:
    """Under which the choice among ways is kept, for these kernels."""
    return f"{name} {'x'.join(map(str, sizes))} kernels {hopper_products.version()}"


def products_of(tune: bool | str, device: torch.device) -> Products:
    """What to multiply by on this device: by torch, by what is timed, or by what a file of that path keeps.

    Raises:
        ValueError: there is nothing to time here.
    """
    if tune is False:
        return TorchProducts()
    if device.type != "cuda":
        raise ValueError(f"tune_products={tune!r} times cuBLASLt's algorithms, but the device is {device}; set it to False.")
    return TunedProducts(device, None if tune is True else Path(tune))
