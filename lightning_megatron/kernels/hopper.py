"""CUDA C++ kernels for GPUs of compute capability 9.0: compiled by NVRTC, launched by the driver.

Triton (3.6, Gluon too) has no loads that go to several multiprocessors at once. Constants are those of ``cuda.h``, CUDA 12 and
13; only CUDA 13.0 has been tried.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels import stream_of

SHARED_MEMORY = 232_448
"""Bytes of shared memory that one program may have."""
_MAX_DYNAMIC_SHARED_MEMORY, _PROMOTION_128 = 8, 2
_DTYPES = {torch.bfloat16: 9, torch.float32: 7}
_SWIZZLE = 3  # of rows of 128 bytes
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_SOURCES = Path(__file__).parent / "cuda"
_SHARED = ("primitives.cuh", "tiles.cuh", "rotation.cuh")
_OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17", b"-default-device")


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the device is a GPU that these kernels are written for, and everything is there that they need."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and _is_usable()


def digest(name: str) -> str:
    """Of a source file and what all of them share: another one for each version."""
    return hashlib.sha256(_text(name)).hexdigest()[:8]


def _text(name: str) -> bytes:
    return b"".join((_SOURCES / file).read_bytes() for file in (*_SHARED, name))


class TensorMap:
    """What a bulk copy knows of a matrix, and the block of it that one copy moves into swizzled rows of shared memory.

    Args:
        place: where the matrix is.
        rows: of the matrix.
        columns: likewise.
        dtype: likewise.
        block: rows and columns of the block; a row of it has 128 bytes.
    """

    def __init__(self, place: int, rows: int, columns: int, dtype: torch.dtype, block: tuple[int, int]) -> None:
        self._memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        sizes, strides = (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(columns * dtype.itemsize)
        status = _driver().cuTensorMapEncodeTiled(
            *(c_void_p(self.address), _DTYPES[dtype], 2, c_void_p(place), sizes, strides),
            *((c_uint32 * 2)(*reversed(block)), (c_uint32 * 2)(1, 1), 0, _SWIZZLE, _PROMOTION_128, 0),
        )
        _check(status, "cuTensorMapEncodeTiled")


_known_map = lru_cache(maxsize=4096)(TensorMap)  # the same matrices come to lie in the same places, step by step


def map_of(matrix: Tensor, rows: int, columns: int) -> TensorMap:
    """Of blocks of so many rows and columns of a contiguous matrix. Inside ``in_context``."""
    return _known_map(matrix.data_ptr(), *matrix.shape, matrix.dtype, (rows, columns))


def map_of_bytes(matrix: Tensor, rows: int) -> TensorMap:
    """Of blocks of 128 bytes a row, of a matrix of bytes. A copy moves bits, so two bytes do for one number of 16."""
    num, size = matrix.shape
    return _known_map(matrix.data_ptr(), num, size // 2, torch.bfloat16, (rows, 64))


class Kernel:
    """A function of a compiled source, on one device.

    Args:
        module: from ``compiled``.
        name: of the function.
        num_threads: of a program.
    """

    def __init__(self, module: c_void_p, name: str, *, num_threads: int) -> None:
        self._function, self._num_threads = c_void_p(), num_threads
        _check(_driver().cuModuleGetFunction(byref(self._function), module, name.encode()), "cuModuleGetFunction")
        status = _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_MEMORY, SHARED_MEMORY)
        _check(status, "cuFuncSetAttribute")

    def launch(self, num_programs: int, *arguments: TensorMap | Tensor | int, device: torch.device) -> None:
        """Start it on the current stream of the device, inside ``in_context``."""
        values: list[Any] = []  # kept until the driver has read them
        places: list[int] = []
        for argument in arguments:
            if isinstance(argument, TensorMap):
                places.append(argument.address)
                continue
            values.append(c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else c_int(argument))
            places.append(ctypes.addressof(values[-1]))
        stream = c_void_p(stream_of(device))
        status = _driver().cuLaunchKernel(
            *(self._function, num_programs, 1, 1, self._num_threads, 1, 1, SHARED_MEMORY, stream),
            *((c_void_p * len(places))(*places), None),
        )
        _check(status, "cuLaunchKernel")


@cache
def compiled(name: str, device: torch.device) -> c_void_p:
    """The module of a source file, behind what all of them share, on a device; compiled at the first call (about a second).

    Raises:
        RuntimeError: it does not compile, with what the compiler says.
    """
    library, program, size = _compiler(), c_void_p(), c_size_t()
    _check(library.nvrtcCreateProgram(byref(program), _text(name), name.encode(), 0, None, None), "nvrtcCreateProgram")
    try:
        status = library.nvrtcCompileProgram(program, len(_OPTIONS), (c_char_p * len(_OPTIONS))(*_OPTIONS))
        if status:
            library.nvrtcGetProgramLogSize(program, byref(size))
            said = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, said)
            error = f"{name} does not compile (status {status}): {said.value.decode()}"
            warnings.warn(error, stacklevel=2)  # who tries it may have another way, and go on
            raise RuntimeError(error)
        library.nvrtcGetCUBINSize(program, byref(size))
        binary = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, binary), "nvrtcGetCUBIN")
    finally:
        library.nvrtcDestroyProgram(byref(program))
    module = c_void_p()
    with in_context(device):
        _check(_driver().cuModuleLoadData(byref(module), binary), "cuModuleLoadData")
    return module


@cache
def kernel(source: str, name: str, device: torch.device, *, num_threads: int) -> Kernel:
    """A function of a source file, compiled at the first call."""
    module = compiled(source, device)
    with in_context(device):
        return Kernel(module, name, num_threads=num_threads)


@contextmanager
def in_context(device: torch.device) -> Iterator[None]:
    """The device is this thread's current one, for the driver too: a thread that has not called CUDA yet has no context."""
    with torch.cuda.device(device):
        context, index = c_void_p(), torch.cuda.current_device()
        _check(_driver().cuCtxGetCurrent(byref(context)), "cuCtxGetCurrent")
        if not context:
            _check(_driver().cuDevicePrimaryCtxRetain(byref(context), index), "cuDevicePrimaryCtxRetain")
            _check(_driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")
        yield


def _is_usable() -> bool:
    """Whether there is a compiler and a driver that knows tensor maps; said once if not."""
    try:
        return _compiler() is not None and _driver().cuTensorMapEncodeTiled is not None
    except (OSError, AttributeError) as error:
        warnings.warn(f"Kernels for Hopper GPUs are not used: {error}", stacklevel=2)
        return False


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> Any:
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")  # the one that torch has loaded
    except OSError:
        from torch.cuda._utils import _get_nvrtc_library

        return _get_nvrtc_library()


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} answered with status {status}.")
