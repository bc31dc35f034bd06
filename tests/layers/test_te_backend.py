"""The backend on Transformer Engine without it: its operations in plain torch, 8-bit rounding included."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.comm import all_reduce
from lightning_megatron.initialize import materialize
from lightning_megatron.layers.choice import choose_backend
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, Scales, TeBackend
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.sharding import ParamSharding, sharding_of
from lightning_megatron.strategy import strategy as strategy_file
from lightning_megatron.strategy.options import check_fp8
from lightning_megatron.testing import run_distributed

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "ffn_hidden_size": 64, "vocab_size": 96}
LLAMA = GPTConfig(**SIZES, num_kv_heads=4, max_seq_len=32, init_std=0.1)
GPT2 = GPTConfig(
    **SIZES,
    max_seq_len=32,
    init_std=0.1,
    position="learned",
    norm="layernorm",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
)
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}


def plain(fp8: Fp8Options | None) -> TeBackend:
    return TeBackend(PlainOperations(fp8), fp8)


def tokens(batch: int = 2, length: int = 17) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(96, (batch, length), generator=torch.Generator().manual_seed(3))
    return drawn[:, :-1], drawn[:, 1:]


def gradients(model: GPT, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch[0], labels=batch[1]).mean().backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def step(model: GPT, backend: TeBackend, batch: tuple[Tensor, Tensor], lr: float = 0.0) -> None:
    gradients(model, batch)
    with torch.no_grad():
        for param in model.parameters():
            param -= lr * param.grad  # type: ignore[operator]
    assert backend.scales is not None
    backend.scales.advance(lambda numbers: numbers)


# Selection


def test_what_cannot_be_had_on_a_cpu_is_refused_by_name() -> None:
    choice: dict[str, Any] = {"device": CPU, "dtype": torch.bfloat16}
    assert not isinstance(choose_backend("auto", **choice), TeBackend)
    with pytest.raises(ValueError, match="backend='te' needs Transformer Engine: the model runs on cpu"):
        choose_backend("te", **choice)
    with pytest.raises(ValueError, match="fp8='delayed' needs Transformer Engine: the model runs on cpu"):
        choose_backend("auto", **choice, fp8=Fp8Options())
    with pytest.raises(ValueError, match="fp8='current' needs Transformer Engine, but backend='torch'"):
        choose_backend("torch", **choice, fp8=Fp8Options(recipe="current"))
    with pytest.raises(ValueError, match=r"16-bit parameters, and this precision's are torch.float32"):
        choose_backend("te", device=torch.device("cuda"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("recipe", "capability", "says"),
    [
        ("mxfp8", (9, 0), "fp8='mxfp8' needs MXFP8 .*10.0; H200 has 9.0: use fp8='delayed' or 'current' or 'blockwise'"),
        ("nvfp4", (9, 0), "fp8='nvfp4' needs NVFP4"),
        ("blockwise", (8, 9), "use fp8='delayed' or 'current'"),
        ("delayed", (8, 0), "leave fp8=None"),
    ],
)
def test_a_format_that_the_chip_lacks_is_refused_by_name(recipe: Any, capability: tuple[int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Fp8Options(recipe=recipe).check_chip(capability, "H200")


def test_a_format_that_the_chip_has_is_taken() -> None:
    for recipe in ("delayed", "current", "blockwise"):
        Fp8Options(recipe=recipe).check_chip((9, 0), "H200")
    Fp8Options(recipe="nvfp4").check_chip((10, 0), "B200")


# Layers


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_without_fp8_the_model_is_the_torch_backends(config: GPTConfig) -> None:
    reference, model = GPT(config, seed=5), GPT(config, seed=5, backend=plain(None))
    names = [name for name, _ in reference.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    for (_, expected), (_, param) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(param, expected)
        assert sharding_of(param) == sharding_of(expected)
    expected_grads, grads = gradients(reference, tokens()), gradients(model, tokens())
    for name in names:
        torch.testing.assert_close(grads[name], expected_grads[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("recipe", ["delayed", "current", "delayed with head"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fp8_gradients_are_those_of_fp32_within_8_bit_rounding(config: GPTConfig, recipe: Any) -> None:
    fp8 = Fp8Options(recipe=recipe.split()[0], head="head" in recipe)
    backend = plain(fp8)
    reference, model = GPT(config, seed=5), GPT(config, seed=5, backend=backend)
    expected = gradients(reference, tokens())
    for _ in range(2):  # the first step with factors of its own, the second with those of the first
        grads = gradients(model, tokens())
        for name in expected:
            error = torch.linalg.vector_norm(grads[name] - expected[name]) / torch.linalg.vector_norm(expected[name])
            assert error < 0.25, (name, error)  # 3 and 2 bits of mantissa, few tokens to average over
        step(model, backend, tokens())


def test_layers_at_the_ends_stay_in_16_bits() -> None:
    fp8 = Fp8Options(first_layers_bf16=1, last_layers_bf16=1)
    backend = plain(fp8)
    reference, model = GPT(LLAMA, seed=5), GPT(LLAMA, seed=5, backend=backend)  # two layers: none is left
    expected, grads = gradients(reference, tokens()), gradients(model, tokens())
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    types = [type(layer.mlp).__name__ for layer in GPT(LLAMA, backend=plain(Fp8Options(last_layers_bf16=1))).layers]
    assert types == ["FusedGatedMLP", "GatedMLP"]


def test_lengths_that_8_bits_cannot_multiply_are_padded_without_a_trace() -> None:
    backend = plain(Fp8Options())
    model = GPT(LLAMA, seed=5, backend=backend)
    step(model, backend, tokens())
    inputs, labels = tokens(length=14)  # 2 * 13 tokens
    expected, grads = gradients(GPT(LLAMA, seed=5), (inputs, labels)), gradients(model, (inputs, labels))
    for name in expected:
        error = torch.linalg.vector_norm(grads[name] - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert error < 0.25, (name, error)


def test_sizes_that_8_bits_cannot_multiply_are_refused_with_the_numbers() -> None:
    odd = GPTConfig(**(SIZES | {"ffn_hidden_size": 72}), max_seq_len=32)
    with pytest.raises(ValueError, match=r"multiples of 16; a weight is \[64, 72\]"):
        GPT(odd, backend=plain(Fp8Options()))


def test_an_8_bit_head_needs_a_weight_of_its_own_and_whole_logits() -> None:
    def checked(config: GPTConfig) -> None:
        fp8 = Fp8Options(head=True)
        module = L.LightningModule()
        module.model = GPT(config, backend=plain(fp8))
        check_fp8(module, fp8)

    checked(LLAMA)
    with pytest.raises(ValueError, match=r"fp8_head=True, but LightningModule has no head of its own"):
        checked(GPT2)
    with pytest.raises(ValueError, match=r"loss_chunks > 1"):
        checked(replace(LLAMA, loss_chunks=2))


class Counting(PlainOperations):
    num_weights = 0

    def quantize_weight(self, weight: Tensor) -> Any:
        self.num_weights += 1
        return super().quantize_weight(weight)


def test_a_weight_is_rounded_once_for_all_micro_batches_of_a_step() -> None:
    fp8 = Fp8Options()
    operations = Counting(fp8)
    backend = TeBackend(operations, fp8)
    model = GPT(LLAMA, backend=backend)
    for micro_batch in range(3):
        gradients(model, tokens(length=17 + 8 * micro_batch))
    assert operations.num_weights == 8  # four in each of two layers
    step(model, backend, tokens(), lr=0.1)
    gradients(model, tokens())
    assert operations.num_weights == 16


# Factors


def test_factors_follow_the_largest_magnitude_of_the_history() -> None:
    scales = Scales(Fp8Options(history_steps=2, margin=1))
    slots = [scales.slot(torch.float8_e4m3fn), scales.slot(torch.float8_e5m2)]
    scales.prepare(CPU)
    factors = []
    for met in ((4.0, 8.0), (2.0, float("inf")), (2.0, 8.0), (0.0, 0.0), (0.0, 0.0)):
        for slot, amax in zip(slots, met, strict=True):
            slot.amax.fill_(amax)
        scales.advance(lambda numbers: numbers)
        factors.append([float(slot.scale) for slot in slots])
        assert [float(slot.amax) for slot in slots] == [0.0, 0.0]
    narrow, wide = 128.0, 16384.0  # powers of two below 448 / 2 and 57344 / 2
    # An overflow leaves the factor alone for as long as it is remembered; so does a step that met nothing.
    assert factors == [[narrow / met[0], wide / met[1]] for met in ((4, 8), (4, 8), (2, 8), (2, 8), (2, 8))]


def test_evaluation_leaves_no_trace_in_the_factors() -> None:
    backend = plain(Fp8Options())
    model = GPT(LLAMA, backend=backend)
    step(model, backend, tokens())
    with torch.no_grad():
        model(tokens()[0] * 0)
    assert backend.scales is not None
    assert all(float(amax) == 0.0 for amax in backend.scales.tensors[2])


def test_a_saved_history_goes_on_where_it_was() -> None:
    runs = []
    for interrupted in (False, True):
        backend = plain(Fp8Options())
        model = GPT(LLAMA, seed=5, backend=backend)
        step(model, backend, tokens(), lr=0.1)
        if interrupted:
            assert backend.scales is not None
            saved, state = backend.scales.state_dict(), model.state_dict()
            backend = plain(Fp8Options())
            model = GPT(LLAMA, seed=9, backend=backend)
            model.load_state_dict(state)
            assert backend.scales is not None
            backend.scales.load_state_dict(saved)
        runs.append(gradients(model, tokens()))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


# Layouts


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: GPT | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(LLAMA)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(batch[0][:, :-1], labels=batch[0][:, 1:]).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(layout: dict[str, Any], recipe: Any) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Four steps of eight samples: losses, parameters, and the factors at the end."""

    def chosen(*_: Any, fp8: Fp8Options | None = None, **__: Any) -> TeBackend:
        return plain(fp8)

    strategy_file.choose_backend = chosen  # this process is forked for one test
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**layout)
    precision = MegatronPrecision("bf16-mixed", fp8=recipe)
    module = Module()
    trainer = L.Trainer(
        strategy=strategy,
        plugins=[precision],
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = torch.randint(96, (32, 17), generator=torch.Generator().manual_seed(3))
    trainer.fit(module, DataLoader(TensorDataset(samples), batch_size=8 // strategy.dp_size))
    (scales,) = precision._scales
    return module.losses, strategy.full_state_dict(), [float(scale) for scale in scales.tensors[0]]


def test_pipelines_and_replicas_train_as_one_rank_in_fp8() -> None:
    layout = {"micro_batch_size": 2}
    (losses, state, scales), *_ = run_distributed(train, 1, layout, "delayed")
    for of_losses, of_state, of_scales in run_distributed(train, 2, {**layout, "pp": 2}, "delayed"):
        assert of_losses == losses
        assert of_scales == scales
        assert all(torch.equal(of_state[name], value) for name, value in state.items())
    replicas = run_distributed(train, 2, layout, "delayed")
    averaged = [(one + other) / 2 for one, other in zip(replicas[0][0], replicas[1][0], strict=True)]
    # Other samples share a micro-batch, and 16-bit sums of them fall to other 8-bit numbers now and then.
    torch.testing.assert_close(averaged, losses, rtol=3e-3, atol=0.0)
    assert replicas[0][2] == replicas[1][2]
    torch.testing.assert_close(replicas[0][2], scales, rtol=1.0, atol=0.0)  # powers of two, by neighbouring amaxes


def sharded_gradients(layout: dict[str, Any], config: GPTConfig, recipe: Any) -> list[list[tuple[ParamSharding, Tensor]]]:
    """Of two steps: each parameter's sharding on this rank, and its gradient, in fp32 but for the 8-bit products."""
    mesh = Mesh.create(Parallelism(**layout), device=CPU)
    backend = plain(Fp8Options(recipe=recipe))
    with use_mesh(mesh):
        model = GPT(config, backend=backend)
    materialize(model, device=CPU, seed=5)
    result = []
    for _ in range(2):
        grads = gradients(model, tokens())
        result.append([(sharding_of(param), grads[name]) for name, param in model.named_parameters()])
        assert backend.scales is not None
        backend.scales.advance(partial(all_reduce, axis=mesh.world, op=ReduceOp.MAX))
    return result


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_cut_of_the_matrices_does_not_change_8_bit_rounding(config: GPTConfig, sequence_parallel: bool, recipe: Any) -> None:
    (whole,) = run_distributed(sharded_gradients, 1, {}, config, recipe)
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    ranks = run_distributed(sharded_gradients, 2, layout, config, recipe)
    for step_of_whole, *steps in zip(whole, *ranks, strict=True):
        for (sharding, full), *shards in zip(step_of_whole, *steps, strict=True):
            expected = full[tuple(slice(size) for size in sharding.global_shape)]
            summed = sum(grad for _, grad in shards) if any(box.partial for box in shards[0][0].boxes) else None
            for held, grad in shards:
                grad = grad if summed is None else summed
                # In bf16 this would be 0.1: other sums, one rounding apart, fall to another 8-bit number now and then.
                torch.testing.assert_close(grad, held.cut(expected, grad.shape), rtol=1e-4, atol=1e-6 * float(full.abs().max()))


def test_a_split_backward_changes_nothing_in_fp8() -> None:
    layout = {"pp": 2, "micro_batch_size": 2}
    plainly, split = (run_distributed(train, 2, {**layout, "schedule": name}, "delayed") for name in ("1f1b", "zbh1"))
    assert plainly[0][0] == split[0][0]
    assert all(torch.equal(plainly[0][1][name], split[0][1][name]) for name in plainly[0][1])
