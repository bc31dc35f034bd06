"""Products by tuned cuBLASLt algorithms on CUDA against torch's, and layers that do more in them; a line a case.

python tests/gpu/products.py          all
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.initialize import materialize
from lightning_megatron.kernels.products import Products, TorchProducts, set_products
from lightning_megatron.kernels.tuned_products import TunedProducts
from lightning_megatron.layers.choice import choose_backend
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.te_backend import Fp8Options, scales_of, why_unavailable
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig

DEVICE = torch.device("cuda", 0)
failed: list[str] = []


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).bfloat16()


def relative(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    return float(torch.linalg.vector_norm(one.double() - other.double()) / torch.linalg.vector_norm(other.double()))


def claim(name: str, is_so: bool) -> None:
    print(f"{'passed' if is_so else 'FAILED'} {name}", flush=True)
    if not is_so:
        failed.append(name)


def check(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = relative(found, expected)
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


def additions(tuned: TunedProducts) -> None:
    """Something that lies elsewhere is added in the product and stays as it is; small sizes are added by torch."""
    for tokens, inner, outer in ((4096, 2048, 3072), (8192, 8192, 1024), (333, 64, 48)):
        x, weight, added = random(2, tokens // 2, inner), random(outer, inner, scale=0.02), random(2, tokens // 2, outer)
        before, name = added.clone(), f"{tokens}x{inner}x{outer}"
        claim(f"adds_to {name}", tuned.adds_to(added, weight) == (tokens > 333))
        expected = added.double() + x.double() @ weight.double().t()
        for again in ("", " again"):  # the first is timed
            check(f"added apart{again} {name}", tuned.forward_added(x, weight, added), expected, 3e-3)
        claim(f"what is added stays {name}", torch.equal(added, before))
    tokens, inner, outer = 4096, 2048, 3072
    x, weight = (random(*shape).to(torch.float8_e4m3fn) for shape in ((tokens, inner), (outer, inner)))
    added, factors = random(tokens, outer, scale=10.0), tuple(torch.full((1,), f, device=DEVICE) for f in (0.5, 0.25))
    before, expected = added.clone(), added.double() + x.double() @ weight.double().t() / 8
    for fast in (True, False):
        y = torch.full_like(added, float("nan"))
        tuned.multiply(x, weight, y, transpose_b=True, scales=factors, fast=fast, added=added)
        check(f"8 bits added apart fast={fast}", y, expected, 3e-3)
        claim(f"what is added to 8 bits stays fast={fast}", torch.equal(added, before))


class Counting(TunedProducts):
    """Counts what is added in products."""

    num_added = 0

    def multiply(self, *args: Any, added: Tensor | None = None, **kwargs: Any) -> None:
        """See ``TunedProducts``."""
        self.num_added += added is not None
        super().multiply(*args, added=added, **kwargs)


SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 1024, "num_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": 4096}
LLAMA = GPTConfig(**SIZES, vocab_size=1024, max_seq_len=2048, init_std=0.05)
BLOCKS = 2 * LLAMA.num_layers


def model(dtype: torch.dtype, backend: Any = None) -> GPT:
    """The same values in bf16 and in fp32."""
    with use_mesh(Mesh(device=DEVICE)):
        made = GPT(LLAMA, dtype=dtype, backend=backend)
    materialize(made, device=DEVICE, seed=3)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(param.bfloat16())
    return made


def found_by(made: GPT, products: Products, *, passes: int = 1) -> dict[str, Tensor]:
    """The loss of each token and all gradients, of the last pass, where factors of 8 bits are known."""
    tokens = torch.randint(1024, (2, 2049), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    set_products(products)
    for _ in range(passes):
        made.zero_grad()
        losses = made(tokens[:, :-1], labels=tokens[:, 1:])
        losses.mean().backward()
        for scales in scales_of(made):
            scales.advance(lambda numbers: numbers)
    set_products(TorchProducts())
    grads = {name: param.grad.float() for name, param in made.named_parameters() if param.grad is not None}
    return {"losses": losses.detach().float(), **grads}


def look(made: GPT) -> None:
    """Somebody looks at what blocks return, so that it is added to the residual apart."""
    for layer in made.layers:
        for dropout in (layer.attn_dropout, layer.mlp_dropout):
            dropout.register_forward_pre_hook(lambda module, args: None)


def blocks(kind: str, backend: Callable[[], Any], apart: Products, *, passes: int) -> None:
    """Blocks that add the residual in their products are as near to fp32 as those that add it apart."""
    expected = found_by(model(torch.float32), TorchProducts())
    looked_at = model(torch.bfloat16, backend())
    look(looked_at)
    before = {name: relative(t, expected[name]) for name, t in found_by(looked_at, apart, passes=passes).items()}
    for way, forwards in ((None, 1), ("selective", 1), ("full", 2)):
        made, counting = model(torch.bfloat16, backend()), Counting(DEVICE)
        recompute(made, Recompute.of(way))
        after = {name: relative(t, expected[name]) for name, t in found_by(made, counting, passes=passes).items()}
        claim(f"{kind} recompute={way}: {counting.num_added} added", counting.num_added == forwards * passes * BLOCKS)
        ratios = {name: after[name] / (error + 1e-5) for name, error in before.items()}
        worst = max(ratios, key=lambda name: ratios[name])
        for name in ("losses", worst):
            says = f"error {after[name]:.1e}, added apart {before[name]:.1e}"
            claim(f"{kind} recompute={way} {name}: {says}", after.keys() == before.keys() and ratios[name] < 1.5)


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
    additions(tuned)
    blocks("bf16", lambda: None, TorchProducts(), passes=1)
    if (why := why_unavailable()) is None:
        fp8 = Fp8Options()
        blocks("8 bits", lambda: choose_backend("te", device=DEVICE, dtype=torch.bfloat16, fp8=fp8), tuned, passes=2)
    else:
        print(f"left out 8 bits: {why}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file_is_read_again(Path(folder))
    print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
