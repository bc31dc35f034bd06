from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.initialize import load_unsharded, materialize
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig, shift_labels
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.model import StagePart, ownership, run_part
from lightning_megatron.testing import run_distributed
from tests.models.gpt_reference import assembled, placed, random_weights, reference_logits, reference_losses

SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 8, "vocab_size": 45, "max_seq_len": 9, "vocab_multiple": 4}
GPT2_STYLE = GPTConfig(
    **SMALL,
    position="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
    label_smoothing=0.1,
)
LLAMA_STYLE = GPTConfig(**SMALL, num_kv_heads=2, ffn_hidden_size=48, z_loss=1e-2, rope_theta=500.0)
QK_NORM_ONE_KV_HEAD = GPTConfig(**SMALL, num_kv_heads=1, ffn_hidden_size=48, qk_norm=True, qkv_bias=True, head_dim=6)
CONFIGS = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE, "qk_norm": QK_NORM_ONE_KV_HEAD}
CPU = torch.device("cpu")


def batch(config: GPTConfig, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, shifted labels with some -100, and a weight for each loss; batch of 3."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocab_size, (3, seq_len), generator=generator)
    labels = shift_labels(tokens)
    labels[1, : seq_len // 2] = -100
    return tokens, labels, torch.rand(3, seq_len, generator=generator, dtype=torch.float64)


def gpt_on(mesh: Mesh, config: GPTConfig, seed: int = 3) -> GPT:
    with use_mesh(mesh):
        model = GPT(config, dtype=torch.float64)
    assert all(p.is_meta for p in model.parameters())
    materialize(model, device=CPU, seed=seed)
    return model


def run_gpt(config: GPTConfig, weights: dict[str, Tensor], parallelism: Parallelism, seq_len: int) -> dict[str, Any]:
    """Losses, logits, and the gradients of the weighted loss sum, taken through either."""
    mesh = Mesh.create(parallelism, device=CPU)
    model = gpt_on(mesh, config)
    load_unsharded(model, weights)
    tokens, labels, loss_weights = batch(config, seq_len)
    losses = model(tokens, labels=labels)
    (losses * loss_weights).sum().backward()
    through_losses = placed(model, mesh, grads=True)
    model.zero_grad()
    logits = model(tokens)
    (reference_losses(config, logits, labels) * loss_weights).sum().backward()
    through_logits = placed(model, mesh, grads=True)
    return {
        "losses": losses.detach(),
        "logits": logits.detach(),
        "through_losses": through_losses,
        "through_logits": through_logits,
    }


def layouts() -> list[tuple[int, bool]]:
    return [(1, True), (2, True), (2, False), (4, True), (4, False)]


@pytest.mark.parametrize(("tp", "sequence_parallel"), layouts())
@pytest.mark.parametrize("name", list(CONFIGS))
def test_losses_logits_and_all_gradients_equal_plain_torch_on_one_process(name: str, tp: int, sequence_parallel: bool) -> None:
    config, seq_len = CONFIGS[name], 8
    check_against_reference(config, Parallelism(tp=tp, sequence_parallel=sequence_parallel), seq_len)


@pytest.mark.parametrize("seq_len", [1, 7, 9])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sequences_that_tp_does_not_divide_give_the_same_up_to_max_seq_len(name: str, seq_len: int) -> None:
    check_against_reference(CONFIGS[name], Parallelism(tp=4), seq_len)


def check_against_reference(config: GPTConfig, parallelism: Parallelism, seq_len: int) -> None:
    weights = random_weights(config)
    tokens, labels, loss_weights = batch(config, seq_len)
    leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
    logits = reference_logits(config, leaves, tokens)
    losses = reference_losses(config, logits, labels)
    (losses * loss_weights).sum().backward()

    if parallelism.tp == 1:
        results = [run_gpt(config, weights, parallelism, seq_len)]
    else:
        results = run_distributed(run_gpt, parallelism.tp, config, weights, parallelism, seq_len)
    for result in results:
        assert_close(result["losses"], losses, rtol=1e-10, atol=1e-10)
        assert_close(result["logits"], logits, rtol=1e-10, atol=1e-10)
        assert (result["losses"][labels == -100] == 0).all()
    for way in ("through_losses", "through_logits"):
        grads = assembled([result[way] for result in results])
        assert grads.keys() == leaves.keys()
        for key, grad in grads.items():
            expected = leaves[key].grad
            assert expected is not None
            assert_close(grad, expected, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", list(CONFIGS))
def test_first_weights_are_bitwise_the_same_at_every_tp(name: str) -> None:
    config = CONFIGS[name]

    def first_weights(tp: int) -> Any:
        mesh = Mesh.create(Parallelism(tp=tp), device=CPU)
        return placed(gpt_on(mesh, config), mesh, grads=False)

    expected = assembled([placed(GPT(config, seed=3, dtype=torch.float64), Mesh(), grads=False)])
    for tp in (2, 4):
        values = assembled(run_distributed(first_weights, tp, tp))
        assert all(torch.equal(values[key], expected[key]) for key in expected)
        assert values.keys() == expected.keys()


def test_first_weights_have_the_configured_spread_and_residual_projections_a_smaller_one() -> None:
    config = GPTConfig(num_layers=8, hidden_size=128, num_heads=4, vocab_size=512, max_seq_len=8, init_std=0.05)
    weights = dict(GPT(config, seed=0).named_parameters())
    assert weights["layers.3.attn.qkv.weight"].std().item() == pytest.approx(0.05, rel=0.03)
    assert weights["layers.3.attn.out.weight"].std().item() == pytest.approx(0.05 / 4, rel=0.03)
    assert weights["layers.3.mlp.down.weight"].std().item() == pytest.approx(0.05 / 4, rel=0.03)
    assert not torch.equal(weights["layers.3.attn.qkv.weight"], weights["layers.4.attn.qkv.weight"])


def test_hidden_dropout_without_sequence_parallelism_draws_the_masks_of_one_rank() -> None:
    config = GPTConfig(**SMALL, num_kv_heads=2, hidden_dropout=0.3)

    def losses(tp: int) -> Tensor:
        model = gpt_on(Mesh.create(Parallelism(tp=tp, sequence_parallel=False), device=CPU), config)
        torch.manual_seed(11)
        tokens, labels, _ = batch(config, 8)
        return model(tokens, labels=labels).detach()

    expected = losses(1)
    for got in run_distributed(losses, 2, 2):
        assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_with_all_dropouts_tp_ranks_agree_on_the_loss_and_on_the_generator_afterwards() -> None:
    config = GPTConfig(**SMALL, num_kv_heads=2, hidden_dropout=0.3, attention_dropout=0.3)

    def losses() -> tuple[Tensor, Tensor]:
        model = gpt_on(Mesh.create(Parallelism(tp=2), device=CPU), config)
        tokens, labels, _ = batch(config, 8)
        return model(tokens, labels=labels).detach(), torch.get_rng_state()

    (first, first_state), (second, second_state) = run_distributed(losses, 2)
    assert torch.equal(first, second)
    assert torch.equal(first_state, second_state)


def test_a_gpt_runs_in_the_dtype_of_its_parameters_inside_autocast() -> None:
    model = GPT(LLAMA_STYLE, seed=0)
    tokens, labels, _ = batch(LLAMA_STYLE, 8)
    expected = model(tokens, labels=labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(tokens, labels=labels), expected)


def test_bfloat16_parameters_give_losses_in_fp32_near_those_of_fp32() -> None:
    tokens, labels, _ = batch(LLAMA_STYLE, 8)
    expected = GPT(LLAMA_STYLE, seed=0)(tokens, labels=labels)
    losses = GPT(LLAMA_STYLE, seed=0, dtype=torch.bfloat16)(tokens, labels=labels)
    assert losses.dtype == torch.float32
    assert_close(losses, expected, rtol=1e-2, atol=1e-2)


def test_both_ends_own_the_tied_embedding_and_only_the_last_the_head() -> None:
    tied, untied = ownership(GPT(GPT2_STYLE, seed=0)), ownership(GPT(LLAMA_STYLE, seed=0))
    assert tied.tied == {"embedding"}
    assert tied.first >= {"embedding", "position_embedding"}
    assert untied.tied == frozenset()
    assert untied.last == {"final_norm", "head"}


def test_running_it_a_stage_at_a_time_gives_the_losses_of_the_whole() -> None:
    model = GPT(GPT2_STYLE, seed=0)
    tokens, labels, _ = batch(GPT2_STYLE, 8)
    hidden = run_part(model, StagePart(0, 2, (0,)), None, (tokens,), {"labels": labels})
    assert hidden.shape == (8, 3, 32)
    losses = run_part(model, StagePart(1, 2, (1,)), hidden, (tokens,), {"labels": labels})
    assert torch.equal(losses, model(tokens, labels=labels))


def test_a_seed_of_zero_is_a_seed_and_the_default_is_that_of_torch() -> None:
    torch.manual_seed(0)
    drawn = GPT(LLAMA_STYLE).embedding.weight
    assert torch.equal(drawn, GPT(LLAMA_STYLE, seed=0).embedding.weight)
    assert not torch.equal(drawn, GPT(LLAMA_STYLE, seed=1).embedding.weight)


def test_too_long_sequences_and_labels_of_another_shape_are_refused_with_the_numbers() -> None:
    model = GPT(LLAMA_STYLE, seed=0)
    with pytest.raises(ValueError, match=r"10 tokens .* max_seq_len=9"):
        model(torch.zeros(1, 10, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels have shape \(1, 3\), tokens \(1, 4\)"):
        model(torch.zeros(1, 4, dtype=torch.int64), labels=torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[B, S\]"):
        model(torch.zeros(4, dtype=torch.int64))


def test_a_layout_that_does_not_fit_is_refused_when_the_model_is_built() -> None:
    with use_mesh(Mesh(parallelism=Parallelism(tp=3))), pytest.raises(ValueError, match="num_heads=8 does not divide by tp=3"):
        GPT(LLAMA_STYLE)


def test_shift_labels_gives_each_position_the_next_token_and_ignores_the_last() -> None:
    assert shift_labels(torch.tensor([[5, 6, 7], [1, 2, 3]])).tolist() == [[6, 7, -100], [2, 3, -100]]
