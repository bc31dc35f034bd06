"""Neither saving nor loading holds more than a bucket above what the run itself keeps, in whatever form it keeps it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.checkpoint import BackgroundSaver, blocks, boxes, load, save, staging, writing
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.testing import run_distributed
from tests.optim.main_values import main_values

SIZE, NUM_LAYERS, BUCKET_MB = 256, 4, 0.25  # a layer is a bucket, and main values in fp32 are four
KEPT: dict[str, dict[str, Any]] = {
    "fp32": {},
    "remainder": {"main_param": "remainder"},
    "fp8": {"state_dtype": "fp8", "fused_adam": True},
    "remainder and fp8": {"main_param": "remainder", "state_dtype": "fp8", "fused_adam": True},
    "offload": {"offload_fraction": 1.0},
    "remainder, bf16, offload": {"main_param": "remainder", "state_dtype": "bf16", "offload_fraction": 1.0},
}


class Live(TorchDispatchMode):
    """Bytes of all storages that operations have made on this thread and that are still there, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        untouched = func is torch.ops.aten.set_.source_Storage_storage_offset  # see Note [Frames] in checkpoint/writing.py
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not isinstance(tensor, boxes.BoxedTensor) and not untouched:
                self.take(tensor)
        self.peak = max(self.peak, self.num_bytes)
        return out

    def take(self, tensor: Tensor) -> None:
        """Count a tensor."""
        storage = tensor.untyped_storage()
        if not tensor.is_meta:
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    @property
    def num_bytes(self) -> int:
        """Alive now."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())


class Inline:
    """In place of a pool of threads, so that what they make is counted, too."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)

        class Done:
            def result(self) -> Any:
                return result

        return Done()

    def shutdown(self, **_: Any) -> None:
        pass


def make(kind: str) -> tuple[nn.Module, DistributedOptimizer]:
    module = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16) for _ in range(NUM_LAYERS))
    config = DistributedOptimizerConfig(bucket_mb=BUCKET_MB, **KEPT[kind])
    named = list(module.named_parameters())
    optimizer = torch.optim.AdamW([param for _, param in named])
    return module, DistributedOptimizer(optimizer, named, mesh=Mesh(), config=config)


def step(module: nn.Module, optimizer: DistributedOptimizer) -> None:
    for number, param in enumerate(module.parameters()):
        gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
        (param * gradient).sum().backward()
    optimizer.reduce_gradients()
    optimizer.finish_gradients(num_tokens=None)
    optimizer.step()
    optimizer.update_parameters()


def values(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    with main_values(optimizer):
        found = {f"{shard.name}.main": shard.main.detach().clone() for shard in optimizer.shards}
        for shard in optimizer.shards:
            state = optimizer.optimizer.state[shard.main]
            found |= {f"{shard.name}.{key}": value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    return found


def measure(kind: str, folder: Path) -> tuple[float, float, list[str]]:
    """Bytes above what was there before and after: of saving, of loading; what is not as it was saved."""
    for module, name in ((blocks, "BLOCK_BYTES"), (writing, "BLOCK_BYTES"), (staging, "BLOCK_BYTES")):
        setattr(module, name, 2**14)  # as much less than 8 MiB as the buckets are less than by default
    boxes.PIECE_NUMEL = 2**12
    blocks.ThreadPoolExecutor = writing.ThreadPoolExecutor = Inline  # type: ignore[misc, assignment]
    with Live() as live:
        module, optimizer = make(kind)
        step(module, optimizer)
        saved = values(optimizer)
        before = live.peak = live.num_bytes
        save(folder / "a.ckpt", module=module, optimizers=[optimizer], meta={}, mesh=optimizer.mesh)
        saving = live.peak - before
        del optimizer, module
        gc.collect()
        module, optimizer = make(kind)
        before = live.peak = live.num_bytes
        load(folder / "a.ckpt", module=module, optimizers=[optimizer], mesh=optimizer.mesh)
        loading = live.peak - max(before, live.num_bytes)
        before = live.peak = live.num_bytes  # again, with states that are there
        load(folder / "a.ckpt", module=module, optimizers=[optimizer], mesh=optimizer.mesh)
        loading = max(loading, live.peak - before)
    loaded = values(optimizer)
    return saving, loading, [name for name, value in saved.items() if not torch.equal(value, loaded[name])]


@pytest.mark.parametrize("kind", KEPT)
def test_saving_and_loading_hold_less_than_a_bucket_of_main_values_or_states(kind: str, tmp_path: Path) -> None:
    saving, loading, wrong = run_distributed(measure, 1, kind, tmp_path, init_process_group=False)[0]
    assert wrong == []
    assert saving < BUCKET_MB * 2**20
    assert loading < BUCKET_MB * 2**20


def in_background(kind: str, folder: Path) -> list[str]:
    module, optimizer = make(kind)
    step(module, optimizer)
    saved, saver = values(optimizer), BackgroundSaver(lambda: None)
    save(folder / "a.ckpt", module=module, optimizers=[optimizer], meta={}, mesh=optimizer.mesh, background=saver)
    step(module, optimizer)  # what is written does not change with it
    saver.wait()
    load(folder / "a.ckpt", module=module, optimizers=[optimizer], mesh=optimizer.mesh)
    loaded = values(optimizer)
    return [name for name, value in saved.items() if not torch.equal(value, loaded[name])]


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_in_any_form_is_copied_before_a_background_save_returns(kind: str, tmp_path: Path) -> None:
    assert run_distributed(in_background, 1, kind, tmp_path, init_process_group=False) == [[]]
