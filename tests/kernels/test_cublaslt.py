"""Calls of cuBLASLt by a library that stands for it, on the CPU; the real one is called in tests/gpu/products.py."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.kernels import cublaslt

STREAM = 0xABCDEF0123456789


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    built = tmp_path_factory.mktemp("cublaslt") / "libcublasLt.so"
    source = Path(__file__).parent / "cublaslt.cpp"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(built), str(source)], check=True, timeout=100)
    return ctypes.CDLL(str(built))


@pytest.fixture
def library(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in.cublasLtMatmul.argtypes = cublaslt._MATMUL
    monkeypatch.setattr(cublaslt, "_load", lambda: stand_in)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: ctypes.c_void_p(5))
    monkeypatch.setattr(cublaslt, "stream_of", lambda device: STREAM)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return stand_in


def noted(library: Any) -> tuple[int, ...]:
    return tuple((ctypes.c_uint64 * 4).in_dll(library, "noted"))


def operands(transpose_a: bool, transpose_b: bool) -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.randn((5, 3) if transpose_a else (3, 5)), torch.randn((4, 5) if transpose_b else (5, 4))
    return a, b, (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_products_and_what_is_added(transpose_a: bool, transpose_b: bool, library: Any) -> None:
    a, b, expected = operands(transpose_a, transpose_b)
    workspace, out = torch.empty(8), torch.full((3, 4), float("nan"))
    product = cublaslt.Product(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b)
    assert product.num_algorithms == 2  # one of three proposals is none
    product.run(a, b, out, algorithm=1, workspace=workspace, accumulate=False)  # reads nothing of ``out``
    torch.testing.assert_close(out, expected)
    assert noted(library) == (102, workspace.data_ptr(), cublaslt.WORKSPACE, STREAM)
    product.run(a, b, out, algorithm=0, workspace=workspace, accumulate=True)
    torch.testing.assert_close(out, 2 * expected)
    assert noted(library)[0] == 100
    added, before = torch.randn(3, 4), out.clone()
    kept = added.clone()
    product.run(a, b, out, algorithm=0, workspace=workspace, accumulate=False, added=added)
    torch.testing.assert_close(out, expected + added)
    assert torch.equal(added, kept)
    assert not torch.equal(out, before)


def test_factors_are_those_of_each_call(library: Any) -> None:
    a, b, expected = operands(False, True)
    out, workspace = torch.empty(3, 4), torch.empty(8)
    product = cublaslt.Product(a, b, out, transpose_a=False, transpose_b=True, scaled=True)
    factors = [torch.tensor([value]) for value in (2.0, 3.0, 0.5)]
    for one, other in ((0, 1), (0, 2), (2, 2), (2, 1), (2, 1)):
        scales = factors[one], factors[other]
        product.run(a, b, out, algorithm=0, workspace=workspace, accumulate=False, scales=scales)
        torch.testing.assert_close(out, expected * scales[0] * scales[1])
    described = ctypes.c_int.in_dll(library, "num_described").value
    product.run(a, b, out, algorithm=0, workspace=workspace, accumulate=False, scales=scales)
    assert ctypes.c_int.in_dll(library, "num_described").value == described  # nothing that is known is said again


def test_a_refusal_is_an_error(library: Any) -> None:
    a, b, _ = operands(False, False)
    out = torch.empty(3, 4)
    product = cublaslt.Product(a, b, out, transpose_a=False, transpose_b=False)
    broken = cublaslt._Proposal()
    broken.algorithm[0] = 1
    product._algorithms[0] = ctypes.byref(broken.algorithm)
    with pytest.raises(RuntimeError, match="status 1"):
        product.run(a, b, out, algorithm=0, workspace=torch.empty(8), accumulate=False)
