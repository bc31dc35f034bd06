"""The live side of ``Parallelism``: this rank's process groups, one ``Axis`` for each set of ranks it works with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.parallelism import DENSE_AXES, Parallelism, pipeline_edges

DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Axis:
    """One set of ranks that this rank works with, and where it stands in it.

    Args:
        name: the name that ``Box.replicated`` and ``Box.partial`` use.
        ranks: global ranks, ordered by position on the axis.
        rank: this rank's position.
        group: the process group, ``None`` when the axis has one rank: collectives then return their input.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, compare=False)

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self  # process groups cannot be copied, and a copied module works on the same ones

    @property
    def size(self) -> int:
        """Ranks on the axis."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank stands at position 0."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank stands at the last position."""
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """All axes of a running job, as seen from one rank.

    Axes by name: ``tp``, ``cp``, ``pp``, ``dp``, ``dp_cp`` (gradients of dense parameters are reduced over it), ``etp``,
    ``ep``, ``edp`` (the same for experts), ``replica`` (the ranks that share a batch: tp, cp and pp), ``ends`` (first
    and last stage of a pipeline, where they are on two ranks; others stand on an axis of their own), ``world``, and
    ``tp:n`` for every proper divisor n of tp: blocks of n neighbouring tensor-parallel ranks (they share a key/value head
    under GQA), and ``cp:n`` likewise (they share a short sequence); and with ``cp_comm="a2a+p2p"`` ``cp:a2a``, neighbouring
    context-parallel ranks that exchange heads, and ``cp:p2p``, the ranks of a ring across them.

    Args:
        parallelism: the layout that was asked for.
        rank: this global rank.
        world_size: ranks in the job.
        device: where this rank computes.
        axes: axis by name.
        channels: one communicator for each directed pipeline edge of this rank and each direction of travel, by
            ``(direction, source rank, destination rank)``; messages on it are ordered by the schedule alone.
        device_mesh: torch's view of the axes larger than 1, slowest rank digit first, on the same process groups. Its
            ``pp`` dim counts ranks upwards, so its index 0 holds the last stage. ``None`` in a world of one rank.
    """

    parallelism: Parallelism = field(default_factory=Parallelism)
    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    axes: dict[str, Axis] = field(default_factory=dict)
    channels: dict[tuple[str, int, int], dist.ProcessGroup] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        return self  # process groups cannot be copied, and a copied module works on the same ones

    def __getitem__(self, name: str) -> Axis:
        """The axis of that name; an axis that the layout does not have is one of a single rank."""
        return self.axes.get(name) or Axis(name, (self.rank,))

    @property
    def tp(self) -> Axis:
        """Tensor-parallel axis."""
        return self["tp"]

    @property
    def cp(self) -> Axis:
        """Context-parallel axis."""
        return self["cp"]

    @property
    def pp(self) -> Axis:
        """Pipeline axis; position 0 holds the first stage (in a V-shaped placement the last one too)."""
        return self["pp"]

    @property
    def dp(self) -> Axis:
        """Data-parallel axis: ranks that read different data."""
        return self["dp"]

    @property
    def dp_cp(self) -> Axis:
        """Ranks that hold the same dense parameters and see different tokens."""
        return self["dp_cp"]

    @property
    def world(self) -> Axis:
        """Every rank."""
        return self["world"]

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between tensor-parallel blocks are cut along the sequence."""
        return self.parallelism.sequence_parallel and self.tp.size > 1

    @property
    def coordinate(self) -> str:
        """Where this rank stands, as errors of a running job begin: ``[pp=1 tp=0 dp=3]``."""
        shown = [f"{name}={self[name].rank}" for name in ("pp", "tp", "cp", "dp") if self[name].size > 1]
        return f"[{' '.join(shown) or f'rank={self.rank}'}]"

    @classmethod
    def create(cls, parallelism: Parallelism, *, device: torch.device, timeout: timedelta = DEFAULT_TIMEOUT) -> Mesh:
        """Make every process group of the layout. All ranks call it together, after ``init_process_group``.

        Each distinct rank set gets one group, with ``timeout``, in one order that all ranks share.

        Raises:
            ValueError: the layout does not fit the world size.
        """
        if not dist.is_initialized():
            parallelism.data_parallel_size(1)
            return cls(parallelism=parallelism, device=device)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        registry = _Groups(rank, timeout, device)
        axes = {"world": Axis("world", tuple(range(world_size)), rank, dist.group.WORLD if world_size > 1 else None)}
        parallelism.data_parallel_size(world_size)
        for name, rank_sets in _rank_sets(parallelism, world_size).items():
            axes[name] = registry.axis(name, rank_sets)
        channels = registry.channels(pipeline_edges(parallelism, world_size)) if parallelism.pp > 1 else {}
        device_mesh = _device_mesh(parallelism, axes, world_size, device)
        return cls(parallelism, rank, world_size, device, axes, channels, device_mesh)


def _rank_sets(parallelism: Parallelism, world_size: int) -> dict[str, list[tuple[int, ...]]]:
    """Rank sets of every axis, in the order in which all ranks make them."""

    def groups(*names: str) -> list[tuple[int, ...]]:
        return parallelism.groups(names, world_size)

    sets = {name: groups(name) for name in ("tp", "cp", "pp", "dp", "etp", "ep", "edp")}
    sets["dp_cp"] = groups("dp", "cp")
    sets["replica"] = groups("pp", "cp", "tp")
    apart = parallelism.pp > 1 and parallelism.placement == "round"
    sets["ends"] = [(ranks[0], ranks[-1]) for ranks in sets["pp"]] if apart else []
    if parallelism.cp_comm == "a2a+p2p" and parallelism.cp > 1:
        size = parallelism.num_exchanging
        sets["cp:a2a"] = [ranks[i : i + size] for ranks in sets["cp"] for i in range(0, len(ranks), size)]
        sets["cp:p2p"] = [ranks[i::size] for ranks in sets["cp"] for i in range(size)]
    for name, whole in (("tp", parallelism.tp), ("cp", parallelism.cp)):
        for size in (size for size in range(2, whole) if whole % size == 0):
            sets[f"{name}:{size}"] = [ranks[i : i + size] for ranks in sets[name] for i in range(0, len(ranks), size)]
    return sets


class _Groups:
    """Makes process groups, one for each distinct rank set."""

    def __init__(self, rank: int, timeout: timedelta, device: torch.device) -> None:
        self._rank, self._timeout, self._device = rank, timeout, device
        self._made: dict[frozenset[int], dist.ProcessGroup | None] = {frozenset(range(dist.get_world_size())): dist.group.WORLD}

    def axis(self, name: str, rank_sets: list[tuple[int, ...]]) -> Axis:
        """This rank's axis among the rank sets; every rank makes the groups of every set."""
        mine = Axis(name, (self._rank,))
        for ranks in rank_sets:
            # Attention has a communicator of its own: gradients, reduced beside it, may go over the same ranks.
            own = name.partition(":")[0] == "cp" and len(ranks) > 1
            group = self._new(ranks, control=False) if own else self._group(ranks, control=name == "pp")
            if self._rank in ranks:
                mine = Axis(name, ranks, ranks.index(self._rank), group)
        return mine

    def _group(self, ranks: tuple[int, ...], *, control: bool) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        key = frozenset(ranks)
        if key not in self._made:
            self._made[key] = self._new(ranks, control=control)
        return self._made[key]

    def _new(self, ranks: tuple[int, ...], *, control: bool) -> dist.ProcessGroup:
        # The pipeline axis also carries small messages between hosts (shapes, log names): those go over gloo.
        nccl = "cpu:gloo,cuda:nccl" if control else "nccl"
        backend = nccl if self._device.type == "cuda" else "gloo"
        group: dist.ProcessGroup = dist.new_group(sorted(ranks), timeout=self._timeout, backend=backend)
        return group

    def channels(self, edges: list[tuple[int, int]]) -> dict[tuple[str, int, int], dist.ProcessGroup]:
        """Communicators of the pipeline edges: activations travel an edge forward, gradients the same edge backward."""
        mine = {}
        for source, destination in edges:
            for key in (("forward", source, destination), ("backward", destination, source)):
                group = self._new((source, destination), control=False)
                if self._rank in key[1:]:
                    mine[key] = group
        for key, group in mine.items():
            self._connect(key, group)
        return mine

    def _connect(self, key: tuple[str, int, int], group: dist.ProcessGroup) -> None:
        """Send one number. The first message makes the connection, which waits for both sides; in a schedule it must not."""
        _, source, destination = key
        message = torch.zeros(1, device=self._device)
        if self._rank == source:
            dist.send(message, destination, group=group)
        else:
            dist.recv(message, source, group=group)


def _device_mesh(parallelism: Parallelism, axes: dict[str, Axis], world_size: int, device: torch.device) -> DeviceMesh | None:
    if world_size == 1:
        return None
    names = [name for name in reversed(parallelism.order.split("-")) if axes[name].size > 1]
    grid = torch.arange(world_size).view([axes[name].size for name in names])
    groups = [axes[name].group for name in names]
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],  # type: ignore[arg-type]
        device.type,
        mesh=grid,
        mesh_dim_names=tuple(names),
    )


_AMBIENT: ContextVar[Mesh | None] = ContextVar("lightning_megatron_mesh", default=None)


def current_mesh() -> Mesh:
    """The mesh that the strategy sets around ``configure_model``; the one-rank mesh outside of it.

    Read it in the constructor of a model's root only, and pass it down.
    """
    return _AMBIENT.get() or Mesh()


def inside_strategy() -> bool:
    """Whether a strategy has set the ambient mesh, i.e. whether ``configure_model`` is running."""
    return _AMBIENT.get() is not None


@contextmanager
def use_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make ``mesh`` the ambient one inside the ``with`` block."""
    token = _AMBIENT.set(mesh)
    try:
        yield mesh
    finally:
        _AMBIENT.reset(token)


__all__ = ["DENSE_AXES", "Axis", "Mesh", "current_mesh", "inside_strategy", "use_mesh"]
