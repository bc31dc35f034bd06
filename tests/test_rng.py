"""Random numbers by name: the same in every process, apart where names differ, and nothing left behind."""

from __future__ import annotations

import random

import numpy as np
import torch

from lightning_megatron.mesh import Axis
from lightning_megatron.rng import derive_seed, named_generator, seeded_rng, seeded_user_rng, shard_rng

CPU = torch.device("cpu")


def test_seeds_follow_from_names_alone() -> None:
    assert derive_seed(1, "init", "layers.3.weight") == 8956422498255936664
    assert len({derive_seed(1, "a", i) for i in range(1000)}) == 1000
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_seeds_that_differ_in_high_bits_only_give_other_numbers_on_the_cpu() -> None:
    draws = {float(torch.rand((), generator=named_generator(CPU, "name", i))) for i in range(200)}
    assert len(draws) == 200


def test_a_seeded_block_repeats_and_leaves_the_surrounding_generators_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with seeded_rng(CPU, 3, "step"):
        first = torch.rand(4)
    with seeded_rng(CPU, 3, "step"):
        assert torch.equal(torch.rand(4), first)
    with seeded_rng(CPU, 4, "step"):
        assert not torch.equal(torch.rand(4), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_user_code_draws_alike_from_python_numpy_and_torch() -> None:
    def draw() -> tuple[float, float, float]:
        with seeded_user_rng(CPU, 1, "step"):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    outside = random.getstate()
    assert draw() == draw()
    assert random.getstate() == outside


def test_shards_draw_apart_and_the_surrounding_generator_stays_common() -> None:
    def draw(rank: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        with shard_rng(Axis("tp", (0, 1), rank), CPU):
            inside = torch.rand(3).tolist()
        return inside, torch.rand(3).tolist()

    (inside_0, after_0), (inside_1, after_1) = draw(0), draw(1)
    assert inside_0 != inside_1
    assert after_0 == after_1
    assert draw(1)[0] == inside_1
