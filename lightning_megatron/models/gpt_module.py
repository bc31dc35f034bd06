"""``GPTModule``: pretraining of a ``GPT`` as an ordinary LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import cos, pi
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT, IGNORE_INDEX, shift_labels
from lightning_megatron.models.presets import preset
from lightning_megatron.parallelism import Parallelism

Batch = Tensor | Mapping[str, Tensor]


class GPTModule(LightningModule):
    """Next-token pretraining with AdamW, linear warm-up and cosine decay. Runs under any strategy of Lightning.

    A batch is tokens ``[B, S]`` (int64), or a dict with ``tokens`` and, optionally, ``labels`` ``[B, S]`` that are already
    shifted: ``labels[:, t]`` is what position t should predict, -100 where it does not count. Without labels each
    position predicts the next token. Losses are means over the tokens that count. A dict may also have ``cu_seqlens``
    ``[B, n + 1]``, the borders of several documents in a row, and ``max_seqlen``, the longest: attention, positions and
    labels then stay inside each document.

    Args:
        config: the model: a ``GPTConfig``, its fields as a dict, or the name of a preset (``"llama3_2_1b"``).
        overrides: fields of the config to replace, ``{"max_seq_len": 4096}``.
        lr: peak learning rate.
        weight_decay: of matrices; vectors (norm gains, biases) are not decayed.
        betas: of AdamW.
        warmup_steps: optimiser steps over which the learning rate rises from 0.
        max_steps: optimiser steps after which the cosine has reached ``min_lr_ratio``; without it the rate stays at its peak.
        min_lr_ratio: what the learning rate ends at, as a share of ``lr``.

    Raises:
        ValueError: an unknown preset or field, or a warm-up that is not shorter than ``max_steps``.
    """

    def __init__(
        self,
        config: GPTConfig | str | dict[str, Any],
        *,
        overrides: dict[str, Any] | None = None,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        max_steps: int | None = None,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        self.config = _resolved(config, overrides or {})
        self.lr, self.weight_decay, self.betas = lr, weight_decay, (betas[0], betas[1])
        self.lr_factor = warmup_cosine(warmup_steps, max_steps, min_ratio=min_lr_ratio)
        # Plain data, so that a checkpoint loads with weights_only=True and a logger can show it.
        options = {"lr": lr, "weight_decay": weight_decay, "betas": list(betas), "warmup_steps": warmup_steps}
        options |= {"max_steps": max_steps, "min_lr_ratio": min_lr_ratio}
        self.save_hyperparameters({"config": asdict(self.config), **options})
        self.model: nn.Module | None = None

    def check_parallelism(self, parallelism: Parallelism) -> None:
        """Refuse a layout that the model cannot be cut to; a strategy calls it before it makes process groups.

        Raises:
            ValueError: with the numbers, the rule and the fix.
        """
        self.config.check_parallelism(parallelism)

    @override
    def configure_model(self) -> None:
        """Build the model once, in torch's default dtype (which a precision plugin sets)."""
        if self.model is None:
            self.model = GPT(self.config, dtype=torch.get_default_dtype())

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Mean loss over the tokens that count, and their number."""
        output = self._loss(batch)
        self.log("train_loss", output["loss"].detach(), prog_bar=True, batch_size=_tokens(batch).shape[0])
        return output

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The same, logged as ``val_loss``."""
        return self._evaluated(batch, "val_loss")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The same, logged as ``test_loss``."""
        return self._evaluated(batch, "test_loss")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely next token at each position, ``[B, S]``."""
        return self._built()(_tokens(batch), **_packing(batch)).argmax(dim=-1)

    def shard_batch(self, batch: Batch, cut: Callable[[Batch], Batch]) -> Batch:
        """Cut a batch over context-parallel ranks; labels are made first, since a rank does not see the next token."""
        return cut({"tokens": _tokens(batch), **(batch if isinstance(batch, Mapping) else {}), "labels": _labels(batch)})

    def _evaluated(self, batch: Batch, name: str) -> dict[str, Tensor]:
        output = self._loss(batch)
        self.log(name, output["loss"], prog_bar=True, batch_size=_tokens(batch).shape[0], sync_dist=True)
        return output

    def _loss(self, batch: Batch) -> dict[str, Tensor]:
        labels = _labels(batch)
        losses = self._built()(_tokens(batch), labels=labels, **_packing(batch))
        num_tokens = (labels != IGNORE_INDEX).sum()
        return {"loss": losses.sum() / num_tokens.clamp(min=1), "num_tokens": num_tokens}

    def _built(self) -> Callable[..., Tensor]:
        if self.model is None:
            raise RuntimeError("the model is not built yet: call configure_model(), which a Trainer does by itself.")
        return self.model

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW in two groups (decayed matrices, other parameters) and the schedule, a step at a time."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        # Both groups always exist: a pipeline stage that holds no parameters of one kind keeps the same groups as the rest.
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Continue token sequences: ``[B, S] -> [B, S + max_new_tokens]``.

        Calls ``self.model`` once a token, outside of any step; it sees the last ``max_seq_len`` tokens. Under tensor or
        pipeline parallelism all ranks of a replica call this together, with the same arguments, and return the same.

        Args:
            tokens: prompts of one length.
            max_new_tokens: tokens to add to each.
            temperature: 0 takes the most likely token; otherwise the logits are divided by it and a token is drawn.
            top_k: draw among the k most likely tokens only.
            seed: of the draws.

        Raises:
            ValueError: a negative temperature, or ``top_k`` below 1.
        """
        if temperature < 0.0 or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature={temperature} must not be negative, and top_k={top_k} must be 1 or more.")
        self.configure_model()
        generator = torch.Generator().manual_seed(seed)
        was_training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                logits = self._built()(tokens[:, -self.config.max_seq_len :])[:, -1]
                chosen = _choose(logits, temperature, top_k, generator)
                tokens = torch.cat((tokens, chosen.to(tokens.device)), dim=1)
        finally:
            self.train(was_training)
        return tokens


def _resolved(config: GPTConfig | str | dict[str, Any], overrides: dict[str, Any]) -> GPTConfig:
    if isinstance(config, str):
        return preset(config, **overrides)
    fields = asdict(config) if isinstance(config, GPTConfig) else config
    return GPTConfig.from_dict({**fields, **overrides})


def _tokens(batch: Batch) -> Tensor:
    return batch["tokens"] if isinstance(batch, Mapping) else batch


def _labels(batch: Batch) -> Tensor:
    given = batch.get("labels") if isinstance(batch, Mapping) else None
    return given if given is not None else shift_labels(_tokens(batch), cu_seqlens=_packing(batch).get("cu_seqlens"))


def _packing(batch: Batch) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        return {}
    return {name: batch[name] for name in ("cu_seqlens", "max_seqlen") if batch.get(name) is not None}


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token a row, ``[B, V] -> [B, 1]``. Drawn on the CPU, so that ranks of any device draw alike."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    scaled = logits.float().cpu() / temperature
    if top_k is not None:
        least = scaled.topk(min(top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    return torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator)


def warmup_cosine(warmup_steps: int, max_steps: int | None, *, min_ratio: float) -> Callable[[int], float]:
    """Share of the peak learning rate at each optimiser step (0, 1, ..): a linear rise, then a cosine to ``min_ratio``.

    Without ``max_steps`` the rate stays at its peak. A plain function, so that a resumed run follows its own arguments and
    not those that a scheduler's state would bring back.

    Raises:
        ValueError: ``warmup_steps`` is negative, or not below ``max_steps``.
    """
    if warmup_steps < 0 or (max_steps is not None and warmup_steps >= max_steps):
        raise ValueError(f"warmup_steps={warmup_steps} must be at least 0 and below max_steps={max_steps}.")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if max_steps is None:
            return 1.0
        done = min(1.0, (step - warmup_steps) / (max_steps - warmup_steps))
        return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + cos(pi * done))

    return factor
