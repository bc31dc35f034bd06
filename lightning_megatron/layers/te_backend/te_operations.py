"""``TeOperations``: the operations by Transformer Engine's kernels, with this project's own where those fuse more.

Note [Which kernel]
Products are Transformer Engine's. What goes into a product with one factor a tensor, and comes from a norm, an activation, a
rotation backward or memory, is computed, rounded and written in both forms by this project's kernels (``kernels/*narrow.py``)
in one pass over memory; Transformer Engine writes 16 bits in between, or one form at a time, and reads a tensor twice where
its factor is not known beforehand. Block formats, sizes that are no whole tiles and other dtypes take that way here too, and
everything on a machine that compiles the kernels wrongly; weights too, once a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import copy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels import available
from lightning_megatron.kernels.products import current_products
from lightning_megatron.kernels.tuned_products import TunedProducts
from lightning_megatron.layers.backend import Activation
from lightning_megatron.layers.te_backend.library import load
from lightning_megatron.layers.te_backend.operations import Heads, Narrow, Rotation
from lightning_megatron.layers.te_backend.options import Fp8Options
from lightning_megatron.layers.te_backend.scales import AttentionSlots, Slot
from lightning_megatron.layers.te_backend.te_attention import HEAD_DIM, MULTIPLE, TeAttention
from lightning_megatron.layers.te_backend.te_gated import faster
from lightning_megatron.layers.te_backend.te_products import TeProducts, kernel


class TeOperations(TeProducts):
    """See ``Operations``. Needs a GPU and the library.

    Args:
        options: ``None`` multiplies in 16 bits.
        device: the GPU.
        fused: whether to use this project's own fused kernels where they fit.
    """

    def __init__(self, options: Fp8Options | None, *, device: torch.device, fused: bool = True) -> None:
        te = load()
        self._options, self._device, self._dtypes = options, device, te.constants.TE_DType
        self._tex: Any = import_module("transformer_engine_torch")
        self._gemm: Callable[..., Any] = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        self._tensor: Any = import_module("transformer_engine.pytorch.tensor")
        self._storage: Any = import_module("transformer_engine.pytorch.tensor.storage.float8_tensor_storage")
        self._is_fast = options is not None and options.fast_gradients
        self._formats = {self._dtypes[dtype]: dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
        per_tensor = fused and options is not None and options.is_per_tensor
        self._kernels: Any = _checked_kernels(device) if per_tensor and available() else None
        self._zeros: Any = None if self._kernels is None else self._kernels.ZeroCells(device)
        self._quantizers: dict[str, Any] = {} if options is None else self._own_scale_quantizers(options)
        self._attention = TeAttention(device, fused=fused) if options is not None and options.attention else None

    def __deepcopy__(self, memo: dict[int, object]) -> TeOperations:
        return self  # holds modules, and nothing of a model

    @property
    def is_narrow(self) -> bool:
        """See ``Operations``."""
        return self._options is not None

    def with_fp32_sums(self) -> TeOperations:
        """See ``Operations``."""
        made = copy(self)
        made._is_fast = False
        return made

    # Into 8 bits

    def quantize(self, x: Tensor, slot: Slot | None, *, record: bool) -> Narrow:
        """See ``Operations``."""
        if slot is None or self._options is None:
            return x
        if self._fused(slot, x, *x.shape) is not None and x.is_contiguous():
            return self._made(slot, partial(self._kernels.round_narrow, x, slot.dtype), record)[0]
        if self._options.recipe != "delayed":
            return self._quantizers[_role(slot)](x)
        if slot.is_known:
            return self._delayed(slot, record)(x)
        narrow = self._quantizers[_role(slot)](x)
        if record:
            torch.maximum(slot.amax, torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32), out=slot.amax)
        return narrow

    def round_rows(self, x: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor) -> Narrow:
        """See ``Operations``."""
        quantizer = self._tensor.Float8Quantizer(scale, amax, self._dtypes[dtype], columnwise=False)
        quantizer.internal = True
        return quantizer(x)

    def rows(self, x: Narrow) -> Tensor:
        """See ``Operations``."""
        result: Tensor = x if isinstance(x, Tensor) else x._data
        return result

    def with_rows(self, x: Narrow, rows: Tensor) -> Narrow:
        """See ``Operations``."""
        if isinstance(x, Tensor):
            return rows
        return self._storage.Float8TensorStorage(**(x.get_metadata() | {"data": rows, "data_transpose": None}))

    def quantize_weight(self, weight: Tensor) -> Narrow:
        """See ``Operations``."""
        return weight.detach() if self._options is None else self._quantizers["weight"](weight.detach())

    def held_weight(self, rows: Tensor, scale_inv: Tensor) -> Narrow:
        """See ``Operations``."""
        quantizer = self._quantizers["weight"]
        return self._storage.Float8TensorStorage(
            data=rows,
            data_transpose=self._tex.fp8_transpose(rows, quantizer.dtype, out=None),
            fp8_scale_inv=scale_inv,
            fp8_dtype=quantizer.dtype,
            fake_dtype=torch.bfloat16,
            quantizer=quantizer,
        )

    def keep_columns(self, x: Narrow) -> Narrow:
        """See ``Operations``."""
        if not isinstance(x, Tensor):
            x.update_usage(rowwise_usage=False, columnwise_usage=True)
        return x

    def _delayed(self, slot: Slot, record: bool) -> Any:
        """Transformer Engine's quantizer with the slot's factor."""
        found = slot.quantizers.get(record)
        if found is None:
            amax = slot.amax if record else slot.scratch
            found = self._tensor.Float8Quantizer(slot.scale, amax, self._dtypes[slot.dtype])
            found.internal = True
            slot.quantizers[record] = found
        return found

    def _own_scale_quantizers(self, options: Fp8Options) -> dict[str, Any]:
        """Quantizers that take factors from what they are given, by role."""
        if options.is_per_tensor:
            roles = {"input": torch.float8_e4m3fn, "weight": torch.float8_e4m3fn, "grad": torch.float8_e5m2}
            made = self._tensor.Float8CurrentScalingQuantizer
            options_of_all = {"device": self._device, "force_pow_2_scales": True}
            quantizers = {role: made(self._dtypes[dtype], **options_of_all) for role, dtype in roles.items()}
        else:
            recipes = import_module("transformer_engine.common.recipe")
            names = {"blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling"}
            recipe = getattr(recipes, names[options.recipe])()
            quantization = import_module("transformer_engine.pytorch.quantization")
            try:
                quantization.check_recipe_support(recipe)  # which knows of versions of CUDA, too
            except RuntimeError as error:
                raise ValueError(
                    f"fp8={options.recipe!r} cannot be had here: {error}; use fp8='delayed' or 'current'."
                ) from error
            states = quantization.RecipeState
            forward = states.create(recipe, mode="forward", num_quantizers=3, device=self._device).make_quantizers()
            backward = states.create(recipe, mode="backward", num_quantizers=2, device=self._device).make_quantizers()
            quantizers = {"input": forward[0], "weight": forward[1], "grad": backward[0]}
        for quantizer in quantizers.values():
            quantizer.internal = True
        return quantizers

    def _fused(self, slot: Slot | None, x: Tensor, num: int, size: int) -> Any:
        """This project's kernels, if they can work on ``x`` to write ``[num, size]``."""
        usable = self._kernels is not None and slot is not None and x.dtype == torch.bfloat16
        return self._kernels if usable and self._kernels.fits(num, size) else None

    def _is_known(self, slot: Slot) -> bool:
        """Whether there is a factor before there is the tensor."""
        return self._options is not None and self._options.recipe == "delayed" and slot.is_known

    def _made(self, slot: Slot, compute: Callable[..., Any], record: bool) -> tuple[Narrow, tuple[Any, ...]]:
        """Call a kernel with its factor; what Transformer Engine multiplies, and what else the kernel returned."""
        assert self._options is not None
        make = self._kernels.Factor
        if self._is_known(slot):
            amax = slot.amax if record else slot.scratch
            result = compute(factor=make(amax, scale=slot.scale, scale_inv=slot.scale_inv))
            quantizer = self._delayed(slot, record)
        else:
            amax = self._zeros.take()
            result = compute(factor=make(amax, guess=slot.guess))
            quantizer = self._quantizers[_role(slot)]
            if record and self._options.recipe == "delayed":
                torch.maximum(slot.amax, amax, out=slot.amax)
        narrow, rest = (result, ()) if isinstance(result, self._kernels.Narrow) else (result[1], result)
        storage = self._storage.Float8TensorStorage(
            data=narrow.rows,
            data_transpose=narrow.columns,
            fp8_scale_inv=narrow.scale_inv,
            fp8_dtype=quantizer.dtype,
            fake_dtype=torch.bfloat16,
            quantizer=quantizer,
        )
        return storage, rest

    # Pointwise

    def add_norm_quantized(
        self, hidden: Tensor, added: Tensor | None, gain: Tensor, eps: float, *, slot: Slot | None, record: bool
    ) -> tuple[Tensor, Narrow, Tensor] | None:
        """See ``Operations``."""
        kernels = self._fused(slot, hidden, *hidden.shape)
        if kernels is None or slot is None:
            return None
        narrow, (summed, _, scales) = self._made(
            slot, partial(kernel("norm_narrow").add_rms_norm_narrow, hidden, added, gain, eps=eps), record
        )
        return summed, narrow, scales

    def activate_quantized(self, x: Tensor, kind: Activation, slot: Slot | None, *, record: bool) -> Narrow:
        """See ``Operations``."""
        kernels = self._fused(slot, x, x.shape[0], x.shape[1] // 2) if kind == "swiglu" else None
        if kernels is not None and slot is not None:
            return self._made(slot, partial(kernel("swiglu_narrow").swiglu_narrow, x), record)[0]
        activated = getattr(self._tex, kind)(x, None)
        return self.quantize(activated, slot, record=record)

    def activate_backward(self, grad: Tensor, x: Tensor, kind: Activation) -> Tensor:
        """See ``Operations``."""
        result: Tensor = getattr(self._tex, f"d{kind}")(grad, x, None)
        return result

    def activate_backward_quantized(self, grad: Tensor, x: Tensor, kind: Activation, slot: Slot | None) -> Narrow:
        """See ``Operations``."""
        kernels = self._fused(slot, x, *grad.shape) if kind == "swiglu" else None
        if kernels is not None and slot is not None:
            return self._made(slot, partial(kernel("swiglu_narrow").swiglu_backward_narrow, grad, x), True)[0]
        return self.quantize(self.activate_backward(grad, x, kind), slot, record=True)

    def turned_back_quantized(self, parts: Heads, rotation: Rotation, slot: Slot | None) -> Narrow:
        """See ``Operations``."""
        tables = rotation.tables
        if self._kernels is not None and slot is not None:
            kernels = kernel("unrotate_narrow")
            if kernels.fits(*parts, tables.cos) and kernels.is_right(self._device):
                return self._made(slot, partial(kernels.unrotate_narrow, *parts, cos=tables.cos, sin=tables.sin), True)[0]
        return self.quantize(rotation.turned_back(*parts).flatten(0, 1), slot, record=True)

    def product_gated(
        self, weight: Narrow, x: Narrow, like: Tensor, slot: Slot | None, *, record: bool
    ) -> tuple[Tensor, Narrow] | None:
        """See ``Operations``. By one kernel where that is faster; it keeps sums as ``product`` does."""
        if slot is None or not (self._are_narrow(weight, x) and self._is_tuned(weight._data, x._data)):
            return None
        (num, size), ffn, kernels, products = x._data.shape, len(weight._data) // 2, kernel("gated_narrow"), current_products()
        if self._fused(slot, like, num, ffn) is None or not kernels.fits(x._data, weight._data, ffn):
            return None

        def apart() -> tuple[Tensor, Narrow]:
            both = self.product(weight, x, None, like)
            return both, self.activate_quantized(both, "swiglu", slot, record=record)

        def together() -> tuple[Tensor, Narrow]:
            both = like.new_empty((num, 2 * ffn))
            make = partial(kernels.gated_narrow_forward, x._data, x._scale_inv, weight._data, weight._scale_inv, both)
            return both, self._made(slot, make, record)[0]

        assert isinstance(products, TunedProducts)
        name, sizes = f"gated narrow forward {kernels.version()}", (num, size, 2 * ffn)
        activate = partial(self.activate_quantized, kind="swiglu", slot=slot, record=False)
        return faster((apart, together), products, name=name, sizes=sizes, activate=activate)

    # Attention

    @property
    def attention_head_dim(self) -> int | None:
        """See ``Operations``."""
        return HEAD_DIM

    @property
    def attention_multiple(self) -> int:
        """See ``Operations``."""
        return MULTIPLE

    def attend(
        self, given: Tensor | Heads, slots: AttentionSlots, *, rotation: Rotation | None, record: bool
    ) -> tuple[Narrow, list[Tensor]]:
        """See ``Operations``."""
        assert self._attention is not None
        return self._attention.attend(given, slots, rotation=rotation, record=record)

    def attend_backward(
        self, grad: Tensor, kept: list[Tensor], slots: AttentionSlots, *, rotation: Rotation | None
    ) -> Tensor | Heads:
        """See ``Operations``."""
        assert self._attention is not None
        return self._attention.attend_backward(grad, kept, slots, rotation=rotation)

    def widened(self, x: Narrow, like: Tensor) -> Tensor:
        """See ``Operations``."""
        result: Tensor = x.dequantize(dtype=like.dtype)
        return result


def _checked_kernels(device: torch.device) -> Any:
    if kernel("narrow_check").are_right(device):
        return kernel("narrow")
    warnings.warn(
        "Triton compiles this project's 8-bit kernels wrongly on this machine; Transformer Engine's take their place, at the "
        "cost of more passes over memory.",
        stacklevel=2,
    )
    return None


def _role(slot: Slot) -> str:
    return "input" if slot.dtype == torch.float8_e4m3fn else "grad"
