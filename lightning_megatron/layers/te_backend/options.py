"""What of a model is multiplied in 8 bits, and how it is scaled: pure data, and the checks that need no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Recipe = Literal["delayed", "current", "blockwise", "mxfp8", "nvfp4"]

_NEEDS: dict[str, tuple[tuple[int, int], str]] = {
    "delayed": ((8, 9), "FP8 matrix products (Ada, Hopper, Blackwell)"),
    "current": ((8, 9), "FP8 matrix products (Ada, Hopper, Blackwell)"),
    "blockwise": ((9, 0), "FP8 matrix products with scaled blocks (Hopper, Blackwell)"),
    "mxfp8": ((10, 0), "MXFP8 matrix products (Blackwell)"),
    "nvfp4": ((10, 0), "NVFP4 matrix products (Blackwell)"),
}


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """Narrow matrix products of the transformer layers.

    Args:
        recipe: how numbers are scaled into 8 (or 4) bits. ``delayed``: one factor a tensor, from the largest magnitudes of
            earlier optimizer steps. ``current``: one factor a tensor, from that tensor. ``blockwise``: a factor for each
            128 elements. ``mxfp8`` and ``nvfp4``: block formats of Blackwell.
        head: multiply the vocabulary head in 8 bits as well.
        attention: the products of attention in 8 bits as well, by factors of earlier steps whatever the recipe.
        params: the model holds the weights of its products in 8 bits alone; wide values are with the optimizer.
        fast_gradients: sums of gradient products may be kept in less than fp32, as those of forward products are.
        first_layers_bf16, last_layers_bf16: layers at either end of the model that stay in 16 bits.
        history_steps: optimizer steps that ``delayed`` looks back on.
        margin: powers of two of headroom that ``delayed`` leaves above the largest magnitude it remembers.

    Raises:
        ValueError: an unknown recipe, or a number out of range.
    """

    recipe: Recipe = "delayed"
    head: bool = False
    attention: bool = False
    params: bool = False
    fast_gradients: bool = False
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0
    history_steps: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        if self.recipe not in get_args(Recipe):
            raise ValueError(f"fp8={self.recipe!r} is unknown; use one of {', '.join(get_args(Recipe))}.")
        for name, least in (("first_layers_bf16", 0), ("last_layers_bf16", 0), ("history_steps", 1), ("margin", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be {least} or more.")
        if self.params and not self.is_per_tensor:
            raise ValueError(
                f"fp8_params=True holds one factor a weight, so it goes with fp8='delayed' or 'current', not with "
                f"fp8={self.recipe!r}; leave fp8_params=False."
            )
        if self.attention and self.recipe in ("mxfp8", "nvfp4"):
            raise ValueError(
                f"fp8_attention=True goes with fp8='delayed', 'current' or 'blockwise', not with fp8={self.recipe!r}: "
                f"attention has one factor a tensor here. Leave fp8_attention=False."
            )

    @property
    def alignment(self) -> int:
        """Sizes of matrices must be multiples of this, tokens included."""
        return {"delayed": 16, "current": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 128}[self.recipe]

    @property
    def is_per_tensor(self) -> bool:
        """Whether a tensor has a single factor."""
        return self.recipe in ("delayed", "current")

    def check_chip(self, capability: tuple[int, int], name: str) -> None:
        """Refuse a recipe that a GPU cannot multiply in.

        Args:
            capability: the GPU's compute capability.
            name: the GPU's name, for the message.

        Raises:
            ValueError: naming the recipe, what it needs, and what this GPU can do.
        """
        needed, what = _NEEDS[self.recipe]
        if capability >= needed and self.attention and capability < (9, 0):
            raise ValueError(
                f"fp8_attention=True needs FP8 attention (Hopper, Blackwell), compute capability 9.0; {name} has "
                f"{capability[0]}.{capability[1]}: leave fp8_attention=False."
            )
        if capability >= needed:
            return
        able = [recipe for recipe, (least, _) in _NEEDS.items() if capability >= least]
        fix = f"use fp8={' or '.join(repr(recipe) for recipe in able)}" if able else "leave fp8=None"
        raise ValueError(
            f"fp8={self.recipe!r} needs {what}, compute capability {needed[0]}.{needed[1]}; {name} has "
            f"{capability[0]}.{capability[1]}: {fix}."
        )

    def is_layer_in_bf16(self, index: int, num_layers: int) -> bool:
        """Whether a layer stays in 16 bits."""
        return index < self.first_layers_bf16 or index >= num_layers - self.last_layers_bf16
