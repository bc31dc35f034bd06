"""Checkpoints that any layout writes and any other layout reads, optimiser state included."""

from lightning_megatron.checkpoint.boxes import BoxedTensor
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.files import announce_link, forget_links, recover, recover_links
from lightning_megatron.checkpoint.gradients import load_gradients, sum_of_own
from lightning_megatron.checkpoint.io import Loaded, is_checkpoint, load, remove, save
from lightning_megatron.checkpoint.saving import BackgroundSaver
from lightning_megatron.checkpoint.single_file import load_single_file, load_state_file
from lightning_megatron.checkpoint.state import Edits

__all__ = [
    "CheckpointConfig",
    "BackgroundSaver",
    "BoxedTensor",
    "Edits",
    "Loaded",
    "save",
    "load",
    "load_single_file",
    "load_state_file",
    "load_gradients",
    "sum_of_own",
    "is_checkpoint",
    "remove",
    "recover",
    "recover_links",
    "announce_link",
    "forget_links",
]
