"""Checkpoints that any layout writes and any other layout reads, optimiser state included."""

from lightning_megatron.checkpoint.boxes import BoxedTensor
from lightning_megatron.checkpoint.io import Loaded, is_checkpoint, load, load_state_file, remove, save

__all__ = ["BoxedTensor", "Loaded", "is_checkpoint", "load", "load_state_file", "remove", "save"]
