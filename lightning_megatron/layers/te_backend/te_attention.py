"""cuDNN's attention in 8 bits, by Transformer Engine's binding.

Note [What the kernel takes]
cuDNN 9.7 and later, on Hopper with heads of 128 in training: queries, keys and values of ``[S, B, heads, d]``, contiguous
each, in e4m3; the result in e4m3; gradients in e5m2. Attention weights and the gradient of the scores are rounded inside of
it, by factors that it is given, and it returns the largest magnitude of all that it rounds. Lengths are made multiples of
128, as Transformer Engine's own tests have them.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels import available
from lightning_megatron.layers.te_backend.library import load
from lightning_megatron.layers.te_backend.operations import Heads, Narrow, Rotation
from lightning_megatron.layers.te_backend.scales import WEIGHTS_SCALE, AttentionSlots, Slot, remember

HEAD_DIM, MULTIPLE = 128, 128
_LEAST_CUDNN = (9, 7, 0)
_LAYOUT = {"qkv_layout": "sbhd_sbhd_sbhd", "o_format": "sbhd"}
_PATTERN = {"attn_bias_type": "no_bias", "attn_mask_type": "causal", "softmax_type": "vanilla", "window_size": (-1, 0)}


class TeAttention:
    """Causal attention of one model.

    Args:
        device: the GPU.
        fused: whether to rotate and round in one pass, by this project's own kernels.

    Raises:
        ValueError: cuDNN is too old, or deterministic kernels are asked for.
    """

    def __init__(self, device: torch.device, *, fused: bool = True) -> None:
        te = load()
        found = import_module("transformer_engine.pytorch.utils").get_cudnn_version()
        if tuple(found) < _LEAST_CUDNN:
            raise ValueError(
                f"fp8_attention=True needs cuDNN {'.'.join(map(str, _LEAST_CUDNN))} or later, and Transformer Engine has "
                f"loaded {'.'.join(map(str, found))}; install a newer one, or set fp8_attention=False."
            )
        if torch.are_deterministic_algorithms_enabled():
            raise ValueError(
                "fp8_attention=True has no deterministic backward, but torch.use_deterministic_algorithms is on; set one of "
                "them to False."
            )
        binding = import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
        self._forward, self._backward = binding.fused_attn_fwd, binding.fused_attn_bwd
        self._engine = binding.FusedAttnBackend["FP8"]
        self._quantizer = import_module("transformer_engine.pytorch.tensor").Float8Quantizer
        self._storage = import_module("transformer_engine.pytorch.tensor.storage.float8_tensor_storage").Float8TensorStorage
        self._dtypes = te.constants.TE_DType
        self._device = device
        self._weights_scale = torch.full((1,), WEIGHTS_SCALE, device=device)
        self._unread = torch.zeros(1, device=device)  # where magnitudes go that nobody asks for
        self._zeros: Any = import_module("lightning_megatron.kernels.narrow").ZeroCells(device) if available() else None
        self._lengths: dict[tuple[int, int], Tensor] = {}
        self._kernels: Any = _checked_kernels(device) if fused and available() else None

    def attend(
        self, given: Tensor | Heads, slots: AttentionSlots, *, rotation: Rotation | None, record: bool
    ) -> tuple[Narrow, list[Tensor]]:
        """See ``Operations.attend``."""
        met = self._magnitudes(2)
        parts, scale_inv = self._narrowed(given, slots.qkv, met[0], rotation)
        size, batch, heads, dim = parts[0].shape
        lengths = self._lengths_of(batch, size)
        out, aux, *_ = self._forward(
            True,
            size,
            size,
            lengths,
            lengths,
            *(self._holding(part, scale_inv, slots.qkv.dtype) for part in parts),
            torch.bfloat16,
            self._engine,
            s_quantizer=self._made(self._weights_scale, torch.float8_e4m3fn, self._unread),
            o_quantizer=self._made(slots.out.scale, slots.out.dtype, met[1]),
            attn_scale=dim**-0.5,
            **_LAYOUT,
            **_PATTERN,
        )
        if record:
            remember([slots.qkv, slots.out], met)
        result = self._holding(out._data.view(size * batch, heads * dim), out._scale_inv, slots.out.dtype)
        return result, [*parts, out._data.view(size, batch, heads, dim), scale_inv, out._scale_inv, *aux]

    def attend_backward(
        self, grad: Tensor, kept: list[Tensor], slots: AttentionSlots, *, rotation: Rotation | None
    ) -> Tensor | Heads:
        """See ``Operations.attend_backward``."""
        *parts, data, of_qkv, of_out = kept[:6]
        size, batch, heads, dim = grad.shape
        met = self._magnitudes(3)
        flat = grad.contiguous().view(size * batch, heads * dim)
        narrow = self._made(slots.grad_out.scale, slots.grad_out.dtype, met[0])(flat)
        lengths = self._lengths_of(batch, size)
        made = self._backward(
            size,
            size,
            lengths,
            lengths,
            *(self._holding(part, of_qkv, slots.qkv.dtype) for part in parts),
            self._holding(data, of_out, slots.out.dtype),
            self._holding(narrow._data.view(grad.shape), narrow._scale_inv, slots.grad_out.dtype),
            torch.bfloat16,
            kept[6:],
            self._engine,
            s_quantizer=self._made(self._weights_scale, torch.float8_e4m3fn, self._unread),
            dp_quantizer=self._made(slots.grad_scores.scale, slots.grad_scores.dtype, met[1]),
            dqkv_quantizer=self._made(slots.grad_qkv.scale, slots.grad_qkv.dtype, met[2]),
            attn_scale=dim**-0.5,
            do_format="sbhd",
            dqkv_layout=_LAYOUT["qkv_layout"],
            deterministic=False,
            **_LAYOUT,
            **_PATTERN,
        )[:3]
        remember([slots.grad_out, slots.grad_scores, slots.grad_qkv], met)
        if rotation is not None and self._kernels is not None and grad.dtype == torch.bfloat16:
            bits = [x._data.view(part.shape) for x, part in zip(made, parts, strict=True)]
            inverses = tuple(x._scale_inv for x in made)
            tables = {"cos": rotation.tables.cos, "sin": rotation.tables.sin}
            back: Tensor = self._kernels.rotate_narrow_back(*bits, scale_inv=inverses, **tables)
            return back
        of_q, of_k, of_v = (x.dequantize(dtype=grad.dtype).view(part.shape) for x, part in zip(made, parts, strict=True))
        return (of_q, of_k, of_v) if rotation is None else rotation.turned_back(of_q, of_k, of_v)

    def _narrowed(
        self, given: Tensor | Heads, slot: Slot, met: Tensor, rotation: Rotation | None
    ) -> tuple[list[Tensor], Tensor]:
        """Queries, keys and values as bytes, contiguous each, and the inverse of their factor."""
        if isinstance(given, Tensor) and rotation is not None:
            tables = rotation.tables
            if self._kernels is not None and self._kernels.fits(given, tables.cos):
                options = {"cos": tables.cos, "sin": tables.sin, "scale": slot.scale, "amax": met}
                return list(self._kernels.rotate_narrow(given.contiguous(), rotation.heads, **options)), slot.scale_inv
            given = rotation.turned(given)
        assert isinstance(given, tuple)
        narrow = self._made(slot.scale, slot.dtype, met)(_joined(*given))
        return _apart(narrow._data, [x.shape for x in given]), narrow._scale_inv

    def _made(self, scale: Tensor, dtype: torch.dtype, met: Tensor) -> Any:
        """The library's quantizer, of rows alone."""
        made = self._quantizer(scale, met, self._dtypes[dtype], rowwise=True, columnwise=False)
        made.internal = True
        return made

    def _holding(self, data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Any:
        return self._storage(
            data=data, data_transpose=None, fp8_scale_inv=scale_inv, fp8_dtype=self._dtypes[dtype], fake_dtype=torch.bfloat16
        )

    def _magnitudes(self, num: int) -> list[Tensor]:
        """Zeros, ``[1]`` each, that kernels raise; 16 bytes from each other."""
        if self._zeros is not None:
            return [self._zeros.take() for _ in range(num)]
        return [row[:1] for row in torch.zeros((num, 4), device=self._device).unbind()]

    def _lengths_of(self, batch: int, size: int) -> Tensor:
        """Where whole rows begin and end, int32 ``[B + 1]``."""
        key = (batch, size)
        if key not in self._lengths:
            self._lengths[key] = torch.arange(batch + 1, dtype=torch.int32, device=self._device) * size
        return self._lengths[key]


def _checked_kernels(device: torch.device) -> Any:
    kernels = import_module("lightning_megatron.kernels.rope_narrow")
    try:
        why = None if kernels.are_right(device) else "wrongly"
    except Exception as error:  # whatever a compiler says of a machine that it does not know
        why = f"not at all ({type(error).__name__}: {error})"
    if why is None:
        return kernels
    warnings.warn(
        f"Triton compiles the kernels between rotation and 8-bit attention {why} on this machine; more passes over memory "
        f"take their place.",
        stacklevel=2,
    )
    return None


def _joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[S * B, (h + 2g) * d]``; a view if the three are neighbours in one tensor already."""
    size, batch, _, dim = q.shape
    widths = [x.shape[2] * dim for x in (q, k, v)]
    total = sum(widths)
    starts = [x.data_ptr() - q.data_ptr() for x in (q, k, v)]
    wanted = [0, widths[0] * q.element_size(), (widths[0] + widths[1]) * q.element_size()]
    strides = (batch * total, total, dim, 1)
    if starts == wanted and all(x.stride() == strides for x in (q, k, v)):
        return q.as_strided((size * batch, total), (total, 1))
    return torch.cat([x.reshape(size * batch, width) for x, width in zip((q, k, v), widths, strict=True)], dim=1)


def _apart(joined: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """``[S * B, (h + 2g) * d]`` bytes to contiguous ``[S, B, h or g, d]``, eight bytes at a time."""
    widths = [shape[2] * shape[3] // 8 for shape in shapes]
    parts = torch.split(joined.view(torch.int64), widths, dim=1)
    return [part.contiguous().view(torch.uint8).view(shape) for part, shape in zip(parts, shapes, strict=True)]
