"""More than one machine: two torchrun agents side by side, and what SLURM tells us."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import run_distributed

from .processes import HERE, free_port, run_agent, run_forked
from .tiny_script import train

SCRIPT = str(HERE / "tiny_script.py")


def run_script() -> None:
    sys.argv = [SCRIPT, "--tp=2", "--devices=2", "--num_nodes=2", "--batch_size=2"]
    runpy.run_path(SCRIPT, run_name="__main__")


def test_two_machines_train_to_the_result_of_one_process(tmp_path: Path) -> None:
    """Tensor parallelism inside a machine, data parallelism across."""
    endpoint = f"127.0.0.1:{free_port()}"

    def main() -> None:
        run_agent(run_script, tmp_path / os.environ["RANK"], num_nodes=2, endpoint=endpoint)

    codes, outputs = run_forked(main, 2)
    assert codes == [0, 0], outputs
    pattern = re.compile(r"^rank=(\d) node=(\d) tp=(\d) dp=(\d) values=\[(.*)\]$", re.MULTILINE)
    logs = [log.read_text() for log in tmp_path.rglob("stdout.log")]
    pids = [int(pid) for log in logs for pid in re.findall(r"^pid=(\d+)$", log, re.MULTILINE)]
    assert len(pids) == 4
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # no orphans
    found = sorted(match for log in logs for match in pattern.findall(log))
    assert [ranks[:4] for ranks in found] == [
        ("0", "0", "0", "0"),
        ("1", "0", "1", "0"),
        ("2", "1", "0", "1"),
        ("3", "1", "1", "1"),
    ]
    ((_, expected),) = run_distributed(lambda: (None, train({}, batch_size=4, devices=1)[1]), 1, init_process_group=False)
    for *_, values in found:
        assert [float(value) for value in values.split(",")] == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What srun sets for the second task of the second of two machines with four tasks each."""
    ranks = {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "5"}
    ranks |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "12345", "SLURM_JOB_NAME": "train"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def slurm_trainer(**options: Any) -> L.Trainer:
    layout = {"tp": 2, "pp": 2} | options.pop("layout", {})
    return L.Trainer(strategy=MegatronStrategy(**layout), accelerator="cpu", logger=False, **options)


@pytest.mark.usefixtures("slurm")
def test_under_slurm_the_ranks_are_those_of_srun() -> None:
    strategy = slurm_trainer(devices=4, num_nodes=2).strategy
    assert isinstance(strategy, MegatronStrategy)
    assert isinstance(strategy.cluster_environment, SLURMEnvironment)
    assert (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size) == (5, 1, 1, 8)
    # Rank 5 of 8: tp is the fastest digit, then pp (reversed), then dp.
    assert strategy.parallelism.coordinate(strategy.global_rank, strategy.world_size) | {} == (
        strategy.parallelism.coordinate(5, 8) | {"tp": 1, "pp": 1, "dp": 1}
    )
    assert (strategy.dp_size, strategy.dp_rank) == (2, 1)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}


@pytest.mark.usefixtures("slurm")
def test_under_slurm_other_sizes_are_refused_by_the_trainer() -> None:
    with pytest.raises(ValueError, match=r"SLURM started 8 ranks, but Trainer\(devices=4, num_nodes=1\) means 4 \* 1 = 4"):
        slurm_trainer(devices=4)
    with pytest.raises(ValueError, match=r"tp\(3\) \* cp\(1\) \* pp\(2\) = 6 does not divide world_size=8"):
        slurm_trainer(devices=4, num_nodes=2, layout={"tp": 3})
    with pytest.raises(ValueError, match=r"devices=2.*ntasks-per-node=4"):
        slurm_trainer(devices=2, num_nodes=4)
