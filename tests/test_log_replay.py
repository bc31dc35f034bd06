"""What is logged in micro-batches on the last stage, and what every rank sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, SumMetric

import lightning_megatron.log_replay as log_replay
from lightning_megatron.comm import broadcast_object
from lightning_megatron.log_replay import LogRecorder
from lightning_megatron.mesh import Mesh
from lightning_megatron.micro_batch import split_batch
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed


class Logged(LightningModule):
    """Keeps what its ``log`` is called with instead of logging it."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MeanMetric()
        self.total = SumMetric()
        self.largest = MaxMetric()
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.logged.append((name, float(value._forward_cache if isinstance(value, nn.Module) else value), kwargs))

    @property
    def values(self) -> dict[str, float]:
        return {name: value for name, value, _ in self.logged}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: kwargs["batch_size"] for name, _, kwargs in self.logged}


def mesh_of(**sizes: int) -> Mesh:
    return Mesh.create(Parallelism(**sizes), device=torch.device("cpu"))


def run_step(
    recorder: LogRecorder, step: Callable[[int], None], sizes: list[int], *, keep: bool = True, loss: Tensor | None = None
) -> Tensor:
    """What the strategy does with a step: run it for each micro-batch, then replay."""
    with recorder.recording():
        for index, size in enumerate(sizes):
            recorder.begin(index, size, keep=keep)
            step(index)
    return recorder.replay(loss)


def test_means_are_over_samples_whatever_the_micro_batches() -> None:
    torch.manual_seed(0)
    samples = torch.randn(7, dtype=torch.float64)
    parts = split_batch(samples, micro_batch_size=3)
    module = Logged()

    def step(index: int) -> None:
        module.log("mean", parts[index].mean(), prog_bar=True)
        module.log_dict({"in_dict": parts[index].mean(), "number": float(parts[index].mean())})

    run_step(LogRecorder(module, mesh=Mesh()), step, parts.sizes)
    assert list(module.values) == ["mean", "in_dict", "number"]
    expected = float(samples.mean())
    assert module.values["mean"] == module.values["in_dict"] == pytest.approx(expected, abs=1e-12)
    assert module.values["number"] == pytest.approx(expected, abs=1e-6)
    assert set(module.sizes.values()) == {7}
    assert module.logged[0][2]["prog_bar"] is True


def test_a_given_batch_size_is_the_weight_and_an_empty_micro_batch_has_none() -> None:
    module = Logged()
    values, tokens = [1.0, 4.0, float("nan")], [30, 10, 0]
    run_step(
        LogRecorder(module, mesh=Mesh()),
        lambda i: module.log("loss", torch.tensor(values[i]), batch_size=tokens[i]),
        [2, 2, 2],
    )
    assert module.values == {"loss": pytest.approx((30 * 1.0 + 10 * 4.0) / 40)}
    assert module.sizes == {"loss": 40}


def test_micro_batches_of_weight_zero_alone_give_zero() -> None:
    module = Logged()
    run_step(LogRecorder(module, mesh=Mesh()), lambda i: module.log("loss", torch.tensor(float("nan")), batch_size=0), [1, 1])
    assert (module.values, module.sizes) == ({"loss": 0.0}, {"loss": 0})


@pytest.mark.parametrize(
    ("reduce_fx", "name", "expected"),
    [
        ("mean", "mean", 16 / 6),
        ("avg", "mean", 16 / 6),
        (torch.mean, "mean", 16 / 6),
        ("sum", "sum", 9.0),
        (torch.sum, "sum", 9.0),
        (sum, "sum", 9.0),
        ("MAX", "max", 5.0),
        (torch.max, "max", 5.0),
        (min, "min", 1.0),
    ],
)
def test_reduce_fx_combines_micro_batches(reduce_fx: Any, name: str, expected: float) -> None:
    module, values = Logged(), [5.0, 1.0, 3.0]
    run_step(LogRecorder(module, mesh=Mesh()), lambda i: module.log("x", values[i], reduce_fx=reduce_fx), [2, 3, 1])
    assert module.values["x"] == pytest.approx(expected)
    assert module.logged[0][2]["reduce_fx"] == name


def test_a_name_of_some_micro_batches_is_their_mean() -> None:
    module = Logged()

    def step(index: int) -> None:
        if index != 1:
            module.log("some", float(index))
        module.log("all", float(index))

    run_step(LogRecorder(module, mesh=Mesh()), step, [1, 1, 2])
    assert module.values == {"some": pytest.approx(4 / 3), "all": pytest.approx(5 / 4)}
    assert module.sizes == {"some": 3, "all": 4}


def test_the_order_in_which_micro_batches_run_does_not_matter() -> None:
    modules = [Logged(), Logged()]
    for module, order in zip(modules, ([0, 1, 2], [2, 0, 1]), strict=True):
        recorder = LogRecorder(module, mesh=Mesh())
        with recorder.recording():
            for index in order:
                recorder.begin(index, index + 1, keep=True)
                module.log(f"only_{index}", index)
                module.log("x", 0.1 * index)
        recorder.replay(None)
    assert modules[0].logged == modules[1].logged


def test_logged_tensors_are_detached_copies() -> None:
    module = Logged()
    recorder, total = LogRecorder(module, mesh=Mesh()), torch.zeros(1)
    weight = torch.ones((), requires_grad=True)
    with recorder.recording():
        for index in range(2):
            recorder.begin(index, 1, keep=True)
            total += 1
            module.log("running", total)
            module.log("graph", weight * 2)
    assert all(call.number is not None and not call.number.requires_grad for call in recorder._calls)
    recorder.replay(None)
    assert module.values == {"running": 1.5, "graph": 2.0}


def test_log_is_the_users_own_again_after_recording_even_when_a_step_fails() -> None:
    module = Logged()
    recorder = LogRecorder(module, mesh=Mesh())

    def failing_step(index: int) -> None:
        module.log("x", 1.0)
        raise RuntimeError("step")

    with pytest.raises(RuntimeError, match="step"):
        run_step(recorder, failing_step, [1])
    assert "log" not in vars(module)
    with recorder.recording():
        pass
    recorder.replay(None)
    assert module.logged == []  # a failed step leaves nothing for the next


def test_metric_values_of_forward_are_those_of_the_whole_batch() -> None:
    module, data = Logged(), [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([5.0])]

    def step(index: int) -> None:
        for name in ("accuracy", "total", "largest"):
            metric = getattr(module, name)
            metric(data[index])
            module.log(name, metric)

    run_step(LogRecorder(module, mesh=Mesh()), step, [3, 1])
    assert module.values == {"accuracy": 3.5, "total": 14.0, "largest": 6.0}
    assert float(module.accuracy.compute()) == 3.5


def on_two_stages(fn: Callable[[Mesh, Logged, LogRecorder], Any]) -> Callable[[], Any]:
    def run() -> Any:
        mesh, module = mesh_of(pp=2), Logged()
        return fn(mesh, module, LogRecorder(module, mesh=mesh))

    return run


def test_all_stages_see_the_last_stages_values_and_its_loss() -> None:
    samples = torch.arange(5.0)
    parts = split_batch(samples, micro_batch_size=2)

    @on_two_stages
    def run(mesh: Mesh, module: Logged, recorder: LogRecorder) -> Any:
        def step(index: int) -> None:
            module.log("before_the_model", 7.0)
            if mesh.pp.is_last:
                module.log("mean", parts[index].mean(), on_step=True)
                module.accuracy(parts[index])
                module.log("metric", module.accuracy)

        loss = torch.tensor(0.5) if mesh.pp.is_last else None
        result = run_step(recorder, step, parts.sizes, keep=mesh.pp.is_last, loss=loss)
        return module.logged, float(result), module.accuracy.update_called

    first, second = run_distributed(run, 2)
    assert first == second
    logged, loss, updated = first
    assert [(name, value) for name, value, _ in logged] == [("before_the_model", 7.0), ("mean", 2.0), ("metric", 2.0)]
    assert all(kwargs["batch_size"] == 5 for _, _, kwargs in logged)
    assert loss == 0.5
    assert updated


def test_a_last_stage_at_position_0_is_the_source_when_told_so() -> None:
    def run() -> Any:
        mesh, module = mesh_of(pp=2), Logged()
        recorder = LogRecorder(module, mesh=mesh, last_stage_rank=0)
        is_source = mesh.pp.is_first
        loss = run_step(
            recorder, lambda i: module.log("x", 3.0), [1], keep=is_source, loss=torch.tensor(2.0) if is_source else None
        )
        return module.values, float(loss)

    assert run_distributed(run, 2) == [({"x": 3.0}, 2.0)] * 2


@contextmanager
def counted_objects() -> Iterator[list[Any]]:
    sent: list[Any] = []

    def counting(value: Any, *args: Any) -> Any:
        sent.append(value)
        return broadcast_object(value, *args)

    log_replay.broadcast_object = counting  # in a forked rank
    yield sent
    log_replay.broadcast_object = broadcast_object


def test_a_schema_travels_once_and_batch_sizes_may_change_without_one() -> None:
    @on_two_stages
    def run(mesh: Mesh, module: Logged, recorder: LogRecorder) -> Any:
        with counted_objects() as sent:
            for number in range(6):
                names = ["train", "loss"] if number % 2 else ["val"]

                def step(index: int, number: int = number, names: list[str] = names) -> None:
                    for name in names:
                        module.log(name, number + index, batch_size=number + 1)

                run_step(recorder, step, [2, 1], keep=mesh.pp.is_last)
        return len(sent), module.logged

    first, second = run_distributed(run, 2)
    assert first == second
    assert first[0] == 2
    assert [(name, value, kwargs["batch_size"]) for name, value, kwargs in first[1]][-3:] == [
        ("val", 4.5, 10),
        ("train", 5.5, 12),
        ("loss", 5.5, 12),
    ]


def test_ever_new_names_keep_the_stages_together_and_memory_bounded() -> None:
    @on_two_stages
    def run(mesh: Mesh, module: Logged, recorder: LogRecorder) -> Any:
        for number in range(150):
            name = f"x_{number // 2}"
            run_step(recorder, lambda i, name=name: module.log(name, 1.0), [1], keep=mesh.pp.is_last)  # type: ignore[misc]
        return module.values, len(recorder._schemas)

    first, second = run_distributed(run, 2)
    assert first == second
    assert len(first[0]) == 75
    assert first[1] <= 64


def test_a_step_without_logs_returns_the_loss_and_one_without_a_loss_zero() -> None:
    @on_two_stages
    def run(mesh: Mesh, module: Logged, recorder: LogRecorder) -> Any:
        loss = torch.tensor(1 / 3, dtype=torch.float64) if mesh.pp.is_last else None
        results = [run_step(recorder, lambda i: None, [1], loss=loss), run_step(recorder, lambda i: None, [1])]
        return [(float(result), result.dtype, result.dim()) for result in results]

    expected = [(1 / 3, torch.float64, 0), (0.0, torch.float32, 0)]
    assert run_distributed(run, 2) == [expected, expected]


def test_a_group_of_this_ranks_own_is_refused_on_every_stage() -> None:
    @on_two_stages
    def run(mesh: Mesh, module: Logged, recorder: LogRecorder) -> str:
        group = mesh.pp.group if mesh.pp.is_last else None
        with pytest.raises(MisconfigurationException, match="sync_dist_group") as error:
            run_step(recorder, lambda i: module.log("x", 1.0, sync_dist_group=group), [1], keep=mesh.pp.is_last)
        return str(error.value)

    assert [message[:6] for message in run_distributed(run, 2)] == ["[pp=1]", "[pp=0]"]


def test_context_parallel_ranks_are_combined_before_the_pipeline() -> None:
    def run() -> Any:
        mesh, module = mesh_of(pp=2, cp=2), Logged()
        recorder, part = LogRecorder(module, mesh=mesh), mesh.cp.rank

        def step(index: int) -> None:
            module.log("mean", 1.0 + 2 * part + index)
            module.log("largest", float(part), reduce_fx="max")
            module.log("smallest", float(part), reduce_fx="min")
            module.log("tokens", 10.0 + part, reduce_fx="sum")
            module.log("weighted", 1.0 + part, batch_size=3 - 2 * part)  # 3 tokens here, 1 there
            if part == 0:
                module.log("alone", 9.0, rank_zero_only=True)

        loss = torch.tensor(1.0 + part) if mesh.pp.is_last else None
        result = run_step(recorder, step, [1, 1], keep=mesh.pp.is_last, loss=loss)
        return module.values, module.sizes, float(result)

    for values, sizes, loss in run_distributed(run, 4):
        assert values.pop("alone", 9.0) == 9.0
        assert sizes.pop("alone", 2) == 2
        assert values == {"mean": 2.5, "largest": 1.0, "smallest": 0.0, "tokens": 21.0, "weighted": 1.25}
        assert sizes == {"mean": 2, "largest": 2, "smallest": 2, "tokens": 2, "weighted": 8}
        assert loss == 1.5
