"""The example of long contexts, made tiny, on ranks forked from this process, which has the imports."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.launch.processes import ROOT, run_forked

EXAMPLE = str(ROOT / "examples" / "long_context.py")
SMALL = ["--max-steps=3", "--seq-len=64", "--documents=4", "--corpus-mb=0.02", "--hidden-size=32"]


@pytest.mark.parametrize("packing", ["static", "dynamic"])
def test_the_example_trains_on_packed_documents_cut_over_two_ranks(packing: str) -> None:
    def main() -> None:
        sys.argv = [EXAMPLE, *SMALL, "--packing", packing]
        runpy.run_path(EXAMPLE, run_name="__main__")

    codes, outputs = run_forked(main, 2)
    assert codes == [0, 0], outputs
    assert "cp=2 over 2 rank(s)" in outputs[0]
    (loss,) = re.findall(r"^loss (\S+) nats a byte$", "".join(outputs), re.MULTILINE)  # rank 0 prints, once
    assert 2.0 < float(loss) < 6.0
