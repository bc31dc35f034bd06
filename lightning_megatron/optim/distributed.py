"""ZeRO-1: the user's own optimizer, on this rank's flat shards of the parameters (Rajbhandari et al. 2020, section 5.1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.shards import Shard


@dataclass(frozen=True)
class DistributedOptimizerConfig:
    """How gradients are laid out.

    Args:
        bucket_mb: size after which a gradient bucket (fp32) is closed, in MiB.
    """

    bucket_mb: float = 128.0


class DistributedOptimizer:
    """Signatures; the body follows."""

    shards: list[Shard]
    grad_norm: Tensor

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        mesh: Mesh,
        config: DistributedOptimizerConfig = DistributedOptimizerConfig(),
        main_params: bool = True,
    ) -> None:
        raise NotImplementedError

    def reduce_gradients(self) -> None: ...

    def finish_gradients(self, *, num_tokens: Tensor | None) -> None: ...

    def clip_by_norm(self, max_norm: float) -> None: ...

    def clip_by_value(self, value: float) -> None: ...

    def update_parameters(self) -> None: ...

    def zero_gradients(self) -> None: ...

    def refresh_main(self) -> None: ...

    def close(self) -> None: ...
