"""One global batch, trained by a plain PyTorch loop on one process and by the strategy under any layout."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.initialize import load_unsharded
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.sharding import sharding_of

SEED = 1234
SAMPLES, SEQUENCE = 24, 10

_SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "vocab_size": 67,
    "max_seq_len": 16,
    "vocab_multiple": 8,
    "init_std": 0.2,
}
GPT2_TIED = GPTConfig(
    **_SIZES, num_heads=4, position="learned", norm="layernorm", activation="gelu", bias=True, tied_embeddings=True
)
LLAMA_GQA = GPTConfig(
    **_SIZES,
    num_heads=8,
    num_kv_heads=2,
    position="rope",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    tied_embeddings=False,
)
CONFIGS = {"gpt2_tied": GPT2_TIED, "llama_gqa": LLAMA_GQA}


class Samples(Dataset[dict[str, Tensor]]):
    """Token sequences with unequal masks: sample i has from none to all of its labels."""

    def __init__(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(vocab_size, (SAMPLES, SEQUENCE), generator=generator)
        self.labels = torch.randint(vocab_size, (SAMPLES, SEQUENCE), generator=generator)
        keep = torch.rand(SAMPLES, SEQUENCE, generator=generator) < torch.linspace(0, 1, SAMPLES)[:, None]
        self.labels[~keep] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index], "labels": self.labels[index]}


def random_gains(reference: GPT) -> dict[str, Tensor]:
    """Norm gains, biases and everything one-dimensional away from their neutral values."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype) * 0.3 + param.detach()
        for name, param in reference.named_parameters()
        if param.dim() == 1
    }


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """SGD shows a wrong gradient scale; AdamW with two groups shows a wrong state or group."""
    parameters = list(parameters)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1.0)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


@dataclass
class Outcome:
    """What a run left behind."""

    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    fingerprints: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = field(default_factory=dict)


class ParityModule(L.LightningModule):
    """A GPT as any user would train it."""

    def __init__(self, config: GPTConfig, *, optimizer: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.optimizer_name, self.parameter_dtype = config, optimizer, dtype
        self.model: GPT | None = None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.initial: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(self.config)

    def on_fit_start(self) -> None:
        self.initial = self.trainer.strategy.full_state_dict()
        reference = GPT(self.config, seed=SEED, dtype=self.parameter_dtype)
        load_unsharded(self.model, random_gains(reference), strict=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        losses = self.model(batch["tokens"], labels=batch["labels"])
        num_tokens = (batch["labels"] != -100).sum()
        loss = losses.sum() / num_tokens  # 0/0 where a micro-batch has no label: must weigh nothing
        self.log("train_loss", loss)
        return {"loss": loss, "num_tokens": num_tokens}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(self.trainer.strategy.grad_norm))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.optimizer_name, self.parameters())


def reference_run(config: GPTConfig, *, optimizer: str, dtype: torch.dtype, steps: int) -> Outcome:
    """The same training without the package's parallel code: one process, one batch a step, plain autograd."""
    model = GPT(config, seed=SEED, dtype=dtype)
    initial = {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    load_unsharded(model, random_gains(model), strict=False)
    opt = make_optimizer(optimizer, model.parameters())
    samples = Samples(config.vocab_size)
    losses, norms = [], []
    per_step = SAMPLES // steps
    for step in range(steps):
        rows = slice(step * per_step, (step + 1) * per_step)
        loss = model(samples.tokens[rows], labels=samples.labels[rows]).sum() / (samples.labels[rows] != -100).sum()
        opt.zero_grad()
        loss.backward()
        norms.append(float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))))
        opt.step()
        losses.append(float(loss))
    full = _unpadded(model)
    return Outcome({k: _cut(v, full[k]) for k, v in initial.items()}, full, losses, norms)


def _unpadded(model: GPT) -> dict[str, Tensor]:
    """Parameters under the names in a LightningModule, without padding rows of the vocabulary."""
    state = {}
    for name, value in model.state_dict(keep_vars=True).items():
        shape = sharding_of(value).global_shape
        state[f"model.{name}"] = value.detach()[tuple(slice(size) for size in shape)].clone()
    return state


def _cut(value: Tensor, like: Tensor) -> Tensor:
    return value[tuple(slice(size) for size in like.shape)]


def strategy_run(
    config: GPTConfig,
    layout: dict[str, Any],
    *,
    optimizer: str,
    precision: str,
    steps: int,
    accumulate: int = 1,
    accelerator: str = "cpu",
    trainer_options: dict[str, Any] | None = None,
) -> Outcome:
    """The same training through the stock Trainer. Call it on every rank."""
    L.seed_everything(SEED, verbose=False)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    strategy = MegatronStrategy(**layout)
    module = ParityModule(config, optimizer=optimizer, dtype=dtype)
    options: dict[str, Any] = {"devices": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1}
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        precision=precision,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(options | (trainer_options or {})),
    )
    per_replica = SAMPLES // steps // accumulate // strategy.dp_size
    trainer.fit(module, DataLoader(Samples(config.vocab_size), batch_size=per_replica))
    return Outcome(module.initial, strategy.full_state_dict(), module.losses, module.norms, fingerprints(module))


def fingerprints(module: L.LightningModule) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], str]:
    """A hash of the bits of each part of each parameter on this rank."""
    found = {}
    for name, param in module.named_parameters():
        for box, part in sharding_of(param).parts(param.detach()):
            bits = part.contiguous().view(torch.uint8) if part.dim() else part.view(1)
            found[name, box.offset, box.size] = hashlib.sha256(bits.cpu().numpy().tobytes()).hexdigest()
    return found
