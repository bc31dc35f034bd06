"""``DistributedOptimizerConfig``: how gradients and main parameters are laid out, reduced and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

_BYTES_PER_GRADIENT = 4

MainParam = Literal["fp32", "remainder", "none"]
StateDtype = Literal["fp32", "bf16", "fp8"]
GradReduceDtype = Literal["fp32", "bf16"]
NonFinitePolicy = Literal["raise", "skip", "ignore"]


@dataclass(frozen=True)
class DistributedOptimizerConfig:
    """How gradients are laid out and reduced, and what the optimizer updates.

    Args:
        bucket_mb: size of gradients (MiB of fp32) after which a bucket is closed. Smaller ones start earlier, larger ones
            use the network better.
        overlap_grad_reduce: reduce a bucket as soon as its last gradient of the step has arrived, beside the backward.
        overlap_param_gather: gather the new parameters beside the next forward, which waits for each bucket where it is used.
        grad_reduce_dtype: what gradients travel in. ``bf16`` halves the traffic; the ranks' parts are summed in fp32.
        main_param: what the optimizer updates for 16-bit parameters, where the precision asks for main parameters:
            ``fp32`` copies; the ``remainder`` of a bf16 parameter to the same fp32 value, bit for bit, at 1.875 bytes less;
            ``none``, the 16-bit values themselves.
        state_dtype: what fp32 states of the optimizer are kept in between steps. ``bf16`` halves moments, rounded to nearest;
            ``fp8``, for torch's Adam and AdamW, keeps the first one in 8 bits with a scale for every 256, the second in bf16.
        offload_fraction: the part of main parameters and optimizer states, 0 to 1, that is kept in host memory.
        fused_adam: step torch's Adam and AdamW in one pass over memory; ``None``: on CUDA, where it is faster. Results differ
            from the optimizer's own step by rounding in fp32.
        nonfinite: what to do about a gradient that is not finite: ``raise`` (the message names the first parameter and where
            it lies), ``skip`` the step and count it, or ``ignore`` it. The host waits for the
            gradient norm once in a step: with ``raise`` and a fused Adam when the update is already running, with ``ignore``
            never. With a loss scale a step with an overflow is always skipped.

    Raises:
        ValueError: a value that is not possible, by name.
    """

    bucket_mb: float = 128.0
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    grad_reduce_dtype: GradReduceDtype = "fp32"
    main_param: MainParam = "fp32"
    state_dtype: StateDtype = "fp32"
    offload_fraction: float = 0.0
    fused_adam: bool | None = None
    nonfinite: NonFinitePolicy = "raise"

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb} must be more than 0; 128 is a good start.")
        if not 0.0 <= self.offload_fraction <= 1.0:
            raise ValueError(f"offload_fraction={self.offload_fraction} must be between 0 (all on the device) and 1 (none).")
        chosen = {"grad_reduce_dtype": GradReduceDtype, "main_param": MainParam}
        for name, choices in (chosen | {"state_dtype": StateDtype, "nonfinite": NonFinitePolicy}).items():
            if (value := getattr(self, name)) not in get_args(choices):
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, get_args(choices)))}.")

    @property
    def bucket_numel(self) -> int:
        """Elements after which a bucket is closed."""
        return max(1, int(self.bucket_mb * 2**20 / _BYTES_PER_GRADIENT))
