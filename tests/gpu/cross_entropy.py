"""Cross entropy with rows on chip (Hopper) against torch in fp32 and against the kernels that read a row twice; a line a case.

python tests/gpu/cross_entropy.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.kernels import cross_entropy, cross_entropy_held

DEVICE = torch.device("cuda", 0)
IGNORED = -100
failed: list[str] = []


def claim(name: str, is_so: bool, detail: str = "") -> None:
    print(f"{'passed' if is_so else 'FAILED'} {name:70s} {detail}", flush=True)
    if not is_so:
        failed.append(name)


def logits_and_labels(rows: int, columns: int, words: int, *, ignored: float, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    logits = (3.0 * torch.randn(rows, columns, device=DEVICE) + shift).bfloat16()
    labels = torch.randint(words, (rows,), device=DEVICE)
    labels[torch.rand(rows, device=DEVICE) < ignored] = IGNORED
    return logits, labels


def reference(logits: Tensor, labels: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Losses and gradients by torch in fp32."""
    x = logits.float().requires_grad_()
    real = x[:, : options["num_real"]]
    losses = F.cross_entropy(real, labels, reduction="none", ignore_index=IGNORED, label_smoothing=options["label_smoothing"])
    losses = losses + options["z_loss"] * real.logsumexp(-1).square() * (labels != IGNORED)
    (grad,) = torch.autograd.grad(losses.sum(), x)
    return losses.detach(), grad


def agrees(name: str, logits: Tensor, labels: Tensor, *, words: int, smoothing: float = 0.0, z_loss: float = 0.0) -> None:
    """Losses to 1e-5 of the largest; gradients within a step of bf16 of torch's, and of the other kernel's."""
    options = {"num_real": words, "ignore_index": IGNORED, "label_smoothing": smoothing, "z_loss": z_loss}
    claim(f"{name}: fits", cross_entropy_held.fits(logits, labels, ignore_index=IGNORED))
    found, other = logits.clone(), logits.clone()
    losses = cross_entropy_held.losses_with_gradient(found, labels, **options)
    torch.cuda.synchronize()
    swept = cross_entropy.losses_with_gradient(other, labels, **options)
    expected, grad = reference(logits, labels, options)
    for of, wanted in (("torch", expected), ("swept", swept)):
        error = float((losses - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))
        claim(f"{name}: losses, {of}", error < 1e-5, f"{error:.1e}")
    for of, wanted in (("torch", grad), ("swept", other.float())):
        # The last term is for columns where terms that nearly cancel are subtracted.
        off = (found.float() - wanted).abs() - wanted.abs() / 128
        claim(f"{name}: gradient, {of}", float(off.max()) < 1e-6, f"{float(off.max()):.1e}")
    zeros = not any(bool(part.any()) for part in (found[:, words:], found[labels == IGNORED], losses[labels == IGNORED]))
    claim(f"{name}: 0 where nothing counts", zeros)


def sizes() -> None:
    for rows, columns, words in ((1, 128256, 128256), (101, 128256, 128001), (40, 138240, 138233), (37, 8, 8), (70, 24, 17)):
        for smoothing, z_loss in ((0.0, 0.0), (0.0, 1e-3), (0.1, 1e-3)):
            logits, labels = logits_and_labels(rows, columns, words, ignored=0.2)
            name = f"{rows} x {words} of {columns}, {smoothing}, {z_loss}"
            agrees(name, logits, labels, words=words, smoothing=smoothing, z_loss=z_loss)


def borders() -> None:
    """Labels at the first and last columns of parts and of pieces of 16 bytes; rows far below 0, or all but gone."""
    columns, part = 128256, 128256 // 4
    logits, labels = logits_and_labels(9, columns, columns, ignored=0.0)
    labels.copy_(torch.tensor([0, 7, 8, part - 1, part, 2 * part, 3 * part - 1, 3 * part, columns - 1]))
    agrees("labels at borders", logits, labels, words=columns)
    logits, labels = logits_and_labels(40, columns, columns, ignored=0.1, shift=-200.0)
    agrees("far below 0", logits, labels, words=columns)
    logits, labels = logits_and_labels(40, columns, columns, ignored=0.0)
    logits[:, 300 : 3 * part] = float("-inf")
    agrees("-inf in two parts", logits, labels.remainder(300), words=columns)
    logits, labels = logits_and_labels(300, columns, columns, ignored=1.0)
    labels.fill_(IGNORED)
    agrees("no row counts", logits, labels, words=columns)


def limits() -> None:
    options = {"num_real": 128, "ignore_index": IGNORED, "label_smoothing": 0.0, "z_loss": 0.0}
    logits, labels = logits_and_labels(8, 128, 128, ignored=0.0)
    empty = cross_entropy_held.losses_with_gradient(logits[:0], labels[:0], **options)
    claim("no rows, no losses", empty.shape == (0,))
    logits[3, 5] = float("nan")
    losses = cross_entropy_held.losses_with_gradient(logits, labels, **options)
    bad = torch.arange(8, device=DEVICE) == 3
    claim("a NaN fills its loss, and no other", bool((losses.isnan() == bad).all()))
    claim("a NaN fills its row, and no other", bool((logits.isnan() == bad[:, None]).all()))
    fits = cross_entropy_held.fits
    wide, odd = (torch.empty(2, n, device=DEVICE, dtype=torch.bfloat16) for n in (138248, 12))
    shifted = torch.empty(2 * 128 + 1, device=DEVICE, dtype=torch.bfloat16)[1:].view(2, 128)
    for name, given in (("too wide", wide), ("half a piece", odd), ("not aligned", shifted), ("fp32", logits[:2].float())):
        claim(f"{name}: does not fit", not fits(given, labels[:2], ignore_index=IGNORED))


def repeats() -> None:
    """Many rows over each cluster, again and again: the same bits each time, also out of a graph."""
    columns = 128256
    logits, labels = logits_and_labels(2049, columns, columns, ignored=0.1)
    options = {"num_real": columns, "ignore_index": IGNORED, "label_smoothing": 0.0, "z_loss": 0.0}
    first = logits.clone()
    losses = cross_entropy_held.losses_with_gradient(first, labels, **options)
    same = True
    for copy_bytes in (1 << 17, 1 << 14, 1 << 12, 1 << 17):
        again = logits.clone()
        other = cross_entropy_held.losses_with_gradient(again, labels, copy_bytes=copy_bytes, **options)
        same = same and bool((other == losses).all()) and bool((again == first).all())
    claim("the same bits each time", same)
    again, graph = logits.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other = cross_entropy_held.losses_with_gradient(again, labels, **options)
    graph.replay()
    claim("the same bits out of a graph", bool((other == losses).all()) and bool((again == first).all()))


def main() -> None:
    torch.manual_seed(0)
    for group in (limits, sizes, borders, repeats):
        try:
            group()
        except Exception as error:
            failed.append(group.__name__)
            print(f"FAILED {group.__name__}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
