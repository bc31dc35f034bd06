"""What multiplies, where there is no GPU; what does on one is in tests/gpu/products.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import MegatronStrategy
from lightning_megatron.kernels import hopper_products, timing
from lightning_megatron.kernels.products import TorchProducts, current_products, set_products
from lightning_megatron.kernels.tuned_products import TunedProducts, products_of, way_key
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

    made = TunedProducts.__new__(TunedProducts)
    made._made, made._device, made._path, made._maker = library, torch.device("cpu"), path, "a GPU, cuBLASLt 1"
    made._products, made._workspaces = {}, {}
    made.chosen = made._read()

    def seconds(run: Any, algorithm: int, repeats: int) -> float:
        run(algorithm)
        return library.times[algorithm] or 0.0

    monkeypatch.setattr(timing, "_seconds", seconds)
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


# SwiGLU in the product


class Multiplying(Library):
    """Whose products are right, and none of which is refused."""

    times = (4.0, 3.0, 1.0, 1.02)

    def Product(self, *args: Any, transpose_a: bool, transpose_b: bool, **kwargs: Any) -> Any:
        made = super().Product()

        def run(a: Tensor, b: Tensor, out: Tensor, *, algorithm: int, accumulate: bool, **kwargs: Any) -> None:
            made.run(algorithm=algorithm, accumulate=accumulate)
            out.copy_((a.t() if transpose_a else a) @ (b.t() if transpose_b else b))

        return SimpleNamespace(num_algorithms=4, run=run)


class Adding(Library):
    """Whose products are right, and are added where that is asked for."""

    times = (4.0, 3.0, 1.0, 1.02)

    def Product(self, *args: Any, transpose_a: bool, transpose_b: bool, **kwargs: Any) -> Any:
        def run(a: Tensor, b: Tensor, out: Tensor, *, algorithm: int, accumulate: bool, **kwargs: Any) -> None:
            made = (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)
            out.copy_(out + made if accumulate else made)

        return SimpleNamespace(num_algorithms=2, run=run)


class Ways:
    """Two ways to a result, the time that each takes, and what has run; one may be refused."""

    def __init__(self, *times: float | None, differs: float = 0.0) -> None:
        self.times, self.ran, self.differs = times, list[int](), differs

    @property
    def calls(self) -> tuple[Callable[[], Tensor], ...]:
        return tuple(lambda way=way: self.run(way) for way in range(len(self.times)))

    def run(self, way: int) -> Tensor:
        self.ran.append(way)
        if self.times[way] is None:
            raise RuntimeError("refused")
        return torch.full((3,), 1.0 + self.differs * way)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def seconds(run: Callable[[int], Any], algorithm: int, repeats: int) -> float:
            run(algorithm)
            return self.times[algorithm] or 0.0

        monkeypatch.setattr(timing, "_seconds", seconds)


@pytest.mark.parametrize(("times", "best"), [((2.0, 1.0), 1), ((1.0, 2.0), 0), ((1.0, 0.99), 0), ((2.0, None), 0)], ids=str)
def test_the_faster_way_is_found_once_and_kept_in_the_file(
    times: tuple[float | None, ...], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ways, sizes = tmp_path / "products.json", Ways(*times), (4, 8, 6, 8)
    one = tuned(Library(), path, monkeypatch)
    ways.patch(monkeypatch)
    assert one._way("gated forward", sizes, ways.calls) == best
    assert ways.ran[0] == 0  # so that its own products are not timed while it is
    assert set(ways.ran) == {0, 1}
    assert json.loads(path.read_text()) == {"a GPU, cuBLASLt 1": {way_key("gated forward", (4, 8, 6, 8)): best}}
    ways.ran.clear()
    other = tuned(Library(), path, monkeypatch)
    ways.patch(monkeypatch)
    for products in (one, other):
        assert products._way("gated forward", sizes, ways.calls) == best
    assert not ways.ran
    assert one._way("gated gradient", sizes, ways.calls) == one._way("gated forward", (8, 8, 6, 8), ways.calls) == best
    assert len(one.chosen) == 3


@pytest.mark.parametrize(("differs", "best"), [(1e-3, 1), (0.1, 0), (float("nan"), 0)])
def test_a_way_with_another_result_is_not_taken_however_fast(
    differs: float, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways, products = Ways(2.0, 1.0, differs=differs), tuned(Library(), None, monkeypatch)
    ways.patch(monkeypatch)
    with nullcontext() if best else pytest.warns(UserWarning, match="gave another result than the library"):
        assert products._way("gated forward", (4, 8, 6, 8), ways.calls) == best


@pytest.mark.parametrize(("wide", "best"), [(lambda made: made[0], 1), (lambda made: (made[0], made[1][0]), 0)])
def test_what_cannot_be_compared_is_compared_by_what_it_is_made_into(
    wide: Callable[[Any], Any], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways, products = Ways(2.0, 1.0), tuned(Library(), None, monkeypatch)
    ways.patch(monkeypatch)
    calls = tuple(lambda way=way: (ways.run(way), [torch.full((2,), 1.0 + way)]) for way in range(2))
    assert products._way("gated forward", (4, 8, 6, 8), calls, wide=wide) == best


def test_nothing_is_timed_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ways = tmp_path / "products.json", Ways(2.0, 1.0)
    products = tuned(Library(), path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr("lightning_megatron.kernels.timing._seconds", lambda *_: pytest.fail("timed"))
    assert products._way("gated forward", (4, 8, 6, 8), ways.calls) == 0
    assert not products.chosen
    assert not path.exists()
    assert not ways.ran  # what runs here is recorded, and would run in each replay
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ways.patch(monkeypatch)
    assert products._way("gated forward", (4, 8, 6, 8), ways.calls) == 1


def gated_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that run on the host, which ``TunedProducts`` believes to be a Hopper GPU; names of those that run."""
    plain, ran = TorchProducts(), list[str]()

    def forward(x: Tensor, gate_up: Tensor, both: Tensor, activated: Tensor) -> None:
        ran.append("forward")
        for out, value in zip((both, activated), plain.forward_gated(x, gate_up), strict=True):
            out.copy_(value)

    def backward(grad: Tensor, down: Tensor, both: Tensor, of_both: Tensor) -> None:
        ran.append("gradient")
        of_both.copy_(plain.gradient_gated(grad, down, both))

    def input_gradient(grad: Tensor, weight: Tensor, out: Tensor) -> None:
        ran.append("input")
        out.copy_(plain.input_gradient(grad, weight))

    def weight_gradient(grad: Tensor, x: Tensor, total: Tensor, *, add: bool) -> None:
        ran.append("add" if add else "put")
        plain.weight_gradient(total, grad, x, add=add)

    def rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, turned: int) -> None:
        ran.append("rotated")
        values = (weight.shape[0] - turned) // cos.shape[-1]
        heads, rows = (turned // cos.shape[-1] - values, values), x.view(len(cos), -1, x.shape[-1])
        out.copy_(plain.forward_rotated(rows, weight, (cos, sin), heads).view(out.shape))

    monkeypatch.setattr(hopper_products, "rotated_forward", rotated)
    monkeypatch.setattr(hopper_products, "fits_rotated", lambda rows, weight, tables, heads: weight.is_contiguous())
    monkeypatch.setattr(hopper_products, "weight_gradient", weight_gradient)
    monkeypatch.setattr(hopper_products, "fits_weight", lambda grad, x, total: True)
    monkeypatch.setattr(hopper_products, "input_gradient", input_gradient)
    monkeypatch.setattr(hopper_products, "gated_forward", forward)
    monkeypatch.setattr(hopper_products, "gated_backward", backward)
    monkeypatch.setattr(hopper_products, "fits", lambda rows, weight, columns: columns == 6 and weight.is_contiguous())
    monkeypatch.setattr(TunedProducts, "_takes", lambda self, *matrices: all(m.is_contiguous() for m in matrices))
    return ran


@pytest.mark.parametrize("shape", [(4, 8), (2, 2, 8)], ids=str)
@pytest.mark.parametrize(("times", "way"), [((2.0, 1.0), 1), ((1.0, 2.0), 0)], ids=["together", "apart"])
def test_tuned_products_do_swiglu_in_the_faster_way(
    times: tuple[float, ...], way: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    products, ran = tuned(Multiplying(), None, monkeypatch), gated_kernels(monkeypatch)
    inside: list[bool] = []

    def seconds(run: Callable[[int], Any], algorithm: int, repeats: int) -> float:
        assert not inside, "a product is timed while a way that uses it is"
        inside.append(True)
        run(algorithm)
        inside.pop()
        return (*times, 9.0, 9.0)[algorithm]

    monkeypatch.setattr("lightning_megatron.kernels.timing._seconds", seconds)
    x, grad, above, down = torch.randn(shape), torch.randn(shape), torch.randn(12, 8), torch.randn(8, 6)
    assert products.gates(x, above)
    plain, result = TorchProducts(), products.forward_gated(x, above)
    for actual, expected in zip(result, plain.forward_gated(x, above), strict=True):
        torch.testing.assert_close(actual, expected)
    of_both = products.gradient_gated(grad, down, result[0])
    torch.testing.assert_close(of_both, plain.gradient_gated(grad, down, result[0]))
    torch.testing.assert_close(products.input_gradient(grad, down), grad @ down)
    keys = (
        way_key("gated forward", (4, 8, 12, 8)),
        way_key("gated gradient", (4, 8, 8, 6)),
        way_key("input gradient", (4, 8, 8, 6)),
    )
    assert {products.chosen[key] for key in keys} == {way}
    ran.clear()
    products.forward_gated(x, above)
    products.gradient_gated(grad, down, result[0])
    products.input_gradient(grad, down)
    assert ran == (["forward", "gradient", "input"] if way else [])


def test_what_no_kernel_takes_goes_apart_whatever_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    products, ran, plain = tuned(Multiplying(), None, monkeypatch), gated_kernels(monkeypatch), TorchProducts()
    products.chosen = dict.fromkeys(
        (
            way_key("gated forward", (4, 8, 10, 8)),
            way_key("gated gradient", (4, 8, 8, 5)),
            way_key("gated forward", (4, 8, 12, 8)),
            way_key("gated gradient", (4, 8, 8, 6)),
        ),
        1,
    )
    products.chosen[way_key("input gradient", (4, 8, 8, 6))] = 0

    def check(x: Tensor, grad: Tensor, above: Tensor, down: Tensor, both: Tensor) -> None:
        for actual, expected in zip(products.forward_gated(x, above), plain.forward_gated(x, above), strict=True):
            torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(products.gradient_gated(grad, down, both), plain.gradient_gated(grad, down, both))

    x, turned = torch.randn(4, 8), torch.randn(8, 4).t()
    above, down = torch.randn(12, 8), torch.randn(8, 6)
    check(x, x, torch.randn(10, 8), torch.randn(8, 5), torch.randn(4, 10))
    check(turned, turned, above, down, torch.randn(4, 12))
    check(x, x, torch.randn(8, 12).t(), torch.randn(6, 8).t(), torch.randn(4, 12))
    assert not products.gates(x, torch.randn(10, 8))
    assert not products.gates(turned, above)
    torch.testing.assert_close(
        products.gradient_gated(x, down, both := torch.randn(12, 4).t()), plain.gradient_gated(x, down, both)
    )
    assert ran == []
    check(x, x, above, down, torch.randn(4, 12))
    assert ran == ["forward", "gradient"]


@pytest.mark.parametrize(("times", "way"), [((2.0, 1.0), 1), ((1.0, 2.0), 0)], ids=["own", "library"])
def test_weight_gradients_are_timed_where_they_are_written_and_not_where_they_are_added(
    times: tuple[float, ...], way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, ran = Adding(), gated_kernels(monkeypatch)
    products = tuned(library, None, monkeypatch)
    timed: list[int] = []

    def seconds(run: Callable[[int], Any], algorithm: int, repeats: int) -> float:
        timed.append(algorithm)
        run(algorithm)
        return (*times, 9.0, 9.0)[algorithm]

    monkeypatch.setattr("lightning_megatron.kernels.timing._seconds", seconds)
    rows, x = torch.randn(4, 8), torch.randn(4, 6)
    total = torch.zeros(8, 6)
    products.weight_gradient(total, rows, x, add=True)
    assert not timed, "what is added once would be added many times"
    torch.testing.assert_close(total, rows.t() @ x)
    assert ran == []
    products.weight_gradient(total, rows, x, add=False)
    assert timed
    assert products.chosen[way_key("weight gradient", (4, 8, 6))] == way
    ran.clear()
    timed.clear()
    for add in (True, True, False, True):
        products.weight_gradient(total, rows, x, add=add)
    torch.testing.assert_close(total, 2 * rows.t() @ x)
    assert not timed
    assert ran == (["add", "add", "put", "add"] if way else [])


def test_kernels_take_nothing_on_the_host() -> None:
    x, above = torch.randn(512, 64).bfloat16(), torch.randn(1024, 64).bfloat16()
    assert not hopper_products.fits(x, above, 512)
    assert not TorchProducts().gates(x, above)
