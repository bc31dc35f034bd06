"""How linear layers multiply: by torch, or by the fastest algorithm that cuBLASLt has for a shape.

Note [Which algorithm is fastest]
cuBLASLt proposes several algorithms for a product and guesses which is best. A GPU under full load runs at its power limit,
where the guess is off by 1 % (bf16) to 2 % (8 bits) over all products of a step, some by 10 %. So the proposals are timed,
each for long enough that the clock settles, at the first product of each shape. Two runs may find differently and then round
differently: what was found is kept in a file, if one is given, and a run that finds it there times nothing.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16)
_MULTIPLE = 16  # of all sizes: what every algorithm takes
_ALIGNMENT = 256  # bytes, of what is added: what proposals count on unless the library is told otherwise
_SMALLEST = 2**32  # multiplications, below which nothing is gained
_ROUNDS, _BLOCK_S, _MARGIN, _MOST = 3, 0.1, 1.06, 4


class Products(Protocol):
    """The products of a linear layer ``y = x weight^T``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[.., in], [out, in], [out] -> [.., out]``."""
        ...

    def adds_to(self, added: Tensor, weight: Tensor) -> bool:
        """Whether ``forward_added`` adds ``[.., out]`` in the product itself, not in a pass of its own."""
        ...

    def forward_added(self, x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
        """``added + x weight^T``, rounded once where ``adds_to`` says so: ``[.., in], [out, in], [.., out] -> [.., out]``."""
        ...

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """``[.., out], [out, in] -> [.., in]``."""
        ...

    def weight_gradient(self, total: Tensor, rows: Tensor, x: Tensor, *, add: bool) -> None:
        """Write ``rows^T x`` over ``total``, or add it: ``[out, in]`` by ``[N, out]`` and ``[N, in]``."""
        ...


class TorchProducts:
    """``Products`` by torch."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Products``."""
        return F.linear(x, weight, bias)

    def adds_to(self, added: Tensor, weight: Tensor) -> bool:
        """Never: torch would copy ``added`` first and multiply into the copy."""
        return False

    def forward_added(self, x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
        """See ``Products``."""
        return added + F.linear(x, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """See ``Products``."""
        return grad @ weight

    def weight_gradient(self, total: Tensor, rows: Tensor, x: Tensor, *, add: bool) -> None:
        """See ``Products``."""
        turned = rows.t()
        if total.dtype == rows.dtype:
            total.addmm_(turned, x) if add else torch.mm(turned, x, out=total)
        elif not (rows.is_cuda and total.dtype == torch.float32):
            total.add_(turned @ x) if add else total.copy_(turned @ x)
        elif add:
            torch.addmm(total, turned, x, out_dtype=torch.float32, out=total)
        else:
            torch.mm(turned, x, out_dtype=torch.float32, out=total)  # reads nothing of ``total``


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
        self._products: dict[str, Any] = {}
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
        flat = grad.reshape(-1, grad.shape[-1])
        if not self._takes(flat, weight):
            return super().input_gradient(grad, weight)
        out = grad.new_empty((*grad.shape[:-1], weight.shape[1]))
        self.multiply(flat, weight, out.view(-1, weight.shape[1]))
        return out

    def weight_gradient(self, total: Tensor, rows: Tensor, x: Tensor, *, add: bool) -> None:
        """See ``Products``."""
        if not self._takes(rows, x, total):
            super().weight_gradient(total, rows, x, add=add)
        else:
            self.multiply(rows, x, total, transpose_a=True, accumulate=add)

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
        kinds = [str(t.dtype).removeprefix("torch.") for t in (a, b, out)]
        turns = f"{'t' if transpose_a else 'n'}{'t' if transpose_b else 'n'}{'f' if fast else ''}"
        key = f"{'x'.join(map(str, (*a.shape, *out.shape)))} {turns} {' '.join(kinds)}"
        product = self._products.get(key)
        if product is None:
            options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "scaled": scales is not None, "fast": fast}
            product = self._products[key] = self._made.Product(a, b, out, **options)
        workspace = self._workspace()

        def run(algorithm: int) -> None:
            adds: dict[str, Any] = {"accumulate": accumulate, "added": added}
            product.run(a, b, out, algorithm=algorithm, workspace=workspace, scales=scales, **adds)

        # Timing writes the result many times, so what is added to must have been found by a product that is not. What lies
        # elsewhere is read each time, as it will be: with it or without, the choice is that of the shape.
        if key not in self.chosen and not accumulate and not torch.cuda.is_current_stream_capturing():
            self.chosen[key] = _fastest(run, product.num_algorithms)
            self._write()
        run(self.chosen.get(key, 0))

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
        stream = torch.cuda.current_stream(self._device).cuda_stream
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


class _Switch:
    """What this process multiplies by. It belongs to the process, as its GPU does: a backward runs in another thread."""

    products: Products = TorchProducts()


def current_products() -> Products:
    """What layers multiply by now."""
    return _Switch.products


def set_products(products: Products) -> None:
    """Let layers multiply by these from now on."""
    _Switch.products = products


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


def _fastest(run: Callable[[int], None], number: int) -> int:
    """The number of the proposal that takes the least time, each timed in turn for ``_BLOCK_S`` several times."""
    quick = {}
    for algorithm in range(number):
        try:
            quick[algorithm] = _seconds(run, algorithm, 3)
        except RuntimeError:
            continue  # proposed, and refused
    if not quick:
        return 0
    best = min(quick.values())
    near = sorted((algorithm for algorithm in quick if quick[algorithm] <= best * _MARGIN), key=lambda i: quick[i])[:_MOST]
    repeats = max(3, int(_BLOCK_S / best))
    times: dict[int, list[float]] = {algorithm: [] for algorithm in near}
    for _ in range(_ROUNDS):
        for algorithm in near:
            times[algorithm].append(_seconds(run, algorithm, repeats))
    return min(near, key=lambda algorithm: statistics.median(times[algorithm]))


def _seconds(run: Callable[[int], None], algorithm: int, repeats: int) -> float:
    run(algorithm)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run(algorithm)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats / 1e3
