"""cuDNN's attention in 8 bits on a GPU: against the same in plain torch, against fp32, and its time; a line for each step.

python tests/gpu/fp8_attention.py            # right or wrong, then milliseconds of 8 and of 16 bits
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from lightning_megatron.initialize import materialize
from lightning_megatron.layers.rope import Rope
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, Scales, TeBackend
from lightning_megatron.layers.te_backend.attention import NarrowAttention
from lightning_megatron.layers.te_backend.library import load
from lightning_megatron.layers.te_backend.operations import Rotation
from lightning_megatron.layers.te_backend.scales import AttentionSlots
from lightning_megatron.layers.te_backend.te_operations import TeOperations
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig

NAMES = ("qkv", "out", "grad_out", "grad_scores", "grad_qkv")
AMAXES = (6.0, 4.0, 5e-5, 3e-3, 3e-4)  # that a first step might note
Sizes = tuple[int, int, int, int]


def relative(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    one, other = one.detach().float(), other.detach().float()
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))


def inputs(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of one tensor, as a model has them, and a small gradient."""
    length, batch, heads, groups = sizes
    torch.manual_seed(0)
    fused = torch.randn(length, batch, (heads + 2 * groups) * 128, device=device, dtype=torch.bfloat16)
    parts = fused.split([heads * 128, groups * 128, groups * 128], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in parts)
    return q, k, v, torch.randn_like(q).contiguous() * 1e-5


def fp32_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Causal attention of ``[S, B, h, d]`` and its gradients, in fp32."""
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.permute(1, 2, 0, 3) for x in wide)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, wide, grad.float())]


def against_plain(sizes: Sizes, device: torch.device) -> str:
    """The operations, twice: by assumed magnitudes, and by those that plain torch has met."""
    options = Fp8Options(attention=True)
    scales = Scales(options)
    slots = AttentionSlots.of(scales)
    scales.prepare(device)
    q, k, v, grad = inputs(sizes, device)
    fast, plain = TeOperations(options, device=device, fused=False), PlainOperations(options)
    expected = fp32_attention(q, k, v, grad)
    for name, amax in zip(NAMES, AMAXES, strict=True):
        getattr(slots, name).amax.fill_(amax)
    shown = []
    for _ in range(2):
        scales.advance(lambda numbers: numbers)
        made = [steps(ops, slots, (q, k, v, grad), expected) for ops in (plain, fast)]
        errors = [relative(one, other) for one, other in zip(made[1], expected, strict=True)]
        apart = [relative(one, other) for one, other in zip(*made, strict=True)]
        assert errors[0] < 0.1, errors
        assert max(errors[1:]) < 0.25, errors
        shown.append(" ".join(f"{error:.3f}" for error in errors) + f" of fp32, {max(apart):.3f} of plain torch")
    return "; ".join(shown)


def steps(
    ops: Any, slots: AttentionSlots, given: tuple[Tensor, Tensor, Tensor, Tensor], expected: list[Tensor]
) -> list[Tensor]:
    """Forward and backward, a line after each."""
    for name in NAMES:
        getattr(slots, name).amax.zero_()
    factors = {name: f"2^{int(getattr(slots, name).scale.log2())}" for name in NAMES}
    print(f"  {type(ops).__name__}, factors {factors}", flush=True)
    narrow, kept = ops.attend(given[:3], slots, rotation=None, record=True)
    out = ops.widened(narrow, given[0]).view(given[0].shape)
    torch.cuda.synchronize()
    print(f"    forward: {relative(out, expected[0]):.1e} of fp32, kept {[tuple(x.shape) for x in kept]}", flush=True)
    grads = ops.attend_backward(given[3], kept, slots, rotation=None)
    torch.cuda.synchronize()
    errors = [f"{relative(one, other):.1e}" for one, other in zip(grads, expected[1:], strict=True)]
    met = {name: f"{float(getattr(slots, name).amax):.2e}" for name in NAMES}
    print(f"    backward: {errors} of fp32, met {met}", flush=True)
    return [out, *grads]


def module(device: torch.device) -> str:
    """The module over three steps, at a length that is no multiple of 128: the first in 16 bits, and finite gradients."""
    options = Fp8Options(attention=True)
    scales = Scales(options)
    core = NarrowAttention(TeOperations(options, device=device, fused=False), scales, Mesh(device=device))
    *given, grad = inputs((1000, 2, 8, 2), device)
    expected = fp32_attention(*given, grad)
    shown = []
    for _ in range(3):
        q, k, v = (x.detach().clone().requires_grad_() for x in given)
        out = core(q, k, v, SequenceContext(1000, 1000))
        grads = torch.autograd.grad(out, (q, k, v), grad.flatten(2))
        errors = [relative(one.view_as(other), other) for one, other in zip((out, *grads), expected, strict=True)]
        print(f"  step: {[f'{error:.1e}' for error in errors]} of fp32", flush=True)
        assert max(errors) < (0.02 if not shown else 0.25), errors
        shown.append(max(errors))
        scales.advance(lambda numbers: numbers)
    return " ".join(f"{error:.3f}" for error in shown)


def rotating(sizes: Sizes, device: torch.device) -> str:
    """Rotating and rounding in one pass against two, forward and backward, bit for bit."""
    from lightning_megatron.kernels import rope_narrow

    print(f"  kernels are right: {rope_narrow.are_right(device)}", flush=True)
    options = Fp8Options(attention=True)
    scales = Scales(options)
    slots = AttentionSlots.of(scales)
    scales.prepare(device)
    for name, amax in zip(NAMES, AMAXES, strict=True):
        getattr(slots, name).amax.fill_(amax)
    scales.advance(lambda numbers: numbers)
    length, batch, heads, groups = sizes
    q, _, _, grad = inputs(sizes, device)
    fused = q.as_strided((length, batch, (heads + 2 * groups) * 128), (batch * q.stride(1), q.stride(1), 1))
    rotation = Rotation((heads, groups), Rope(head_dim=128).tables(torch.arange(length, device=device)))
    made = []
    for is_fused in (True, False):
        for name in NAMES:
            getattr(slots, name).amax.zero_()
        ops = TeOperations(options, device=device, fused=is_fused)
        narrow, kept = ops.attend(fused, slots, rotation=rotation, record=True)
        back = ops.attend_backward(grad, kept, slots, rotation=rotation)
        torch.cuda.synchronize()
        met = torch.cat([getattr(slots, name).amax.clone() for name in NAMES])
        made.append([*kept[:3], met, ops.widened(narrow, q), back])
    shown = []
    for name, one, other in zip(("q", "k", "v", "amax", "out", "gradient"), *made, strict=True):
        equal = float((one.flatten() == other.flatten()).float().mean())
        shown.append(f"{name} {equal:.4f} equal, {relative(one.float(), other.float()):.1e} apart")
        print(f"  {shown[-1]}", flush=True)
        assert equal > (0.9 if name != "amax" else 0.1), shown
        assert relative(one.float(), other.float()) < 0.02, shown
    return "; ".join(shown)


def milliseconds(run: Callable[[], Any], num: int = 10) -> float:
    """The median time of a call."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num)]
    for _ in range(3):
        run()
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[num // 2]


def block(device: torch.device) -> str:
    """A whole attention block of Llama-3-8B at 8192 tokens: 8-bit attention, its rotation and the handing over, and 16 bits."""
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 256}
    hidden = torch.randn(8192, 1, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    context = SequenceContext(8192, 8192, rope=Rope(head_dim=128).tables(torch.arange(8192, device=device)))
    shown = []
    for name, options, fused in (
        ("8 bits", Fp8Options(attention=True), True),
        ("8 bits, rotation apart", Fp8Options(attention=True), False),
        ("16 bits", Fp8Options(), True),
    ):
        backend = TeBackend(TeOperations(options, device=device, fused=fused), options)
        with use_mesh(Mesh(device=device)):
            made = GPT(GPTConfig(**sizes, max_seq_len=8192), dtype=torch.bfloat16, backend=backend)
        materialize(made, device=device, seed=3)
        attn: Any = made.layers[0].attn
        assert backend.scales is not None
        for _ in range(2):
            attn(hidden, context).sum().backward()
            backend.scales.advance(lambda numbers: numbers)
        out = attn(hidden, context)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward = milliseconds(lambda attn=attn: attn(hidden, context))
        both = milliseconds(lambda attn=attn: attn(hidden, context).backward(torch.ones_like(hidden)))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        shown.append(f"{name}: forward {forward:.3f} ms, with backward {both:.3f} ms, peak {peak:.0f} MiB")
        print(f"  {shown[-1]}", flush=True)
        del made, attn, out
    return "; ".join(shown)


def times(sizes: Sizes, device: torch.device) -> str:
    """Forward and backward of a layer's attention, casts included, in 8 bits and in 16."""
    options = Fp8Options(attention=True)
    scales = Scales(options)
    narrow = NarrowAttention(TeOperations(options, device=device, fused=False), scales, Mesh(device=device))
    wide = CausalAttention(dropout=0.0, mesh=Mesh(device=device))
    q, k, v, grad = inputs(sizes, device)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    context, shown = SequenceContext(sizes[0], sizes[0]), []
    torch.autograd.grad(narrow(q, k, v, context), (q, k, v), grad.flatten(2))
    scales.advance(lambda numbers: numbers)
    for name, core in (("8 bits", narrow), ("16 bits, neither with its rotation", wide)):
        out = core(q, k, v, context)
        forward = milliseconds(lambda core=core: core(q, k, v, context))
        backward = milliseconds(lambda out=out: torch.autograd.grad(out, (q, k, v), grad.flatten(2), retain_graph=True))
        shown.append(f"{name}: forward {forward:.3f} ms, backward {backward:.3f} ms")
    return "; ".join(shown)


def main() -> None:
    """Run all; a failure does not stop the others."""
    device = torch.device("cuda", 0)
    load()
    print(f"cuDNN {import_module('transformer_engine.pytorch.utils').get_cudnn_version()}", flush=True)
    cases: dict[str, Callable[[], str]] = {}
    for sizes in ((256, 2, 4, 2), (1024, 1, 8, 8), (2048, 1, 32, 8)):
        cases[f"operations {sizes}"] = lambda sizes=sizes: against_plain(sizes, device)
    for sizes in ((256, 2, 4, 2), (2048, 1, 32, 8)):
        cases[f"rotating {sizes}"] = lambda sizes=sizes: rotating(sizes, device)
    cases["block"] = lambda: block(device)
    cases["module"] = lambda: module(device)
    for sizes in ((8192, 1, 32, 8), (4096, 4, 32, 8)):
        cases[f"times {sizes}"] = lambda sizes=sizes: times(sizes, device)
    failed = []
    for name, run in cases.items():
        try:
            print(f"passed {name}: {run()}", flush=True)
        except Exception:
            failed.append(name)
            print(f"FAILED {name}: {traceback.format_exc(limit=8)}", flush=True)
    print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
