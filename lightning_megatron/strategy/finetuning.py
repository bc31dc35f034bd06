"""Thawing parameters during a run: what Lightning's callback for it needs of an optimizer is not there."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn


def refuse_finetuning(trainer: Trainer) -> None:
    """Refuse ``BaseFinetuning`` in ``fit``: it looks up the optimizer's tensors among the module's parameters.

    Those are this rank's main values, cut from flat buffers, and the look-up fails in the first epoch.

    Raises:
        ValueError: naming the callback and what to do instead.
    """
    callbacks = trainer.callbacks if trainer.state.fn == TrainerFn.FITTING else []  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            raise ValueError(
                f"{type(callback).__name__} (a BaseFinetuning) looks for the module's parameters in the optimizer, which holds "
                f"this rank's main values instead. Remove the callback: give the optimizer what trains from the start, keep "
                f"the rest at requires_grad=False, and thaw it in on_train_epoch_start of the module by requires_grad_(True) "
                f"and self.optimizers().add_param_group({{'params': [...], 'lr': ...}})."
            )
