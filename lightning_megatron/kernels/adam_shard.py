"""What an update of Adam works on, for the kernel (``adam.py``) and for its form in plain torch (``optim/fused_adam.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamShard:
    """One flat shard of n elements.

    Args:
        value: the parameter, in any dtype; it gets the rounded new value.
        main: its fp32 copy; with ``ties``, the int16 remainders; ``None`` if ``value`` is all there is.
        ties: one bit an element, ``[n / 8]`` bytes, see ``optim/remainder.py``.
        grad: the gradient in fp32.
        exp_avg: first moment.
        exp_avg_scale: scales of a first moment in 8 bits, see ``optim/float8.py``.
        exp_avg_sq: second moment.
    """

    value: Tensor
    main: Tensor | None
    ties: Tensor | None
    grad: Tensor
    exp_avg: Tensor
    exp_avg_scale: Tensor | None
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class AdamOptions:
    """Options of a param group.

    Args:
        lr: learning rate.
        betas: of the moments.
        eps: added to the denominator.
        weight_decay: see ``decoupled``.
        decoupled: AdamW (Loshchilov and Hutter 2019); otherwise weight decay is added to the gradient.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
