"""``MegatronStrategy``: what Lightning's Trainer talks to."""

from lightning_megatron.strategy.strategy import MegatronStrategy

__all__ = ["MegatronStrategy"]
