"""What is told to the driver of a GPU, by one that stands for it; the real one is called in tests/gpu/hopper_products.py."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_megatron.kernels import hopper

MEMORY = 232_448


class Driver:
    """Notes the matrices that maps are of, and what kernels are started with."""

    def __init__(self) -> None:
        self.maps: list[tuple[int, ...]] = []
        self.launches: list[Any] = []
        self.status = 0

    def cuTensorMapEncodeTiled(self, *args: Any) -> int:
        out, dtype, rank, place, sizes, strides, block, steps, *rest = args
        assert out.value % 64 == 0
        assert (rank, tuple(steps), rest) == (2, (1, 1), [0, 3, 2, 0])
        self.maps.append((dtype, place.value, *sizes, *strides, *block))
        return self.status

    def cuLaunchKernel(self, *args: Any) -> int:
        self.launches.append(args)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(hopper, "_driver", lambda: made)
    hopper._known_map.cache_clear()
    yield made
    hopper._known_map.cache_clear()


def test_a_map_has_columns_first_and_is_made_once(driver: Driver) -> None:
    wide, narrow = torch.empty(512, 192, dtype=torch.bfloat16), torch.empty(96, 64)
    first = hopper.map_of(wide, 128, 64)
    hopper.map_of(narrow, 64, 32)
    assert driver.maps == [
        (9, wide.data_ptr(), 192, 512, 384, 64, 128),
        (7, narrow.data_ptr(), 64, 96, 256, 32, 64),
    ]
    assert hopper.map_of(wide, 128, 64) is first
    assert hopper.map_of(wide, 64, 64) is not first
    assert hopper.map_of(wide.view(192, 512), 128, 64) is not first
    assert hopper.map_of(wide.view(torch.float16).view(torch.bfloat16)[:256], 128, 64) is not first
    assert len(driver.maps) == 5


def test_bytes_are_taken_two_by_two(driver: Driver) -> None:
    matrix = torch.empty(256, 384, dtype=torch.uint8)
    hopper.map_of_bytes(matrix, 128)
    assert driver.maps == [(9, matrix.data_ptr(), 192, 256, 384, 64, 128)]


def test_a_map_that_is_refused_is_not_kept(driver: Driver) -> None:
    matrix = torch.empty(64, 64, dtype=torch.bfloat16)
    driver.status = 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled answered with status 1"):
            hopper.map_of(matrix, 64, 64)
    assert len(driver.maps) == 2


def test_a_kernel_is_started_with_maps_addresses_and_numbers(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "stream_of", lambda device: 77)
    kernel = hopper.Kernel.__new__(hopper.Kernel)
    kernel.__dict__.update(_function=ctypes.c_void_p(5), _num_threads=384)
    matrix, numbers = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(3)
    seen: list[Any] = []

    def launch(*args: Any) -> int:  # arguments live until then, not longer
        places = args[9]
        address, number = (ctypes.cast(place, ctypes.POINTER(kind)) for place, kind in zip(places[1:], KINDS, strict=True))
        seen.append((args[:8], args[8].value, places[0], address[0], number[0]))
        return 0

    KINDS = (ctypes.c_uint64, ctypes.c_int)
    monkeypatch.setattr(driver, "cuLaunchKernel", launch)
    tensor_map = hopper.map_of(matrix, 64, 64)
    kernel.launch(132, tensor_map, numbers, -3, device=torch.device("cpu"))
    shape = (kernel._function, 132, 1, 1, 384, 1, 1, MEMORY)
    assert seen == [(shape, 77, tensor_map.address, numbers.data_ptr(), -3)]


def test_the_current_stream_is_asked_of_the_device_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megatron.kernels import stream_of

    monkeypatch.setattr(torch, "_C", SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 100 + index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert stream_of(torch.device("cuda", 2)) == 102
    assert stream_of(torch.device("cuda")) == 103
