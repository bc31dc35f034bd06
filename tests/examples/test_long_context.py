"""The example of long contexts, made tiny."""

from __future__ import annotations

import re
import sys

import pytest

from tests.launch.processes import ROOT, run_jobs

SMALL = ["--max-steps=3", "--seq-len=64", "--documents=4", "--corpus-mb=0.02", "--hidden-size=32"]


@pytest.mark.parametrize("packing", ["static", "dynamic"])
def test_the_example_trains_on_packed_documents_cut_over_two_ranks(packing: str) -> None:
    (job,) = run_jobs([sys.executable, str(ROOT / "examples" / "long_context.py"), *SMALL, "--packing", packing])
    assert job.code == 0, job.output
    assert "cp=2 over 2 rank(s)" in job.output
    (loss,) = re.findall(r"^loss (\S+) nats a byte$", job.output, re.MULTILINE)  # rank 0 prints, once
    assert 2.0 < float(loss) < 6.0
