"""Products by tuned cuBLASLt algorithms on CUDA against torch's; a line a case.

python tests/gpu/products.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.kernels.products import TorchProducts, TunedProducts

DEVICE = torch.device("cuda", 0)
failed: list[str] = []


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).bfloat16()


def check(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float(torch.linalg.vector_norm(found.double() - expected.double()) / torch.linalg.vector_norm(expected.double()))
    passed = error <= tolerance and bool(torch.isfinite(found).all())
    print(f"{'passed' if passed else 'FAILED'} {name:60s} {error:.1e}", flush=True)
    if not passed:
        failed.append(name)


def linears(tuned: TunedProducts) -> None:
    """Forward, input gradient and weight gradient of a layer; small and odd sizes go to torch."""
    plain = TorchProducts()
    for tokens, inner, outer in ((4096, 2048, 3072), (4096, 4096, 4096), (333, 64, 48), (8192, 1024, 8192)):
        x, weight, grad = random(2, tokens // 2, inner), random(outer, inner, scale=0.02), random(2, tokens // 2, outer)
        rows, flat = grad.reshape(-1, outer), x.reshape(-1, inner)
        name = f"{tokens}x{inner}x{outer}"
        check(f"forward {name}", tuned.forward(x, weight), plain.forward(x.float(), weight.float()), 3e-3)
        found = tuned.input_gradient(grad, weight)
        check(f"input gradient {name}", found, plain.input_gradient(grad.float(), weight.float()), 3e-3)
        total, expected = torch.full((outer, inner), float("nan"), device=DEVICE), rows.double().t() @ flat.double()
        tuned.weight_gradient(total, rows, flat, add=False)
        check(f"weight gradient, put {name}", total, expected, 1e-5)
        tuned.weight_gradient(total, rows, flat, add=True)
        check(f"weight gradient, added {name}", total, 2 * expected, 1e-5)
        narrow = random(outer, inner)
        expected = narrow.double() + expected
        tuned.weight_gradient(narrow, rows, flat, add=True)
        check(f"weight gradient, added in bf16 {name}", narrow, expected, 3e-3)


def eight_bits(tuned: TunedProducts) -> None:
    """All products of a layer in 8 bits, with factors."""
    tokens, inner, outer = 4096, 2048, 3072
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x, weight, grad = (
        t.to(dtype) for t, dtype in ((random(tokens, inner), e4m3), (random(outer, inner), e4m3), (random(tokens, outer), e5m2))
    )
    first, second = torch.full((1,), 0.5, device=DEVICE), torch.full((1,), 0.25, device=DEVICE)
    for fast in (True, False):
        y = torch.empty(tokens, outer, device=DEVICE, dtype=torch.bfloat16)
        tuned.multiply(x, weight, y, transpose_b=True, scales=(first, second), fast=fast)
        check(f"8 bits forward fast={fast}", y, x.double() @ weight.double().t() / 8, 3e-3)
        dx = torch.empty(tokens, inner, device=DEVICE, dtype=torch.bfloat16)
        turned = weight.t().contiguous()
        tuned.multiply(grad, turned, dx, transpose_b=True, scales=(first, second), fast=fast)
        check(f"8 bits input gradient fast={fast}", dx, grad.double() @ weight.double() / 8, 3e-3)
        total = torch.full((outer, inner), float("nan"), device=DEVICE)
        columns = {"transpose_b": True, "scales": (second, first), "fast": fast}
        tuned.multiply(grad.t().contiguous(), x.t().contiguous(), total, **columns)
        expected = grad.double().t() @ x.double() / 8
        check(f"8 bits weight gradient, put fast={fast}", total, expected, 3e-3)
        tuned.multiply(grad.t().contiguous(), x.t().contiguous(), total, accumulate=True, **columns)
        check(f"8 bits weight gradient, added fast={fast}", total, 2 * expected, 3e-3)


def file_is_read_again(folder: Path) -> None:
    """What one finds another takes, and finds nothing new."""
    path = folder / "products.json"
    one = TunedProducts(DEVICE, path)
    x, weight = random(4096, 2048), random(4096, 2048, scale=0.02)
    first = one.forward(x, weight)
    other = TunedProducts(DEVICE, path)
    same = other.chosen == one.chosen and len(one.chosen) == 1 and torch.equal(other.forward(x, weight), first)
    print(f"{'passed' if same else 'FAILED'} a file of choices is read again: {other.chosen}", flush=True)
    if not same:
        failed.append("file")


def main() -> None:
    """Run all."""
    torch.manual_seed(0)
    tuned = TunedProducts(DEVICE)
    linears(tuned)
    eight_bits(tuned)
    with tempfile.TemporaryDirectory() as folder:
        file_is_read_again(Path(folder))
    print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
