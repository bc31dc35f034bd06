"""What one layout saves, any other loads, bit for bit, optimiser state included."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint import blocks, load, save, writing
from lightning_megatron.checkpoint.files import read_index
from lightning_megatron.checkpoint.storage import read_sums
from lightning_megatron.sharding import sharding_of
from lightning_megatron.testing import run_distributed

META = {"epoch": 3, "loops": {"done": [1, 2]}, "state_dict": {"not": "here"}}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "dp3": (3, {}),
    "dp4": (4, {}),
    "tp2 dp2": (4, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2 cp2": (4, {"tp": 2, "cp": 2}),
    "pp2 dp2": (4, {"pp": 2}),
    "pp2 tp2": (4, {"pp": 2, "tp": 2}),
    "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2}),
    "pp4": (4, {"pp": 4}),
    "ep2 dp4": (4, {"ep": 2}),
    "tp2 ep4": (4, {"tp": 2, "ep": 4}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
}
PAIRS = [
    ("one", "one"),
    ("tp2 dp2", "tp2 dp2"),
    ("pp2 dp2", "pp2 dp2"),
    ("tp2 dp2", "dp4"),
    ("dp4", "tp2 dp2"),
    ("dp3", "tp4"),
    ("tp4", "pp2 tp2"),
    ("pp2 tp2", "tp2 cp2"),
    ("pp2 dp2", "pp2 vpp2 dp2"),
    ("pp2 vpp2 dp2", "one"),
    ("one", "pp4"),
    ("pp4", "dp3"),
    ("dp3", "ep2 dp4"),
    ("ep2 dp4", "tp2 ep4"),
    ("tp2 ep4", "pp2 ep2"),
    ("pp2 ep2", "one"),
]


def write(make: Any, layout: dict[str, int], path: Path, dtype: torch.dtype, **options: Any) -> None:
    job = make(layout, dtype)
    job.fill()
    save(path, module=job.module, optimizers=[job.optimizer], meta=META, mesh=job.mesh, **options)


def read(
    make: Any, layout: dict[str, int], path: Path, dtype: torch.dtype, **options: Any
) -> tuple[Any, list[str], list[float]]:
    job = make(layout, dtype, lr=123.0)
    loaded = load(path, module=job.module, optimizers=[job.optimizer], mesh=job.mesh, **options)
    return loaded, job.wrong(states=loaded.optimizers), [group["lr"] for group in job.optimizer.optimizer.param_groups]


CASES = [(*pair, torch.bfloat16) for pair in PAIRS] + [(*pair, torch.float32) for pair in PAIRS[1:9:2]]


@pytest.mark.parametrize(("source", "target", "dtype"), CASES)
def test_every_value_arrives(make: Any, tmp_path: Path, source: str, target: str, dtype: torch.dtype) -> None:
    path = tmp_path / "a.ckpt"
    run_distributed(write, LAYOUTS[source][0], make, LAYOUTS[source][1], path, dtype)
    for loaded, wrong, rates in run_distributed(read, LAYOUTS[target][0], make, LAYOUTS[target][1], path, dtype):
        assert wrong == []
        assert loaded.optimizers
        assert loaded.meta == {"epoch": 3, "loops": {"done": [1, 2]}}
        assert rates == [1e-2, 5e-3]


def test_it_works_without_a_process_group(make: Any, tmp_path: Path) -> None:
    write(make, {}, tmp_path / "a.ckpt", torch.bfloat16)
    _, wrong, _ = read(make, {}, tmp_path / "a.ckpt", torch.bfloat16)
    assert wrong == []


@pytest.mark.parametrize("source", ["tp2 dp2", "pp2 dp2"])
def test_each_element_is_written_once(make: Any, tmp_path: Path, source: str) -> None:
    path = tmp_path / "a.ckpt"
    run_distributed(write, LAYOUTS[source][0], make, LAYOUTS[source][1], path, torch.bfloat16)
    index = read_index(path).state_dict_metadata
    tensors = {key: saved for key, saved in index.items() if hasattr(saved, "chunks")}
    names = {key.removeprefix("model.") for key in tensors if key.startswith("model.")}
    assert {"embed", "head", "layers.3.qkv", "layers.0.seen", "layers.3.running"} <= names
    assert not any(name.endswith("cache") for name in names)
    for saved in tensors.values():
        assert sum(chunk.sizes.numel() for chunk in saved.chunks) == saved.size.numel()


def test_each_wanted_byte_is_read_once(make: Any, tmp_path: Path) -> None:
    write(make, {}, tmp_path / "a.ckpt", torch.float32)

    def count() -> tuple[list[tuple[int, int]], int]:
        reads: list[tuple[int, int]] = []
        fill = blocks.BlockReader._fill

        def counted(self: Any, descriptor: int, one: Any, target: Any) -> None:
            reads.append((one.offset, one.offset + one.num_bytes))
            fill(self, descriptor, one, target)

        blocks.BlockReader._fill = counted  # type: ignore[method-assign]
        job = make()
        load(tmp_path / "a.ckpt", module=job.module, optimizers=[job.optimizer], mesh=job.mesh)
        states = (value for state in job.optimizer.optimizer.state.values() for value in state.values())
        return sorted(reads), sum(value.numel() * value.element_size() for value in states if value.dim())

    for reads, num_state_bytes in run_distributed(count, 3):
        assert all(before[1] <= after[0] for before, after in pairwise(reads))  # in the one file that was written
        parameters = sum(4 * full.numel() for full in make({}).module.state_dict().values())
        assert num_state_bytes < sum(stop - start for start, stop in reads) < num_state_bytes + 1.5 * parameters


def test_parts_whose_elements_have_no_known_place_are_read_whole(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing._Frame, "is_whole", False)  # as if torch.save copied elements before it writes them
    run_distributed(write, 4, make, {"tp": 2}, tmp_path / "a.ckpt", torch.bfloat16)
    assert read_sums(tmp_path / "a.ckpt").elements == {}  # type: ignore[union-attr]
    for _, wrong, _ in run_distributed(read, 4, make, {"pp": 2}, tmp_path / "a.ckpt", torch.bfloat16):
        assert wrong == []


def test_a_checkpoint_without_optimizer_restores_parameters_and_says_so(make: Any, tmp_path: Path) -> None:
    write(make, {}, tmp_path / "a.ckpt", torch.bfloat16, save_optimizer=False)
    loaded, wrong, rates = read(make, {}, tmp_path / "a.ckpt", torch.bfloat16)
    assert (loaded.optimizers, wrong, rates) == (False, [], [123.0, 61.5])


def test_the_optimizer_is_left_alone_when_it_is_not_asked_for(make: Any, tmp_path: Path) -> None:
    write(make, {}, tmp_path / "a.ckpt", torch.bfloat16)
    loaded, wrong, rates = read(make, {}, tmp_path / "a.ckpt", torch.bfloat16, load_optimizer=False)
    assert (loaded.optimizers, wrong, rates) == (False, [], [123.0, 61.5])


def test_main_parameters_that_were_not_saved_are_read_from_the_parameters(make: Any, tmp_path: Path) -> None:
    write(make, {}, tmp_path / "a.ckpt", torch.float32)  # fp32 parameters have no main copies
    job = make({}, torch.bfloat16)
    assert load(tmp_path / "a.ckpt", module=job.module, optimizers=[job.optimizer], mesh=job.mesh, cast=True).optimizers
    for shard in job.optimizer.shards:
        torch.testing.assert_close(shard.main, shard.param.reshape(-1)[shard.start : shard.stop].float(), rtol=0, atol=0)


def test_an_optimizer_that_never_stepped_is_saved_and_loaded(make: Any, tmp_path: Path) -> None:
    job = make()
    job.fill(states=False)
    save(tmp_path / "a.ckpt", module=job.module, optimizers=[job.optimizer], meta={}, mesh=job.mesh)
    other = make(lr=1.0)
    other.fill()
    assert load(tmp_path / "a.ckpt", module=other.module, optimizers=[other.optimizer], mesh=other.mesh).optimizers
    assert not other.optimizer.optimizer.state


def step(job: Any, number: int) -> None:
    """An optimiser step whose gradient is known, and the same at every layout."""
    for name, param in job.module.named_parameters():
        sharding = sharding_of(param)
        gradient = sharding.cut(make_gradient(name, number, sharding.global_shape), tuple(param.shape))
        sharers = job.mesh["edp"] if sharding.expert else job.mesh.dp_cp
        gradient = gradient / sharers.size / (2 if sharding.tied else 1)  # both ends' gradients are summed
        (param * gradient.to(param.dtype)).sum().backward()
    job.optimizer.reduce_gradients()
    job.optimizer.finish_gradients(num_tokens=None)
    job.optimizer.optimizer.step()
    job.optimizer.update_parameters()


def make_gradient(name: str, number: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) * 100 + number))


def test_training_goes_on_at_another_layout_as_if_it_had_never_stopped(make: Any, tmp_path: Path) -> None:
    whole = make()
    whole.fill(states=False)
    for number in range(4):
        step(whole, number)
    expected = {name: param.detach().clone() for name, param in whole.module.named_parameters()}

    def begin() -> None:
        job = make({"tp": 2, "ep": 4})
        job.fill(states=False)
        for number in range(2):
            step(job, number)
        save(tmp_path / "a.ckpt", module=job.module, optimizers=[job.optimizer], meta={}, mesh=job.mesh)

    def go_on() -> None:
        job = make({"pp": 2, "ep": 2})
        load(tmp_path / "a.ckpt", module=job.module, optimizers=[job.optimizer], mesh=job.mesh)
        for number in range(2, 4):
            step(job, number)
        for name, param in job.module.named_parameters():
            part = sharding_of(param).cut(expected[name], tuple(param.shape))
            torch.testing.assert_close(param.detach(), part, rtol=1e-6, atol=1e-6)

    run_distributed(begin, 4)
    run_distributed(go_on, 4)
