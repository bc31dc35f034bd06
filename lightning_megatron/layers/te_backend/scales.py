"""Scaling factors of delayed FP8: what they are, and when they change.

Note [Scales change between optimizer steps]
Transformer Engine changes its delayed factors after every forward, so what a micro-batch gets depends on the schedule, and
a recomputed forward needs the factors of its first run kept for it. Here the factors stay as they are for a whole optimizer
step, while the largest magnitudes of the step are gathered; after it there is one maximum over all ranks and one update for
all tensors at once. So a step is the same under every schedule, number of stages and recompute, all ranks agree, and a step
costs one small collective. The first step has no history: it takes each tensor's own factor, as ``current`` does.

Factors are powers of two. An 8-bit number then rounds the same whatever its factor, except at the ends of the range: a change
of layout, of recipe or of history does not change the rounding of what lies between. A factor that follows from the very
tensor (``own_factor``) is coarser yet, a power of 4 or 16, so that it seldom changes: see Note [Guessed factors] in
``kernels/narrow.py``. That leaves of e4m3's 15 powers of two (and 3 below, with fewer bits) at least 13 under the largest
magnitude, and of e5m2's 30 at least 26.

A slot is one tensor of one layer. Slots are numbered as the model is built, which every rank does in full, so the number
means the same on all ranks and at every layout; slots of layers on other ranks stay at zero until the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.layers.te_backend.options import Fp8Options

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite number of each format."""
SPACING = {torch.float8_e4m3fn: 2, torch.float8_e5m2: 4}
"""Powers of two between neighbouring factors of ``own_factor``; itself a power of two."""
WEIGHTS_SCALE = 256.0
"""The factor of attention weights, whose largest is 1: the largest power of two that keeps them below 448."""


def power_of_two(numbers: Tensor) -> Tensor:
    """The largest powers of two that are not larger."""
    mantissa, exponent = torch.frexp(numbers)
    return torch.where(numbers.isfinite() & (mantissa > 0.0), torch.ldexp(torch.full_like(numbers, 0.5), exponent), numbers)


def own_factor(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor of a tensor by its own largest magnitude: the largest power of 4 (e4m3) or 16 (e5m2) that fits, 1 without one.

    Few launches: under tensor parallelism everything behind it waits for it.

    Args:
        largest: of magnitudes, fp32, any shape.
        dtype: the 8-bit format.
    """
    wanted = LARGEST[dtype] / largest
    exponent = torch.clamp_min((wanted.view(torch.int32) >> 23) - 127, -124) & -SPACING[dtype]
    factor = ((exponent + 127) << 23).view(torch.float32)
    return torch.where((wanted > 0.0) & (wanted < inf), factor, 1.0)


_FIRST_NUMBERS = 1.0, 1.0, 0.0, 0.0, 0.0  # scale, inverse, amax, scratch, guess


class Slot:
    """One tensor's factor and largest magnitude.

    Args:
        scales: holds the numbers.
        index: position in them.
        dtype: the 8-bit format.
    """

    def __init__(self, scales: Scales, index: int, dtype: torch.dtype) -> None:
        self.scales, self.index, self.dtype = scales, index, dtype
        self.quantizers: dict[object, Any] = {}
        """What a library made for this slot."""

    @property
    def is_known(self) -> bool:
        """Whether an earlier step has met the tensor, so that ``scale`` says something; the same on all ranks."""
        return self.scales.is_known(self.index)

    @property
    def scale(self) -> Tensor:
        """What the tensor is multiplied by before it is rounded, fp32 ``[1]``."""
        return self.scales.tensors[0][self.index]

    @property
    def scale_inv(self) -> Tensor:
        """The inverse of ``scale``, fp32 ``[1]``."""
        return self.scales.tensors[1][self.index]

    @property
    def amax(self) -> Tensor:
        """Largest magnitude met in this step, fp32 ``[1]``."""
        return self.scales.tensors[2][self.index]

    @property
    def scratch(self) -> Tensor:
        """Where a magnitude goes that is not to be remembered, fp32 ``[1]``."""
        return self.scales.tensors[3][self.index]

    @property
    def guess(self) -> Tensor:
        """The factor that the last tensor had, if factors follow from tensors themselves, fp32 ``[1]``; 0 before the first."""
        return self.scales.tensors[4][self.index]

    def __deepcopy__(self, memo: dict[int, object]) -> Slot:
        return self  # a copied model (an average, say) is multiplied with the factors of the one it was copied from


class Scales:
    """The slots of one model. See Note [Scales change between optimizer steps].

    Args:
        options: recipe, history and margin.
    """

    def __init__(self, options: Fp8Options) -> None:
        self.options = options
        self.epoch = 0
        """Grows whenever weights may have changed: what was made of them before is stale."""
        self.tensors: tuple[list[Tensor], ...] = ([], [], [], [], [])  # of _flat, by slot
        self._dtypes: list[torch.dtype] = []
        self._flat: list[Tensor] | None = None  # scale, inverse, amax, scratch, guess, each [slots]
        self._history: Tensor | None = None  # [history_steps, slots]
        self._limits: Tensor | None = None
        self._loaded: dict[str, Any] | None = None
        self._steps = 0
        self._known: list[bool] | None = []  # by slot; None for all
        self._pending: tuple[Tensor, Any] | None = None  # which are, on its way to the host

    def __deepcopy__(self, memo: dict[int, object]) -> Scales:
        return self

    @property
    def keeps_history(self) -> bool:
        """Whether there are tensors whose factors come from earlier steps."""
        return self.options.recipe == "delayed" or self.options.attention

    @property
    def is_warm(self) -> bool:
        """Whether there is a history to take factors from."""
        return self._steps > 0

    def is_known(self, index: int) -> bool:
        """See ``Slot.is_known``."""
        return self._steps > 0 and (self._known is None or self._known[index])

    def slot(self, dtype: torch.dtype) -> Slot:
        """A slot for one more tensor. Only before the first use."""
        assert self._flat is None, "slots are made while the model is built"
        self._dtypes.append(dtype)
        return Slot(self, len(self._dtypes) - 1, dtype)

    def prepare(self, device: torch.device) -> None:
        """Allocate on the first use."""
        if self._flat is None:
            with torch.inference_mode(False):
                self._allocate(device)

    def _allocate(self, device: torch.device) -> None:
        num = len(self._dtypes)
        # Not parts of one tensor: autograd would take a change of one for a change of all. Each number stands 16 bytes from
        # the next: cuBLAS wants the address of a factor to be a multiple of that.
        self._flat = [torch.full((num, 4), value, device=device)[:, 0] for value in _FIRST_NUMBERS]
        self._history = torch.zeros((self.options.history_steps, num), device=device)
        self._limits = torch.tensor([LARGEST[dtype] for dtype in self._dtypes], device=device) / 2.0**self.options.margin
        self.tensors = tuple(list(torch.split(numbers, 1)) for numbers in self._flat)
        if self._loaded is not None:
            self._restore(self._loaded)

    def advance(self, reduce_max: Callable[[Tensor], Tensor]) -> None:
        """An optimizer step is done: weights have changed, and factors follow what the step has met.

        Args:
            reduce_max: the largest of each element over all ranks. Every rank calls it, once.
        """
        self.epoch += 1
        if not self.keeps_history or self._flat is None or self._history is None:
            return
        met = reduce_max(self._flat[2].clone())
        # What a step that overflowed has met says nothing, and would stay in the history for as long as that is.
        self._history[self._steps % len(self._history)] = torch.where(met.isfinite(), met, 0.0)
        self._flat[2].zero_()
        self._steps += 1
        self._update()
        self._find_known(at_once=self._steps == 1)

    def _find_known(self, *, at_once: bool) -> None:
        """See which slots have been met. Later than in the first step a step late, so that nobody waits for the device."""
        if self._known is None:
            return
        assert self._flat is not None
        assert self._history is not None
        if self._pending is not None:
            flags, event = self._pending
            event.synchronize()
            self._take_known(flags)
        self._pending = None
        flags = (self._history.amax(dim=0) > 0.0) | (self._flat[0] != 1.0)
        if at_once or not flags.is_cuda:
            self._take_known(flags)
        elif self._known is not None:
            on_host, copied = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._pending = on_host.copy_(flags, non_blocking=True), copied
            copied.record()

    def _take_known(self, flags: Tensor) -> None:
        known = flags.tolist()
        self._known = None if all(known) else known

    def _update(self) -> None:
        assert self._flat is not None
        assert self._history is not None
        assert self._limits is not None
        scale = power_of_two(self._limits / self._history.amax(dim=0))
        # Nothing met yet (0): keep the factor.
        usable = scale.isfinite() & (scale > 0.0)
        self._flat[0].copy_(torch.where(usable, scale, self._flat[0]))
        self._flat[1].copy_(self._flat[0].reciprocal())

    def weights_changed(self) -> None:
        """Somebody has written to the weights outside of an optimizer step."""
        self.epoch += 1

    # Checkpoints: the same at every layout, see the Note

    def state_dict(self) -> dict[str, Any]:
        """The history, on the host; empty while there is none."""
        if not self.is_warm or self._flat is None or self._history is None:
            return {}
        return {"steps": self._steps, "history": self._history.cpu(), "scale": self._flat[0].cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved history. One of another model, or of another length, is left out: a first step needs none."""
        self._loaded = state
        if self._flat is not None:
            self._restore(state)

    def _restore(self, state: dict[str, Any]) -> None:
        assert self._flat is not None
        assert self._history is not None
        self._loaded = None
        if not state:  # of a run that had none yet
            for numbers, value in zip(self._flat, _FIRST_NUMBERS, strict=True):
                numbers.fill_(value)
            self._history.zero_()
            self._steps, self._known, self._pending = 0, [], None
        if not state or state["history"].shape != self._history.shape:
            return
        self._history.copy_(state["history"])
        self._flat[0].copy_(state["scale"])
        self._flat[1].copy_(self._flat[0].reciprocal())
        self._flat[2].zero_()
        self._steps, self._known, self._pending = state["steps"], [], None
        self._find_known(at_once=True)


@dataclass(frozen=True)
class AttentionSlots:
    """The tensors of one layer's attention whose factors come from earlier steps, whatever the recipe of the products is.

    Args:
        qkv: queries, keys and values, which share a factor.
        out: what attention returns.
        grad_out: its gradient.
        grad_scores: the gradient of the scores, inside of the kernel.
        grad_qkv: the gradients of queries, keys and values.
    """

    qkv: Slot
    out: Slot
    grad_out: Slot
    grad_scores: Slot
    grad_qkv: Slot

    @property
    def are_known(self) -> bool:
        """See ``Slot.is_known``."""
        return all(slot.is_known for slot in (self.qkv, self.out, self.grad_out, self.grad_scores, self.grad_qkv))

    @classmethod
    def of(cls, scales: Scales) -> AttentionSlots:
        """New slots of a model."""
        narrow, wide = torch.float8_e4m3fn, torch.float8_e5m2
        return cls(scales.slot(narrow), scales.slot(narrow), scales.slot(wide), scales.slot(wide), scales.slot(wide))


def remember(slots: list[Slot], magnitudes: list[Tensor]) -> None:
    """Let later steps know of largest magnitudes, fp32 ``[1]`` each, of different slots: one launch writes them in no order."""
    assert len({id(slot) for slot in slots}) == len(slots), "a slot is given twice"
    torch._foreach_maximum_([slot.amax for slot in slots], magnitudes)


def scales_of(module: nn.Module) -> list[Scales]:
    """The factors that a model's layers use, each once."""
    found = (getattr(child, "scales", None) for child in module.modules())
    return list({id(scales): scales for scales in found if isinstance(scales, Scales)}.values())
