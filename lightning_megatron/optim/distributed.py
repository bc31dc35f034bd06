"""ZeRO-1: the user's own optimizer, on this rank's flat shards of the parameters (Rajbhandari et al. 2020, section 5.1).

One optimizer step, in order::

    backward passes            # autograd adds into the flat gradient buffers
                               # and buckets that are full are reduced over data-parallel ranks beside the last one
    reduce_gradients()         # the rest of the reduction, then the sums that sharding asks for
    finish_gradients(...)      # norm and token count in one all-reduce, normalisation
    clip_by_norm(...)          # optional
    optimizer.step()           # any elementwise optimizer, on the shards
    update_parameters()        # main -> 16-bit, all-gather (beside the next forward), gradients zeroed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.comm import all_reduce
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.arrivals import Arrivals
from lightning_megatron.optim.buffers import SIXTEEN_BIT, Bucket, build_buckets
from lightning_megatron.optim.config import DistributedOptimizerConfig
from lightning_megatron.optim.elementwise import check_elementwise, install_shards, trainable_parameters
from lightning_megatron.optim.guard import ParameterGuard, wait_in_forwards
from lightning_megatron.optim.layout import overlap, shard_range
from lightning_megatron.optim.norm import clamp, counted_ranges, divide, scale_by_norm, sum_of_squares
from lightning_megatron.optim.reduction import check_agreement, plan_sums
from lightning_megatron.optim.shards import Shard, by_dtype
from lightning_megatron.sharding import sharding_of

__all__ = ["DistributedOptimizer", "DistributedOptimizerConfig"]


class DistributedOptimizer:
    """Shards an elementwise optimizer over the ranks that hold the same parameters.

    The parameters' ``data`` and ``grad`` become views of flat buffers, and the optimizer's groups get this rank's flat
    ranges of them instead: fp32 copies of 16-bit parameters, views of fp32 and fp64 ones. Groups, options, schedulers and
    the optimizer object stay the user's own. A parameter that got no gradient counts as one with a zero gradient.

    Collective over the world: all ranks make it together, also those without a trainable parameter.

    Args:
        optimizer: any optimizer whose update is elementwise.
        named_parameters: all parameters of this rank's part of the model, by global name, in the order of definition.
        mesh: the running layout: dense parameters are sharded over ``dp_cp``, experts over ``edp``.
        config: bucket sizes and what is overlapped.
        main_params: keep fp32 copies of 16-bit parameters and update those; otherwise the 16-bit values are updated.
        stages: the parameters of each pipeline stage on this rank, as ``last_backward`` and ``backward_done`` name them. By
            default there is one stage, 0.

    Attributes:
        optimizer: the optimizer that was given.
        shards: what each main shard is.
        grad_norm: norm of the whole gradient (0-dim fp64), set by ``finish_gradients``, the same on every rank.

    Raises:
        ValueError: the optimizer is not elementwise, holds a parameter that is not among ``named_parameters``, or the ranks
            of an axis do not hold the same parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        mesh: Mesh,
        config: DistributedOptimizerConfig | None = None,
        main_params: bool = True,
        stages: Mapping[int, Sequence[nn.Parameter]] | None = None,
    ) -> None:
        check_elementwise(optimizer)
        trainable = trainable_parameters(optimizer, named_parameters)
        self._config = config = config or DistributedOptimizerConfig()
        self.optimizer, self.mesh = optimizer, mesh
        self.shards: list[Shard] = []
        self.grad_norm = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._gradients: list[Tensor] = []  # each shard's range of the gradient buffer
        self._values: list[Tensor] = []  # each shard's range of the parameter buffer
        stages = stages if stages is not None else {0: [param for _, param in trainable]}
        self._buckets = build_buckets(
            trainable,
            mesh=mesh,
            bucket_numel=config.bucket_numel,
            stages=_stages_of(stages),
            reduce_dtype=torch.bfloat16 if config.grad_reduce_dtype == "bf16" else None,
        )
        names = {param: name for name, param in trainable}
        self._arrivals = Arrivals(self._buckets, names, stages=stages, mesh=mesh, overlap=config.overlap_grad_reduce)
        self._guard = ParameterGuard(self._buckets)
        self._forward_hooks: list[RemovableHandle] = []
        for bucket in self._buckets:
            self._cut(bucket, names, main_params=main_params)
        self._sums = plan_sums(self.shards, self._gradients, mesh=mesh)
        check_agreement(self._buckets, self._sums, mesh=mesh)
        self._counted = [
            gradient[start:stop]
            for shard, gradient in zip(self.shards, self._gradients, strict=True)
            for start, stop in counted_ranges(shard, mesh)
        ]
        install_shards(optimizer, self.shards)

    def _cut(self, bucket: Bucket, names: dict[nn.Parameter, str], *, main_params: bool) -> None:
        """Make the shards of the parameters that reach into this rank's part of a bucket."""
        values, gradients = bucket.own(bucket.values), bucket.own(bucket.gradients)
        for placement, param in zip(bucket.plan.placements, bucket.params, strict=True):
            shared = overlap(placement, shard_range(bucket.plan, bucket.index))
            if shared is None:
                continue
            view = values[shared.shard_start : shared.shard_stop]
            copied = main_params and param.dtype in SIXTEEN_BIT
            main = nn.Parameter(view.float() if copied else view)
            self.shards.append(Shard(names[param], param, main, shared.start, shared.stop, sharding_of(param)))
            self._values.append(view)
            self._gradients.append(gradients[shared.shard_start : shared.shard_stop])

    def last_backward(self, stage: int = 0) -> None:
        """Say that the backward which begins now is the stage's last of this step: buckets are reduced as it fills them.

        Nothing needs to be said: ``reduce_gradients`` reduces what has not been. After ``last_backward`` an earlier gradient
        of the stage must not arrive any more.
        """
        self._arrivals.last_backward(stage)

    def backward_done(self, stage: int = 0) -> None:
        """Say that the stage's parameters get no more gradients in this step: their buckets are reduced from now on.

        With overlap on, every rank says it at the same point of its program, also one whose backward was left out.
        """
        self._arrivals.backward_done(stage)

    def reduce_gradients(self) -> None:
        """Sum the gradients over the ranks that saw other tokens, and where sharding says so over other axes.

        Afterwards this rank's shards hold the sums. Every rank of the world calls it, after its last backward of the step.
        """
        self._arrivals.all_done()
        for bucket in self._buckets:
            bucket.wait_reduce()
        for one in self._sums:
            one.run()

    def finish_gradients(self, *, num_tokens: Tensor | None) -> None:
        """Normalise the reduced gradients, set ``grad_norm`` and give each main shard its ``grad``.

        One all-reduce over the world, which every rank joins. The device is not waited for.

        Args:
            num_tokens: how many tokens this rank adds to the count of the whole step (0-dim): gradients are divided by the
                sum over the world, or by 1 if that is 0. Tokens that several ranks saw (tp, pp) are given by one of them
                and the others give 0. ``None``, on every rank alike: no division.
        """
        squares = sum_of_squares(self._counted, self.mesh.device)
        # fp64, because fp32 cannot count beyond 2**24 tokens.
        tokens = torch.zeros_like(squares) if num_tokens is None else num_tokens.detach().reshape(()).to(squares)
        squares, tokens = all_reduce(torch.stack([squares, tokens]), self.mesh.world).unbind()
        self.grad_norm = squares.sqrt()
        if num_tokens is not None:
            divisor = tokens.clamp(min=1.0)
            self.grad_norm = self.grad_norm / divisor
            divide(self._gradients, divisor)
        for shard, gradient in zip(self.shards, self._gradients, strict=True):
            shard.main.grad = gradient.to(shard.main.dtype)

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``. ``grad_norm`` stays."""
        scale_by_norm(self._shard_grads(), self.grad_norm, max_norm=max_norm)

    def clip_by_value(self, value: float) -> None:
        """Clamp each element of the gradients to ``[-value, value]``."""
        clamp(self._shard_grads(), value)

    def _shard_grads(self) -> list[Tensor]:
        return [shard.main.grad for shard in self.shards if shard.main.grad is not None]

    def update_parameters(self) -> None:
        """After ``optimizer.step()``: send every rank the new parameters and clear the gradients.

        With ``overlap_param_gather`` the parameters are on their way when it returns; whatever reads one waits for it.
        """
        self.wait_parameters()  # of the step before, if nothing has read them
        for mains, values in self._copies():
            torch._foreach_copy_(values, mains)
        for bucket in reversed(self._buckets):  # in the order in which a forward wants them
            bucket.launch_gather()
        self.zero_gradients()
        if self._config.overlap_param_gather:
            self._guard.start()
        else:
            self.wait_parameters()

    def wait_parameters(self) -> None:
        """Wait until the model's parameters hold what the last ``update_parameters`` has sent."""
        for bucket in reversed(self._buckets):
            bucket.wait_gather()
        ParameterGuard.release()

    def wait_in_forwards(self, module: nn.Module) -> None:
        """Make the forward of each submodule wait for its own parameters. Without it, ``wait_parameters`` before a forward."""
        self._forward_hooks += wait_in_forwards(module, self._buckets)

    def zero_gradients(self) -> None:
        """Clear the gradient buffers and the shards' ``grad``, for example after a step that is skipped."""
        for bucket in self._buckets:
            bucket.zero()
        self._arrivals.reset()
        for shard in self.shards:
            shard.main.grad = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank that it trains."""
        return [param for bucket in self._buckets for param in bucket.params]

    def hide_gradients(self) -> None:
        """Make ``grad`` of the parameters ``None``, for code that would zero it, until ``show_gradients``."""
        for bucket in self._buckets:
            bucket.hide()

    def show_gradients(self) -> None:
        """Undo ``hide_gradients``."""
        for bucket in self._buckets:
            bucket.show()

    def refresh_main(self) -> None:
        """Read the main shards from the parameters again, after weights were loaded into the parameters alone."""
        self.wait_parameters()
        for mains, values in self._copies():
            torch._foreach_copy_(mains, values)

    def _copies(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Main shards that are copies, and the ranges of the parameter buffer they belong to, one pair of lists a dtype."""
        pairs = [
            (shard.main.detach(), value)
            for shard, value in zip(self.shards, self._values, strict=True)
            if shard.main.dtype != value.dtype
        ]
        values = by_dtype(value for _, value in pairs)
        dtypes = [same[0].dtype for same in values]
        mains = [[main for main, value in pairs if value.dtype == dtype] for dtype in dtypes]
        return list(zip(mains, values, strict=True))

    def close(self) -> None:
        """Let go of the parameters: ``grad`` is ``None``, hooks are gone, gradient buffers are freed, values stay.

        The optimizer keeps its shards. The parameters can be laid out anew for another optimizer.
        """
        self.wait_parameters()
        for bucket in self._buckets:
            bucket.release()
        self._arrivals.close()
        for hook in self._forward_hooks:
            hook.remove()
        for shard in self.shards:
            shard.main.grad = None
        self._buckets, self._sums, self._counted, self._gradients, self._forward_hooks = [], [], [], [], []


def _stages_of(stages: Mapping[int, Sequence[nn.Parameter]]) -> dict[nn.Parameter, tuple[int, ...]]:
    found: dict[nn.Parameter, tuple[int, ...]] = {}
    for stage in sorted(stages):
        for param in stages[stage]:
            found[param] = (*found.get(param, ()), stage)
    return found
