"""Every kernel on CUDA against plain torch in fp32, forward and gradients, and the speed of each. Prints a line a case.

python tests/gpu/kernels.py [--speed]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.initialize import materialize
from lightning_megatron.kernels.rotation import apply_rope
from lightning_megatron.layers.activation import swiglu
from lightning_megatron.layers.norm import RMSNorm, add_and_norm
from lightning_megatron.layers.rope import Rope, rotate_fused, rotate_heads
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import Axis, Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.optim import DistributedOptimizer
from lightning_megatron.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.tensor_parallel.embedding import add_rows
from lightning_megatron.tensor_parallel.product import add_weight_gradient, put_weight_gradient

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
failed: list[str] = []


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def check(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((found.detach().double() - expected.detach().double()).abs().max() / expected.detach().double().abs().max())
    passed = error <= tolerance and bool(torch.isfinite(found).all())
    print(f"{'passed' if passed else 'FAILED'} {name:60s} {error:.1e}", flush=True)
    if not passed:
        failed.append(name)


def compare(
    name: str, run: Callable[..., tuple[Tensor, ...]], reference: Callable[..., tuple[Tensor, ...]], *given: Tensor
) -> None:
    """Outputs and gradients of ``run`` against those of ``reference`` on the same numbers in fp32."""
    mine = [tensor.clone().requires_grad_() for tensor in given]
    theirs = [tensor.float().clone().requires_grad_() for tensor in given]
    found, expected = run(*mine), reference(*theirs)
    grads = [torch.randn_like(output) for output in found]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(expected, [grad.float() for grad in grads])
    tolerance = TOLERANCE[given[0].dtype]
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        check(f"{name} {given[0].dtype} output {index}", a, b, tolerance)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        check(f"{name} {given[0].dtype} gradient {index}", a.grad, b.grad, tolerance)


def norms() -> None:
    for dtype in TOLERANCE:
        for size, rows in ((128, (7, 3, 5)), (576, (33, 2)), (4096, (300, 1)), (8192, (17, 1)), (16384, (3, 1))):
            norm = RMSNorm(size, device=DEVICE, dtype=dtype)

            def run(hidden: Tensor, weight: Tensor, added: Tensor, norm: RMSNorm = norm) -> tuple[Tensor, ...]:
                del norm.weight
                norm.weight = weight
                return add_and_norm(norm, hidden, added)

            def reference(hidden: Tensor, weight: Tensor, added: Tensor) -> tuple[Tensor, ...]:
                total = hidden + added
                return total, F.rms_norm(total, weight.shape, weight, 1e-5)

            norm.register_parameter("weight", None)
            weight = 1 + random(size, dtype=dtype, scale=0.1)
            compare(
                f"add and norm {size}",
                run,
                reference,
                random(*rows, size, dtype=dtype),
                weight,
                random(*rows, size, dtype=dtype),
            )


def activations() -> None:
    for dtype in TOLERANCE:
        for width in (96, 2048, 14336):

            def reference(gate_up: Tensor) -> tuple[Tensor, ...]:
                gate, up = gate_up.chunk(2, dim=-1)
                return (F.silu(gate) * up,)

            compare(f"swiglu {width}", lambda x: (swiglu(x),), reference, random(33, 2, 2 * width, dtype=dtype))


def ropes() -> None:
    for dtype in TOLERANCE:
        for seq, batch, heads, kv, size in ((65, 2, 8, 2, 64), (40, 1, 32, 8, 128), (9, 3, 4, 4, 80)):
            tables = Rope(head_dim=size).tables(torch.arange(seq, device=DEVICE))

            def run(fused: Tensor, sizes: tuple[int, ...] = (heads, kv, size), tables=tables) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
                return rotate_fused(fused, sizes[:2], head_dim=sizes[2], tables=tables)  # type: ignore[arg-type]

            def reference(fused: Tensor, sizes: tuple[int, ...] = (heads, kv, size), tables=tables) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
                h, g, d = sizes
                q, k, v = (part.unflatten(-1, (-1, d)) for part in fused.split([h * d, g * d, g * d], dim=-1))
                return apply_rope(q, tables.cos, tables.sin), apply_rope(k, tables.cos, tables.sin), v

            both = [lambda x, f=f, t=tables: (f(x, t.cos, t.sin),) for f in (rotate_heads, apply_rope)]
            compare(f"rope of {heads} heads of {size}", *both, random(seq, batch, heads, size, dtype=dtype))
            compare(f"rope {heads}/{kv} of {size}", run, reference, random(seq, batch, (heads + 2 * kv) * size, dtype=dtype))


def losses() -> None:
    axis = Axis("tp", (0,), 0)
    for dtype in TOLERANCE:
        for columns, words in ((128, 100), (128256, 128256), (33024, 32999)):
            for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-3)):
                labels = torch.randint(words, (40, 2), device=DEVICE)
                labels[::7] = -100
                options = {"vocab_size": words, "label_smoothing": smoothing, "z_loss": z_loss}
                for reuse in (False, True):

                    def run(logits: Tensor, labels: Tensor = labels, options=options, reuse=reuse) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
                        own = logits * 1.0  # what the backward may overwrite
                        return (vocab_parallel_cross_entropy(own, labels, tp=axis, reuse_logits=reuse, **options),)

                    def reference(logits: Tensor, labels: Tensor = labels, options=options) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
                        real = logits[..., : options["vocab_size"]].flatten(0, 1)
                        flat, smooth = labels.flatten(), options["label_smoothing"]
                        loss = F.cross_entropy(real, flat, reduction="none", label_smoothing=smooth)
                        return ((loss + options["z_loss"] * real.logsumexp(-1).square() * (flat != -100)).view(labels.shape),)

                    name = f"cross entropy {columns} smoothing {smoothing} reuse {reuse}"
                    compare(name, run, reference, random(40, 2, columns, dtype=dtype, scale=3.0))


def sums() -> None:
    total, rows, x = random(96, 64, dtype=torch.float32), random(500, 96), random(10, 50, 64)
    expected = total + rows.float().t() @ x.flatten(0, 1).float()
    add_weight_gradient(total, rows, x)
    check("product into its sum", total, expected, 2e-5)
    put_weight_gradient(total.fill_(float("nan")), rows, x)
    check("product over its sum", total, rows.float().t() @ x.flatten(0, 1).float(), 2e-5)
    for width in (64, 4096):
        total, ids, values = (
            random(500, width, dtype=torch.float32),
            torch.randint(-1, 500, (900,), device=DEVICE),
            random(900, width),
        )
        ids[100:400] = 7
        kept = ids >= 0
        expected = total.double().index_add(0, ids[kept], values[kept].double())
        again = total.clone()
        add_rows(total, ids, values)
        add_rows(again, ids, values)
        check(f"rows into their sum {width}", total, expected, 2e-6)
        check("  the same each time", again, total, 0.0)


def attention() -> None:
    mesh = Mesh(device=DEVICE)
    core = CausalAttention(dropout=0.0, mesh=mesh)
    for seq, batch, heads, kv, size in ((1024, 2, 8, 2, 128), (2048, 1, 8, 8, 64), (77, 2, 4, 2, 64)):
        fused = random(seq, batch, (heads + 2 * kv) * size)

        def run(fused: Tensor, sizes: tuple[int, ...] = (heads, kv, size)) -> tuple[Tensor, ...]:
            h, g, d = sizes
            return (core(*(part.unflatten(-1, (-1, d)) for part in fused.split([h * d, g * d, g * d], dim=-1)), None),)

        def reference(fused: Tensor, sizes: tuple[int, ...] = (heads, kv, size)) -> tuple[Tensor, ...]:
            h, g, d = sizes
            parts = [part.unflatten(-1, (-1, d)).permute(1, 2, 0, 3) for part in fused.split([h * d, g * d, g * d], dim=-1)]
            q, k, v = parts[0], *(part.repeat_interleave(h // g, dim=1) for part in parts[1:])
            scores = (q @ k.transpose(-1, -2)) / d**0.5
            scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), float("-inf"))
            return ((scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2),)

        compare(f"attention {seq} {heads}/{kv} of {size}", run, reference, fused)


def models() -> None:
    """A small model's summed gradients over two micro-batches, with sums and without, against fp32."""
    shape = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 1000, "max_seq_len": 1024}
    for tied in (False, True):
        config = GPTConfig(**shape, ffn_hidden_size=512, tied_embeddings=tied)  # type: ignore[arg-type]
        tokens = torch.randint(1000, (2, 2, 1024), device=DEVICE)
        with use_mesh(Mesh(device=DEVICE)):
            exact, narrow = GPT(config), GPT(config, dtype=torch.bfloat16)
        for model in (exact, narrow):
            materialize(model, device=DEVICE, seed=3)
        optimizer = torch.optim.SGD(narrow.parameters(), lr=1.0)
        sharded = DistributedOptimizer(optimizer, narrow.named_parameters(), mesh=Mesh(device=DEVICE))
        for model in (exact, narrow):
            for micro in tokens:
                model(micro, labels=micro.roll(-1, 1)).mean().backward()
        for (name, a), b in zip(narrow.named_parameters(), exact.parameters(), strict=True):
            assert a.grad is not None
            assert a.grad.dtype == torch.float32
            error = float((a.grad - b.grad).norm() / b.grad.norm())
            print(f"{'passed' if error < 0.05 else 'FAILED'} model tied={tied} {name:45s} {error:.1e}", flush=True)
            if error >= 0.05:
                failed.append(name)
        sharded.close()


def milliseconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    torch.cuda._sleep(20_000_000)  # the host gets ahead, so that its own time does not count
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(9)] for _ in "se")
    for start, end in zip(starts, ends, strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))[4]


def speed() -> None:
    """Each kernel at the sizes of llama-8b-8l, 8192 tokens: milliseconds, and GB/s of what it has to move."""
    from lightning_megatron.kernels import cross_entropy, norm, rope
    from lightning_megatron.kernels import swiglu as glu

    n, h, f, v = 8192, 4096, 14336, 128256
    x, d, w = random(n, h), random(n, h), random(h)
    _, y, scales = norm.rms_norm_forward(x, d, w, eps=1e-5)
    gate_up, act = random(n, 2 * f), random(n, f)
    q, k, val = random(n, 1, 32, 128), random(n, 1, 8, 128), random(n, 1, 8, 128)
    tables = Rope(head_dim=128).tables(torch.arange(n, device=DEVICE))
    logits, ids, per_row = random(n, v), torch.randint(v, (n,), device=DEVICE), torch.rand(n, device=DEVICE)
    mine = torch.ones(n, dtype=torch.bool, device=DEVICE)
    table, rows = torch.zeros(v, h, device=DEVICE), random(n, 2 * f)
    wide = torch.zeros(2 * f, h, device=DEVICE)
    grads = {"lse": per_row + 12, "of_softmax": per_row, "of_target": -per_row, "of_all": None}
    cases: dict[str, tuple[Callable[[], object], float]] = {
        "norm forward": (lambda: norm.rms_norm_forward(x, None, w, eps=1e-5), 2 * n * h * 2),
        "add and norm forward": (lambda: norm.rms_norm_forward(x, d, w, eps=1e-5), 4 * n * h * 2),
        "norm backward": (lambda: norm.rms_norm_backward(d, y, summed=x, weight=w, scales=scales), 4 * n * h * 2),
        "swiglu forward": (lambda: glu.swiglu_forward(gate_up), 3 * n * f * 2),
        "swiglu backward": (lambda: glu.swiglu_backward(gate_up, act), 5 * n * f * 2),
        "rope": (lambda: rope.rotate_together(q, k, val, cos=tables.cos, sin=tables.sin, inverse=False), 2 * n * 48 * 128 * 2),
        "cross entropy forward": (lambda: cross_entropy.local_stats(logits, ids, mine, num_real=v, sums=False), n * v * 2),
        "cross entropy backward": (lambda: cross_entropy.gradient(logits, ids, **grads, num_real=v, out=logits), 2 * n * v * 2),
        "embedding into its sum": (lambda: add_rows(table, ids, x), n * h * (2 + 8)),
        "product (gate and up), alone": (lambda: rows.t() @ x, 0),
        "product (gate and up) into its sum": (lambda: add_weight_gradient(wide, rows, x), 0),
        "copy": (lambda: act.clone(), 2 * n * f * 2),
    }
    for programs in (2, 4, 8, 16):
        norm._PROGRAMS_PER_SM = programs
        time = milliseconds(lambda: norm.rms_norm_backward(d, y, summed=x, weight=w, scales=scales))
        print(f"norm backward, {programs} programs a SM {time:7.3f} ms", flush=True)
    for name, (run, num_bytes) in cases.items():
        time = milliseconds(run)
        print(f"{name:40s} {time:7.3f} ms {num_bytes / time / 1e6:7.0f} GB/s", flush=True)


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    for group in (norms, activations, ropes, losses, sums, attention, models):
        try:
            group()
        except Exception as error:
            failed.append(group.__name__)
            print(f"FAILED {group.__name__}: {type(error).__name__}: {error}", flush=True)
    if "--speed" in sys.argv:
        speed()
    print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
