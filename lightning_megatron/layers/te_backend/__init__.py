"""The backend on Transformer Engine: fused layers in bf16, FP8 and the narrower formats. The library is loaded on demand."""

from lightning_megatron.layers.te_backend.backend import TeBackend
from lightning_megatron.layers.te_backend.library import why_unavailable
from lightning_megatron.layers.te_backend.modules import make_weights, narrow_weights
from lightning_megatron.layers.te_backend.options import Fp8Options
from lightning_megatron.layers.te_backend.plain import PlainOperations
from lightning_megatron.layers.te_backend.scales import Scales, scales_of

__all__ = [
    "Fp8Options",
    "PlainOperations",
    "Scales",
    "TeBackend",
    "make_weights",
    "narrow_weights",
    "scales_of",
    "why_unavailable",
]
