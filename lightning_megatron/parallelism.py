"""Rank arithmetic as pure data: which ranks share which axis, and which layouts are legal.

Nothing here touches a process group. ``Parallelism`` is the intent; ``lightning_megatron.mesh.Mesh`` is the running thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DENSE_AXES = ("tp", "cp", "pp", "dp")
EXPERT_AXES = ("etp", "ep", "edp")
DEFAULT_ORDER = "tp-cp-pp-dp"
ContextComm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
PipelineLayout = tuple[int, ...] | Literal["auto"] | None
"""Layers of each pipeline stage; by cost; or as even as can be."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How many ranks share each axis, and how axes are laid over ranks.

    The world is ``dp * pp * cp * tp`` for dense parameters and ``edp * pp * ep * etp`` for expert parameters, over the
    same ranks; ``dp`` and ``edp`` are what is left of the world.

    Args:
        tp: tensor-parallel size: each weight matrix is cut over this many ranks.
        pp: pipeline-parallel size: the layers are cut over this many ranks.
        cp: context-parallel size: each sequence is cut over this many ranks.
        vpp: pipeline stages held by one rank (interleaved schedules use 2 and more).
        ep: expert-parallel size: a layer's experts are cut over this many ranks.
        etp: tensor-parallel size inside one expert.
        sequence_parallel: cut the activations between tensor-parallel blocks along the sequence. Without effect at tp = 1.
        tp_overlap: pieces in which products of tensor-parallel layers and their communication are done beside each other;
            1: one after the other.
        order: axes from the fastest-varying rank digit to the slowest, as ``"tp-cp-pp-dp"``.
        pipeline_layout: the number of layers of each stage, ``pp * vpp`` numbers in the order of the model; ``"auto"`` to
            split by cost; ``None`` for as even as can be.
        placement: how stages lie over the pipeline ranks: ``"round"`` deals them like cards; ``"v"`` goes down the ranks and
            back up, two stages each (schedule ``zbv``), so that the first rank holds both ends of the model.
        cp_comm: how attention reaches over the cuts of a sequence: ``p2p`` (ring), ``all_gather`` (of keys and values),
            ``a2a`` (heads against tokens), ``a2a+p2p`` (that among neighbours, a ring across).
        cp_a2a: neighbouring cp ranks that exchange heads under ``a2a+p2p``; by default the largest proper divisor of cp
            with at most 8 ranks of tp and cp together, which a machine usually has.
        cp_kernel: whose attention over cut sequences: ``torch`` for this project's, ``te`` for Transformer Engine's.

    Raises:
        ValueError: a size below 1, an ``order`` that does not name each of tp, cp, pp, dp once, a ``pipeline_layout``
            that has not one number for each stage, or cp ranks that ``cp_comm`` cannot divide.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = True
    tp_overlap: int = 1
    order: str = DEFAULT_ORDER
    pipeline_layout: PipelineLayout = None
    placement: Literal["round", "v"] = "round"
    cp_comm: ContextComm = "p2p"
    cp_a2a: int | None = None
    cp_kernel: Literal["torch", "te"] = "torch"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "vpp", "ep", "etp", "tp_overlap"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r} is not a size: give a whole number of 1 or more.")
        if sorted(self.order.split("-")) != sorted(DENSE_AXES):
            raise ValueError(
                f"order={self.order!r} must name tp, cp, pp and dp once each, joined by '-', fastest first, "
                f"for example {DEFAULT_ORDER!r}."
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"vpp={self.vpp} needs pp >= 2 (pp=1 here): with one rank there is no bubble to shrink; set vpp=1."
            )
        if self.placement == "v" and self.vpp != 2:
            raise ValueError(f"a V-shaped placement (schedule='zbv') has 2 stages a rank, but vpp={self.vpp}; set vpp=2.")
        if isinstance(self.pipeline_layout, tuple):
            self._check_layout(list(self.pipeline_layout))
        self._check_context()

    def _check_context(self) -> None:
        if self.cp_comm not in (known := ("p2p", "all_gather", "a2a", "a2a+p2p")):
            raise ValueError(f"cp_comm={self.cp_comm!r} is unknown; use one of {', '.join(known)}.")
        if self.cp_kernel not in ("torch", "te"):
            raise ValueError(f"cp_kernel={self.cp_kernel!r} is unknown; use 'torch' or 'te'.")
        if self.cp_a2a is not None and self.cp_comm != "a2a+p2p":
            raise ValueError(f"cp_a2a={self.cp_a2a} is for cp_comm='a2a+p2p', but cp_comm={self.cp_comm!r}; leave it out.")
        if self.cp_comm != "a2a+p2p" or self.cp == 1:
            return
        proper = [size for size in range(2, self.cp) if self.cp % size == 0]
        if not proper or (self.cp_a2a is not None and self.cp_a2a not in proper):
            shown = "" if self.cp_a2a is None else f" and cp_a2a={self.cp_a2a}"
            raise ValueError(
                f"cp_comm='a2a+p2p' with cp={self.cp}{shown}: cp must be a product of two numbers of 2 or more, of which "
                f"cp_a2a is one ({', '.join(map(str, proper)) or 'none here'}); use 'p2p' or 'a2a' otherwise."
            )

    @property
    def num_exchanging(self) -> int:
        """Context-parallel ranks that exchange heads: cp under ``a2a``, ``cp_a2a`` under ``a2a+p2p``, otherwise 1."""
        if self.cp == 1 or self.cp_comm in ("p2p", "all_gather"):
            return 1
        if self.cp_comm == "a2a" or self.cp_a2a is not None:
            return self.cp_a2a or self.cp
        proper = [size for size in range(2, self.cp) if self.cp % size == 0]
        return max([size for size in proper if size * self.tp <= 8] or proper[:1])

    def _check_layout(self, counts: list[int]) -> None:
        if wrong := [count for count in counts if not isinstance(count, int) or isinstance(count, bool) or count < 0]:
            raise ValueError(
                f"pipeline_layout {counts} holds {wrong[0]!r}, which is no number of layers: give whole numbers of 0 or more."
            )
        if len(counts) != self.num_stages:
            raise ValueError(
                f"pipeline_layout {counts} has {len(counts)} numbers for pp({self.pp}) * vpp({self.vpp}) = {self.num_stages} "
                f"pipeline stages: give the number of layers of each."
            )

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline: ``pp * vpp``."""
        return self.pp * self.vpp

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model and read the same batch: ``tp * cp * pp``."""
        return self.tp * self.cp * self.pp

    def data_parallel_size(self, world_size: int) -> int:
        """Model replicas in a world of ``world_size`` ranks.

        Raises:
            ValueError: the world is not a multiple of ``tp * cp * pp``, or the ranks of a stage not one of ``ep * etp``.
        """
        if world_size % self.model_parallel_size:
            raise ValueError(
                f"tp({self.tp}) * cp({self.cp}) * pp({self.pp}) = {self.model_parallel_size} does not divide "
                f"world_size={world_size}; launch a multiple of {self.model_parallel_size} ranks or lower one axis."
            )
        ranks_per_stage = world_size // self.pp
        if ranks_per_stage % (self.ep * self.etp):
            raise ValueError(
                f"ep({self.ep}) * etp({self.etp}) = {self.ep * self.etp} does not divide the {ranks_per_stage} ranks of a "
                f"pipeline stage (world_size={world_size} / pp={self.pp}); lower ep or etp, or launch more ranks."
            )
        return world_size // self.model_parallel_size

    def stage_of(self, pp_rank: int, local_stage: int) -> int:
        """Global stage that ``pp_rank`` holds as its ``local_stage``-th."""
        if self.placement == "v" and local_stage == 1:
            return self.num_stages - 1 - pp_rank
        return local_stage * self.pp + pp_rank

    def coordinate(self, rank: int, world_size: int) -> dict[str, int]:
        """Position of a global rank on every axis, dense (tp, cp, pp, dp) and expert (etp, ep, edp).

        Stages are laid over ranks so that global rank 0 holds the last stage of its pipeline: in reverse, or, where both
        ends of a V are on the first pipeline rank, as they come.
        """
        sizes = self._dense_sizes(world_size)
        position, rest = {}, rank
        for axis in self.order.split("-"):
            rest, position[axis] = divmod(rest, sizes[axis])
        if self.placement == "round":
            position["pp"] = self.pp - 1 - position["pp"]
        within_stage = (position["dp"] * self.cp + position["cp"]) * self.tp + position["tp"]
        within_stage, position["etp"] = divmod(within_stage, self.etp)
        position["edp"], position["ep"] = divmod(within_stage, self.ep)
        return position

    def groups(self, axes: tuple[str, ...], world_size: int) -> list[tuple[int, ...]]:
        """All rank sets that share the given axes, i.e. differ on those axes alone. One set for each setting of the rest.

        Ranks inside a set are ordered by their position on ``axes``, the last named axis fastest. Dense and expert axes
        cannot be mixed, except that ``pp`` belongs to both.
        """
        expert = any(axis in EXPERT_AXES for axis in axes)
        all_axes = (*EXPERT_AXES, "pp") if expert else DENSE_AXES
        if unknown := [axis for axis in axes if axis not in all_axes]:
            raise ValueError(f"axes {axes} mix the dense and the expert view, or are unknown: {unknown}.")
        fixed = [axis for axis in all_axes if axis not in axes]
        sets: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for rank in range(world_size):
            position = self.coordinate(rank, world_size)
            key = tuple(position[axis] for axis in fixed)
            sets.setdefault(key, []).append((tuple(position[axis] for axis in axes), rank))
        return sorted(tuple(rank for _, rank in sorted(members)) for members in sets.values())

    def _dense_sizes(self, world_size: int) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.data_parallel_size(world_size)}

    def describe(self, world_size: int) -> str:
        """One line, for logs: ``tp=2 pp=2 dp=1``, axes of size 1 left out."""
        sizes = {**self._dense_sizes(world_size), "vpp": self.vpp, "ep": self.ep, "etp": self.etp}
        shown = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        layout = self.pipeline_layout
        if layout is not None:
            shown.append(f"pipeline_layout={layout if layout == 'auto' else ','.join(map(str, layout))}")
        if self.placement == "v":
            shown.append("placement=v")
        if self.cp > 1 and self.cp_comm != "p2p":
            shown.append(f"cp_comm={self.cp_comm}")
        return " ".join(shown) or "one rank a replica, one replica"


def pipeline_edges(parallelism: Parallelism, world_size: int) -> list[tuple[int, int]]:
    """Directed pairs ``(source rank, destination rank)`` of every pipeline that activations travel between.

    The edge from the last rank back to the first is there with ``vpp > 1``; in a V both directions of each neighbour pair.
    """
    pairs = []
    for ranks in parallelism.groups(("pp",), world_size):
        down = [(ranks[i], ranks[i + 1]) for i in range(len(ranks) - 1)]
        if parallelism.placement == "v":
            pairs += down + [(second, first) for first, second in down]
        else:
            pairs += down + ([(ranks[-1], ranks[0])] if parallelism.vpp > 1 else [])
    return pairs
