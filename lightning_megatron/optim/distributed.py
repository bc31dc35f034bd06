"""ZeRO-1: the user's own optimizer, on this rank's flat shards of the parameters (Rajbhandari et al. 2020, section 5.1).

One optimizer step, in order::

    backward passes            # autograd adds into the flat gradient buffers
                               # and buckets that are full are reduced over data-parallel ranks beside the last one
    reduce_gradients()         # the rest of the reduction, then the sums that sharding asks for
    finish_gradients(...)      # norm and token count in one all-reduce, normalisation
    clip_by_norm(...)          # optional
    step()                     # any elementwise optimizer, on the shards
    update_parameters()        # main -> 16-bit, all-gather (beside the next forward), gradients zeroed
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.arrivals import Arrivals
from lightning_megatron.optim.buffers import Bucket, build_buckets
from lightning_megatron.optim.config import DistributedOptimizerConfig
from lightning_megatron.optim.cutting import Cut, cut_buckets
from lightning_megatron.optim.elementwise import install_shards, trainable_parameters, wants_whole_parameters
from lightning_megatron.optim.finish import GradientFinisher
from lightning_megatron.optim.frozen import resting, take_over
from lightning_megatron.optim.guard import ParameterGuard, wait_in_forwards
from lightning_megatron.optim.kept import KeptValues
from lightning_megatron.optim.late import LateGroups
from lightning_megatron.optim.narrow import Holders, NarrowParameters
from lightning_megatron.optim.reduction import check_agreement, check_peers, plan_sums
from lightning_megatron.optim.shards import Shard
from lightning_megatron.optim.stepper import Stepper
from lightning_megatron.optim.written import MainValues

__all__ = ["DistributedOptimizer", "DistributedOptimizerConfig"]


class DistributedOptimizer:
    """Shards an optimizer over the ranks that hold the same parameters.

    The parameters' ``data`` and ``grad`` become views of flat buffers, and the optimizer's groups get this rank's flat
    ranges of them instead: fp32 copies of 16-bit parameters, views of fp32 and fp64 ones. Groups, options, schedulers and
    the optimizer object stay the user's own. A parameter that got no gradient counts as one with a zero gradient, unless it
    is frozen (``optim/frozen.py``). An optimizer that is known to look at whole parameters (Muon and its kin) gets whole ones,
    each on one of the ranks.

    Collective over the world: all ranks make it together, also those without a trainable parameter.

    Args:
        optimizer: any optimizer whose update is elementwise, or that works on one parameter at a time.
        named_parameters: all parameters of this rank's part of the model, by global name, in the order of definition.
        mesh: the running layout: dense parameters are sharded over ``dp_cp``, experts over ``edp``.
        config: bucket sizes and what is overlapped.
        main_params: keep fp32 copies of 16-bit parameters and update those; otherwise the 16-bit values are updated.
        stages: the parameters of each pipeline stage on this rank, as ``last_backward`` and ``backward_done`` name them. By
            default there is one stage, 0.
        narrow: the parameters that the model is to hold in 8 bits, and the layers that multiply by them.

    Attributes:
        optimizer: the optimizer that was given.
        shards: what each main shard is.
        kept: main values and states, to save or restore them.
        add_param_group: the optimizer's own method, which also lays the new parameters out: see ``optim/late.py``.

    Raises:
        ValueError: the optimizer is of neither kind, holds a parameter that is not among ``named_parameters``, or the ranks
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
        narrow: Holders | None = None,
    ) -> None:
        self._config = config or DistributedOptimizerConfig()
        self.optimizer, self.mesh = optimizer, mesh
        self._whole, self._main_params = wants_whole_parameters(optimizer), main_params
        named = list(named_parameters)
        trainable = trainable_parameters(optimizer, named)
        self._late = LateGroups(optimizer, named, trainable, self._extend)
        self.add_param_group: Callable[[dict[str, Any]], None] = self._late.add
        self._resting: set[Tensor] = set()
        self._stages = dict(stages) if stages is not None else {0: [param for _, param in named]}
        self._names: dict[nn.Parameter, str] = {}
        self._hooked: list[nn.Module] = []
        self._forward_hooks: list[RemovableHandle] = []
        self._buckets, self._cut = self._lay_out(trainable, narrow or {})
        self._narrow = NarrowParameters(self._buckets, self._cut.local, narrow or {})
        install_shards(optimizer, self._cut.shards)
        self._assemble()
        check_agreement(self._buckets, self._sums, mesh=mesh)
        self._send_narrow()

    def _lay_out(self, trainable: Sequence[tuple[str, nn.Parameter]], narrow: Holders) -> tuple[list[Bucket], Cut]:
        """Buckets and shards of parameters that have none."""
        config = self._config
        self._names |= {param: name for name, param in trainable}
        buckets = build_buckets(
            trainable,
            mesh=self.mesh,
            bucket_numel=config.bucket_numel,
            stages=self._stages,
            reduce_dtype=torch.bfloat16 if config.grad_reduce_dtype == "bf16" else None,
            whole=self._whole,
            narrow=narrow,
        )
        return buckets, cut_buckets(
            buckets, self._names, mesh=self.mesh, config=config, main_params=self._main_params, whole=self._whole
        )

    def _assemble(self, num_skipped: int = 0, arrived: Iterable[int] = ()) -> None:
        """Make what works on all buckets and shards, anew if there are more of them."""
        config, mesh, cut = self._config, self.mesh, self._cut
        self.shards: list[Shard] = cut.shards
        options: dict[str, Any] = {"stages": self._stages, "overlap": config.overlap_grad_reduce}
        self._arrivals = Arrivals(self._buckets, self._names, mesh=mesh, **options)
        self._arrivals.arrived.update(arrived)
        self._guard = ParameterGuard(self._buckets)
        self._sums = plan_sums(cut.local, cut.gradients, mesh=mesh)
        self.mains = MainValues(self._buckets, cut, names=self._names, mesh=mesh)
        self.kept = KeptValues(self.optimizer, cut, config)
        self._stepper = Stepper(self.optimizer, cut, config=config, device=mesh.device)
        self._finisher = GradientFinisher(
            cut.local,
            cut.gradients,
            buckets=self._buckets,
            mesh=mesh,
            nonfinite=config.nonfinite,
            direct=self._stepper.reads_buffer,
            confirms=self._stepper.changes_nothing_by_nan,
        )
        self._finisher.num_skipped = num_skipped

    def _extend(
        self,
        trainable: Sequence[tuple[str, nn.Parameter]],
        groups: Sequence[dict[str, Any]],
        gradients: Mapping[nn.Parameter, Tensor | None],
    ) -> None:
        """Train more parameters, which alone are in these groups. In buckets of their own, after the others."""
        self.take_in_values()
        buckets, cut = self._lay_out(trainable, {})
        check_peers(buckets, mesh=self.mesh)
        install_shards(self.optimizer, cut.shards, groups=groups)
        take_over(gradients, buckets)
        self._buckets += buckets
        self._cut.extend(cut)
        self._arrivals.close()
        self._assemble(self.num_skipped, self._arrivals.arrived)
        for module in self._hooked:
            self._forward_hooks += wait_in_forwards(module, buckets)

    def last_backward(self, stage: int = 0, *, pattern: Hashable = None) -> None:
        """Say that the backward which begins now is the stage's last of this step: buckets are reduced as it fills them.

        Nothing needs to be said: ``reduce_gradients`` reduces what has not been.

        Args:
            stage: which stage.
            pattern: what the number of times that a parameter's gradient still arrives depends on, if it may change from
                step to step: the number of micro-batches, under a schedule that splits the backward.
        """
        self._arrivals.last_backward(stage, pattern)

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
        self._late.thaw()
        self._arrivals.all_done()  # what has been thawed
        for bucket in self._buckets:
            bucket.wait_reduce()
        for one in self._sums:
            one.run()

    def finish_gradients(self, *, num_tokens: Tensor | None, loss_scale: float | None = None, defer: bool = False) -> None:
        """Normalise the reduced gradients, set ``grad_norm`` and give each main shard its ``grad``.

        One all-reduce over the world, which every rank joins. See Note [One multiplication] in ``optim/finish.py``.

        Args:
            num_tokens: how many tokens this rank adds to the count of the whole step (0-dim): gradients are divided by the
                sum over the world, or by 1 if that is 0. Tokens that several ranks saw (tp, pp) are given by one of them
                and the others give 0. ``None``, on every rank alike: no division.
            loss_scale: what the losses were multiplied by, on every rank alike. An overflow then means a skipped step.
            defer: leave the division to ``clip_by_norm`` or ``apply_scaling``, because nobody reads gradients before.

        Raises:
            RuntimeError: with ``nonfinite="raise"``, on every rank: a gradient is not finite. With ``defer`` it may be left
                to ``step``, which then has changed nothing.
        """
        self._resting = resting(self.shards, self._arrivals.has_arrived)
        self._stepper.prepare(self._resting)  # before the host waits for the norm
        self._finisher.finish(num_tokens, loss_scale=loss_scale, defer=defer)

    @property
    def grad_norm(self) -> Tensor:
        """Norm of the whole gradient before clipping (0-dim fp64), the same on every rank; by ``finish_gradients``."""
        return self._finisher.grad_norm

    @property
    def should_skip(self) -> bool:
        """Whether this step must not be taken, on every rank alike: a gradient is not finite."""
        return self._finisher.should_skip

    @property
    def num_skipped(self) -> int:
        """Steps that were not taken so far."""
        return self._finisher.num_skipped

    def apply_scaling(self) -> None:
        """Do the division that ``finish_gradients(defer=True)`` has left, unless clipping has done it."""
        self._finisher.apply()

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``. ``grad_norm`` stays."""
        self._finisher.clip_by_norm(max_norm)

    def clip_by_value(self, value: float) -> None:
        """Clamp each element of the gradients to ``[-value, value]``."""
        self._finisher.clip_by_value(value)

    def module_norms(self, depth: int = 1) -> dict[str, Tensor]:
        """Gradient norms before clipping by the first ``depth`` parts of module names (0-dim fp64), the same on every rank.

        All ranks call it together, after ``finish_gradients``. It gathers names over the host: log it every few steps.
        """
        return self._finisher.module_norms(depth)

    def num_zero_gradients(self) -> Tensor:
        """Elements of the gradient that are exactly zero (0-dim int64), every element counted once over all ranks.

        All ranks call it together, between ``finish_gradients`` and ``update_parameters``. It reads all gradients.
        """
        return self._finisher.num_zero_gradients()

    def step(self, **kwargs: Any) -> None:
        """Step the optimizer on the shards, by whatever way suits it: see ``optim/stepper.py``.

        Raises:
            RuntimeError: what ``finish_gradients`` has left to it.
        """
        self.take_in_values()
        for matrix in self._cut.gathered:
            matrix.before_step()
        without = {*self._finisher.left_out, *self._resting}
        self._stepper.step(self._finisher.take_factor(), without, confirm=self._finisher.confirm, **kwargs)
        for matrix in self._cut.gathered:
            matrix.after_step()

    def update_parameters(self) -> None:
        """After a step: send every rank the new parameters and clear the gradients; after one that is to be skipped only that.

        With ``overlap_param_gather`` the parameters are on their way when it returns; whatever reads one waits for it.
        """
        if self.should_skip:
            self.zero_gradients()
            return
        self.wait_parameters()  # of the step before, if nothing has read them
        if not self._stepper.writes_values:
            self.mains.publish()
        self._narrow.publish()
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
        self._hooked.append(module)
        self._forward_hooks += wait_in_forwards(module, self._buckets)

    def zero_gradients(self) -> None:
        """Clear the gradient buffers and the shards' ``grad``, for example after a step that is skipped."""
        for bucket in self._buckets:
            bucket.zero()
        self._late.zero_gradients()
        self._arrivals.reset()
        self._finisher.clear()
        self._resting = set()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank that it trains."""
        return [param for bucket in self._buckets for param in bucket.params]

    def local_gradients(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """This rank's gradients, before their reduction, to save or restore them between the batches of a step.

        Returns:
            For each parameter its global name, itself, and a view of the gradient buffer in its shape.
        """
        found = []
        for bucket in self._buckets:
            for placement, slot in zip(bucket.plan.placements, bucket.slots, strict=True):
                slot.collect()
                found.append((placement.name, slot.param, slot.view))
        return found

    def hide_gradients(self) -> None:
        """Make ``grad`` of the parameters ``None``, for code that would zero it, until ``show_gradients``."""
        self._late.thaw()
        for bucket in self._buckets:
            bucket.hide()

    def show_gradients(self) -> None:
        """Undo ``hide_gradients``."""
        for bucket in self._buckets:
            bucket.show()

    def take_in_values(self) -> None:
        """Let main shards follow what others have written into parameters since the last step; see ``optim/written.py``."""
        self.wait_parameters()
        self.mains.take_in()

    def refresh_main(self) -> None:
        """Read the main shards from the parameters again, after weights were loaded into the parameters alone."""
        self.wait_parameters()
        self.mains.refresh()
        self._narrow.refresh()

    def refresh_shard(self, shard: Shard) -> None:
        """Read one main shard from the parameter. For a gathered one the ranks of tp call it together."""
        self.mains.refresh_shard(shard)

    @contextmanager
    def wide_parameters(self, *, changed: bool = False) -> Iterator[None]:
        """Inside the ``with`` block parameters that the model holds in 8 bits have values, to save, show or load them.

        All ranks enter it together. ``changed``: main values may be others afterwards, and the 8 bits follow them.
        """
        if changed:
            self._late.thaw()  # so that there is a place to load states into
        self.take_in_values()
        with self._narrow.wide():
            yield
        if changed:
            self.mains.accept()
        if changed and self._narrow.is_in_use:
            self._send_narrow()

    def widen_parameters(self) -> None:
        """Give parameters in 8 bits values of their own for good: there are no more steps. All ranks call it together."""
        self.wait_parameters()
        self._narrow.close()

    def _send_narrow(self) -> None:
        self._narrow.publish()
        for bucket in self._buckets:
            if bucket.is_narrow:
                bucket.launch_gather()
        self.wait_parameters()
        self._narrow.narrow()

    def close(self) -> None:
        """Let go of the parameters: ``grad`` is ``None``, hooks are gone, gradient buffers are freed, values stay.

        The optimizer keeps its shards. The parameters can be laid out anew for another optimizer.
        """
        self.widen_parameters()
        for bucket in self._buckets:
            bucket.release()
        self._late.close()
        self._arrivals.close()
        for hook in self._forward_hooks:
            hook.remove()
        self._finisher.clear()
        self._finisher = GradientFinisher([], [], buckets=[], mesh=self.mesh, nonfinite=self._config.nonfinite)
        self._buckets, self._sums, self._forward_hooks = [], [], []
