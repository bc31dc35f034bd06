"""Callbacks that tell how fast a run is and how much memory it takes. They work under any strategy of Lightning."""

from lightning_megatron.callbacks.memory import MemoryMonitor
from lightning_megatron.callbacks.throughput import ThroughputMonitor

__all__ = ["MemoryMonitor", "ThroughputMonitor"]
