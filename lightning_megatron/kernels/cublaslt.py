"""cuBLASLt by its C interface: the algorithms that it proposes for a product, and products by a given one.

torch and Transformer Engine take the first proposal. Constants are those of ``cublasLt.h``, CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels import stream_of

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_FP32, _TRANSPOSE_A, _TRANSPOSE_B, _SCALE_A, _SCALE_B, _FAST_SUMS = 68, 3, 4, 17, 18, 25
_MAX_WORKSPACE = 1
_NUM_PROPOSALS = 16
WORKSPACE = 64 << 20
"""Bytes that an algorithm may need besides its tensors."""


_ONE, _ZERO = byref(c_float(1.0)), byref(c_float(0.0))
_MATMUL: Any = (*[c_void_p] * 14, c_size_t, c_void_p)
"""Arguments of ``cublasLtMatmul``: numbers are taken as they are, which is faster than objects made of them."""


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def usable() -> bool:
    """Whether the library can be called here."""
    return torch.cuda.is_available() and _load() is not None


def version() -> int:
    """Of the library: proposals are the same for the same one."""
    get = _library().cublasLtGetVersion
    get.restype = c_size_t
    return int(get())


class Product:
    """``out = op(a) op(b)``, or with something added: row-major matrices ``[M, K], [K, N] -> [M, N]``, sums in fp32.

    Args:
        a: 16 or 8 bits; its storage is read only by ``run``, as is that of ``b`` and ``out``.
        b: likewise. Matrices in 8 bits need ``transpose_b`` alone: K is the last dim of both.
        out: what is written.
        transpose_a: ``a`` is ``[K, M]``.
        transpose_b: ``b`` is ``[N, K]``.
        scaled: ``run`` is given factors of ``a`` and ``b``.
        fast: sums of products in 8 bits may be kept in less than fp32.

    Attributes:
        num_algorithms: how many the library proposes, the best first by its own guess.
    """

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        transpose_a: bool,
        transpose_b: bool,
        scaled: bool = False,
        fast: bool = False,
    ) -> None:
        self._library = library = _library()
        (m, n), k = out.shape, a.shape[0 if transpose_a else 1]
        # The library is column-major, where a row-major matrix is its transpose: it computes out^T = op(b)^T op(a)^T.
        self._layouts = [
            _layout(b, *((k, n) if transpose_b else (n, k))),
            _layout(a, *((m, k) if transpose_a else (k, m))),
            _layout(out, n, m),
        ]
        self._description = c_void_p()
        _check(library.cublasLtMatmulDescCreate(byref(self._description), _COMPUTE_FP32, _TYPES[torch.float32]))
        self._describe(_TRANSPOSE_A, c_int32(transpose_b))
        self._describe(_TRANSPOSE_B, c_int32(transpose_a))
        if a.element_size() == 1:
            self._describe(_FAST_SUMS, c_int8(fast))
        self._factors = c_void_p(), c_void_p()
        if scaled:
            one = torch.ones(1, device=a.device)
            self._point_to_scales(one, one)
        self._algorithms = [byref(proposal.algorithm) for proposal in self._ask()]
        self.num_algorithms = len(self._algorithms)

    def run(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        algorithm: int,
        workspace: Tensor,
        accumulate: bool,
        added: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Multiply on the current stream.

        Args:
            a: laid out as the one that the product was made for, as ``b`` and ``out``.
            b: likewise.
            out: likewise.
            algorithm: which proposal.
            workspace: of ``WORKSPACE`` bytes, of this stream alone.
            accumulate: add to ``out``.
            added: add this instead, laid out as ``out`` and elsewhere; it is only read.
            scales: factors of ``a`` and ``b``, fp32 ``[1]``.

        Raises:
            RuntimeError: the library refuses.
        """
        if scales is not None:
            self._point_to_scales(*scales)
        left, right, result = self._layouts
        assert added is None or not accumulate, "one thing is added"
        source, place = out if added is None else added, out.data_ptr()
        status = self._library.cublasLtMatmul(
            *(_handle(a.device), self._description, _ONE),
            *(b.data_ptr(), left, a.data_ptr(), right, _ONE if accumulate or added is not None else _ZERO),
            *(source.data_ptr(), result, place, result, self._algorithms[algorithm]),
            *(workspace.data_ptr(), WORKSPACE, stream_of(a.device)),
        )
        _check(status)

    def _point_to_scales(self, of_a: Tensor, of_b: Tensor) -> None:
        for attribute, known, factor in zip((_SCALE_B, _SCALE_A), self._factors, (of_a, of_b), strict=True):
            if known.value != factor.data_ptr():
                known.value = factor.data_ptr()
                self._describe(attribute, known)

    def _describe(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(self._library.cublasLtMatmulDescSetAttribute(self._description, attribute, byref(value), size))

    def _ask(self) -> list[_Proposal]:
        preference, limit = c_void_p(), c_uint64(WORKSPACE)
        _check(self._library.cublasLtMatmulPreferenceCreate(byref(preference)))
        size = c_size_t(ctypes.sizeof(limit))
        _check(self._library.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE, byref(limit), size))
        found, number = (_Proposal * _NUM_PROPOSALS)(), c_int()
        left, right, result = self._layouts
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            *(_handle(torch.device("cuda", torch.cuda.current_device())), self._description, left, right, result, result),
            *(preference, _NUM_PROPOSALS, found, byref(number)),
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status)
        return [proposal for proposal in found[: number.value] if proposal.state == 0]


def _layout(matrix: Tensor, rows: int, columns: int) -> c_void_p:
    """Of a column-major ``[rows, columns]`` without gaps."""
    made = c_void_p()
    kind, lead = _TYPES[matrix.dtype], c_int64(rows)
    _check(_library().cublasLtMatrixLayoutCreate(byref(made), kind, c_uint64(rows), c_uint64(columns), lead))
    return made


@cache
def _handle(device: torch.device) -> c_void_p:
    made = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(made)))
    return made


@cache
def _load() -> Any:
    major = (torch.version.cuda or "").split(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")  # the one that torch has loaded
    except OSError:
        return None
    library.cublasLtMatmul.argtypes = _MATMUL
    return library


def _library() -> Any:
    library = _load()
    if library is None:
        raise RuntimeError("libcublasLt of this torch's CUDA cannot be loaded; products cannot be tuned here.")
    return library


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered with status {status}.")
