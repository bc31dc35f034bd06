"""A rank that fails ends the whole job, its error in sight, and leaves no process behind."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_megatron.strategy import failure

from .failing_script import MESSAGE, run
from .processes import HERE, TORCHRUN, run_forked, run_jobs

TWO_BY_TORCHRUN = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
SCRIPT = str(HERE / "failing_script.py")
ERROR = f"ArithmeticError: {MESSAGE}"


def arguments(**options: Any) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


# As a user starts it. A start-up takes some seconds of imports for each process, so there are few of these.


@pytest.mark.parametrize(
    ("launcher", "options", "where", "shown"),
    [
        ([sys.executable], {"devices": 4, "tp": 2, "pp": 2, "rank": 2}, "[pp=0 tp=0]", ERROR),
        ([sys.executable], {"devices": 2, "pp": 2, "rank": 1, "how": "kill"}, "[pp=1]", "was killed by SIGKILL"),
        (
            TWO_BY_TORCHRUN,
            {"devices": 2, "pp": 2, "rank": 0, "where": "validation"},
            "[pp=1]",
            ERROR,
        ),
        (
            TWO_BY_TORCHRUN,
            {"devices": 2, "pp": 2, "rank": 1, "how": "kill"},
            "[pp=1]",
            "-9",
        ),
    ],
    ids=["script-raises", "script-killed", "torchrun-raises-on-rank-0", "torchrun-killed"],
)
def test_the_job_ends_with_the_error_in_sight(launcher: list[str], options: dict[str, Any], where: str, shown: str) -> None:
    (ended,) = run_jobs([*launcher, SCRIPT, *arguments(**options)])
    assert ended.code not in (0, None)
    assert "about to fail" in ended.output
    assert shown in ended.output
    assert where in ended.output
    assert ended.seconds_after < 30, ended.output
    assert ended.orphans == []
    if shown == ERROR:
        assert f"{where} {ERROR}" in ended.output
        assert "self.fail()" in ended.output  # the traceback goes down to the user's line
        assert ended.output.count("self.fail()") == 1, ended.output  # by one rank; torchrun may add tracebacks of its own


# Every rank by itself, with no launcher to help.


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(failure, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(failure, "GATHER_SECONDS", 1.0)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("where", ["training", "validation"])
@pytest.mark.parametrize("rank", [0, 3])
def test_every_rank_ends_by_itself_and_names_the_first_failure(rank: int, where: str) -> None:
    layout = {"tp": 2, "pp": 2}
    codes, outputs = run_forked(lambda: run(layout, devices=4, rank=rank, how="raise", where=where), 4)
    assert codes == [1, 1, 1, 1]
    coordinates = ["[pp=1 tp=0]", "[pp=1 tp=1]", "[pp=0 tp=0]", "[pp=0 tp=1]"]
    for at, output in enumerate(outputs):
        assert f"{coordinates[rank]} {ERROR}" in output, output
        assert coordinates[at] in output
        assert ("Traceback" in output) == (at == rank)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_ranks_end_when_one_is_gone_without_a_word(how: str) -> None:
    codes, outputs = run_forked(lambda: run({"pp": 2}, devices=4, rank=1, how=how, where="training"), 4)
    assert codes == [1, -9 if how == "kill" else 3, 1, 1]
    assert any("A peer went away without a word" in output for output in outputs)


class Sleeps(Callback):
    """Waits for something that no failure of a peer interrupts, as a collective on a GPU does."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 1:
            time.sleep(100)


@pytest.mark.usefixtures("short_waits")
def test_a_rank_that_waits_for_something_else_is_ended_too() -> None:
    def main() -> None:
        run({}, devices=2, rank=0, how="raise", where="training", callbacks=[Sleeps()])

    codes, outputs = run_forked(main, 2)
    assert codes == [1, 1]
    assert f"[dp=1] is ended, because a peer failed: [dp=0] {ERROR}" in outputs[1]


@pytest.mark.usefixtures("short_waits")
def test_a_checkpoint_on_exception_does_not_wait_for_ranks_that_run_on(tmp_path: Any) -> None:
    def main() -> None:
        callbacks = [OnExceptionCheckpoint(str(tmp_path))]
        run({"pp": 2}, devices=2, rank=1, how="raise", where="training", callbacks=callbacks)

    codes, outputs = run_forked(main, 2)
    assert codes == [1, 1]
    assert "[pp=0] no checkpoint is written" in outputs[1]
    assert ERROR in outputs[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("short_waits")
def test_an_exception_that_is_caught_on_every_rank_ends_nothing() -> None:
    def main() -> None:
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                run({}, devices=2, rank=int(os.environ["RANK"]), how="raise", where="validation")
        run({"pp": 2}, devices=2, rank=-1, how="raise", where="training")
        print("done")

    codes, outputs = run_forked(main, 2)
    assert codes == [0, 0], outputs
    assert all("done" in output for output in outputs)


def test_with_fork_the_exception_comes_back_to_the_caller() -> None:
    with pytest.raises(ProcessRaisedException, match=MESSAGE):
        run({"pp": 2, "start_method": "fork"}, devices=2, rank=1, how="raise", where="training")
