"""From buckets to what an optimizer gets: this rank's shards, and where their main values are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.buffers import SIXTEEN_BIT, Bucket
from lightning_megatron.optim.config import DistributedOptimizerConfig
from lightning_megatron.optim.layout import overlap
from lightning_megatron.optim.mains import CopyStore, MainStore, RemainderStore
from lightning_megatron.optim.shards import Shard
from lightning_megatron.optim.whole import GatheredMatrix, gather_boxes, is_cut
from lightning_megatron.sharding import sharding_of


@dataclass
class Cut:
    """This rank's part of the buckets.

    Attributes:
        shards: what the optimizer gets.
        local: the same in the geometry of local parameters: reductions and norms work on these.
        gradients: each local shard's range of the gradient buffer.
        values: each local shard's range of the parameter buffer.
        stores: where main values are kept that the optimizer does not hold between steps, by main parameter.
        on_host: main parameters whose states are kept in host memory.
        gathered: parameters that are put together over tp for the step.
    """

    shards: list[Shard] = field(default_factory=list)
    local: list[Shard] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    stores: dict[Tensor, MainStore] = field(default_factory=dict)
    on_host: set[Tensor] = field(default_factory=set)
    gathered: list[GatheredMatrix] = field(default_factory=list)

    def extend(self, other: Cut) -> None:
        """Take in the parts of further buckets."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            mine.extend(value) if isinstance(mine, list) else mine.update(value)


def placeholder(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor ``[numel]`` with the memory of one element: it has a shape and can carry a gradient, but no values."""
    return torch.zeros(1, dtype=dtype, device=device).expand(numel)


def cut_buckets(
    buckets: Sequence[Bucket],
    names: dict[nn.Parameter, str],
    *,
    mesh: Mesh,
    config: DistributedOptimizerConfig,
    main_params: bool,
    whole: bool,
) -> Cut:
    """Make the shards of the parameters that reach into this rank's parts of the buckets.

    Args:
        buckets: all buckets.
        names: of the parameters.
        mesh: the running layout.
        config: what main parameters are, and where they lie.
        main_params: keep wider main values of 16-bit parameters at all.
        whole: the buckets hold whole parameters, and the optimizer wants them in their shape.

    Raises:
        ValueError: remainders of fp16 parameters; whole parameters with remainders, or of experts cut over ranks.
    """
    cut = Cut()
    copies = main_params and config.main_param != "none"
    if any(bucket.is_narrow for bucket in buckets):
        _check_narrow(config, main_params=main_params, whole=whole)
    total = sum(bucket.plan.numel // bucket.plan.num_shards for bucket in buckets)
    host_room = config.offload_fraction * total
    for bucket in buckets:
        values, gradients = bucket.own(bucket.values), bucket.own(bucket.gradients)
        for placement, param in zip(bucket.plan.placements, bucket.params, strict=True):
            shared = overlap(placement, bucket.own_range)
            if shared is None:
                continue
            view = values[shared.shard_start : shared.shard_stop]
            if bucket.is_narrow:
                view = param.detach().reshape(-1)[shared.start : shared.stop].float()  # the main values themselves
            gradient = gradients[shared.shard_start : shared.shard_stop]
            on_host, host_room = host_room > 0, host_room - view.numel()
            main, store = _main(view, param, name=names[param], config=config, copied=copies, on_host=on_host, whole=whole)
            cut.local.append(Shard(names[param], param, main, shared.start, shared.stop, sharding_of(param)))
            cut.values.append(view)
            cut.gradients.append(gradient)
            if store is not None:
                cut.stores[main] = store
            if on_host:
                cut.on_host.add(main)
    _gather(cut, mesh, whole=whole)
    return cut


def _main(
    view: Tensor,
    param: nn.Parameter,
    *,
    name: str,
    config: DistributedOptimizerConfig,
    copied: bool,
    on_host: bool,
    whole: bool,
) -> tuple[nn.Parameter, MainStore | None]:
    """The main parameter of one range, and the store of its values if it does not hold them itself."""
    shape = param.shape if whole else view.shape
    copied = copied and param.dtype in SIXTEEN_BIT
    remainder = copied and config.main_param == "remainder"
    if remainder and param.dtype != torch.bfloat16:
        raise ValueError(
            f"parameter {name!r} is {param.dtype}, but main_param='remainder' keeps what bfloat16 lacks of fp32; use "
            f"main_param='fp32'."
        )
    if whole and is_cut(sharding_of(param)):
        return nn.Parameter(placeholder(view.numel(), dtype=_main_dtype(view, copied=copied), device=view.device)), None
    if copied and (remainder or on_host):
        store = RemainderStore(view, host=on_host) if remainder else CopyStore(view, host=on_host)
        return nn.Parameter(placeholder(view.numel(), dtype=torch.float32, device=view.device).view(shape)), store
    return nn.Parameter((view.float() if copied and view.dtype != torch.float32 else view).view(shape)), None


def _check_narrow(config: DistributedOptimizerConfig, *, main_params: bool, whole: bool) -> None:
    """Refuse what parameters in 8 bits cannot go with: nobody but the optimizer has their values.

    Raises:
        ValueError: by name.
    """
    if not main_params or config.main_param != "fp32":
        asked = f"main_param={config.main_param!r}" if main_params else "precision='bf16-true'"
        raise ValueError(f"fp8_params=True needs main parameters in fp32, not {asked}; use 'bf16-mixed' and main_param='fp32'.")
    if config.offload_fraction > 0.0:
        raise ValueError(f"fp8_params=True keeps main values on the device: offload_fraction={config.offload_fraction}; set 0.")
    if whole:
        raise ValueError("fp8_params=True is for elementwise optimizers, such as torch.optim.AdamW; set fp8_params=False.")


def _main_dtype(view: Tensor, *, copied: bool) -> torch.dtype:
    return torch.float32 if copied else view.dtype


def _gather(cut: Cut, mesh: Mesh, *, whole: bool) -> None:
    cut.shards = list(cut.local)
    if not whole:
        return
    split = [index for index, shard in enumerate(cut.local) if is_cut(shard.sharding)]
    for index in split:
        if cut.local[index].sharding.expert:
            raise ValueError(
                f"parameter {cut.local[index].name!r} is an expert's and cut over ranks; an optimizer that wants whole "
                f"parameters cannot train it. Use an elementwise optimizer such as torch.optim.AdamW."
            )
    boxes = gather_boxes([cut.local[index] for index in split], mesh.tp)
    for index in split:
        shard = cut.local[index]
        cut.on_host.discard(shard.main)
        matrix = GatheredMatrix(shard, cut.values[index], mesh=mesh, boxes=boxes[shard.name])
        cut.gathered.append(matrix)
        cut.shards[index] = matrix.shard
