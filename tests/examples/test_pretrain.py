"""The demo, made tiny: what ``make demo`` runs ends with a resumed model, a continuation and one line of losses."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from tests.launch.processes import ROOT, run_jobs

# Validations and saves, one every seven steps, cost more than the steps between them.
SMALL = ["--max-steps=14", "--vocab-size=300", "--corpus-mb=0.1", "--seq-len=16", "--batch-size=4", "--micro-batch-size=2"]


def test_the_example_trains_saves_resumes_and_continues_a_prompt_on_four_ranks(tmp_path: Path) -> None:
    (job,) = run_jobs([sys.executable, str(ROOT / "examples" / "pretrain.py"), *SMALL, f"--output={tmp_path}"])
    assert job.code == 0, job.output
    assert "tp=2 pp=2 over 4 rank(s)" in job.output
    assert re.search(
        r"resumed from .*last\.ckpt; the model continues '    def __init__\(self':\s+def __init__\(self", job.output
    )
    (losses,) = re.findall(r"^loss start (\S+) end (\S+) ln\(vocab\) (\S+)$", job.output, re.MULTILINE)  # rank 0 prints, once
    start, end, uniform = map(float, losses)
    assert uniform == round(math.log(300), 3)
    assert abs(start - uniform) < 0.5
    assert end < start
    assert (tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt").is_dir()


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "pretrain.py").read_text().splitlines()) < 100
