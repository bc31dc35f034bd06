"""The steps of ``train_step.py`` without a Trainer: the same model and optimizer in a plain Python loop."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.models.gpt import IGNORE_INDEX
from lightning_megatron.strategy.strategy import MegatronStrategy


def seconds_per_step(
    strategy: MegatronStrategy, module: Any, batches: list[dict[str, Tensor]], *, mbs: int, warmup: int
) -> float:
    """Train on, after a ``fit``, and time: mean seconds of a step, the device at rest at both ends only.

    Nothing of Lightning is called, nor the strategy's engine: no logs, no seeds, no schedule.

    Args:
        strategy: whose optimizer and FP8 factors go on. One rank, or data-parallel ones alone.
        module: holds the model, as the ``fit`` has left it.
        batches: one a step, in host memory, tokens and labels ``[B, S]`` each.
        mbs: samples in a micro-batch.
        warmup: steps before the clock starts.
    """
    (optimizer,) = strategy._distributed
    model, device = module.model, strategy.root_device
    model.train()
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    start = 0.0
    for number, batch in enumerate(batches):
        if number == warmup:
            _rest()
            start = time.perf_counter()
        batch = {name: value.to(device) for name, value in batch.items()}
        optimizer.last_backward()
        num_tokens = torch.zeros((), dtype=torch.float64, device=device)
        for first in range(0, len(batch["tokens"]), mbs):
            tokens, labels = (batch[name][first : first + mbs] for name in ("tokens", "labels"))
            model(tokens, labels=labels).sum().backward()
            num_tokens += (labels != IGNORE_INDEX).sum()
        optimizer.backward_done()
        optimizer.reduce_gradients()
        optimizer.finish_gradients(num_tokens=num_tokens, defer=True)
        optimizer.clip_by_norm(1.0)
        optimizer.apply_scaling()
        if not optimizer.should_skip:
            optimizer.step()
        for scales in strategy.precision_plugin._scales:
            scales.advance(strategy.precision_plugin._reduce_max)
        optimizer.update_parameters()
    _rest()
    if collects:
        gc.enable()
    return (time.perf_counter() - start) / (len(batches) - warmup)


def _rest() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
