"""Attention in 8 bits, in plain torch: against attention that nothing rounds, over steps, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, Scales, TeBackend
from lightning_megatron.layers.te_backend.attention import NarrowAttention, NarrowCoreAttention
from lightning_megatron.layers.te_backend.te_attention import _apart, _joined
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.strategy.options import check_fp8
from lightning_megatron.testing import run_distributed

CPU = torch.device("cpu")
LLAMA = GPTConfig(
    num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, ffn_hidden_size=64, vocab_size=96, max_seq_len=32, init_std=0.1
)


def attention(recipe: Any = "delayed") -> tuple[NarrowAttention, Scales]:
    options = Fp8Options(recipe=recipe, attention=True)
    scales = Scales(options)
    return NarrowAttention(PlainOperations(options), scales, Mesh()), scales


def heads(length: int = 24) -> list[Tensor]:
    """Queries, keys, values of two rows, four heads and two groups, and a gradient, of very different sizes."""
    generator = torch.Generator().manual_seed(7)
    sizes, scales = (4, 2, 2, 4), (0.5, 2.0, 0.05, 1e-5)
    drawn = [torch.randn(length, 2, num, 16, generator=generator) * scale for num, scale in zip(sizes, scales, strict=True)]
    return [*drawn[:3], drawn[3].flatten(2)]


def run(core: torch.nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """The result and the three gradients."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    result = core(q, k, v, SequenceContext(q.shape[0], q.shape[0]))
    return [result.detach(), *torch.autograd.grad(result, (q, k, v), inputs[3])]


def relative(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_first_step_attends_in_16_bits_and_later_ones_within_8_bit_rounding(recipe: Any) -> None:
    core, scales = attention(recipe)
    expected = run(CausalAttention(dropout=0.0, mesh=Mesh()), heads())
    assert all(torch.equal(one, other) for one, other in zip(run(core, heads()), expected, strict=True))
    for _ in range(2):  # by the bound of the first step, then by what the second has met
        scales.advance(lambda numbers: numbers)
        found = run(core, heads())
        errors = [relative(one, other) for one, other in zip(found, expected, strict=True)]
        assert 0.0 < errors[0] < 0.07, errors  # e4m3: 3 bits of mantissa
        assert max(errors[1:]) < 0.16, errors  # e5m2: 2 bits


def test_magnitudes_of_the_first_step_bound_those_of_the_second() -> None:
    core, scales = attention()
    run(core, heads())
    noted = [float(amax) for amax in scales.tensors[2]]
    scales.advance(lambda numbers: numbers)
    run(core, heads())
    met = [float(amax) for amax in scales.tensors[2]]
    for name, before, after in zip(("qkv", "out", "grad_out", "grad_scores", "grad_qkv"), noted, met, strict=True):
        assert after <= before * (1.0 if name in ("qkv", "grad_out", "grad_scores") else 1.1), name
        assert after > before * (2.0**-12 if name == "grad_scores" else 0.9), name


def test_evaluation_leaves_no_trace_in_the_factors_of_attention() -> None:
    core, scales = attention()
    for _ in range(2):
        with torch.no_grad():
            core(*heads()[:3], SequenceContext(24, 24))
        assert all(float(amax) == 0.0 for amax in scales.tensors[2])
        run(core, heads())
        scales.advance(lambda numbers: numbers)


def test_positions_that_are_added_behind_change_nothing() -> None:
    class OnlyMultiples(PlainOperations):
        attention_multiple = 16

        def attend(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert q.shape[0] % 16 == 0
            return super().attend(q, k, v, *args, **kwargs)

    core, scales = attention()
    run(core, heads())
    scales.advance(lambda numbers: numbers)
    expected = run(core, heads())
    core.operations = OnlyMultiples(scales.options)
    for one, other in zip(run(core, heads()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_a_model_trains_with_8_bit_attention_as_without() -> None:
    losses = []
    for narrow in (False, True):
        options = Fp8Options(attention=narrow)
        backend = TeBackend(PlainOperations(options), options)
        model = GPT(LLAMA, seed=5, backend=backend)
        tokens = torch.randint(96, (4, 17), generator=torch.Generator().manual_seed(3))
        found = []
        for _ in range(6):
            model.zero_grad()
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
            loss.backward()
            found.append(float(loss.detach()))
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.03 * param.grad  # type: ignore[operator]
            assert backend.scales is not None
            backend.scales.advance(lambda numbers: numbers)
        losses.append(found)
    assert losses[0][0] == losses[1][0]
    assert losses[0][1:] != losses[1][1:]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0.0)
    assert losses[0][-1] < losses[0][0] - 0.3


def test_neighbours_in_one_tensor_are_joined_without_a_copy() -> None:
    fused = torch.randn(6, 2, (4 + 2 + 2) * 8)
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in fused.split([32, 16, 16], dim=-1))
    joined = _joined(q, k, v)
    assert joined.data_ptr() == fused.data_ptr()
    assert torch.equal(joined, fused.view(12, 64))
    assert torch.equal(_joined(q.clone(), k, v), joined)
    assert torch.equal(_joined(q, v, k), torch.cat([x.reshape(12, -1) for x in (q, v, k)], dim=1))
    data = torch.randint(256, (12, 64), dtype=torch.uint8)
    parts = _apart(data, [q.shape, k.shape, v.shape])
    assert torch.equal(torch.cat([part.reshape(12, -1) for part in parts], dim=1), data)


# What is refused


def test_dropout_and_cut_sequences_are_refused_when_the_model_is_built() -> None:
    def build(cp: int) -> None:
        options = Fp8Options(attention=True)
        mesh = Mesh.create(Parallelism(cp=cp), device=CPU)
        dropout = 0.1 if cp == 1 else 0.0
        says = "attention_dropout=0.1" if cp == 1 else "cp=2 cuts them"
        with pytest.raises(ValueError, match=says):
            TeBackend(PlainOperations(options), options).core_attention(dropout=dropout, mesh=mesh)

    run_distributed(build, 1, 1)
    run_distributed(build, 2, 2)


def test_patterns_and_sizes_that_there_is_no_kernel_for_are_refused_before_training() -> None:
    class Heads128(PlainOperations):
        attention_head_dim = 128

    options = Fp8Options(attention=True)

    def checked(config: GPTConfig, operations: PlainOperations) -> None:
        module = L.LightningModule()
        module.model = GPT(config, backend=TeBackend(operations, options))
        check_fp8(module, options)

    checked(LLAMA, PlainOperations(options))
    with pytest.raises(ValueError, match="needs heads of 128, and these are of 8"):
        checked(LLAMA, Heads128(options))
    with pytest.raises(ValueError, match="sliding_window=4"):
        checked(replace(LLAMA, sliding_window=4), PlainOperations(options))
    with pytest.raises(ValueError, match="causal=False"):
        checked(replace(LLAMA, causal=False), PlainOperations(options))
    core = NarrowCoreAttention(operations=PlainOperations(options), scales=Scales(options), dropout=0.0, mesh=Mesh())
    pattern = replace(SequenceContext(24, 24).pattern, causal=False)
    with pytest.raises(ValueError, match="packed documents"):
        core(*heads()[:3], SequenceContext(24, 24, pattern=pattern))


def test_a_chip_without_attention_in_8_bits_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"fp8_attention=True needs FP8 attention \(Hopper, Blackwell\).*L40 has 8.9"):
        Fp8Options(attention=True).check_chip((8, 9), "L40")
    Fp8Options(attention=True).check_chip((9, 0), "H200")
