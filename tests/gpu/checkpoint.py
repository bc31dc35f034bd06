"""Checkpoints of what lies on a GPU; one line a case.

    python tests/gpu/checkpoint.py [FOLDER]

Parameters, main values and states are saved (in the foreground, and in the background while a next step changes them), and
loaded into a fresh run that keeps them in the same way or in another one; memory on the GPU is measured while that goes on.
"""

from __future__ import annotations

import gc
import itertools
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint import BackgroundSaver, load, save
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig, float8
from lightning_megatron.parallelism import Parallelism

DEVICE = torch.device("cuda", 0)
SIZE, NUM_LAYERS, BUCKET_MB = 3000, 4, 64.0  # 36 million parameters; a layer is no whole number of blocks or pieces
KEPT: dict[str, dict[str, Any]] = {
    "fp32": {},
    "unfused": {"fused_adam": False},
    "remainder": {"main_param": "remainder"},
    "bf16 states": {"state_dtype": "bf16"},
    "fp8 states": {"state_dtype": "fp8"},
    "remainder, fp8 states": {"main_param": "remainder", "state_dtype": "fp8"},
    "offload": {"offload_fraction": 0.5},
    "remainder, offload": {"main_param": "remainder", "offload_fraction": 1.0},
}
FAILED: list[str] = []


def case(name: str, run: Callable[[], str]) -> None:
    """Run one, and say how it went."""
    try:
        print(f"passed {name} {run()}", flush=True)
    except Exception as error:
        FAILED.append(name)
        traceback.print_exc()
        print(f"FAILED {name} {type(error).__name__}: {error}", flush=True)


class Job:
    """A run that keeps its values in one of the ways."""

    def __init__(self, kind: str, seed: int) -> None:
        self.mesh = Mesh.create(Parallelism(), device=DEVICE)
        torch.manual_seed(seed)
        layers = [nn.Linear(SIZE, SIZE, device=DEVICE, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
        self.module = nn.ModuleList(layers)
        self.module.register_buffer("count", torch.full((5,), seed, device=DEVICE))
        named = list(self.module.named_parameters())
        optimizer = torch.optim.AdamW([param for _, param in named], lr=0.01)
        config = DistributedOptimizerConfig(bucket_mb=BUCKET_MB, **KEPT[kind])
        self.optimizer = DistributedOptimizer(optimizer, named, mesh=self.mesh, config=config)

    def step(self, number: int) -> None:
        """An update by known gradients."""
        generator = torch.Generator(DEVICE).manual_seed(number)
        for param in self.module.parameters():
            gradient = torch.randn(param.shape, generator=generator, device=DEVICE).to(param.dtype)
            (param * gradient).sum().backward()
        self.optimizer.reduce_gradients()
        self.optimizer.finish_gradients(num_tokens=None)
        self.optimizer.step()
        self.optimizer.update_parameters()
        self.optimizer.wait_parameters()

    def save(self, path: Path, background: BackgroundSaver | None = None) -> None:
        """Write a checkpoint."""
        parts = {"module": self.module, "optimizers": [self.optimizer], "meta": {"epoch": 3}, "mesh": self.mesh}
        save(path, **parts, background=background)

    def load(self, path: Path) -> None:
        """Read it."""
        load(path, module=self.module, optimizers=[self.optimizer], mesh=self.mesh)

    def values(self) -> dict[str, Tensor]:
        """Everything, on the host."""
        kept = self.optimizer.kept
        kept.settle()
        found = {name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()}
        for shard in self.optimizer.shards:
            for key, value in {"main": kept.main(shard), **kept.states(shard)}.items():
                whole = value if isinstance(value, Tensor) else value.read(0, shard.main.numel())
                found[f"{shard.name}.{key}"] = whole.detach().cpu().clone()
        return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same bit for bit."""
    return [name for name, value in one.items() if name not in other or not torch.equal(value, other[name])]


def same_way(kind: str, folder: Path) -> str:
    """Saved, loaded and trained on."""
    job = Job(kind, 1)
    job.step(0)
    expected, path = job.values(), folder / "a.ckpt"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    job.save(path)
    saving = torch.cuda.max_memory_allocated() - before
    job.step(1)
    trained = job.values()
    del job
    gc.collect()
    other = Job(kind, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    other.load(path)
    loading = torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())
    assert not differing(expected, other.values()), differing(expected, other.values())
    other.step(1)
    assert not differing(trained, other.values()), differing(trained, other.values())
    assert max(saving, loading) < 128 * 2**20, f"{saving / 2**20:.0f} and {loading / 2**20:.0f} MiB"
    return f"(MiB on the GPU above the run's own: saving {saving / 2**20:.0f}, loading {loading / 2**20:.0f})"


def other_way(source: str, target: str, folder: Path) -> str:
    """What one way saves, another loads: values agree within what each can hold."""
    job = Job(source, 1)
    job.step(0)
    expected = job.values()
    job.save(folder / "a.ckpt")
    del job
    other = Job(target, 2)
    other.load(folder / "a.ckpt")
    found, worst = other.values(), 0.0
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = ((found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)).item()
        worst = max(worst, error)
        assert error < (0.05 if name.endswith("exp_avg") else 0.005), f"{name}: {error}"
    return f"(worst relative difference {worst:.1e})"


def in_background(kind: str, folder: Path) -> str:
    """What is written is what was there, whatever the next steps do."""
    job, saver = Job(kind, 1), BackgroundSaver(lambda: None)
    for number in range(3):  # the second one and the third use the host copies of the one before
        job.step(number)
        expected = job.values()
        job.save(folder / "a.ckpt", saver)
        job.step(number + 10)
        saver.wait()
        other = Job(kind, 2)
        other.load(folder / "a.ckpt")
        assert not differing(expected, other.values()), f"save {number}: {differing(expected, other.values())}"
        del other
    return ""


def moments() -> str:
    """8-bit moments in pieces are those of the whole."""
    values = torch.randn(100_003, device=DEVICE) * torch.logspace(-8, 8, 100_003, device=DEVICE)
    moment = float8.Moment.zeros(values.numel(), DEVICE)
    for start in range(0, values.numel(), 4096):
        moment.write(values[start : start + 4096], start, min(start + 4096, values.numel()))
    narrow, scales = float8.narrowed(values)
    assert torch.equal(narrow.view(torch.uint8), moment.narrow.view(torch.uint8))
    assert torch.equal(scales, moment.scales)
    return ""


def main() -> None:
    """All cases."""
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        case("8-bit moments in pieces", moments)
        for kind in KEPT:
            case(f"{kind}: saved, loaded, trained on", partial(same_way, kind, folder))
            case(f"{kind}: in the background", partial(in_background, kind, folder))
        for source, target in itertools.pairwise([*KEPT, "fp32"]):
            case(f"{source} -> {target}", partial(other_way, source, target, folder))
    finally:
        shutil.rmtree(folder)
    print(f"{len(FAILED)} failed: {FAILED}")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
