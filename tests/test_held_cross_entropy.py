"""When cross entropy holds rows on chip, where there is no GPU; the kernel itself runs in tests/kernels and tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.kernels import cross_entropy_held as held

CPU = torch.device("cpu")


def plain(logits: Tensor, labels: Tensor, *, num_real: int, ignore_index: int, label_smoothing: float, z_loss: float) -> Tensor:
    """By autograd, in double precision."""
    wide = logits.double().requires_grad_()
    real, counts = wide[:, :num_real], labels != ignore_index
    lse = real.logsumexp(-1)
    hit = real.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    losses = lse - (1 - label_smoothing) * hit - label_smoothing / num_real * real.sum(-1) + z_loss * lse.square()
    losses = torch.where(counts, losses, 0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), wide)
    logits.copy_(gradient)
    return losses.detach().float()


@pytest.fixture(autouse=True)
def _forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    held._right.clear()
    yield
    held._right.clear()


def test_a_kernel_that_is_right_is_used_and_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[float]()

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["label_smoothing"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(held, "losses_with_gradient", noting)
    assert held._is_right(CPU)
    assert held._is_right(CPU)
    assert calls == [0.0, 0.1]


def refused(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("cross_entropy.cu does not compile")


def another_loss(*args: Any, **kwargs: Any) -> Tensor:
    return plain(*args, **kwargs) * 1.001


def another_gradient(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    losses = plain(logits, labels, **kwargs)
    logits[3, 1000] *= 1.05
    return losses


def counts_what_is_ignored(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return plain(logits, labels.clamp(min=0), **kwargs)


def spreads_over_padding(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    losses = plain(logits, labels, **kwargs)
    logits[:, 1001:] = -1e-4
    return losses


@pytest.mark.parametrize(
    "wrong", [refused, another_loss, another_gradient, counts_what_is_ignored, spreads_over_padding], ids=lambda f: f.__name__
)
def test_one_that_is_not_is_left_with_a_word(wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "losses_with_gradient", wrong)
    with pytest.warns(UserWarning, match="one that reads them twice takes its place"):
        assert not held._is_right(CPU)
    assert not held._is_right(CPU)


def test_nothing_is_found_out_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "losses_with_gradient", plain)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not held._is_right(CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert held._is_right(CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert held._is_right(CPU)
