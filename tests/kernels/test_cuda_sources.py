"""The CUDA sources, compiled for the CPU with an emulation of what the GPU has instructions for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import lightning_megatron.kernels

HERE = Path(__file__).parent
SOURCES = Path(lightning_megatron.kernels.__file__).parent / "cuda"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("name", "cases"), [("products", 14), ("cross_entropy", 12)])
def test_kernels_are_right_and_end_in_whatever_order_warps_and_copies_come(name: str, cases: int, tmp_path: Path) -> None:
    program, schedules = tmp_path / name, 3
    build = ["g++", "-std=c++20", "-O2", "-w", f"-I{SOURCES}", f"-I{HERE}", "-o", str(program), str(HERE / f"{name}.cpp")]
    subprocess.run(build, check=True, timeout=100)
    done = subprocess.run([str(program), str(schedules)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed") == schedules * cases
