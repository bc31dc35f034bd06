"""Batches of several data loaders at once: those of unequal sizes cannot be cut into the same micro-batches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_megatron.mesh import Mesh
from lightning_megatron.micro_batch import MicroBatches, batch_size_of


def check_combined_batch(
    batch: Any,
    loader: CombinedLoader | None,
    module: LightningModule,
    *,
    mesh: Mesh,
    micro_batch_size: int | None,
    num_microbatches: int | None,
) -> None:
    """Check that the entries of a batch of several loaders hold equally many samples, if it is to be cut.

    Those with another size than the first would be whole in each micro-batch, and count several times.

    Args:
        batch: what the step is given.
        loader: where it comes from.
        module: may have a ``split_batch`` of its own, which knows what to do.
        mesh: for the message.
        micro_batch_size: how it is to be cut, as ``split_batch`` takes it.
        num_microbatches: the same.

    Raises:
        ValueError: with the sizes.
    """
    if loader is None or len(loader.flattened) < 2 or loader._mode == "sequential":
        return
    if isinstance(batch, MicroBatches) or hasattr(module, "split_batch"):
        return
    try:
        entries = loader._spec.flatten_up_to(batch)
    except ValueError:
        return  # a hook has made something else of it
    found = [size for entry in entries if (size := _size(entry)) is not None]
    if len(set(found)) < 2:
        return
    number = min(num_microbatches or 1, found[0]) if micro_batch_size is None else -(-found[0] // micro_batch_size)
    if number == 1:
        return
    raise ValueError(
        f"{mesh.coordinate} the combined data loaders gave batches of {', '.join(map(str, found))} samples, which cannot be "
        f"cut into the same {number} micro-batches: those of another size than the first would be repeated in each. Give the "
        f"loaders one batch_size (and drop_last=True), set num_microbatches=1, or give {type(module).__name__} a method "
        f"split_batch(batch, micro_batch_size) that returns the micro-batches."
    )


def _size(entry: Any) -> int | None:
    """Samples in the batch of one loader; ``None`` of one that is exhausted, or holds no tensor."""
    try:
        return batch_size_of(entry)
    except ValueError:
        return None
