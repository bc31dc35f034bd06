"""What multiplies, where there is no GPU; what does on one is in tests/gpu/products.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.kernels.products import TorchProducts, TunedProducts, current_products, products_of, set_products
from lightning_megatron.tensor_parallel.product import add_weight_gradient, input_gradient, product, put_weight_gradient


class Counted(TorchProducts):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.calls.append("forward")
        return super().forward(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        self.calls.append("input")
        return super().input_gradient(grad, weight)

    def weight_gradient(self, total: Tensor, rows: Tensor, x: Tensor, *, add: bool) -> None:
        self.calls.append("add" if add else "put")
        super().weight_gradient(total, rows, x, add=add)


def test_layers_multiply_by_what_was_set_and_get_the_same() -> None:
    x, weight, grad = torch.randn(2, 3, 5), torch.randn(4, 5), torch.randn(2, 3, 4)
    counted = Counted()
    set_products(counted)
    try:
        torch.testing.assert_close(product(x, weight), x @ weight.t())
        torch.testing.assert_close(input_gradient(grad, weight), grad @ weight)
        total, expected = torch.full((4, 5), float("nan")), grad.view(-1, 4).t() @ x.view(-1, 5)
        put_weight_gradient(total, grad.view(-1, 4), x)
        add_weight_gradient(total, grad.view(-1, 4), x)
        torch.testing.assert_close(total, 2 * expected)
    finally:
        set_products(TorchProducts())
    assert counted.calls == ["forward", "input", "put", "add"]
    assert type(current_products()) is TorchProducts


def test_tuning_without_cuda_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tune_products=True times cuBLASLt's algorithms, but the device is cpu"):
        products_of(True, torch.device("cpu"))
    assert MegatronStrategy(tune_products="products.json")._tune_products == "products.json"


class Library:
    """Four algorithms of which the third is the fastest, and the second is refused."""

    WORKSPACE = 0
    times = (4.0, None, 1.0, 1.02)

    def __init__(self) -> None:
        self.ran: list[tuple[int, bool]] = []

    def Product(self, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, algorithm: int, accumulate: bool, **kwargs: Any) -> None:
            if self.times[algorithm] is None:
                raise RuntimeError("refused")
            self.ran.append((algorithm, accumulate))

        return SimpleNamespace(num_algorithms=4, run=run)


def tuned(library: Library, path: Path | None, monkeypatch: pytest.MonkeyPatch) -> TunedProducts:
    from lightning_megatron.kernels import products

    made = TunedProducts.__new__(TunedProducts)
    made._made, made._device, made._path, made._maker = library, torch.device("cpu"), path, "a GPU, cuBLASLt 1"
    made._products, made._workspaces = {}, {}
    made.chosen = made._read()

    def seconds(run: Any, algorithm: int, repeats: int) -> float:
        run(algorithm)
        return library.times[algorithm] or 0.0

    monkeypatch.setattr(products, "_seconds", seconds)
    monkeypatch.setattr(TunedProducts, "_workspace", lambda self: torch.empty(0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_the_fastest_is_found_once_by_a_product_that_is_not_added_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, library = tmp_path / "deep" / "products.json", Library()
    one = tuned(library, path, monkeypatch)
    a, b, out = torch.empty(32, 16), torch.empty(48, 16), torch.empty(32, 48)
    one.multiply(a, b, out, transpose_b=True, accumulate=True)
    assert library.ran == [(0, True)]  # nothing is timed into a sum
    one.multiply(a, b, out, transpose_b=True)
    assert library.ran[-1] == (2, False)
    assert all(not added for _, added in library.ran[1:])
    one.multiply(a, b, out, transpose_b=True, accumulate=True)
    assert library.ran[-1] == (2, True)
    (key,) = json.loads(path.read_text())["a GPU, cuBLASLt 1"]
    assert key == "32x16x32x48 nt float32 float32 float32"
    other_library = Library()
    other = tuned(other_library, path, monkeypatch)
    other.multiply(a, b, out, transpose_b=True)
    assert other_library.ran == [(2, False)]
