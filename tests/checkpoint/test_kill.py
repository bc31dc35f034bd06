"""SIGKILL at any moment of saving: ``ckpt_path="last"`` finds a complete checkpoint, and what is left over is cleaned."""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_megatron.testing
from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig, files, is_checkpoint, writing
from lightning_megatron.testing import run_distributed

STEPS, RANKS = 5, 2
MODES = {(asynchronous, last): 5 for asynchronous in (False, True) for last in (True, "link")}
_WATCHED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink")


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Moments:
    """Counts the moments of saving on this rank, and dies at one of them."""

    def __init__(self, folder: Path, victim: int | None, at: int, everyone: bool) -> None:
        self.folder, self.at, self.everyone = str(folder), at if victim == _rank() else -1, everyone
        self.count = 0
        sys.addaudithook(self._audit)
        watched = ((writing, "write_item"), (writing, "write_exactly"), (files, "_exchange"), (files, "sync_directory"))
        for module, name in watched:
            setattr(module, name, self._wrapped(getattr(module, name)))

    def _audit(self, event: str, arguments: Any) -> None:
        if event in _WATCHED and arguments and self.folder in str(arguments[0]):
            self._moment()

    def _wrapped(self, function: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            self._moment()
            result = function(*arguments)
            self._moment()
            return result

        return wrapped

    def _moment(self) -> None:
        self.count += 1
        if self.count == self.at:
            for rank in range(RANKS if self.everyone else 0):
                if rank != _rank():
                    os.kill(int(Path(f"{self.folder}.pid{rank}").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Diary(Callback):
    """Notes how far saving has come: what it says is on the disk must not be lost."""

    def __init__(self, folder: Path) -> None:
        self.file = Path(f"{folder}.diary")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            with open(self.file, "a") as diary:
                diary.write(f"{trainer.global_step}\n")


def fit(folder: Path, mode: tuple[bool, Any], max_steps: int, **options: Any) -> L.Trainer:
    saving = ModelCheckpoint(folder, save_last=mode[1], save_top_k=1, every_n_train_steps=1, enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=MegatronStrategy(checkpoint=CheckpointConfig(async_save=mode[0])),
        callbacks=[saving, *options.pop("callbacks", ())],
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder.parent,
    )
    trainer.fit(Tiny(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=2), **options)
    return trainer


def saving(folder: Path, mode: tuple[bool, Any], victim: int | None = None, at: int = -1, everyone: bool = False) -> int:
    Path(f"{folder}.pid{_rank()}").write_text(str(os.getpid()))
    moments = Moments(folder, victim, at, everyone)
    torch.distributed.barrier()
    fit(folder, mode, STEPS, callbacks=[Diary(folder)])
    return moments.count


def resume(cases: list[tuple[Path, tuple[bool, Any]]]) -> list[tuple[int, list[str], list[str], bool, list[str]]]:
    """Of each folder: the step that was found, what was left, what was said of it, whether all is well, what was there."""
    found = []
    for folder, mode in cases:
        left = [entry.name for entry in files.leftovers(folder)]
        tree = [
            f"{entry.relative_to(folder)} -> {os.readlink(entry) if entry.is_symlink() else ''}"
            for entry in sorted(folder.rglob("*"))
        ]
        steps: list[int] = []

        class Started(Callback):
            def on_train_start(self, trainer: L.Trainer, *_: Any, steps: list[int] = steps) -> None:
                steps.append(trainer.global_step)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(folder, mode, STEPS + 2, callbacks=[Started()], ckpt_path="last")
        said = [str(warning.message) for warning in caught if ".incomplete" in str(warning.message)]
        clean = all(is_checkpoint(entry) for entry in folder.iterdir())
        found.append((steps[0], left, said, clean, tree))
    return found


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{'async' if mode[0] else 'sync'}-{mode[1]}")
def test_last_is_whole_after_a_kill_at_any_moment(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_megatron.testing, "_GRACE_SECONDS", 0.5)
    counts = run_distributed(saving, RANKS, tmp_path / "dry", mode)
    dice = random.Random(str(mode))
    cases, killed, number = [], 0, 0
    while killed < MODES[mode] and number < 2 * MODES[mode]:  # threads count their moments a little differently each time
        victim, folder = dice.choice([0, 0, 1]), tmp_path / str(number)
        at = dice.randrange(counts[victim] // 3, counts[victim] - 2)
        try:
            run_distributed(saving, RANKS, folder, mode, victim, at, number % 2 == 0)
        except AssertionError as error:
            killed += "died" in str(error)
        cases.append((folder, mode))
        number += 1
    assert killed == MODES[mode]
    for (folder, _), (step, left, said, clean, tree) in zip(cases, run_distributed(resume, 1, cases)[0], strict=True):
        noted = int(Path(f"{folder}.diary").read_text().rsplit("\n", 2)[-2])
        assert step >= noted - (1 if mode[0] else 0), f"{folder}: step {noted} was saved, and {step} found in {tree}"
        assert all(any(name in text for text in said) for name in left)
        assert clean


def killed_before_the_link(folder: Path, mode: tuple[bool, Any]) -> None:
    """Train until Lightning has removed ``last.ckpt``, and what it led to is gone, and is about to make it anew."""
    steps = []

    def audit(event: str, arguments: Any) -> None:
        if event == "os.symlink" and str(arguments[1]).endswith("/last.ckpt"):
            steps.append(arguments)
            if len(steps) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    if _rank() == 0:
        sys.addaudithook(audit)
    fit(folder, mode, STEPS)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_link_that_was_being_replaced_is_made_by_the_next_start(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_megatron.testing, "_GRACE_SECONDS", 0.5)
    folder, mode = tmp_path / "a", (asynchronous, "link")
    with pytest.raises(AssertionError, match="died, exit code -9"):
        run_distributed(killed_before_the_link, RANKS, folder, mode)
    assert not os.path.lexists(folder / "last.ckpt")
    (step, _, _, clean, tree) = run_distributed(resume, 1, [(folder, mode)])[0][0]
    assert step >= (2 if asynchronous else 3), tree
    assert clean
