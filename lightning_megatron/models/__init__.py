"""Built-in models, their sizes and their LightningModule."""

from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt import GPT, IGNORE_INDEX, shift_labels
from lightning_megatron.models.gpt_module import GPTModule
from lightning_megatron.models.presets import preset

__all__ = ["GPT", "IGNORE_INDEX", "GPTConfig", "GPTModule", "preset", "shift_labels"]
