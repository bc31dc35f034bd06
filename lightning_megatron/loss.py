"""One rule of loss normalisation over micro-batches, accumulation and replicas (docs/design.md, section 5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm import all_reduce
from lightning_megatron.mesh import Axis
from lightning_megatron.token_guard import TokenGuard

MIXED = (
    "training_step returned {now} where an earlier micro-batch of the same optimizer step returned {before}. Return "
    "{{'loss': mean over valid tokens, 'num_tokens': n}} always, or a plain loss always."
)


class StepLosses:
    """Turns what ``training_step`` returns into the scalar to differentiate, and keeps what the logged loss needs.

    Two forms are accepted. A plain loss (or ``{"loss": loss}``) is a mean over the micro-batch: micro-batches count by
    their size, accumulated batches and replicas alike. ``{"loss": loss, "num_tokens": n}`` is a mean over ``n`` tokens:
    gradients accumulate as sums over tokens and are divided once by the global count of the whole optimizer step.

    Args:
        sizes: samples in each micro-batch.
        num_sharers: accumulated batches times replicas: the weight of this batch in the step is 1 over it.
        device: where the token count is kept.
    """

    def __init__(self, sizes: list[int], *, num_sharers: int, device: torch.device) -> None:
        self._sizes, self._num_sharers = sizes, num_sharers
        self._losses: list[Tensor] = []
        self._weights: list[Tensor | float] = []
        self.num_tokens = torch.zeros((), dtype=torch.float64, device=device)
        self.per_token: bool | None = None

    def scaled(self, microbatch: int, output: Any, guard: TokenGuard | None = None) -> Tensor | None:
        """The loss to differentiate for one micro-batch's output; ``None`` if it is known to have no valid token.

        Args:
            microbatch: its index.
            output: what ``training_step`` returned.
            guard: keeps the gradient of a micro-batch without valid tokens at zero. Without one the host reads the count.

        Raises:
            TypeError: the output is no loss.
            ValueError: the two forms are mixed within a step.
        """
        loss, num_tokens = _loss_and_tokens(output)
        per_token = num_tokens is not None
        if self.per_token is not None and per_token != self.per_token:
            forms = {True: "a loss with num_tokens", False: "a plain loss"}
            raise ValueError(MIXED.format(now=forms[per_token], before=forms[self.per_token]))
        self.per_token = per_token
        if num_tokens is None:
            self._losses.append(loss.detach())
            self._weights.append(float(self._sizes[microbatch]))
            return loss * (self._sizes[microbatch] / (sum(self._sizes) * self._num_sharers))
        empty = False
        if guard is not None and isinstance(num_tokens, Tensor):
            guard.has_tokens = (num_tokens > 0).to(loss.device)
        else:
            empty = float(num_tokens) == 0
        self.num_tokens += num_tokens
        detached = loss.detach()
        # A mean over no token may be 0/0: such a micro-batch weighs nothing, and must not turn the others into NaN.
        some = torch.as_tensor(num_tokens, device=loss.device) > 0
        self._losses.append(torch.where(some, detached, torch.zeros_like(detached)))
        self._weights.append(num_tokens if isinstance(num_tokens, Tensor) else float(num_tokens))
        return None if empty else loss * num_tokens

    def mean(self, cp: Axis | None = None) -> Tensor | None:
        """The batch's loss (0-dim, detached): the mean over its samples or its valid tokens. ``None`` before any output.

        With ``cp``, over those of all its ranks, which call it together.
        """
        if not self._losses:
            return None
        losses = torch.stack([loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in self._losses])
        weights = torch.stack([torch.as_tensor(weight, device=losses.device, dtype=losses.dtype) for weight in self._weights])
        both = torch.stack(((losses * weights).sum(), weights.sum()))
        total, weight = (both if cp is None else all_reduce(both, cp)).unbind()
        return total / weight.clamp(min=1)

    @property
    def tokens(self) -> Tensor | None:
        """Valid tokens of each micro-batch, ``[M]``; ``None`` where the step does not tell them."""
        if not self.per_token or not self._weights:
            return None
        device = self.num_tokens.device
        return torch.stack([torch.as_tensor(weight, device=device, dtype=torch.float64) for weight in self._weights])


def _loss_and_tokens(output: Any) -> tuple[Tensor, Tensor | float | None]:
    loss, num_tokens = output, None
    if isinstance(output, dict):
        if "loss" not in output:
            raise TypeError(f"training_step returned a dict without 'loss' (its keys: {sorted(map(str, output))}).")
        loss, num_tokens = output["loss"], output.get("num_tokens")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        form = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise TypeError(
            f"training_step must return a scalar loss, or a dict with one under 'loss'; it returned {form}. To leave a batch "
            f"out, return a loss of zero: the ranks step together."
        )
    if isinstance(num_tokens, Tensor):
        num_tokens = num_tokens.detach().reshape(())
    return loss.reshape(()), num_tokens
