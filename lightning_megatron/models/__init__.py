"""Built-in models. ``GPTModule``, their LightningModule, is in ``lightning_megatron.models.gpt_module``."""

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT, IGNORE_INDEX, shift_labels
from lightning_megatron.models.presets import preset

__all__ = ["GPT", "IGNORE_INDEX", "GPTConfig", "preset", "shift_labels"]
