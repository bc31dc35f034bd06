"""``self.log`` in a step that runs once for each micro-batch, and to its end on the last stage alone.

Note [Record and replay]
While a schedule runs, what the user logs is recorded. Afterwards the last stage combines each name over the micro-batches,
all stages of the pipeline receive the result, and every rank calls Lightning's own ``log`` once for each name, with the
same value and with the batch size of all micro-batches together. Callbacks, loggers and the progress bar then see on every
rank what one process would have seen.

Note [One value of an epoch]
Callbacks decide by the values of an epoch. Replicas that decide by their own would part (shards of one optimizer would even
get unlike learning rates), so a value kept for the epoch is always reduced over them, as ``sync_dist=True`` does. In an
evaluation replicas may have unlike numbers of batches: what is shown by step too is reduced at the end (epoch_names.py).

A step costs a small CPU broadcast (which schema, batch sizes) and a packed tensor on the device; a new schema is sent once.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Number
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import MaxMetric, MinMetric, SumMetric

from lightning_megatron.comm import broadcast, broadcast_object
from lightning_megatron.log_means import Entry, Kind, mean_by_tokens, over_context, reduced, token_shares
from lightning_megatron.mesh import Mesh

# A program that logs under ever new names must not fill the memory with schemas.
_MAX_SCHEMAS = 64


@dataclass(frozen=True)
class _Schema:
    entries: tuple[Entry, ...]
    has_loss: bool
    dtype: torch.dtype

    @property
    def num_values(self) -> int:
        return self.has_loss + sum(entry.has_value for entry in self.entries)


@dataclass(frozen=True)
class _Call:
    """One call of ``log``: ``number`` is what it adds to the combined value, if anything."""

    microbatch_index: int
    entry: Entry
    number: Tensor | None
    weight: int
    own_weight: bool


@dataclass
class _Record:
    """All calls of ``log`` for one entry in one step."""

    entry: Entry
    numbers: list[Tensor] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, call: _Call) -> None:
        self.size += call.weight
        if call.number is not None:
            self.numbers.append(call.number)
            self.weights.append(call.weight)
            self.microbatches.append(call.microbatch_index)
        has_value, own_weights = bool(self.numbers), self.entry.own_weights or call.own_weight
        self.entry = replace(self.entry, has_value=has_value, own_weights=own_weights)


@dataclass(frozen=True)
class _Message:
    """What the last stage tells the others: a schema, the batch size of each entry, and the values, packed (1-D)."""

    schema: _Schema
    sizes: list[int]
    packed: Tensor


class LogRecorder:
    """Records ``self.log`` during a step, and replays it on every rank of the pipeline. See Note [Record and replay].

    All ranks of a pipeline make one and call ``replay`` together, after each step. Context-parallel ranks must log the
    same names.

    Args:
        lightning_module: the user's module.
        mesh: the running layout: values go along ``pp`` and are averaged over ``cp``.
        last_stage_rank: position on ``pp`` that holds the last stage; by default the last position (V-shaped schedules
            bring the last stage back to position 0).
    """

    def __init__(self, lightning_module: LightningModule, *, mesh: Mesh, last_stage_rank: int | None = None) -> None:
        self._module, self._mesh = lightning_module, mesh
        self._source = mesh.pp.size - 1 if last_stage_rank is None else last_stage_rank
        self._calls: list[_Call] = []
        self._microbatch_index, self._size, self._keep = 0, 0, False
        self._argument_names: tuple[str, ...] = ()
        self._schemas: list[_Schema] = []  # the same on all ranks of the pipeline; an index in it is a schema's id
        self._paths: dict[int, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside the ``with`` block the module's ``log`` (and so ``log_dict``) records instead of logging."""
        attributes, absent = self._module.__dict__, object()
        earlier = attributes.get("log", absent)
        self._argument_names = _argument_names(self._module.log)
        self._calls, self._keep = [], False
        attributes["log"] = self._record
        try:
            yield
        finally:
            if earlier is absent:
                del attributes["log"]
            else:
                attributes["log"] = earlier

    def begin(self, microbatch_index: int, size: int, *, keep: bool) -> None:
        """Tell that the user's step is about to run.

        Args:
            microbatch_index: which micro-batch.
            size: samples in it: the weight of its values, unless the user gives a ``batch_size``.
            keep: whether this is the run on the last stage; what other runs log is thrown away.
        """
        self._microbatch_index, self._size, self._keep = microbatch_index, size, keep

    def _record(self, *args: Any, **kwargs: Any) -> None:
        if not self._keep:
            return
        given = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}
        if missing := [name for name in ("name", "value") if name not in given]:
            raise TypeError(f"self.log() is missing the argument(s) {', '.join(missing)}.")
        name, value, batch_size = given.pop("name"), given.pop("value"), given.pop("batch_size", None)
        entry, number = self._entry(name, value, given)
        weight = self._size if batch_size is None else int(batch_size)
        self._calls.append(_Call(self._microbatch_index, entry, number, weight, batch_size is not None))

    def _entry(self, name: str, value: Any, arguments: dict[str, Any]) -> tuple[Entry, Tensor | None]:
        """The schema's entry for a call, and the number that the call contributes."""
        reduction = _reduction(arguments.get("reduce_fx", "mean"))
        if "reduce_fx" in arguments:
            arguments["reduce_fx"] = reduction
        group = arguments.pop("sync_dist_group", None) if self._mesh.pp.size > 1 else None

        def entry(kind: Kind, detail: str | bytes = "") -> Entry:
            return Entry(name, kind, tuple(sorted(arguments.items())), detail, reduction)

        if group is not None:
            message = "sync_dist_group is a group of this rank's own, which other pipeline stages cannot use. Leave it out: "
            return entry("error", message + "sync_dist=True reduces over the data-parallel replicas."), None
        if isinstance(value, Metric):
            path = arguments.get("metric_attribute") or self._path_of(value)
            if path is None:
                return entry("error", "the torchmetrics.Metric is not an attribute of the LightningModule; make it one."), None
            reduction = _reduction_of_metric(value)
            cache = value._forward_cache
            return entry("metric", path), self._number(cache) if isinstance(cache, Tensor) and cache.numel() == 1 else None
        if isinstance(value, Tensor) and value.numel() == 1:
            return entry("value"), self._number(value)
        if isinstance(value, Number) and not isinstance(value, complex):
            return entry("value"), self._number(float(value))  # type: ignore[arg-type]
        return entry("refused", _pickled(value)), None

    def _number(self, value: Tensor | float) -> Tensor:
        """A 0-dim tensor on the device, the recorder's own: the user may go on to change what was logged in place."""
        if isinstance(value, Tensor) and value.device == self._mesh.device:
            return value.detach().clone().reshape(())
        dtype = torch.float64 if isinstance(value, Tensor) and value.dtype == torch.float64 else torch.float32
        # A fill kernel takes the number along; copying a host tensor to the device could wait for the device.
        return torch.full((), float(value), dtype=dtype, device=self._mesh.device)

    def _path_of(self, metric: Metric) -> str | None:
        if self._module_at(path := self._paths.get(id(metric))) is not metric:
            self._paths = {id(m): name for name, m in self._module.named_modules() if isinstance(m, Metric)}
            path = self._paths.get(id(metric))
        return path

    def _module_at(self, path: str | None) -> torch.nn.Module | None:
        try:
            return self._module.get_submodule(path) if path else None
        except AttributeError:
            return None

    def replay(self, loss: Tensor | None, num_tokens: Tensor | None = None) -> Tensor:
        """Combine what was recorded, send it from the last stage to the others, and log it on every rank.

        Call it outside of ``recording``, within the hook that the step belongs to. In ``predict_step`` Lightning allows
        no logging: where something was logged there, its error is raised on every rank.

        Args:
            loss: the loss of the step, 0-dim, on the last stage; ``None`` on the others, and where there is none.
            num_tokens: valid tokens of each micro-batch on this rank, ``[M]``, where the step tells them: the weights of its
                means over ``cp``.

        Returns:
            The loss on every rank, averaged over ``cp``; 0-dim, fp32 (fp64 if it was); zero where there is none.

        Raises:
            ValueError: Lightning's own, on every rank, for a value that is not a single number.
            MisconfigurationException: Lightning's own; and for what cannot be sent along a pipeline.
        """
        calls, self._calls = self._calls, []
        message = self._combined(calls, loss, num_tokens) if self._has_values else None
        if self._mesh.pp.size > 1:
            message = self._exchange(message)
        assert message is not None
        values = iter(message.packed.unbind())
        loss = next(values) if message.schema.has_loss else message.packed.new_zeros(())
        for entry, size in zip(message.schema.entries, message.sizes, strict=True):
            self._log(entry, next(values) if entry.has_value else None, size)
        return loss

    @property
    def _has_values(self) -> bool:
        return self._mesh.pp.rank == self._source

    def _combined(self, calls: list[_Call], loss: Tensor | None, num_tokens: Tensor | None = None) -> _Message:
        """Every name over the micro-batches and over ``cp``. Waits for the device only for a ``batch_size`` under ``cp``."""
        records: dict[Entry, _Record] = {}
        for call in sorted(calls, key=lambda call: call.microbatch_index):
            records.setdefault(call.entry, _Record(call.entry)).add(call)
        numbers = [number for record in records.values() for number in record.numbers] + ([] if loss is None else [loss])
        dtype = torch.float64 if any(number.dtype == torch.float64 for number in numbers) else torch.float32
        schema = _Schema(tuple(record.entry for record in records.values()), loss is not None, dtype)
        values = [] if loss is None else [loss.detach().to(self._mesh.device, dtype).reshape(())]
        shares = None if num_tokens is None or self._mesh.cp.size == 1 else token_shares(num_tokens, self._mesh.cp)
        weights: list[Tensor | None] = [None] * len(values)
        for record in records.values():
            if not record.entry.has_value:
                continue
            numbers, how = [number.to(dtype) for number in record.numbers], record.entry.reduction
            if shares is None or how != "mean" or record.entry.on_one_rank:
                value, weight = reduced(numbers, record.weights, how), None
            else:
                value, weight = mean_by_tokens(numbers, record.weights, shares[record.microbatches].to(dtype))
            values.append(value)
            weights.append(weight)
        sizes = [record.size for record in records.values()]
        if self._mesh.cp.size > 1:
            values, sizes = over_context(schema.entries, values, sizes, mesh=self._mesh, weights=weights)
        packed = torch.stack(values) if values else torch.empty(0, dtype=dtype, device=self._mesh.device)
        return _Message(schema, sizes, packed)

    def _exchange(self, sent: _Message | None) -> _Message:
        """Send the last stage's message to the other stages of the pipeline."""
        pp, source = self._mesh.pp, self._source
        # As long as the longest schema so far, which all ranks know: one broadcast of a known shape does.
        header = torch.zeros(2 + max((len(schema.entries) for schema in self._schemas), default=0), dtype=torch.int64)
        if sent is not None:
            known = sent.schema in self._schemas
            content = [self._schemas.index(sent.schema), sent.schema.num_values, *sent.sizes] if known else [-1, 0]
            header[: len(content)] = torch.tensor(content)
        schema_id, num_values, *sizes = broadcast(header, pp, source).tolist()
        if schema_id < 0:
            schema, sizes = broadcast_object((sent.schema, sent.sizes) if sent is not None else None, pp, source)
            if len(self._schemas) == _MAX_SCHEMAS:
                self._schemas.clear()
            self._schemas.append(schema)
        else:
            schema = self._schemas[schema_id]
            assert num_values == schema.num_values, "the ranks of a pipeline disagree on the schema"
        empty = torch.empty(schema.num_values, dtype=schema.dtype, device=self._mesh.device)
        packed = empty if sent is None else sent.packed
        if schema.num_values:
            broadcast(packed, pp, source)
        return _Message(schema, sizes[: len(schema.entries)], packed)

    def _log(self, entry: Entry, value: Any, size: int) -> None:
        where = f"{self._mesh.coordinate} self.log({entry.name!r}, ...): "
        if entry.kind == "error":
            raise MisconfigurationException(f"{where}{entry.detail!s}")
        if entry.kind == "refused":
            assert isinstance(entry.detail, bytes)
            value = pickle.loads(entry.detail)  # our own bytes, of the last stage
        if entry.kind == "metric":
            metric = self._module_at(str(entry.detail))
            if not isinstance(metric, Metric):
                raise MisconfigurationException(
                    f"{where}the metric {entry.detail!s} is not on this pipeline stage. Make it an attribute of the "
                    f"LightningModule, outside of the model that is cut into stages."
                )
            if value is not None or not self._has_values:
                metric._forward_cache = value
            metric._update_count = max(1, metric._update_count)  # on the other stages: it has values, though not here
            value = metric
        arguments = dict(entry.arguments)
        if self._is_of_the_epoch(entry):
            arguments["sync_dist"] = True
        self._module.log(entry.name, value, **arguments, batch_size=size)

    def _is_of_the_epoch(self, entry: Entry) -> bool:
        """Whether Lightning keeps the value for the end of the epoch: see Note [One value of an epoch]."""
        if entry.kind != "value" or entry.on_one_rank or self._mesh.dp_cp.size == 1:
            return False
        on_epoch, on_step = (dict(entry.arguments).get(name) for name in ("on_epoch", "on_step"))
        if on_step and self._module._current_fx_name in ("validation_step", "test_step"):
            return False
        return self._module._current_fx_name != "training_step" if on_epoch is None else bool(on_epoch)


def _argument_names(log: Callable[..., Any]) -> tuple[str, ...]:
    """Of a ``log`` that may be a method of the module's class, or a function that somebody has put on the module."""
    function = getattr(log, "__func__", None)
    return tuple(inspect.signature(log).parameters) if function is None else _names_of_method(function)


@cache
def _names_of_method(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def _reduction(reduce_fx: str | Callable[..., Any]) -> str:
    """The name of a ``reduce_fx``. One that Lightning does not know gets a name that it refuses, on every rank."""
    if isinstance(reduce_fx, str):
        return "mean" if reduce_fx.lower() == "avg" else reduce_fx.lower()
    known = {"mean": (torch.mean,), "sum": (torch.sum, sum), "min": (torch.min, min), "max": (torch.max, max)}
    for name, functions in known.items():
        if reduce_fx in functions:
            return name
    return f"the function {getattr(reduce_fx, '__name__', repr(reduce_fx))}"


def _reduction_of_metric(metric: Metric) -> str:
    """How the values of ``forward`` of several micro-batches give that of the batch: the mean but for three aggregators."""
    for name, kind in {"sum": SumMetric, "min": MinMetric, "max": MaxMetric}.items():
        if isinstance(metric, kind):
            return name
    return "mean"


def _pickled(value: Any) -> bytes:
    value = value.detach().cpu() if isinstance(value, Tensor) else value
    try:
        return pickle.dumps(value)
    except Exception:  # whatever a foreign type raises; it is only to be refused under its looks
        return pickle.dumps(repr(value))
