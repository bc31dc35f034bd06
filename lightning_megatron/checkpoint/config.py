"""``CheckpointConfig``: how checkpoints are written and read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written and read.

    Args:
        async_save: copy to host memory and write beside the training, one checkpoint at a time. Older ones are removed when the
            new one is durable; an error is raised at the next step.
        verify: compare the checksums of what a rank reads before anything is loaded. It reads the files twice, the second
            time from the page cache where memory allows.
        weights_only: how Lightning's part of a checkpoint is unpickled; ``None`` is torch's default, containers and tensors
            alone. (The Trainer does not pass its own ``weights_only`` on to strategies that restore after set-up.)
    """

    async_save: bool = False
    verify: bool = True
    weights_only: bool | None = None

    @classmethod
    def of(cls, given: CheckpointConfig | None) -> CheckpointConfig:
        """What was given, or the defaults.

        Raises:
            TypeError: something else was given.
        """
        if given is not None and not isinstance(given, cls):
            raise TypeError(f"checkpoint={given!r} must be a CheckpointConfig, such as CheckpointConfig(async_save=True).")
        return given or cls()
