"""torchmetrics under model parallelism: states are reduced over the data-parallel replicas, results sent along the pipeline.

Note [Who has seen the updates]
Only the last stage runs a step to its end, so only its metrics are updated. Outside of a step, ``compute`` is called on
every rank together (Lightning does so at the end of an epoch): the last stage computes, reduced over the ranks that see
different tokens, and sends the result to the other stages. Inside a step only the last stage may get to the call, so
it stays what torchmetrics makes of it: a collective of the replicas at most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_megatron.comm import broadcast_object
from lightning_megatron.mesh import Mesh


class MetricSync:
    """Makes every torchmetrics ``Metric`` of a module right for the layout, and takes it back.

    Each metric gets ``process_group`` (unless the user gave one) and a ``compute`` of its own. Copies and pickles of a
    metric are plain torchmetrics again; a copy inside the module is found by the next ``apply``.

    Args:
        module: the LightningModule; metrics in submodules and in a ``MetricCollection`` are found too.
        mesh: the running layout. States are reduced over ``dp_cp``, the ranks that see different tokens.
        last_stage_rank: position on ``pp`` that holds the last stage; by default the last position (V-shaped schedules
            bring the last stage back to position 0).
    """

    def __init__(self, module: nn.Module, *, mesh: Mesh, last_stage_rank: int | None = None) -> None:
        self._module, self._mesh = module, mesh
        self._source = mesh.pp.size - 1 if last_stage_rank is None else last_stage_rank
        self._sees_updates = mesh.pp.rank == self._source
        self._patches: dict[int, _Patch] = {}
        self._steps = 0
        self._computing = False

    def apply(self) -> None:
        """Take charge of the metrics that the module holds now. May be called again at any time."""
        for metric in self._module.modules():
            if isinstance(metric, Metric) and not self._is_patched(metric):
                self._patches[id(metric)] = self._patch(metric)

    def restore(self) -> None:
        """Make every metric what it was before ``apply``."""
        for patch in self._patches.values():
            patch.undo()
        self._patches.clear()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside the ``with`` block nothing is sent along the pipeline: not every stage gets to every call."""
        self._steps += 1
        try:
            yield
        finally:
            self._steps -= 1

    @contextmanager
    def discarded(self) -> Iterator[None]:
        """What the ``with`` block does to metrics is taken back: an update before the model call, in a run for its sake."""
        metrics = [metric for metric in self._module.modules() if isinstance(metric, Metric)]
        before = [_state(metric) for metric in metrics]
        try:
            yield
        finally:
            for metric, state in zip(metrics, before, strict=True):
                metric.__dict__.update(state)

    def _is_patched(self, metric: Metric) -> bool:
        patch = self._patches.get(id(metric))  # it holds the metric, so the id is not another's
        return patch is not None and metric.__dict__.get("compute") is patch.compute

    def _patch(self, metric: Metric) -> _Patch:
        # A sync of an earlier run may not have been restored: build on what lies under it.
        earlier = getattr(metric.compute, "_metric_patch", None)
        if isinstance(earlier, _Patch) and earlier.metric is metric:
            earlier.undo()
        original = metric.compute
        patch = _Patch(metric, original, metric.process_group, metric.distributed_available_fn)

        @functools.wraps(original)
        def compute(*args: Any, **kwargs: Any) -> Any:
            return self._compute(patch, *args, **kwargs)

        compute._metric_patch = patch  # type: ignore[attr-defined]
        patch.compute = compute
        patch.do(self._mesh)
        return patch

    def _compute(self, patch: _Patch, *args: Any, **kwargs: Any) -> Any:
        """See Note [Who has seen the updates]."""
        own = functools.partial(self._own, patch, *args, **kwargs)
        metric = patch.metric
        # torchmetrics sets `_should_unsync` to False around the value of one batch in `forward`, which is local by contract.
        if self._mesh.pp.size == 1 or self._steps or self._computing or not metric._should_unsync:
            return own()
        failure: Exception | None = None
        sent: tuple[str | None, Any] = (None, None)
        if self._sees_updates:
            try:
                sent = (None, _to(own(), torch.device("cpu")))
            except Exception as error:  # the other stages wait for a result: tell them before failing
                failure, sent = error, (repr(error), None)
        message, value = broadcast_object(sent, self._mesh.pp, self._source)
        if failure is not None:
            raise failure
        if message is not None:
            raise RuntimeError(f"{self._mesh.coordinate} {type(metric).__name__}.compute() failed on the last stage: {message}")
        return _to(value, metric.device)

    def _own(self, patch: _Patch, *args: Any, **kwargs: Any) -> Any:
        """This rank's own ``compute``. The metrics that a wrapper metric computes inside it send nothing by themselves."""
        metric, outermost = patch.metric, not self._computing
        unseen = not self._sees_updates and not metric.update_called
        self._computing = True
        if unseen:
            metric._update_count = 1  # no warning: this stage is not meant to have seen an update
        try:
            return patch.original(*args, **kwargs)
        finally:
            if unseen:
                metric._update_count = 0
            if outermost:
                self._computing = False


@dataclass(eq=False)
class _Patch:
    """What was changed on one metric."""

    metric: Metric
    original: Callable[..., Any]
    process_group: Any
    distributed_available_fn: Any
    compute: Callable[..., Any] | None = None

    def do(self, mesh: Mesh) -> None:
        group = mesh.dp_cp.group
        if group is None:
            self.metric.distributed_available_fn = _not_distributed  # `process_group=None` would mean the world
        elif self.process_group is None:
            self.metric.process_group = group
        # On the instance; torchmetrics leaves `compute` out of copies and pickles by itself, the rest is up to us: a
        # process group can be neither copied nor pickled.
        self.metric.__dict__.update(compute=self.compute, __getstate__=self.plain_state)

    def undo(self) -> None:
        if self.metric.__dict__.get("compute") is not self.compute:
            return  # another has taken over
        self.metric.process_group = self.process_group
        self.metric.distributed_available_fn = self.distributed_available_fn
        self.metric.__dict__["compute"] = self.original
        self.metric.__dict__.pop("__getstate__", None)

    def plain_state(self) -> dict[str, Any]:
        """The state that the metric would have without the patch, for copies and pickles."""
        state = dict(type(self.metric).__getstate__(self.metric))
        state.pop("__getstate__", None)
        saved = {"process_group": self.process_group, "distributed_available_fn": self.distributed_available_fn}
        return {**state, **saved}


def _state(metric: Metric) -> dict[str, Any]:
    """A metric's state as it is now: tensors are copied, since updates add in place; lists are only appended to."""
    names = ("_update_count", "_computed", "_forward_cache", "_is_synced", "_cache")
    state = {name: metric.__dict__[name] for name in names if name in metric.__dict__}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = value.clone() if isinstance(value, Tensor) else list(value)
    return state


def _not_distributed() -> bool:
    return False


def _to(value: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, value)
