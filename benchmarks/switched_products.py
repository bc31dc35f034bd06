"""What products cost inside of training: one run whose layers multiply in another way every two steps.

    python benchmarks/switched_products.py --shape llama-1b --seq 4096 --mbs 4 --gbs 16 --tune products.json

Prints the median step of each way: torch's products, the fastest of cuBLASLt's proposals, these with the residual stream added
in the product, and with SwiGLU in the product where that was found to be faster. Differences of less than a percent drown
between two processes, since a GPU at its power limit is faster or slower with its temperature; here the ways take turns.
``--ways`` names the ones to take. A file of choices made elsewhere (``--other``) is one more way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.kernel_kinds import table_of
from benchmarks.model_shapes import SHAPES, config_of
from benchmarks.train_step import Clock, Module, RandomTokens
from lightning_megatron import MegatronStrategy
from lightning_megatron.kernels.products import Products, TorchProducts, set_products
from lightning_megatron.kernels.tuned_products import TunedProducts
from lightning_megatron.precision import MegatronPrecision

_STEPS_A_TURN, _NUM_TURNS = 2, 3  # the first turn of each is warm-up


class Ungated(TunedProducts):
    """Tuned products that leave SwiGLU to a pass of its own."""

    def gates(self, *_: Any) -> bool:
        """Never."""
        return False


class AddedApart(Ungated):
    """Tuned products that leave the residual stream to the layers as well."""

    def adds_to(self, *_: Any) -> bool:
        """Never."""
        return False


class Turns(Clock):
    """Lets the ways take turns, and keeps the seconds of each.

    Args:
        ways: what to multiply by, by name.
    """

    def __init__(self, ways: dict[str, Products]) -> None:
        self.ways = ways
        self.num_steps = _STEPS_A_TURN * _NUM_TURNS * len(ways)
        self.times: dict[str, list[float]] = {name: [] for name in ways}
        super().__init__(self.num_steps)

    def _way(self, step: int) -> str:
        turn = min(step, self.num_steps - 1) // _STEPS_A_TURN
        return list(self.ways)[turn % len(self.ways)]

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        """Switch, then start the clock."""
        set_products(self.ways[self._way(trainer.global_step)])
        super().on_train_batch_start(trainer, *arguments)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *arguments: Any) -> None:
        """Stop the clock."""
        super().on_train_batch_end(trainer, module, outputs, *arguments)
        step = trainer.global_step - 1
        if _STEPS_A_TURN * len(self.ways) <= step < self.num_steps:
            self.times[self._way(step)].append(self.seconds[-1])


def ways_of(tune: str, other: str) -> dict[str, Callable[[], Products]]:
    """How to make each way, by its name."""
    device = torch.device("cuda", 0)
    found: dict[str, Callable[[], Products]] = {"torch": TorchProducts}
    if other:
        found["other"] = lambda: AddedApart(device, Path(other))
    found["tuned"] = lambda: AddedApart(device, Path(tune))
    found["residual"] = lambda: Ungated(device, Path(tune))
    found["gated"] = lambda: TunedProducts(device, Path(tune))
    return found


def main() -> None:
    """Train, and print the medians and the last step's kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b-8l")
    for name, default in {"seq": 8192, "mbs": 1, "gbs": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tune", required=True, metavar="PATH", help="file of the choices, made here if it does not exist")
    parser.add_argument("--other", default="", metavar="PATH", help="a file of other choices")
    parser.add_argument("--fp8", default="", help="delayed or current")
    parser.add_argument("--ways", default="torch,tuned,residual,gated", help="with commas between them")
    options = parser.parse_args()
    made = ways_of(options.tune, options.other)
    turns = Turns({name: made[name]() for name in options.ways.split(",")})
    config = config_of(options.shape, options.seq)
    precision = MegatronPrecision("bf16-mixed", fp8=options.fp8) if options.fp8 else MegatronPrecision("bf16-mixed")
    backend: dict[str, Any] = {} if options.fp8 else {"backend": "torch"}
    trainer = L.Trainer(
        strategy=MegatronStrategy(micro_batch_size=options.mbs, tune_products=options.tune, **backend),
        plugins=[precision],
        accelerator="gpu",
        devices=1,
        max_steps=turns.num_steps + 1,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        callbacks=[turns],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    data = RandomTokens(config, seq_len=options.seq, num_samples=options.gbs * (turns.num_steps + 1))
    trainer.fit(Module(config), DataLoader(data, batch_size=options.gbs))
    print(table_of(turns.profile))
    for name, times in turns.times.items():
        print(f"{name:24s} {statistics.median(times):.4f} s of {[round(each, 4) for each in times]}", flush=True)


if __name__ == "__main__":
    main()
