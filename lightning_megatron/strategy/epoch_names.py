"""Replicas agree on the names of an epoch's values before Lightning reduces them.

Note [Names of an epoch]
At the end of an epoch Lightning reduces name by name, in the order in which a rank first came to the names. Replicas see other
samples: what a step logs by the kind of its batch comes in another order on each, or on some of them only, and one name would
be added to another, or waited for without end. So the ranks first compare their names. Where they differ, all take the union of
them, sorted; a name that a rank did not log is there with no weight. The values are then Lightning's own to reduce.

In training a callback in front of all others sees the end of an epoch first. An evaluation has no hook there (with several data
loaders, values are reduced at the end of each), so while it runs ``metrics`` of its results, which asks for them, is ours: on
the instance, until the evaluation ends.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultCollection, _ResultMetric, _Sync
from typing_extensions import override

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh


@dataclass(frozen=True)
class _Described:
    """What another rank needs to make the entry of a name.

    Args:
        meta: fields of Lightning's record of it; empty for a torchmetrics object, which reduces itself.
        asked: whether ``log`` was called with ``sync_dist=True``: it will be again.
        dtype: of the value.
    """

    meta: dict[str, Any]
    asked: bool = False
    dtype: torch.dtype = torch.float32


class EpochNames:
    """Makes the replicas' names agree; see Note [Names of an epoch].

    Args:
        trainer: whose results.
        mesh: the running layout: values are reduced over ``dp_cp``.

    Attributes:
        trainer: the same.
        mesh: the same.
    """

    def __init__(self, trainer: Trainer, mesh: Mesh) -> None:
        self.trainer, self.mesh = trainer, mesh
        self._callback = _TrainEpochEnd(self)
        self._agreed: set[int | None] = set()
        self._forced: list[_ResultMetric] = []

    def begin_training(self) -> None:
        """Stand in front of all callbacks."""
        self.end_training()
        if self.mesh.dp_cp.size > 1:
            self._callbacks.insert(0, self._callback)

    def end_training(self) -> None:
        """Leave the callbacks to the user."""
        self._callbacks[:] = [callback for callback in self._callbacks if not isinstance(callback, _TrainEpochEnd)]

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    def begin_evaluation(self) -> None:
        """A validation or test begins. All replicas call it, with batches or without."""
        self.end_evaluation()
        results = self.trainer._results
        if results is not None and self.mesh.dp_cp.size > 1:
            results.__dict__["metrics"] = partial(self._metrics, results)

    def end_evaluation(self) -> None:
        """Take back what ``begin_evaluation`` did."""
        self._agreed.clear()
        for metric in self._forced:
            metric.meta.sync.should = False
        self._forced.clear()
        if (results := self.trainer._results) is not None:
            results.__dict__.pop("metrics", None)

    def _metrics(self, results: _ResultCollection, on_step: bool) -> Any:
        index = results.dataloader_idx
        # What is logged in hooks after the last of several loaders has the order of the hooks.
        is_new = index not in self._agreed and not (index is None and self._agreed)
        if not on_step and is_new and self._has_read():
            self._agreed.add(index)
            for metric in results.values():
                in_step = metric.meta.fx.split(".")[0] in ("validation_step", "test_step")
                if in_step and _is_pending(metric, results) and not metric.meta.sync.rank_zero_only:
                    self._force(metric)
            self.agree(results)
        return _ResultCollection.metrics(results, on_step)

    def _has_read(self) -> bool:
        """Whether the loader has been read to its end: a hook may ask for values before the first batch."""
        loop = self.trainer._evaluation_loop
        ready: int = loop.batch_progress.current.ready
        return ready > 0 or (loop._data_fetcher is not None and loop._data_fetcher.done)

    def _force(self, metric: _ResultMetric) -> None:
        if metric.is_tensor and not metric.meta.sync.should:
            metric.meta.sync.should = True
            self._forced.append(metric)

    def agree(self, results: _ResultCollection) -> None:
        """Give all replicas the same names in the same order. They call it together.

        Raises:
            RuntimeError: they are at the end of different data loaders.
        """
        forced = {id(metric) for metric in self._forced}
        pending = {key: metric for key, metric in results.items() if _is_pending(metric, results)}
        own = {key: _described(metric, id(metric) in forced) for key, metric in pending.items() if _is_reduced(metric)}
        gathered = all_gather_object((results.dataloader_idx, own), self.mesh.dp_cp)
        indices = [index for index, _ in gathered]
        if len(set(indices)) > 1:
            raise RuntimeError(
                f"{self.mesh.coordinate} the data-parallel replicas are at the end of different data loaders: {indices} in "
                f"their order. Each replica needs at least one batch of each of the loaders."
            )
        if all(list(names) == list(own) for _, names in gathered):
            return
        values: dict[str, _Described] = {}
        for _, names in gathered:
            values |= {key: described for key, described in names.items() if described.meta and key not in values}
        for key in sorted(values):
            if key not in own:
                self._add(results, key, values[key])
        objects = sorted(key for key, described in own.items() if not described.meta)
        entries = dict(results)
        order = dict.fromkeys([*sorted(values), *objects, *entries])
        results.clear()
        results.update({key: entries[key] for key in order})

    def _add(self, results: _ResultCollection, key: str, described: _Described) -> None:
        """A name that this rank did not log in this epoch: the neutral value of its reduction, and no weight."""
        metric = results.get(key)
        if metric is None:
            meta = _Metadata(**described.meta)
            meta.sync = _Sync(_should=described.asked, fn=self.trainer.strategy.reduce)
            results[key] = metric = _ResultMetric(meta, True)
        metric.to(self.mesh.device)
        metric.value = metric.value.to(described.dtype)
        metric.has_reset, metric._update_count = False, 1
        self._force(metric)


class _TrainEpochEnd(Callback):
    """Tells the end of an epoch of training."""

    def __init__(self, names: EpochNames) -> None:
        self._names = names

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert trainer._results is not None
        self._names.agree(trainer._results)


def _is_pending(metric: _ResultMetric, results: _ResultCollection) -> bool:
    """Whether Lightning is about to compute its value of the epoch."""
    here = metric.meta.dataloader_idx == results.dataloader_idx
    return here and not metric.has_reset and metric.meta.on_epoch and metric._computed is None


def _is_reduced(metric: _ResultMetric) -> bool:
    """Whether its value of the epoch is one of all replicas."""
    sync = metric.meta.sync
    return not metric.is_tensor or (sync.should and not sync.rank_zero_only and sync.group is None)


def _described(metric: _ResultMetric, was_forced: bool) -> _Described:
    if not metric.is_tensor:
        return _Described({})
    meta = metric.meta
    named = {field.name: getattr(meta, field.name) for field in fields(meta) if field.name not in ("_sync", "reduce_fx")}
    return _Described({**named, "reduce_fx": meta.reduce_fx.__name__}, not was_forced, metric.value.dtype)
