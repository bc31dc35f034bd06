from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from lightning_megatron.layers.rope import RopeScaling
from lightning_megatron.models import GPT, GPTConfig, preset
from lightning_megatron.models.presets import (
    gpt2,
    gpt2_large,
    gpt2_medium,
    gpt2_tiny,
    gpt2_xl,
    llama3_1_405b,
    llama3_2_1b,
    llama3_2_3b,
    llama3_8b,
    llama3_70b,
    llama_tiny,
)
from lightning_megatron.parallelism import Parallelism

VALID: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 8, "vocab_size": 50, "max_seq_len": 16}


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (llama3_8b, 8_030_261_248),
        (llama3_70b, 70_553_706_496),
        (llama3_1_405b, 405_853_388_800),
        (llama3_2_1b, 1_235_814_400),
        (llama3_2_3b, 3_212_749_824),
        (gpt2, 124_439_808),
        (gpt2_medium, 354_823_168),
        (gpt2_large, 774_030_080),
        (gpt2_xl, 1_557_611_200),
    ],
)
def test_presets_have_the_published_number_of_parameters(make: Any, published: int) -> None:
    assert make().num_parameters() == published


@pytest.mark.parametrize(
    "config",
    [
        llama_tiny(vocab_multiple=1),
        gpt2_tiny(vocab_multiple=1),
        gpt2_tiny(vocab_multiple=1, qkv_bias=False, tied_embeddings=False, qk_norm=True, num_kv_heads=2),
        llama_tiny(vocab_multiple=1, qkv_bias=True, head_dim=10, qk_norm=True),
    ],
)
def test_num_parameters_counts_what_a_built_model_holds(config: GPTConfig) -> None:
    assert config.num_parameters() == sum(p.numel() for p in GPT(config, seed=0).parameters())


def test_flops_per_token_are_those_of_the_shared_benchmark_formula() -> None:
    config, seq_len = llama3_8b(), 8192
    matmul_params = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 4096 * 128256
    assert config.flops_per_token(seq_len) == 6 * matmul_params + 6 * 32 * 32 * 128 * seq_len


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"hidden_size": 33}, "hidden_size=33 does not divide by num_heads=8"),
        ({"num_kv_heads": 3}, "num_heads=8 does not divide by num_kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"norm": "batchnorm"}, "norm='batchnorm'"),
        ({"position": "alibi"}, "position='alibi'"),
        ({"activation": "relu"}, "activation='relu'"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_number(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**VALID, **change})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, r"num_heads=8 does not divide by tp=3.*divisors of 8"),
        ({"tp": 8}, r"num_kv_heads=6 and tp=8: one must divide the other.*divisors or the multiples of 6"),
        ({"pp": 2, "vpp": 2}, r"num_layers=2 is less than the pp\(2\) \* vpp\(2\) = 4"),
        ({"cp": 3, "cp_comm": "a2a"}, r"query heads .* 3 context-parallel ranks"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_numbers_the_rule_and_the_fix(
    layout: dict[str, int], message: str
) -> None:
    config = GPTConfig(**VALID)
    if layout.get("tp") == 8:
        config = replace(config, num_heads=24, num_kv_heads=6, head_dim=4)
    with pytest.raises(ValueError, match=message):
        config.check_parallelism(Parallelism(**layout))


def test_a_feed_forward_width_that_tp_does_not_divide_is_refused_with_a_width_that_fits() -> None:
    config = GPTConfig(**VALID, ffn_hidden_size=90)
    with pytest.raises(ValueError, match=r"ffn_hidden_size=90 does not divide by tp=4.*92"):
        config.check_parallelism(Parallelism(tp=4))


def test_layouts_that_fit_pass_and_kv_heads_may_be_fewer_than_tp() -> None:
    GPTConfig(**VALID, num_kv_heads=2).check_parallelism(Parallelism(tp=8, pp=2))
    llama3_8b().check_parallelism(Parallelism(tp=16, pp=4, vpp=8))


def test_a_config_survives_a_round_trip_through_plain_data() -> None:
    config = llama3_2_1b(rope_scaling=RopeScaling(factor=4.0))
    assert GPTConfig.from_dict(asdict(config)) == config
    with pytest.raises(ValueError, match="hidden"):
        GPTConfig.from_dict({**VALID, "hidden": 3})


def test_presets_are_found_by_name_and_take_overrides() -> None:
    assert preset("llama3_8b", max_seq_len=4096) == llama3_8b(max_seq_len=4096)
    assert llama3_8b(max_seq_len=4096).max_seq_len == 4096
    with pytest.raises(ValueError, match=r"no preset 'llama4'.*llama3_8b"):
        preset("llama4")
