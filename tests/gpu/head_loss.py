"""Head and loss on CUDA against plain torch in fp32, or the speed of each way to sweep logits. Prints a line a case.

python tests/gpu/head_loss.py [--speed]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.kernels import cross_entropy as kernels
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.tensor_parallel.chunked_loss import head_cross_entropy
from lightning_megatron.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from lightning_megatron.tensor_parallel.embedding import vocab_logits
from lightning_megatron.weight_gradients import open_sum
from tests.gpu.kernels import DEVICE, TOLERANCE, check, compare, failed, milliseconds, random


def heads() -> None:
    """Head and loss in one function: gradients are in the logits before the factors of the losses are known."""
    for words, columns in ((128256, 128256), (32999, 33024), (1001, 1001), (100, 128)):
        for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-3)):
            for dtype in TOLERANCE:
                labels = torch.randint(words, (40, 2), device=DEVICE)
                labels[::7] = -100
                given = random(40, 2, 256, dtype=dtype), random(columns, 256, dtype=dtype, scale=0.1)
                options = {"vocab_size": words, "label_smoothing": smoothing, "z_loss": z_loss}

                def run(hidden: Tensor, weight: Tensor, labels: Tensor = labels, options=options) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
                    return (head_cross_entropy(hidden, weight, labels, mesh=Mesh(device=DEVICE), **options),)

                def reference(hidden: Tensor, weight: Tensor, labels: Tensor = labels, options=options) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
                    real = F.linear(hidden, weight[: options["vocab_size"]]).flatten(0, 1)
                    flat, smooth = labels.flatten(), options["label_smoothing"]
                    loss = F.cross_entropy(real, flat, reduction="none", label_smoothing=smooth)
                    return ((loss + options["z_loss"] * real.logsumexp(-1).square() * (flat != -100)).view(labels.shape),)

                compare(f"head and loss {columns} smoothing {smoothing}", run, reference, *given)


def swept_rows() -> None:
    """More rows than programs, against torch: losses and gradients over the logits."""
    for words, columns in ((128256, 128256), (151643, 151936), (32000, 32000), (50257, 50304), (8200, 8208)):
        for smoothing, z_loss, dtype in ((0.0, 0.0, torch.bfloat16), (0.1, 1e-3, torch.bfloat16), (0.1, 1e-3, torch.float32)):
            logits = random(700, columns, dtype=dtype, scale=3.0)
            labels = torch.randint(words, (700,), device=DEVICE)
            labels[::7] = -100
            logits[7] = float("nan")  # in a row that does not count
            real = logits[:, :words].float().index_fill(0, torch.tensor([7], device=DEVICE), 0.0).requires_grad_()
            losses = F.cross_entropy(real, labels, reduction="none", label_smoothing=smoothing)
            losses = losses + z_loss * real.logsumexp(-1).square() * (labels != -100)
            (slopes,) = torch.autograd.grad(losses.sum(), real)
            for sweep in (kernels.LOSSES, kernels.Sweep(8, 4, 2)):
                own = logits.clone()
                terms = {"num_real": words, "ignore_index": -100, "label_smoothing": smoothing, "z_loss": z_loss}
                found = kernels.losses_with_gradient(own, labels, **terms, sweep=sweep)  # type: ignore[arg-type]
                name = f"{sweep.warps} {columns} {dtype} {smoothing}"
                check(f"losses {name}", found, losses, 2e-5)
                check(f"slopes {name}", own[:, :words], slopes, 5e-3 if dtype == torch.bfloat16 else 2e-5)
                # Small probabilities count as well.
                check(f"roots {name}", own[:, :words].float().abs().sqrt(), slopes.abs().sqrt(), 5e-3)
                check(f"padding {name}", own[:, words:].float().sum() + 1.0, torch.ones((), device=DEVICE), 0.0)
            del real, slopes, own, logits


def sweep_speed() -> None:
    """Ways to sweep the logits of llama-8b-8l, 8192 tokens."""
    n, v = 8192, 128256
    logits, ids = random(n, v), torch.randint(v, (n,), device=DEVICE)
    mine = torch.ones(n, dtype=torch.bool, device=DEVICE)
    time = milliseconds(partial(kernels.local_stats, logits, ids, mine, num_real=v, sums=False))
    print(f"stats  {kernels.STATS!s:60s} {time:7.3f} ms {n * v * 2 / time / 1e6:7.0f} GB/s", flush=True)
    terms = {"num_real": v, "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
    for warps, steps, programs in ((32, 4, 0), (16, 4, 0), (32, 4, 1)):
        sweep = kernels.Sweep(warps, steps, programs)
        # Each run takes the last one's gradients for logits: as many bytes, and other numbers.
        time = milliseconds(partial(kernels.losses_with_gradient, logits, ids, **terms, sweep=sweep))  # type: ignore[arg-type]
        print(f"losses {sweep!s:60s} {time:7.3f} ms {2 * n * v * 2 / time / 1e6:7.0f} GB/s of read and write", flush=True)
    x, factors = random(n, 4096), torch.rand(n, device=DEVICE)
    print(f"scaled rows {milliseconds(partial(kernels.scale_rows, x, factors, out=x)):7.3f} ms", flush=True)


def head_speed() -> None:
    """Head and loss with their backward, by two functions and by one."""
    n, h, v = 8192, 4096, 128256
    x, weight = random(n, 1, h), torch.nn.Parameter(random(v, h, scale=0.02))
    labels = torch.randint(v, (n, 1), device=DEVICE)
    weight.grad_dtype = None  # any
    weight.grad = torch.zeros(v, h, device=DEVICE)
    open_sum(weight, weight.grad)
    axis, mesh = Axis("tp", (0,), 0), Mesh(device=DEVICE)
    x.requires_grad_()

    def before() -> None:
        made = vocab_logits(x, weight, mesh)
        vocab_parallel_cross_entropy(made, labels, tp=axis, vocab_size=v, reuse_logits=True).mean().backward()

    def now() -> None:
        head_cross_entropy(x, weight, labels, mesh=mesh, vocab_size=v).mean().backward()

    for name, run in (("head and loss, before", before), ("head and loss", now), ("again, before", before), ("again", now)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held, time = torch.cuda.memory_allocated(), milliseconds(run)
        peak = (torch.cuda.max_memory_allocated() - held) / 2**20
        print(f"{name:40s} {time:7.3f} ms, peak {peak:.0f} MiB above what is held", flush=True)


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    for group in (sweep_speed, head_speed) if "--speed" in sys.argv else (heads, swept_rows):
        try:
            group()
        except Exception as error:
            failed.append(group.__name__)
            print(f"FAILED {group.__name__}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
