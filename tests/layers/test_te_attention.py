"""Attention in 8 bits, in plain torch: against attention that nothing rounds, over steps, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.attention import Attention
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.rope import Rope, RopeTables
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, Scales, TeBackend
from lightning_megatron.layers.te_backend.attention import NarrowAttention, NarrowCoreAttention
from lightning_megatron.layers.te_backend.scales import remember
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


def test_one_launch_notes_no_slot_twice() -> None:
    core, scales = attention()
    scales.prepare(CPU)
    numbers = [torch.tensor([value]) for value in (1.0, 3.0, 2.0)]
    with pytest.raises(AssertionError, match="given twice"):  # on a GPU any of the three might be the last to write
        remember([core.slots.qkv] * 3, numbers)
    remember([core.slots.qkv, core.slots.out, core.slots.grad_out], numbers)
    assert [float(amax) for amax in scales.tensors[2]] == [1.0, 3.0, 2.0, 0.0, 0.0]


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

        def attend(self, given: Any, *args: Any, **kwargs: Any) -> Any:
            assert given[0].shape[0] % 16 == 0
            return super().attend(given, *args, **kwargs)

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


def rotated(recipe: Any = "delayed") -> tuple[Attention, TeBackend]:
    """A block with rotary positions after a first step, whose core hands its result to the linear behind it."""
    options = Fp8Options(recipe=recipe, attention=True)
    backend = TeBackend(PlainOperations(options), options)
    layer: Any = GPT(LLAMA, seed=5, backend=backend).layers[0]
    block: Attention = layer.attn
    tables = Rope(head_dim=8).tables(torch.arange(16))
    hidden = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(2))
    attend(block, hidden, tables)
    assert backend.scales is not None
    backend.scales.advance(lambda numbers: numbers)
    return block, backend


def attend(block: Attention, hidden: Tensor, tables: RopeTables) -> list[Tensor]:
    """The result, the input's gradient and the parameters'."""
    block.zero_grad()
    hidden = hidden.clone().requires_grad_()
    result = block(hidden, SequenceContext(16, 16, rope=tables))
    (result * torch.linspace(-1.0, 1.0, 64)).sum().backward()
    assert hidden.grad is not None
    return [result.detach(), hidden.grad, *(param.grad.clone() for param in block.parameters() if param.grad is not None)]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_result_that_is_handed_over_in_8_bits_is_the_one_that_is_rounded_twice(recipe: Any) -> None:
    tables = Rope(head_dim=8).tables(torch.arange(16))
    hidden = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(2))
    block, _ = rotated(recipe)
    core: Any = block.core
    with torch.no_grad():
        fused = block.qkv(hidden)
        core.announced(block.out)
        stand_in = core(fused, None, None, SequenceContext(16, 16, rope=tables), heads=(8, 4))
        assert stand_in.isnan().all()
        assert core.plain.handoff.take() is not None
    handed = attend(block, hidden, tables)
    core.part()
    apart = attend(block, hidden, tables)
    for one, other in zip(handed, apart, strict=True):  # factors are powers of two: in range, rounding again changes nothing
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
    assert torch.equal(handed[0], apart[0]) or recipe == "delayed"


def test_a_core_that_rotates_does_what_rotating_before_it_does() -> None:
    tables = Rope(head_dim=8).tables(torch.arange(16))
    hidden = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(2))
    block, _ = rotated()
    together = attend(block, hidden, tables)
    block.core.rotates = False  # type: ignore[assignment]
    for one, other in zip(attend(block, hidden, tables), together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_recompute_of_attention_alone_hands_nothing_over_and_of_a_layer_does() -> None:
    options = Fp8Options(attention=True)
    losses = []
    for names in (None, "attention_core", "layer", "layers.*.attn"):
        backend = TeBackend(PlainOperations(options), options)
        model = GPT(LLAMA, seed=5, backend=backend)
        recompute(model, None if names is None else Recompute(names))
        assert backend.scales is not None
        tokens = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            model.zero_grad()
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
            loss.backward()
            backend.scales.advance(lambda numbers: numbers)
        core: Any = model.layers[0].attn.core  # type: ignore[union-attr]
        assert (core.plain.handoff.slot is None) == (names == "attention_core")
        assert core.plain.handoff.narrow is None
        losses.append([float(loss.detach()), *(float(param.grad.double().sum()) for param in model.parameters())])  # type: ignore[union-attr]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-2, atol=1e-4)


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
    with pytest.raises(ValueError, match="needs heads of 128, these are of 8"):
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
