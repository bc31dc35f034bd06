from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_megatron.initialize import materialize
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig, preset, shift_labels
from lightning_megatron.models.gpt_module import GPTModule, warmup_cosine
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed

TINY = {"num_layers": 2, "hidden_size": 32, "vocab_size": 64, "max_seq_len": 12}


def tiny() -> GPTConfig:
    return preset("llama_tiny", **TINY)


def samples(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(64, (8,), generator=generator) for _ in range(count)]


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", default_root_dir=tmp_path, **{**quiet, **options})


def test_two_steps_of_a_stock_trainer_equal_two_steps_written_by_hand(tmp_path: Path) -> None:
    module = GPTModule(tiny(), lr=1e-2, warmup_steps=2, max_steps=10)
    torch.manual_seed(4)
    run = trainer(tmp_path, max_steps=2, gradient_clip_val=1.0, precision="64-true")
    run.fit(module, DataLoader(samples(8), batch_size=4), DataLoader(samples(4), batch_size=2))

    torch.manual_seed(4)
    model = GPT(tiny(), dtype=torch.float64)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step, tokens in enumerate(torch.stack(samples(8)).split(4)):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 2
        optimizer.step()
    assert module.model is not None
    for (name, trained), expected in zip(module.model.named_parameters(), model.parameters(), strict=True):
        assert_close(trained, expected, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert run.callback_metrics["train_loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    assert "val_loss" in run.callback_metrics


def test_a_step_returns_the_mean_over_valid_tokens_and_their_number() -> None:
    module = GPTModule(tiny())
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    tokens = torch.stack(samples(2))
    labels = shift_labels(tokens)
    labels[0, :3] = -100
    result = module.training_step({"tokens": tokens, "labels": labels}, 0)
    assert module.model is not None
    logits = module.model(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert_close(result["loss"], expected)
    assert int(result["num_tokens"]) == 2 * 7 - 3
    unlabelled = module.training_step(tokens, 0)
    assert int(unlabelled["num_tokens"]) == 2 * 7
    nothing = module.training_step({"tokens": tokens, "labels": torch.full_like(tokens, -100)}, 0)
    assert nothing["loss"].item() == 0.0


def test_configure_model_builds_once_and_in_the_default_dtype() -> None:
    module = GPTModule(tiny())
    torch.set_default_dtype(torch.bfloat16)
    try:
        module.configure_model()
    finally:
        torch.set_default_dtype(torch.float32)
    built = module.model
    module.configure_model()
    assert built is not None
    assert module.model is built
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_greedy_generation_takes_the_most_likely_token_and_crops_to_max_seq_len() -> None:
    module = GPTModule(tiny())
    module.configure_model()
    assert module.model is not None
    prompt = torch.stack(samples(2))
    generated = module.generate(prompt, 7)
    tokens = prompt
    for _ in range(7):
        tokens = torch.cat((tokens, module.model(tokens[:, -12:])[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(generated, tokens)
    assert module.training, "generation leaves the mode as it was"


def test_sampled_generation_repeats_with_its_seed_and_one_candidate_is_greedy() -> None:
    module = GPTModule(tiny())
    prompt = torch.stack(samples(2))
    first, second = (module.generate(prompt, 4, temperature=1.0, top_k=20, seed=3) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, module.generate(prompt, 4, temperature=1.0, top_k=20, seed=4))
    assert torch.equal(module.generate(prompt, 4, temperature=1.0, top_k=1), module.generate(prompt, 4))
    with pytest.raises(ValueError, match="top_k=0"):
        module.generate(prompt, 1, top_k=0)


def test_tensor_parallel_ranks_generate_what_one_rank_does() -> None:
    prompt = torch.stack(samples(2))

    def generated(tp: int) -> Tensor:
        mesh = Mesh.create(Parallelism(tp=tp), device=torch.device("cpu"))
        module = GPTModule(tiny())
        with use_mesh(mesh):
            module.configure_model()
        assert module.model is not None
        materialize(module.model, device=mesh.device, seed=1)
        return module.generate(prompt, 5, temperature=0.8, seed=1)

    expected = generated(1)
    assert all(torch.equal(got, expected) for got in run_distributed(generated, 2, 2))


def test_predictions_are_the_most_likely_next_tokens(tmp_path: Path) -> None:
    module = GPTModule(tiny())
    predicted = trainer(tmp_path).predict(module, DataLoader(samples(4), batch_size=2))
    assert predicted is not None
    assert module.model is not None
    assert torch.equal(torch.cat(predicted), module.model(torch.stack(samples(4))).argmax(-1))  # type: ignore[arg-type]


def test_a_stock_checkpoint_loads_as_plain_data(tmp_path: Path) -> None:
    module = GPTModule(tiny(), lr=1e-2)
    run = trainer(tmp_path, max_steps=1)
    run.fit(module, DataLoader(samples(4), batch_size=2))
    run.save_checkpoint(tmp_path / "one.ckpt")
    loaded = GPTModule.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert loaded.config == module.config
    assert (loaded.lr, loaded.betas) == (module.lr, module.betas)
    for one, other in zip(loaded.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_command_line_takes_a_preset_or_single_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import _JSONARGPARSE_SIGNATURES_AVAILABLE, LightningCLI

    if not _JSONARGPARSE_SIGNATURES_AVAILABLE:
        pytest.skip("jsonargparse[signatures] is not installed")
    monkeypatch.setattr("sys.argv", ["train"])

    def module_of(*args: str) -> GPTModule:
        quiet = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.enable_checkpointing=false"]
        options: dict[str, Any] = {"run": False, "save_config_callback": None, "seed_everything_default": False}
        model = LightningCLI(GPTModule, args=[*quiet, *args], **options).model
        assert isinstance(model, GPTModule)
        return model

    by_preset = module_of("--model.config=llama_tiny", '--model.overrides={"max_seq_len": 64}', "--model.lr=0.01")
    assert by_preset.config == preset("llama_tiny", max_seq_len=64)
    assert by_preset.lr == 0.01
    fields = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "max_seq_len": 8}
    assert module_of(*(f"--model.config.{k}={v}" for k, v in fields.items())).config == GPTConfig(**fields)


def test_layouts_are_checked_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="num_heads=8 does not divide by tp=3"):
        GPTModule(tiny()).check_parallelism(Parallelism(tp=3))


def test_the_learning_rate_rises_linearly_then_falls_as_a_cosine() -> None:
    factor = warmup_cosine(4, 12, min_ratio=0.1)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(8) == pytest.approx(0.55)
    assert factor(12) == pytest.approx(0.1)
    assert factor(50) == pytest.approx(0.1)
    constant = warmup_cosine(0, None, min_ratio=0.1)
    assert [constant(0), constant(1000)] == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"warmup_steps=5 .* max_steps=5"):
        warmup_cosine(5, 5, min_ratio=0.0)


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    module = GPTModule(preset("gpt2_tiny", **TINY))
    module.configure_model()
    configured: Any = module.configure_optimizers()
    decayed, rest = configured["optimizer"].param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(rest["params"]) == len(list(module.parameters()))
