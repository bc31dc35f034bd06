"""Weight gradients on a stream beside the backward: the same bits as without, and peak memory; one line a case.

Both under ``torch.use_deterministic_algorithms``: else attention's backward has another order of sums from run to run.

python tests/gpu/beside.py
torchrun --no-python --nproc-per-node 2 bash tests/gpu/one_gpu_ranks.sh tests/gpu/beside.py        # dp2, tp2
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or products are not deterministic
from tests.gpu.graphs import FAILED, GPT2, LLAMA, WORLD, case, trained  # first: it loads Transformer Engine's cuDNN

# isort: split
from dataclasses import replace

import torch

from lightning_megatron.layers.te_backend import why_unavailable
from lightning_megatron.models import GPTConfig

WIDE = replace(LLAMA, hidden_size=2048, ffn_hidden_size=8192, num_heads=16, num_kv_heads=4)  # long products, many in flight


def compared(config: GPTConfig, tune: str, **options: Any) -> str:
    """Train with and without; choices of products are made once."""
    found = []
    for overlap in (False, True):
        torch.cuda.reset_peak_memory_stats()
        module, weights = trained(config, tune_products=tune, overlap_weight_gradients=overlap, **options)
        found.append(([float(loss) for loss in module.losses], weights, torch.cuda.max_memory_allocated() / 2**20))
        del module
    (losses, weights, before), (others, changed, after) = found
    assert losses == others, (losses, others)
    different = [name for name, value in weights.items() if not torch.equal(value, changed[name])]
    assert not different, different
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f}, same bits; peak {before:.0f} and {after:.0f} MiB"


def main() -> None:
    """All cases of this number of ranks."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    tune = str(Path(tempfile.mkdtemp()) / "products.json")
    layouts: dict[str, dict[str, Any]] = {"one rank": {}, "tied, biases": {"config": GPT2}, "recompute": {"recompute": "full"}}
    if WORLD > 1:
        layouts = {"dp2": {}, "tp2+sp": {"tp": 2, "sequence_parallel": True}}
    kinds: dict[str, dict[str, Any]] = {"bf16": {"backend": "torch"}}
    if why_unavailable() is None:
        kinds |= {"fp8 delayed": {"fp8": "delayed"}, "fp8 current": {"fp8": "current"}}
    for name, layout in layouts.items():
        for kind, options in kinds.items():
            given = {"config": WIDE, "length": 512, **layout, **options}
            case(f"{name}, {kind}", partial(compared, given.pop("config"), tune, **given))
    if WORLD == 1:
        case("graphs", partial(compared, LLAMA, tune, backend="torch", cuda_graphs=True))
    print(f"{len(FAILED)} failed: {FAILED}")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
