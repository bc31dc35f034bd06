r"""Pretraining through LightningCLI, on the text that is on every machine with Python.

    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml \
        --trainer.strategy=lightning_megatron.MegatronStrategy --trainer.strategy.tp=2 --trainer.devices=2
    python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --trainer.strategy=megatron_tp2_pp2

A run writes its whole configuration to ``config.yaml`` in its log folder; ``fit --config`` with that file runs it again.
"""

from lightning.pytorch.cli import LightningCLI

import lightning_megatron  # noqa: F401  (registers the names "megatron", "megatron_tp2", ...)
from lightning_megatron.data.datamodule import TextDataModule
from lightning_megatron.models.gpt_module import GPTModule


def main(args: list[str] | None = None) -> LightningCLI:
    """Parse the command line, or ``args``, and run what it says."""
    return LightningCLI(GPTModule, TextDataModule, args=args)


if __name__ == "__main__":
    main()
