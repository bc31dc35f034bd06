"""Random numbers that depend on what they are for, not on which rank draws them.

Note [Seeds by name]
Every random draw of a job is seeded by a name: ``(seed, "init", parameter name)``, ``(seed, step, micro-batch, dp rank,
"layer", 17)``. Initial weights and dropout masks are then the same at every pipeline layout, replicas draw different
masks, and a resumed run needs no stored generator states. Inside a layer, the parts of a tensor-parallel region that
hold different data draw from ``shard_rng``; it takes its seed from the surrounding generator, so activation recompute
(which restores that generator) repeats the same masks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from lightning_megatron.mesh import Axis


def derive_seed(*names: object) -> int:
    """A 63-bit seed from a sequence of names and numbers, the same in every process and Python version."""
    text = ":".join(str(name) for name in names)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def named_generator(device: torch.device, *names: object) -> torch.Generator:
    """A fresh generator on ``device`` seeded by ``derive_seed(*names)``."""
    return torch.Generator(device=device).manual_seed(_low_bits(derive_seed(*names), device))


def _low_bits(seed: int, device: torch.device) -> int:
    # The CPU generator reads the low 32 bits only; fold the high ones in so that they count.
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF if device.type == "cpu" else seed


def seed_default_generators(device: torch.device, seed: int) -> None:
    """Seed the default generator of the CPU and, where it differs, that of ``device``."""
    cpu = torch.device("cpu")
    torch.default_generator.manual_seed(_low_bits(seed, cpu))
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(seed)


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Leave the default generators as they were, whatever is drawn inside."""
    cpu_state = torch.default_generator.get_state()
    cuda = torch.cuda.default_generators[_index(device)] if device.type == "cuda" else None
    cuda_state = cuda.get_state() if cuda is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu_state)
        if cuda is not None and cuda_state is not None:
            cuda.set_state(cuda_state)


@contextmanager
def seeded_rng(device: torch.device, *names: object) -> Iterator[None]:
    """Run the block under default generators seeded by the names, then put them back as they were."""
    with preserved_rng(device):
        seed_default_generators(device, derive_seed(*names))
        yield


@contextmanager
def seeded_user_rng(device: torch.device, *names: object) -> Iterator[None]:
    """``seeded_rng`` for code of the user's, which may also draw from Python's ``random`` and from numpy."""
    python, array = random.getstate(), np.random.get_state()
    seed = derive_seed(*names)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        with preserved_rng(device):
            seed_default_generators(device, seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """States of all default generators that user code may draw from: torch's, Python's and numpy's."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.default_generator.get_state(), cuda, random.getstate(), np.random.get_state()


def set_generator_states(device: torch.device, states: tuple[Any, ...]) -> None:
    """Continue from what ``generator_states`` returned, on this rank or another."""
    cpu, cuda, python, array = states
    torch.default_generator.set_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    random.setstate(python)
    np.random.set_state(array)


@contextmanager
def shard_rng(axis: Axis, device: torch.device) -> Iterator[None]:
    """Run the block under generators that differ between the ranks of ``axis``: for dropout on sharded activations.

    One number is taken from the surrounding CPU generator, which all ranks of the axis hold alike.
    """
    if axis.size == 1:
        yield
        return
    drawn = int(torch.randint(2**31, (), device="cpu"))
    with seeded_rng(device, drawn, axis.rank):
        yield
