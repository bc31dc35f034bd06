"""How linear layers multiply: by torch, unless something faster has been chosen (``kernels/tuned_products.py``)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.kernels import glu, rotation

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of positions, fp32 ``[S, 1, 1, d]`` each, the two halves of the last dim alike."""


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

    def gates(self, x: Tensor, gate_up: Tensor) -> bool:
        """Whether the next two do more than one thing in a product for ``[.., H]`` and ``[2 F, H]``."""
        ...

    def forward_gated(self, x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """``x gate_up^T`` and its SwiGLU: ``[.., H], [2 F, H] -> [.., 2 F], [.., F]``."""
        ...

    def gradient_gated(self, grad: Tensor, down: Tensor, both: Tensor) -> Tensor:
        """The gradient of ``both`` by that of the block: ``[.., H], [H, F], [.., 2 F] -> [.., 2 F]``."""
        ...

    def rotates(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> bool:
        """Whether the next one rotates in the product, for these."""
        ...

    def forward_rotated(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> Tensor:
        """``x weight^T``, queries and keys rotated: ``[S, B, H], [(h + 2g) * d, H] -> [S, B, (h + 2g) * d]``, h and g heads."""
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

    def gates(self, x: Tensor, gate_up: Tensor) -> bool:
        """Never."""
        return False

    def forward_gated(self, x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Products``."""
        both = self.forward(x, gate_up)
        return both, glu.swiglu(both)

    def gradient_gated(self, grad: Tensor, down: Tensor, both: Tensor) -> Tensor:
        """See ``Products``."""
        return glu.swiglu_gradient(both, self.input_gradient(grad, down))

    def rotates(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> bool:
        """Never."""
        return False

    def forward_rotated(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> Tensor:
        """See ``Products``."""
        cos, sin = tables
        parts = rotation.split_heads(self.forward(x, weight), heads, cos.shape[-1])
        return rotation.rotate_together(*parts, cos=cos, sin=sin, inverse=False)


class _Switch:
    """What this process multiplies by. It belongs to the process, as its GPU does: a backward runs in another thread."""

    products: Products = TorchProducts()


def current_products() -> Products:
    """What layers multiply by now."""
    return _Switch.products


def set_products(products: Products) -> None:
    """Let layers multiply by these from now on."""
    _Switch.products = products
