"""Products by this project's own kernels for Hopper against torch's, those with SwiGLU in them too; a line a case.

python tests/gpu/hopper_products.py
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.products import DEVICE, LLAMA, Counting, check, claim, failed, found_by, model, random, relative  # first

# isort: split
import torch
from torch import Tensor

from lightning_megatron.kernels import hopper_products
from lightning_megatron.kernels.products import TorchProducts
from lightning_megatron.kernels.tuned_products import way_key
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.rope import RopeTables, rotate_fused


class Forced(Counting):
    """SwiGLU in the product where ``force`` says so, the first proposal of all else; nothing is timed."""

    def force(self, tokens: int, inner: int, ffn: int) -> None:
        self.chosen[way_key("gated forward", (tokens, inner, 2 * ffn, inner))] = 1
        self.chosen[way_key("gated gradient", (tokens, inner, inner, ffn))] = 1

    def _is_open(self, key: str) -> bool:
        return False


@contextlib.contextmanager
def launches() -> Iterator[list[str]]:
    """Names of the kernels of our own that were launched."""
    names = ("gated_forward", "gated_backward", "rotated_forward", "input_gradient", "weight_gradient")
    ran: list[str] = []

    def noting(name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Tensor, **kwargs: int) -> None:
            ran.append(name)
            launch(*args, **kwargs)

        return noted

    kept = {name: getattr(hopper_products, name) for name in names}
    for name, launch in kept.items():
        setattr(hopper_products, name, noting(name, launch))
    try:
        yield ran
    finally:
        for name, launch in kept.items():
            setattr(hopper_products, name, launch)


def same_bits(name: str, found: Tensor, other: Tensor) -> None:
    """Say how many elements differ from those of the passes apart; they need not be the same where sums run otherwise."""
    differ = int((found != other).sum())
    print(
        f"       {name:60s} {'same bits' if not differ else f'{differ / other.numel():.1e} of the elements differ'}", flush=True
    )


def gated_products(forced: Forced) -> None:
    """SwiGLU in both products, tensors of 2 and 3 dims; what does not fit goes apart. Nothing beside the results is written."""
    fitting = [(512, 1024, 14336), (512, 4096, 512), (768, 4032, 768), (8192, 1024, 512), (8192, 4096, 14336)]
    apart = [(512, 1024, 512), (8192 + 16, 1024, 512), (8192, 1024, 512 + 128), (8192, 1024 + 32, 512)]
    plain = TorchProducts()
    for tokens, inner, ffn in fitting + apart:
        forced.force(tokens, inner, ffn)
        fits, name = (tokens, inner, ffn) in fitting, f"{tokens}x{inner}x{ffn}"
        above, down = random(2 * ffn, inner, scale=inner**-0.5), random(inner, ffn, scale=inner**-0.5)
        for shape in ((tokens, inner), (2, tokens // 2, inner)):
            x, grad, says = random(*shape), random(*shape), f"{name} of {len(shape)} dims"
            kept = [t.clone() for t in (x, grad, above, down)]
            claim(f"gates {says}", forced.gates(x, above) == fits)
            with launches() as ran:
                both, activated = forced.forward_gated(x, above)
                of_both = forced.gradient_gated(grad, down, both)
            claim(f"launched {says}: {ran}", ran == (["gated_forward", "gated_backward"] if fits else []))
            exact = plain.forward_gated(x.float(), above.float())
            check(f"gated forward, gate and up {says}", both, exact[0], 3e-3)
            check(f"gated forward, activated {says}", activated, exact[1], 5e-3)
            check(f"gated gradient {says}", of_both, plain.gradient_gated(grad.float(), down.float(), both.float()), 5e-3)
            del exact
            for what, found, other in (
                ("gate and up", both, plain.forward(x, above)),
                ("activated", activated, plain.forward_gated(x, above)[1]),
                ("gradient", of_both, plain.gradient_gated(grad, down, both)),
            ):
                same_bits(f"{what} {says}", found, other)
            claim(f"inputs stay {says}", all(torch.equal(*pair) for pair in zip((x, grad, above, down), kept, strict=True)))
            again = (*forced.forward_gated(x, above), forced.gradient_gated(grad, down, both))
            claim(f"again the same {says}", all(map(torch.equal, (both, activated, of_both), again)))


def input_gradients(forced: Forced) -> None:
    """The gradient of a linear's input by the kernel without SwiGLU."""
    for tokens, inner, outer in (
        (512, 4096, 4096),
        (8192, 512, 1024),
        (768, 768, 4032),
        (8192, 2048, 3072),
        (8192, 512 + 128, 1024),
    ):
        forced.chosen[way_key("input gradient", (tokens, outer, outer, inner))] = 1
        weight, name, fits = random(outer, inner, scale=0.02), f"{tokens}x{inner}x{outer}", inner % 256 == 0
        for shape in ((tokens, outer), (2, tokens // 2, outer)):
            grad = random(*shape)
            with launches() as ran:
                found = forced.input_gradient(grad, weight)
            claim(f"launched {name} of {len(shape)} dims: {ran}", ran == ["input_gradient"] * fits)
            check(f"input gradient {name} of {len(shape)} dims", found, grad.float() @ weight.float(), 3e-3)
            same_bits(f"input gradient {name} of {len(shape)} dims", found, grad @ weight)


def gated_extremes(forced: Forced) -> None:
    """Gates far out saturate as in the passes apart, and what is not finite stays where it is."""
    tokens, inner, ffn = 512, 4096, 512
    forced.force(tokens, inner, ffn)
    x, above, down = random(tokens, inner), random(2 * ffn, inner, scale=10.0), random(inner, ffn)
    grad = random(tokens, inner)
    x[7, 3], grad[300, 5] = float("nan"), float("inf")
    both, activated = forced.forward_gated(x, above)
    of_both, plain = forced.gradient_gated(grad, down, both), TorchProducts()
    other, of_other = plain.forward_gated(x, above)[1], plain.gradient_gated(grad, down, both)
    rows = [row for row in range(tokens) if row not in (7, 300)]
    check("gated forward, far out", activated[rows], other[rows].float(), 3e-3)
    check("gated gradient, far out", of_both[rows], of_other[rows].float(), 3e-3)
    claim("what is not finite stays in its row", bool(activated[7].isnan().all()) and not bool(of_both[300].isfinite().all()))


def gated_elsewhere(forced: Forced) -> None:
    """On another stream, and in a thread that has called nothing of CUDA before, as that of a first backward."""
    tokens, inner, ffn = 512, 4096, 512
    forced.force(tokens, inner, ffn)
    x, above, down = random(tokens, inner), random(2 * ffn, inner, scale=0.02), random(inner, ffn, scale=0.02)
    both, activated = forced.forward_gated(x, above)
    expected = [both, activated, forced.gradient_gated(x, down, both)]
    found: list[Tensor] = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = [*forced.forward_gated(x, above), forced.gradient_gated(x, down, both)]
    torch.cuda.synchronize()
    claim("gated on another stream", all(map(torch.equal, found, expected)))
    found.clear()
    torch.empty_like(both)  # memory that the allocator then has at hand
    thread = threading.Thread(target=lambda: found.append(forced.gradient_gated(x, down, both)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    claim("gated gradient in a fresh thread", len(found) == 1 and torch.equal(found[0], expected[2]))


def blocks() -> None:
    """A step of a GPT with SwiGLU and rotations in the products is as near to fp32 as one with passes of its own."""
    expected = found_by(model(torch.float32), TorchProducts())
    before = {name: relative(t, expected[name]) for name, t in found_by(model(torch.bfloat16), TorchProducts()).items()}
    apart = found_by(model(torch.bfloat16), Forced(DEVICE))  # the same proposals, and the residual in the product
    # A dropped activation stays apart.
    for way, forwards, rotated in ((None, 1, 1), ("selective", 0, 1), ("full", 2, 2), (["mlp"], 2, 1)):
        made, forced = model(torch.bfloat16), Forced(DEVICE)
        forced.force(2 * LLAMA.max_seq_len, LLAMA.hidden_size, LLAMA.ffn_hidden_size)
        heads = (LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.hidden_size // LLAMA.num_heads)
        sizes = (LLAMA.max_seq_len, 2, LLAMA.hidden_size, *made.layers[0].attn.qkv.weight.shape, *heads)
        forced.chosen[way_key("rotated", sizes)] = 1
        recompute(made, Recompute.of(way))
        with launches() as ran:
            found = found_by(made, forced)
        counts = [ran.count(name) // LLAMA.num_layers for name in ("gated_forward", "gated_backward", "rotated_forward")]
        claim(f"recompute={way}: {counts} launched a layer", counts == [forwards, min(forwards, 1), rotated])
        after = {name: relative(t, expected[name]) for name, t in found.items()}
        ratios = {name: after[name] / (error + 1e-5) for name, error in before.items()}
        worst = max(ratios, key=lambda name: ratios[name])
        for name in ("losses", worst):
            says = f"error {after[name]:.1e}, apart {before[name]:.1e}"
            claim(f"recompute={way} {name}: {says}", after.keys() == before.keys() and ratios[name] < 1.5)
        if way is None:
            for name in found:
                same_bits(f"in a step, {name}", found[name], apart[name])


def weight_gradients(forced: Forced) -> None:
    """Written over what is there, whatever it is, and added to it; both factors have the tokens first."""
    for tokens, rows, columns in ((64, 256, 256), (512, 768, 1024), (8192, 6144, 4096), (8192, 256, 14336), (4096, 256, 384)):
        forced.chosen[way_key("weight gradient", (tokens, rows, columns))] = 1
        grad, x, name, fits = random(tokens, rows), random(tokens, columns), f"{tokens}x{rows}x{columns}", columns % 256 == 0
        expected = grad.t().float() @ x.float()
        total, other = (torch.full((rows, columns), float("nan"), device=DEVICE) for _ in range(2))
        with launches() as ran:
            for add in (False, True, True):
                forced.weight_gradient(total, grad, x, add=add)
                TorchProducts().weight_gradient(other, grad, x, add=add)
        takes = fits and tokens * rows * max(tokens, columns) >= 2**32
        claim(f"launched {name}: {ran}", ran == ["weight_gradient"] * 3 * takes)
        check(f"weight gradient, three times {name}", total, 3 * expected, 1e-5)
        same_bits(f"weight gradient {name}", total, other)


def rotated_products() -> None:
    """Queries and keys rotated in the product against a pass of its own: heads of 64 and 128, several samples."""
    for tokens, batch, inner, heads, kv, size in (
        (512, 2, 1024, 8, 2, 128),
        (8192, 1, 4096, 32, 8, 128),
        (4096, 4, 2048, 32, 8, 64),
    ):
        x, weight = random(tokens, inner), random((heads + 2 * kv) * size, inner, scale=0.02)
        angles = torch.rand(tokens // batch, 1, 1, size // 2, device=DEVICE) * 6
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
        out = torch.full((tokens, weight.shape[0]), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        hopper_products.rotated_forward(x, weight, cos, sin, out, turned=(heads + kv) * size)
        fused = (x @ weight.t()).view(tokens // batch, batch, -1)
        parts = rotate_fused(fused, (heads, kv), head_dim=size, tables=RopeTables(cos, sin))
        expected = torch.cat([part.flatten(2) for part in parts], -1).view(tokens, -1)
        check(f"rotated {tokens} {batch} {heads} {kv} {size}", out, expected.float(), 3e-3)
        same_bits(f"rotated {tokens} {batch} {heads} {kv} {size}", out, expected)


def main() -> None:
    """Run all."""
    torch.manual_seed(0)
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        sys.exit("these kernels are for Hopper")
    for part in (gated_products, input_gradients, weight_gradients, gated_extremes, gated_elsewhere):
        part(Forced(DEVICE))
    blocks()
    rotated_products()
    print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
