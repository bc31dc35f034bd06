"""The fused Adam kernel and the norm kernel on CUDA against plain torch; prints a line a case.

python3 tests/gpu/optimizer.py
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.kernels.adam import adam_
from lightning_megatron.kernels.adam_shard import AdamOptions, AdamShard
from lightning_megatron.kernels.main_narrow import NarrowMains
from lightning_megatron.kernels.sum_of_squares import SumsOfSquares
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig, float8
from lightning_megatron.optim.fused_adam import plain_update
from lightning_megatron.optim.narrow import PlainRounding
from lightning_megatron.optim.remainder import Remainder

MOMENTS = (torch.float32, torch.bfloat16, float8.DTYPE)
OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}


def tensors(numel: int, kind: str, moments: torch.dtype) -> dict[str, Any]:
    """What one shard has, the same in every call."""
    torch.manual_seed(numel)
    wide = torch.randn(numel, device="cuda")
    value = wide.clone() if kind == "fp32" else wide.bfloat16()
    main: Tensor | None = None
    ties = None
    if kind == "copy":
        main = wide
    elif kind == "remainder":
        rest = Remainder(numel, device=value.device)
        rest.split(wide, value, 0, numel)
        main, ties = rest.low, rest.ties
    first, second = torch.randn(numel, device="cuda") * 0.1, torch.rand(numel, device="cuda") * 0.1
    grad = torch.randn(numel, device="cuda")
    in_fp8 = moments == float8.DTYPE
    kept, scales = float8.narrowed(first) if in_fp8 else (first.to(moments), None)
    held = {"value": value, "main": main, "ties": ties, "grad": grad, "exp_avg": kept, "exp_avg_scale": scales}
    return held | {"exp_avg_sq": second.to(torch.bfloat16 if in_fp8 else moments)}


def wide_of(held: dict[str, Any]) -> Tensor:
    """The value that a shard stands for, in fp32."""
    if held["ties"] is not None:
        return Remainder.of(held["main"], held["ties"]).join(held["value"], 0, held["value"].numel())
    return (held["value"] if held["main"] is None else held["main"]).float()


def kernel_against_plain() -> int:
    """Number of failed cases."""
    failed = 0
    kinds, sizes = ("fp32", "copy", "remainder", "none"), (1, 8, 13, 4096, 1_000_003)
    for kind, moments, decoupled, scaled in product(kinds, MOMENTS, (True, False), (True, False)):
        worst = 0.0
        for numel in sizes:
            found, expected = tensors(numel, kind, moments), tensors(numel, kind, moments)
            scale = torch.full((), 0.5, device="cuda") if scaled else None
            for step in range(1, 4):
                rates = torch.tensor([1 / (1 - 0.9**step), (1 - 0.99**step) ** -0.5], device="cuda")
                for update, held in ((adam_, found), (plain_update, expected)):
                    update(AdamShard(**held), AdamOptions(decoupled=decoupled, **OPTIONS), scale=scale, rates=rates)
            worst = max(worst, float((wide_of(found) - wide_of(expected)).abs().max()))
            if kind in ("copy", "remainder"):
                assert torch.equal(found["value"], wide_of(found).bfloat16()), "the weight is not the rounded main value"
        limit = 2e-2 if kind == "none" or moments != torch.float32 else 2e-6
        failed += worst > limit
        print(
            f"{'FAILED' if worst > limit else 'passed'} {kind:10s} {moments} decoupled={decoupled} scaled={scaled} {worst:.1e}"
        )
    return failed


def nan_changes_nothing() -> int:
    """A step whose factor is NaN leaves every tensor of a shard as it was."""
    failed = 0
    rates = torch.ones(2, device="cuda")
    for kind, moments in product(("fp32", "copy", "remainder", "none"), MOMENTS):
        held, before = tensors(100_003, kind, moments), tensors(100_003, kind, moments)
        for scale in (torch.full((), 0.5, device="cuda"), torch.full((), float("nan"), device="cuda")):
            for some in (held, before) if scale == 0.5 else (held,):
                adam_(AdamShard(**some), AdamOptions(decoupled=True, **OPTIONS), scale=scale, rates=rates)
        bits = [(held[name], value) for name, value in before.items() if value is not None]
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in bits)
        failed += not same
        print(f"{'passed' if same else 'FAILED'} NaN changes nothing, {kind} {moments}")
    return failed


def remainders_are_exact() -> int:
    """50 steps on remainders and on fp32 copies."""
    failed = 0
    for moments in MOMENTS:
        one, other = tensors(1_000_003, "copy", moments), tensors(1_000_003, "remainder", moments)
        for step in range(1, 51):
            rates = torch.tensor([1 / (1 - 0.9**step), (1 - 0.99**step) ** -0.5], device="cuda")
            grad = torch.randn(1_000_003, device="cuda")
            for held in (one, other):
                adam_(AdamShard(**(held | {"grad": grad})), AdamOptions(decoupled=True, **OPTIONS), scale=None, rates=rates)
        same = torch.equal(wide_of(one), wide_of(other)) and torch.equal(one["value"], other["value"])
        failed += not same
        print(f"{'passed' if same else 'FAILED'} remainders bit-equal to copies after 50 steps, moments {moments}")
    return failed


def norms() -> int:
    """Sums of squares against fp64."""
    failed, odd = 0, (1, 5, 4096, 4097, 3_000_001, 50_000_000, 0)
    for name, sizes in (("aligned", (16, 64, 4096, 4112, 3_000_000, 50_000_000, 0)), ("odd", odd)):
        parts = [torch.randn(n, device="cuda") for n in sizes]
        sums = SumsOfSquares(parts, torch.device("cuda"))
        found = sums()
        expected = torch.stack([part.double().square().sum() for part in parts])
        again = sums()
        error = float(((found - expected).abs() / expected.clamp(min=1e-9)).max())
        passed = error < 1e-6 and torch.equal(found, again)
        parts[3][17] = float("nan")
        passed &= torch.isfinite(sums()).tolist() == [True] * 3 + [False] + [True] * 3
        failed += not passed
        print(f"{'passed' if passed else 'FAILED'} sums of squares, {name} sizes {error:.1e}")
    return failed


def narrow_weights() -> int:
    """Main values rounded to 8 bits by the kernel and in plain torch, with factors of the step before that were wrong."""
    failed, device = 0, torch.device("cuda")
    for name, sizes in (("aligned", (64, 32768, 100_000, 5_000_000)), ("odd", (1, 13, 32769, 1_000_003))):
        torch.manual_seed(len(name))
        numbers = [0, 1, 1, 3]  # two parts of one weight, and one without a part
        wide = [torch.randn(size, device=device) * 10.0**power for power, size in enumerate(sizes, -2)]
        narrow = [torch.zeros((2, size), dtype=torch.uint8, device=device) for size in sizes]
        made = [NarrowMains(list(zip(wide, (pair[0] for pair in narrow), numbers, strict=True)), 4, device)]
        made += [PlainRounding(list(zip(wide, (pair[1] for pair in narrow), numbers, strict=True)), 4, device)]
        before, factors = (
            torch.tensor([1.0, 4.0, 1.0, 8.0], device=device),
            torch.tensor([2.0**9, 4.0, 1.0, 8.0], device=device),
        )
        largest = [one.round(before).clone() for one in made]
        for one in made:
            one.round_again(factors, before)
        different = [int((pair[0] != pair[1]).sum()) for pair in narrow]
        same = torch.equal(*largest) and not any(different)
        failed += not same
        print(f"{'passed' if same else 'FAILED'} main values in 8 bits, {name} sizes: bytes that differ {different}")
    return failed


def whole_steps() -> int:
    """The distributed optimizer, fused and by torch's own AdamW."""
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300, device="cuda", dtype=torch.bfloat16) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        config = DistributedOptimizerConfig(fused_adam=fused)
        sharded = DistributedOptimizer(
            optimizer, model.named_parameters(), mesh=Mesh(device=torch.device("cuda", 0)), config=config
        )
        for step in range(10):
            x = torch.randn(64, 300, generator=torch.Generator().manual_seed(step)).cuda().bfloat16()
            model(x).float().square().sum().backward()
            sharded.reduce_gradients()
            sharded.finish_gradients(num_tokens=torch.tensor(64.0, device="cuda"), defer=True)
            sharded.clip_by_norm(1.0)
            sharded.step()
            sharded.update_parameters()
            sharded.wait_parameters()
        results.append([shard.main.detach().clone() for shard in sharded.shards])
    worst = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    print(f"{'passed' if worst < 1e-4 else 'FAILED'} ten whole steps, fused against torch's own: {worst:.1e}")
    return worst >= 1e-4


if __name__ == "__main__":
    failures = kernel_against_plain() + nan_changes_nothing() + remainders_are_exact() + norms()
    failures += narrow_weights() + whole_steps()
    print(f"{failures} failed")
    sys.exit(failures > 0)
