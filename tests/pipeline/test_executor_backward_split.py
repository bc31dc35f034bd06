"""I then W give what a whole backward gives, for any module; each gradient is made once and arrives once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.weight_gradients import now_or_later
from tests.pipeline.stages import Layer

H = 6


class Square(torch.autograd.Function):
    """A Function that knows nothing of splits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.square() * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * x * grad * weight, (x.square() * grad).sum((0, 1))


class Scale(torch.autograd.Function):
    """One that can wait."""

    weight_input = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return grad * weight, now_or_later(ctx, lambda: (x * grad).sum((0, 1)))


class Custom(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(H, H), nn.Linear(H, H)
        self.gain = nn.Parameter(torch.randn(H))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function.apply(self.before(x), self.gain))


class SharedWeight(nn.Module):
    """One weight in two products, one below the other, and once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).tanh()).tanh() @ self.linear.weight


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(11, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(15).view(5, 3) % 11
        return self.inner(x + self.table(tokens)) @ self.table.weight.t()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x).relu())


class MadeWeight(nn.Module):
    """A weight that is computed: low-rank and normalised, then used by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(H, 2)), nn.Parameter(torch.randn(2, H))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(H, H))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x @ (self.a @ self.b))


class Hooked(nn.Module):
    """Tensor hooks that change gradients, on an activation and on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(H, H), nn.Linear(H, H)
        self.first.weight.register_hook(lambda grad: grad * 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(lambda grad: grad * 2)
        return self.second(y.sin())


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(H, H), nn.Dropout(0.5), nn.GELU(), nn.Linear(H, H))
        self.outer = nn.Linear(H, H)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant).sin())


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"mesh": Mesh(), "bias": True, "device": "cpu", "dtype": torch.float64}
        self.column, self.row = ColumnParallelLinear(H, 4 * H, **options), RowParallelLinear(4 * H, H, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(F.gelu(self.column(x)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(self.convolution(x).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(H, 2, 4 * H, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "linear": (lambda: nn.Linear(H, H), 1),
    "mlp": (lambda: nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), nn.GELU(), nn.Linear(H, H, bias=False)), 2),
    "attention": (Attention, 4),
    "einsum": (lambda: Einsum(), 1),
    "convolution": (Convolution, 2),
    "function": (lambda: Custom(Square), 2),
    "function that can wait": (lambda: Custom(Scale), 3),
    "shared weight": (SharedWeight, 3),
    "tied embedding": (Tied, 1),
    "unused": (Unused, 1),
    "made weight": (MadeWeight, 1),
    "hooks": (Hooked, 2),
    "recomputed": (lambda: Recomputed(False), 1),
    "recomputed, reentrant": (lambda: Recomputed(True), 0),
    "nothing to train": (nn.GELU, 0),
    "tensor parallel": (Parallel, 2),
}


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("sbh,hk->sbk", x, self.weight)


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    yield
    torch.set_default_dtype(torch.float32)


def run(module: nn.Module, *, split: bool, needs_input: bool = True) -> tuple[dict[str, Tensor], list[str], int]:
    """Gradients of two forwards by name, the order in which parameters were reached, and how many products waited."""
    reached: list[str] = []
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        param.register_post_accumulate_grad_hook(lambda _, name=name: reached.append(name))
    grads, num_late = {}, 0
    for microbatch in range(2):
        torch.manual_seed(microbatch)
        x = torch.randn(5, 3, H, requires_grad=needs_input)
        y = module(x)
        upstream = torch.randn_like(y)
        if not split:
            y.backward(upstream)
        else:
            backward = SplitBackward([(get_gradient_edge(y), upstream)], [x] if needs_input else [])
            del y
            backward.run_input_part()
            num_late = backward.num_late
            before = len(reached)
            grads[f"input {microbatch}"] = x.grad
            backward.run_weight_part()
            assert len(reached) >= before
        grads[f"input {microbatch}"] = x.grad
    grads |= {name: param.grad for name, param in module.named_parameters()}
    return grads, reached, num_late


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_two_parts_equal_a_whole_backward(name: str, needs_input: bool) -> None:
    make, num_late = MODULES[name]
    if not needs_input and name in ("nothing to train", "recomputed, reentrant"):
        pytest.skip("there is no gradient at all")
    torch.manual_seed(3)
    whole = make()
    torch.manual_seed(3)
    parted = make()
    expected, reached, _ = run(whole, split=False, needs_input=needs_input)
    found, reached_in_parts, late = run(parted, split=True, needs_input=needs_input)
    assert late == num_late
    assert sorted(reached_in_parts) == sorted(reached)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] is None) == (value is None), key
        if value is not None:
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-14, msg=lambda text, key=key: f"{key}: {text}")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        return func(*args, **(kwargs or {}))


def parts_of(module: nn.Module, x: Tensor, widest: int | None = None) -> SplitBackward:
    y = module(x)
    return SplitBackward([(get_gradient_edge(y), torch.randn_like(y))], [x], widest=widest)


def test_each_product_is_entered_once_for_its_input_and_once_for_its_weight() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(5)))
    with Products() as counted:
        backward = parts_of(module, torch.randn(7, H, requires_grad=True))
        forward = counted.num
        backward.run_input_part()
        of_input = counted.num - forward
        backward.run_weight_part()
        of_weight = counted.num - forward - of_input
    assert (forward, of_input, of_weight) == (5, 5, 5)


def test_no_weight_is_reached_by_the_first_part_and_no_input_by_the_second() -> None:
    module = nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H))
    x = torch.randn(7, H, requires_grad=True)
    backward = parts_of(module, x)
    backward.run_input_part()
    assert x.grad is not None
    assert [name for name, p in module.named_parameters() if p.grad is None] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    of_input = x.grad.clone()
    backward.run_weight_part()
    assert all(param.grad is not None for param in module.parameters())
    assert torch.equal(x.grad, of_input)


def test_the_first_part_frees_what_it_alone_needs_and_the_second_the_rest() -> None:
    layer = Layer(0)
    backward = parts_of(layer, torch.randn(3, 4, requires_grad=True))
    assert (layer.watch.alive["i0"], layer.watch.alive["w0"]) == (1, 1)
    backward.run_input_part()
    assert (layer.watch.alive["i0"], layer.watch.alive["w0"]) == (0, 1)
    backward.run_weight_part()
    assert (layer.watch.alive["i0"], layer.watch.alive["w0"]) == (0, 0)


def test_the_first_part_frees_as_it_goes() -> None:
    layers = [Layer(i) for i in range(3)]
    seen: list[list[int]] = []
    x = torch.randn(3, 4, requires_grad=True)
    y = layers[0](x)
    y.register_hook(lambda grad: seen.append([layer.watch.alive[f"i{i}"] for i, layer in enumerate(layers)]))
    y = layers[2](layers[1](y))
    backward = SplitBackward([(get_gradient_edge(y), torch.ones_like(y))], [x])
    del y
    backward.run_input_part()
    assert seen == [[1, 0, 0]]


def test_a_product_that_is_too_wide_does_not_wait() -> None:
    module = nn.Sequential(nn.Linear(H, H), nn.Linear(H, 20 * H))
    backward = parts_of(module, torch.randn(7, H, requires_grad=True), widest=8 * 7 * H)
    backward.run_input_part()
    assert backward.num_late == 1
    assert module[1].weight.grad is not None
    assert module[0].weight.grad is None


def test_gradients_go_into_a_wider_buffer_that_was_there_before() -> None:
    module = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)).to(torch.bfloat16)
    buffers = {}
    for name, param in module.named_parameters():
        param.grad_dtype = torch.float32
        buffers[name] = param.grad = torch.zeros(param.shape, dtype=torch.float32)
    for _ in range(300):
        backward = parts_of(module, torch.ones(1, H, dtype=torch.bfloat16, requires_grad=True))
        backward._roots = [(edge, torch.ones_like(grad)) for edge, grad in backward._roots]
        backward.run_input_part()
        backward.run_weight_part()
    assert all(param.grad is buffers[name] for name, param in module.named_parameters())
    assert torch.equal(module[1].bias.grad, torch.full((H,), 300.0)), "bf16 would have stopped at 256"
