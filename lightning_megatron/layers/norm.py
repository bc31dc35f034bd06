"""RMSNorm and LayerNorm over the last dim, replicated over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.sharding import Init, replicated
from lightning_megatron.tensor_parallel.linear import make_parameter


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich 2019); 16-bit inputs are computed in fp32.

    Args:
        size: extent of the last dim.
        eps: added to the mean square.
        partial: whether each tp rank sees other tokens or heads, so that the weight's gradient is summed over tp.
        device, dtype: of the weight.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        partial: bool = False,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = _parameter(size, Init("ones"), partial, device, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[.., size] -> [.., size]``."""
        return F.rms_norm(hidden, (self.size,), self.weight, self.eps)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{self.size}, eps={self.eps}"


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016); 16-bit inputs are computed in fp32.

    Args:
        size: extent of the last dim.
        eps: added to the variance.
        partial: whether each tp rank sees other tokens or heads, so that the gradients are summed over tp.
        device, dtype: of weight and bias.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float = 1e-5,
        partial: bool = False,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = _parameter(size, Init("ones"), partial, device, dtype)
        self.bias = _parameter(size, Init("zeros"), partial, device, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[.., size] -> [.., size]``."""
        return F.layer_norm(hidden, (self.size,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{self.size}, eps={self.eps}"


def _parameter(size: int, init: Init, partial: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    return make_parameter((size,), replicated((size,), partial=partial, init=init), device=device, dtype=dtype)
