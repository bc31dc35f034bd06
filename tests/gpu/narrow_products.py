"""Products in 8 bits with SwiGLU or a rotation in them, on Hopper; a line a case.

Gate and up against fp32 and cuBLASLt's product, the activated against ``swiglu_narrow`` of the same gate and up, byte for byte;
queries, keys and values against cuBLASLt's product rotated by a pass of its own.

python tests/gpu/narrow_products.py           all
python tests/gpu/narrow_products.py kernel    without models
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.initialize import materialize
from lightning_megatron.kernels.gated_narrow import fits, gated_narrow_forward
from lightning_megatron.kernels.narrow import Factor, Narrow
from lightning_megatron.kernels.products import TorchProducts, set_products
from lightning_megatron.kernels.rotated_narrow import fits as rotated_fits
from lightning_megatron.kernels.rotated_narrow import rotated_narrow_forward
from lightning_megatron.kernels.swiglu_narrow import swiglu_narrow
from lightning_megatron.kernels.tuned_products import TunedProducts
from lightning_megatron.layers.choice import choose_backend
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.rope import RopeTables
from lightning_megatron.layers.te_backend import Fp8Options, scales_of, why_unavailable
from lightning_megatron.layers.te_backend.operations import Rotation
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig

DEVICE = torch.device("cuda", 0)
E4M3 = torch.float8_e4m3fn
failed: list[str] = []


def claim(name: str, is_so: bool) -> None:
    print(f"{'passed' if is_so else 'FAILED'} {name}", flush=True)
    if not is_so:
        failed.append(name)


def relative(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    return float(torch.linalg.vector_norm(one.float() - other.float()) / torch.linalg.vector_norm(other.float()))


class Quick(TunedProducts):
    """The first proposal of everything, or of products that do more the way that is given; nothing is timed."""

    def __init__(self, way: int = 0) -> None:
        super().__init__(DEVICE)
        self.way, self.asked = way, list[str]()

    def _is_open(self, key: str) -> bool:
        return False

    def _way(self, name: str, sizes: tuple[int, ...], ways: Sequence[Callable[[], Any]], **options: Any) -> int:
        is_narrow = "narrow" in name
        self.asked += [name.split()[0]] * is_narrow
        return self.way if is_narrow else 0


@dataclass(frozen=True)
class Operands:
    """Bytes of x ``[M, H]`` and of the weight ``[2 F, H]``, and the inverses of their factors."""

    x: Tensor
    x_inv: Tensor
    weight: Tensor
    weight_inv: Tensor

    @classmethod
    def drawn(cls, tokens: int, hidden: int, ffn: int) -> Operands:
        """About what a layer has; the activated is of magnitude 1."""
        x = (torch.randn(tokens, hidden, device=DEVICE) * 16.0).to(E4M3)
        weight = (torch.randn(2 * ffn, hidden, device=DEVICE) * 16.0).to(E4M3)
        return cls(x.view(torch.uint8), number(1 / 16), weight.view(torch.uint8), number(2.0**-4 * 2 * hidden**-0.5))

    def made(self, factor: Factor) -> tuple[Tensor, Narrow]:
        """What the kernel makes of them, in memory that held other things."""
        num, ffn = len(self.x), len(self.weight) // 2
        for _ in range(2):  # where results will lie, most likely
            dirt = [torch.full((num, ffn), 0xAB, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
            del dirt
        both = torch.full((num, 2 * ffn), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        return both, gated_narrow_forward(self.x, self.x_inv, self.weight, self.weight_inv, both, factor)

    def product(self) -> Tensor:
        """Gate and up by cuBLASLt."""
        both = torch.empty((len(self.x), len(self.weight)), device=DEVICE, dtype=torch.bfloat16)
        scales = self.x_inv, self.weight_inv
        Quick().multiply(self.x.view(E4M3), self.weight.view(E4M3), both, transpose_b=True, scales=scales, fast=True)
        return both

    def reference(self) -> Tensor:
        """Gate and up in fp32."""
        x, weight = self.x.view(E4M3).float() * self.x_inv, self.weight.view(E4M3).float() * self.weight_inv
        return x @ weight.t()


def number(value: float) -> Tensor:
    return torch.full((4,), value, device=DEVICE)[:1]


def known(scale: float) -> Factor:
    return Factor(number(0.0), scale=number(scale), scale_inv=number(1 / scale))


def guessed(guess: float) -> Factor:
    return Factor(number(0.0), guess=number(guess))


def same(name: str, operands: Operands, factor: Callable[[], Factor]) -> None:
    """All that is written, and what the factor is left with, are those of ``swiglu_narrow``; NaN compare as bits."""
    mine, theirs = factor(), factor()
    both, found = operands.made(mine)
    expected = swiglu_narrow(both, theirs)
    pairs = {"rows": (found.rows, expected.rows), "columns": (found.columns, expected.columns)}
    pairs |= {"inverse": (found.scale_inv, expected.scale_inv), "largest": (mine.amax, theirs.amax)}
    if mine.guess is not None and theirs.guess is not None:
        pairs["guess"] = mine.guess, theirs.guess
    wrong = {
        what: float((one.view(torch.uint8) != other.view(torch.uint8)).float().mean()) for what, (one, other) in pairs.items()
    }
    wrong = {what: part for what, part in wrong.items() if part}
    turned = torch.equal(found.rows.t(), found.columns)
    state = "wrong: " + str(wrong) if wrong else f"largest {float(mine.amax):.4g} inverse {float(found.scale_inv):.4g}"
    claim(f"{name}: {state}{'' if turned else ', forms differ'}", not wrong and turned)


def shapes() -> None:
    """Every combination of few and many tokens, short and long sums, few and many columns."""
    for tokens in (512, 8192):
        for hidden in (1024, 4096):
            for ffn in (512, 14336):
                name, operands = f"{tokens}x{hidden}x{ffn}", Operands.drawn(tokens, hidden, ffn)
                claim(f"{name} fits", fits(operands.x, operands.weight, ffn))
                both, _ = operands.made(known(16.0))
                wanted, product = operands.reference(), operands.product()
                error, theirs, equal = (
                    relative(both, wanted),
                    relative(product, wanted),
                    float((both == product).float().mean()),
                )
                says = f"error {error:.1e}, cuBLASLt's {theirs:.1e}, {equal:.6f} of the bits are its"
                claim(f"{name} gate and up: {says}", error < 2e-2 and bool(both.isfinite().all()))
                right = 1 / float(swiglu_narrow(both, guessed(0.0)).scale_inv)
                del both, wanted, product
                for scale in (16.0, 1024.0):  # the second is too large
                    same(f"{name} known {scale:g}", operands, partial(known, scale))
                for what, guess in (("right", right), ("wrong", right * 16), ("none", 0.0)):
                    same(f"{name} guess {what}", operands, partial(guessed, guess))


def rotations() -> None:
    """Heads of 64 and 128, several samples, sums short and long."""
    for tokens, batch, hidden, heads, kv, size in (
        (512, 2, 1024, 8, 2, 128),
        (512, 1, 128, 4, 4, 128),
        (8192, 1, 4096, 32, 8, 128),
        (16384, 4, 2048, 32, 8, 64),
    ):
        name, drawn = (
            f"rotated {tokens} {batch} {hidden} {heads} {kv} {size}",
            Operands.drawn(tokens, hidden, (heads + 2 * kv) * size // 2),
        )
        angles = torch.rand(tokens // batch, 1, 1, size // 2, device=DEVICE) * 6
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        given = drawn.x, drawn.x_inv, drawn.weight, drawn.weight_inv, (cos, sin), (heads, kv)
        claim(f"{name} fits", rotated_fits(drawn.x, drawn.weight, (cos, sin), (heads, kv)))
        found, again = (rotated_narrow_forward(*given) for _ in range(2))
        rotation = Rotation((heads, kv), RopeTables(cos, sin))
        expected = rotation.turned_whole(drawn.product().view(tokens // batch, batch, -1)).view(tokens, -1)
        error, equal = relative(found, expected), float((found == expected).float().mean())
        claim(f"{name}: error {error:.1e}, {equal:.6f} of the bits are those of two passes", error < 3e-3)
        claim(f"{name} twice the same", torch.equal(found, again))


def extremes() -> None:
    """Not numbers, the largest numbers, gates far below zero, and nothing but zeros."""
    for what in ("nan", "largest", "zeros"):
        drawn = Operands.drawn(512, 1024, 512)
        if what == "nan":
            drawn.x[3, 5] = 0x7F
            drawn.x[300, 7] = 0xFF
        elif what == "zeros":
            drawn.x.zero_()
        else:
            drawn.x[:, :512] = 0x7E
            drawn.weight[::3, :512], drawn.weight[1::3, :512] = 0x7E, 0xFE
        operands = Operands(drawn.x, number(1.0), drawn.weight, number(1.0)) if what == "largest" else drawn
        same(f"{what}, known", operands, partial(known, 16.0))
        same(f"{what}, guessed", operands, partial(guessed, 1.0))


def again_and_again() -> None:
    """The same bits every time: a race would show."""
    operands = Operands.drawn(8192, 4096, 14336)
    first, narrow = operands.made(known(16.0))
    differ = 0
    for _ in range(20):
        both, other = operands.made(known(16.0))
        pairs = (both, first), (other.rows, narrow.rows), (other.columns, narrow.columns)
        differ += not all(torch.equal(one, two) for one, two in pairs)
    claim(f"twenty times the same: {differ} differ", differ == 0)


def graphs() -> None:
    """Captured once, run with other numbers; the guess of the second run is what the first one found."""
    operands, other = Operands.drawn(512, 1024, 512), Operands.drawn(512, 1024, 512)
    guess = number(0.0)
    for which in ("known", "guessed"):
        operands.made(known(16.0) if which == "known" else guessed(0.0))  # compiles
        torch.cuda.synchronize()
        both = torch.empty(512, 1024, device=DEVICE, dtype=torch.bfloat16)
        given = operands.x, operands.x_inv, operands.weight, operands.weight_inv, both
        steady = known(16.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            amax = torch.zeros(1, device=DEVICE)
            factor = (
                Factor(amax, scale=steady.scale, scale_inv=steady.scale_inv) if which == "known" else Factor(amax, guess=guess)
            )
            narrow = gated_narrow_forward(*given, factor)
        for scale in (1, 2):
            operands.x.copy_(other.x if scale == 2 else operands.x)
            operands.x_inv.fill_(scale / 16)
            graph.replay()
            expected = swiglu_narrow(both, known(16.0) if which == "known" else guessed(0.0))
            right = torch.equal(narrow.rows, expected.rows) and torch.equal(narrow.columns, expected.columns)
            claim(f"graph, {which}, run {scale}", right and torch.equal(narrow.scale_inv, expected.scale_inv))


def found_by(way: int, recipe: Any, again: str | None) -> tuple[dict[str, Tensor], list[str]]:
    """Losses and gradients of the second of two steps, and which products were asked which way to go."""
    config = GPTConfig(
        num_layers=2,
        hidden_size=1024,
        num_heads=8,
        num_kv_heads=4,
        ffn_hidden_size=2048,
        vocab_size=1024,
        max_seq_len=1024,
        init_std=0.05,
    )
    fp8 = None if recipe is None else Fp8Options(recipe=recipe)
    dtype = torch.float32 if fp8 is None else torch.bfloat16
    backend = None if fp8 is None else choose_backend("te", device=DEVICE, dtype=dtype, fp8=fp8)
    with use_mesh(Mesh(device=DEVICE)):
        made = GPT(config, dtype=dtype, backend=backend)
    materialize(made, device=DEVICE, seed=3)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(param.bfloat16())
    recompute(made, Recompute.of(again))
    tokens = torch.randint(1024, (2, 1025), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    products = Quick(way)
    set_products(TorchProducts() if fp8 is None else products)
    for _ in range(2):
        made.zero_grad()
        losses = made(tokens[:, :-1], labels=tokens[:, 1:])
        losses.mean().backward()
        for scales in scales_of(made):
            scales.advance(lambda numbers: numbers)
    set_products(TorchProducts())
    grads = {name: param.grad.float() for name, param in made.named_parameters() if param.grad is not None}
    return {"losses": losses.detach().float(), **grads}, products.asked


def models() -> None:
    """Models whose blocks go this way are as near to fp32 as those that go the other, and recompute changes no bit."""
    expected, _ = found_by(0, None, None)
    for recipe in ("delayed", "current"):
        apart, _ = found_by(0, recipe, None)
        first = None
        for again in (None, "mlp_act", "mlp", "full"):
            found, asked = found_by(1, recipe, again)
            counts, full = [asked.count(name) for name in ("gated", "rotated")], again == "full"
            is_right = counts == [2 * 2 * (2 if full or again == "mlp" else 1), 2 * 2 * (2 if full else 1)]
            claim(f"{recipe} recompute={again}: asked {counts} times", is_right)
            ratios = {
                name: relative(t, expected[name]) / (relative(apart[name], expected[name]) + 1e-5) for name, t in found.items()
            }
            worst = max(ratios, key=lambda name: ratios[name])
            claim(f"{recipe} recompute={again} {worst}: error {ratios[worst]:.2f} of that apart", ratios[worst] < 1.5)
            first = found if first is None else first
            same_bits = sum(torch.equal(t, first[name]) for name, t in found.items())
            print(
                f"       {recipe} recompute={again}: {same_bits} of {len(found)} have the bits of none recomputed", flush=True
            )


def main() -> None:
    """Run all."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        print("left out: the kernel is for Hopper", flush=True)
        return
    for part in (shapes, extremes, again_and_again, graphs, rotations):
        part()
    if sys.argv[1:] != ["kernel"]:
        if (why := why_unavailable()) is not None:
            print(f"left out models: {why}", flush=True)
        else:
            models()
    print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
