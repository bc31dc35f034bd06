"""The products of ``TeOperations``: Transformer Engine's, or those that were found to be fastest."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels.products import current_products
from lightning_megatron.kernels.tuned_products import TunedProducts
from lightning_megatron.layers.te_backend.operations import Narrow, Rotation
from lightning_megatron.layers.te_backend.options import Fp8Options


class TeProducts:
    """See ``Operations``. What it needs of the library is imported by ``TeOperations``."""

    _options: Fp8Options | None
    _gemm: Callable[..., Any]
    _storage: Any
    _formats: dict[Any, torch.dtype]
    _is_fast: bool
    _kernels: Any

    # The library's dims are cuBLAS's: the first operand is the one whose dim comes to be the last of the result.

    def product(
        self,
        weight: Narrow,
        x: Narrow,
        bias: Tensor | None,
        like: Tensor,
        *,
        added: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See ``Operations``."""
        addable = added is None or (added.dtype == like.dtype and TunedProducts.is_addable(added))
        if bias is None and addable and self._are_narrow(weight, x) and self._is_tuned(weight._data, x._data):
            return self._multiply((x, x._data), (weight, weight._data), dtype=like.dtype, out=out, added=added, fast=True)
        result: Tensor = self._gemm(weight, x, out_dtype=like.dtype, bias=bias, out=out)[0]
        return result if added is None else added + result

    def product_rotated(self, weight: Narrow, x: Narrow, like: Tensor, rotation: Rotation) -> Tensor | None:
        """See ``Operations``. By one kernel where that is faster; it keeps sums as ``product`` does."""
        if self._kernels is None or not (self._are_narrow(weight, x) and self._is_tuned(weight._data, x._data)):
            return None
        kernels, products = kernel("rotated_narrow"), current_products()
        heads, tables = rotation.heads, (rotation.tables.cos, rotation.tables.sin)
        name = f"rotated narrow {kernels.version()}"
        sizes = (*like.shape[:-1], x._data.shape[1], len(weight._data), *heads)
        assert isinstance(products, TunedProducts)
        if like.dtype != torch.bfloat16 or not kernels.fits(x._data, weight._data, tables, heads):
            return None

        def apart() -> Tensor:
            return rotation.turned_whole(self.product(weight, x, None, like).view(*like.shape[:-1], -1)).flatten(0, 1)

        def together() -> Tensor:
            made: Tensor = kernels.rotated_narrow_forward(x._data, x._scale_inv, weight._data, weight._scale_inv, tables, heads)
            return made

        return (apart, together)[products._way(name, sizes, (apart, together))]()

    def adds_to(self, added: Tensor, weight: Tensor) -> bool:
        """See ``Operations``. In 8 bits with one factor a tensor; other products are Transformer Engine's."""
        tuned = isinstance(current_products(), TunedProducts) and TunedProducts.is_addable(added)
        return tuned and self._options is not None and self._options.is_per_tensor and added.dtype == weight.dtype

    def input_gradient(self, weight: Narrow, grad: Narrow, like: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See ``Operations``."""
        if self._are_narrow(weight, grad) and self._is_tuned(weight._transpose, grad._data):
            return self._multiply(
                (grad, grad._data), (weight, weight._transpose), dtype=like.dtype, out=out, fast=self._is_fast
            )
        options: dict[str, Any] = {"grad": True, "use_split_accumulator": not self._is_fast, "out": out}
        gemm = self._gemm(weight, grad, out_dtype=like.dtype, layout="NN", **options)
        result: Tensor = gemm[0]
        return result

    def weight_gradient(self, x: Narrow, grad: Narrow, like: Tensor) -> Tensor:
        """See ``Operations``."""
        options = {"grad": True, "use_split_accumulator": not self._is_fast}
        gemm = self._gemm(x, grad, out_dtype=like.dtype, layout="NT", **options)
        result: Tensor = gemm[0]
        return result

    def add_weight_gradient(self, x: Narrow, grad: Narrow, total: Tensor, *, add: bool = True) -> None:
        """See ``Operations``."""
        if self._are_narrow(x, grad) and self._is_tuned(x._transpose, grad._transpose) and total.is_contiguous():
            self._multiply((grad, grad._transpose), (x, x._transpose), out=total, accumulate=add, fast=self._is_fast)
            return
        options: dict[str, Any] = {"out_dtype": total.dtype, "out": total, "accumulate": add, "grad": True}
        self._gemm(x, grad, layout="NT", use_split_accumulator=not self._is_fast, **options)

    def _are_narrow(self, *operands: Narrow) -> bool:
        return all(isinstance(operand, self._storage.Float8TensorStorage) for operand in operands)

    @staticmethod
    def _is_tuned(*given: Tensor | None) -> bool:
        """Whether products of these bytes, K last in both, are multiplied by what was found to be fastest."""
        return isinstance(current_products(), TunedProducts) and all(
            matrix is not None and matrix.dim() == 2 and matrix.is_contiguous() for matrix in given
        )

    def _multiply(
        self,
        a: tuple[Narrow, Tensor],
        b: tuple[Narrow, Tensor],
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
        added: Tensor | None = None,
        fast: bool = False,
    ) -> Tensor:
        """``a b^T``, or ``added`` to it, of two matrices in 8 bits, each with its bytes: ``[M, K], [N, K] -> [M, N]``."""
        (left, rows), (right, columns) = a, b
        out = rows.new_empty((rows.shape[0], columns.shape[0]), dtype=dtype) if out is None else out
        products = current_products()
        assert isinstance(products, TunedProducts)
        products.multiply(
            rows.view(self._formats[left._fp8_dtype]),
            columns.view(self._formats[right._fp8_dtype]),
            out,
            transpose_b=True,
            accumulate=accumulate,
            added=added,
            scales=(left._scale_inv, right._scale_inv),
            fast=fast,
        )
        return out


def kernel(name: str) -> Any:
    """A module of kernels, which imports Triton."""
    return import_module(f"lightning_megatron.kernels.{name}")
