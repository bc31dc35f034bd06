"""A sharded model with every kind of parameter, whose right content at any layout is the cut of known full tensors."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.sharding import Box, ParamSharding, replicated, set_sharding

NUM_LAYERS, HIDDEN, VOCABULARY = 4, 6, 9
TINY_BUCKET_MB = 40 * 4 / 2**20


def full(name: str, shape: tuple[int, ...]) -> Tensor:
    """The unsharded values that go by a name, fp32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))


def add(module: nn.Module, name: str, sharding: ParamSharding, dtype: torch.dtype, padding: int = 0) -> None:
    rows = sum(box.size[0] for box in sharding.boxes) + padding if sharding.global_shape else 0
    shape = (rows, *sharding.boxes[0].size[1:]) if sharding.global_shape else ()
    module.register_parameter(name, set_sharding(nn.Parameter(torch.zeros(shape, dtype=dtype)), sharding))


class Layer(nn.Module):
    """Three boxes with a replicated middle one, a row-parallel matrix, experts, a vector, a 0-dim parameter and buffers."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        tp, rank = mesh.tp.size, mesh.tp.rank
        q = Box((rank * 8 // tp, 0), (8 // tp, HIDDEN))
        k = Box((8, 0), (4, HIDDEN), replicated=("tp",))
        v = Box((12 + rank * 4 // tp, 0), (4 // tp, HIDDEN))
        add(self, "qkv", ParamSharding((16, HIDDEN), (q, k, v)), dtype)
        add(self, "out", ParamSharding((HIDDEN, 8), (Box((0, rank * 8 // tp), (HIDDEN, 8 // tp)),)), dtype)
        ep = mesh["ep"]
        own = Box((ep.rank * 12 // ep.size, 0), (12 // ep.size, 5))  # of four experts, three rows each
        add(self, "experts", ParamSharding((12, 5), (own,), expert=True), dtype)
        add(self, "norm", replicated((HIDDEN,)), dtype)
        add(self, "gain", replicated(()), dtype)
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


class Sharded(nn.Module):
    """A vocabulary that no tp divides (rank 3 of 4 has padding alone), tied over the ends; layers; a whole vector."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> None:
        super().__init__()
        pp, tp = mesh.pp, mesh.tp
        rows = -(-VOCABULARY // tp.size)
        start, stop = (min(VOCABULARY, edge * rows) for edge in (tp.rank, tp.rank + 1))
        box = Box((start, 0), (stop - start, hidden))
        if pp.is_first or pp.is_last:
            tied = ParamSharding((VOCABULARY, hidden), (box,), tied=pp.size > 1)
            add(self, "embed", tied, dtype, padding=rows - (stop - start))
        self.layers = nn.ModuleList()
        for index in range(NUM_LAYERS):
            vpp = mesh.parallelism.vpp
            if index * pp.size * vpp // NUM_LAYERS % pp.size == pp.rank:
                self.layers._modules[str(index)] = Layer(mesh, dtype)
        if pp.is_last:
            add(self, "head", replicated((HIDDEN,)), dtype)


@dataclass
class Job:
    """One rank's model and optimiser."""

    mesh: Mesh
    module: Sharded
    optimizer: DistributedOptimizer

    @torch.no_grad()
    def fill(self, *, states: bool = True) -> None:
        """Give everything its known value."""
        for name, param in self.module.named_parameters():
            param.copy_(self.part(param, name))
        for name, buffer in self.module.named_buffers():
            if not name.endswith("cache"):
                buffer.copy_(full(name, tuple(buffer.shape)) * 100)
        self.optimizer.refresh_main()
        for shard in self.optimizer.shards if states else ():
            if shard.main.dtype != shard.param.dtype:
                shard.main.copy_(self.shard_part(shard, "main", name=shard.name))
            self.optimizer.optimizer.state[shard.main] = {
                "step": torch.tensor(7.0),
                "exp_avg": self.shard_part(shard, "exp_avg", name=shard.name),
                "exp_avg_sq": self.shard_part(shard, "exp_avg_sq", name=shard.name),
            }

    def part(self, param: nn.Parameter, name: str) -> Tensor:
        sharding: ParamSharding = param._lightning_megatron_sharding  # type: ignore[attr-defined]
        return sharding.cut(full(name, sharding.global_shape), tuple(param.shape)).to(param.dtype)

    def shard_part(self, shard, kind: str, *, name: str) -> Tensor:  # type: ignore[no-untyped-def]
        whole = full(f"{kind}.{name}", shard.sharding.global_shape)
        return shard.sharding.cut(whole, shard.param.shape).reshape(-1)[shard.start : shard.stop].clone()

    def wrong(self, *, states: bool = True) -> list[str]:
        """Names of what does not have its known value, bit for bit."""
        bad = [name for name, param in self.module.named_parameters() if not torch.equal(param, self.part(param, name))]
        for name, buffer in self.module.named_buffers():
            expected = (full(name, tuple(buffer.shape)) * 100).to(buffer.dtype)
            expected = torch.zeros_like(buffer) if name.endswith("cache") else expected
            bad += [] if torch.equal(buffer, expected) else [name]
        for shard in self.optimizer.shards if states else ():
            state = self.optimizer.optimizer.state[shard.main]
            bad += [] if state.keys() == {"step", "exp_avg", "exp_avg_sq"} else [f"keys of {shard.name}"]
            bad += [] if torch.equal(state["step"], torch.tensor(7.0)) else [f"step of {shard.name}"]
            for kind in ("exp_avg", "exp_avg_sq"):
                bad += (
                    [] if torch.equal(state[kind], self.shard_part(shard, kind, name=shard.name)) else [f"{kind}.{shard.name}"]
                )
            copied = shard.main.dtype != shard.param.dtype
            if copied and not torch.equal(shard.main, self.shard_part(shard, "main", name=shard.name)):
                bad.append(f"main.{shard.name}")
        return bad


class Maker:
    """Makes a rank's job; given to tests as a fixture because test files do not import each other."""

    full = staticmethod(full)
    Sharded = Sharded

    def __call__(self, layout: dict[str, int] | None = None, dtype: torch.dtype = torch.float32, lr: float = 1e-2) -> Job:
        mesh = Mesh.create(Parallelism(**(layout or {})), device=torch.device("cpu"))  # type: ignore[arg-type]
        module = Sharded(mesh, dtype)
        vectors = [param for param in module.parameters() if param.dim() < 2]
        matrices = [param for param in module.parameters() if param.dim() == 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": lr / 2, "weight_decay": 0.0}]
        config = DistributedOptimizerConfig(bucket_mb=TINY_BUCKET_MB)
        optimizer = torch.optim.AdamW(groups, lr=lr)
        return Job(mesh, module, DistributedOptimizer(optimizer, module.named_parameters(), mesh=mesh, config=config))


@pytest.fixture
def make() -> Maker:
    return Maker()
