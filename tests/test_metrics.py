"""torchmetrics under pipeline and data parallelism, against the value that one process computes from all samples."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score, MulticlassRecall
from torchmetrics.metric import jit_distributed_available
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_megatron.mesh import Mesh
from lightning_megatron.metrics import MetricSync
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed

NUM_CLASSES = 3


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.scores = MetricCollection(
            {"f1": MulticlassF1Score(NUM_CLASSES), "recall": MulticlassRecall(NUM_CLASSES)}, prefix="val_"
        )
        self.confusion = MulticlassConfusionMatrix(NUM_CLASSES)
        self.nested = nn.ModuleDict({"inner": nn.ModuleList([MulticlassAccuracy(NUM_CLASSES, average="macro")])})
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(NUM_CLASSES, average=None))
        self.best = MinMaxMetric(MulticlassAccuracy(NUM_CLASSES))
        self.seen = CatMetric()

    @property
    def of_predictions(self) -> list[Any]:
        return [self.accuracy, self.scores, self.confusion, self.nested["inner"][0], self.classwise, self.best]

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        for metric in self.of_predictions:
            metric.update(predictions, labels)
        self.seen.update(labels)

    def compute(self) -> list[Any]:
        return [metric.compute() for metric in (*self.of_predictions, self.seen)]


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(22, NUM_CLASSES, generator=generator), torch.randint(NUM_CLASSES, (22,), generator=generator)


def mesh_of(**sizes: int) -> Mesh:
    return Mesh.create(Parallelism(**sizes), device=torch.device("cpu"))


def update_own_part(module: Module, sync: MetricSync, mesh: Mesh, micro_batch_size: int = 3) -> None:
    """Each replica sees every other sample; of a pipeline only the last stage sees any."""
    predictions, labels = (tensor[mesh.dp.rank :: mesh.dp.size] for tensor in samples())
    with sync.in_step():
        for start in range(0, len(labels) if mesh.pp.is_last else 0, micro_batch_size):
            module.update(predictions[start : start + micro_batch_size], labels[start : start + micro_batch_size])


@pytest.mark.parametrize(("pp", "tp", "dp"), [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_every_rank_computes_what_one_process_would(pp: int, tp: int, dp: int) -> None:
    reference = Module()
    reference.update(*samples())
    expected = reference.compute()

    def run() -> tuple[Any, list[str]]:
        mesh, module = mesh_of(pp=pp, tp=tp), Module()
        sync = MetricSync(module, mesh=mesh)
        sync.apply()
        update_own_part(module, sync, mesh)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [module.compute(), module.compute()]  # the second comes from torchmetrics' cache where it is one
        return results, [str(entry.message) for entry in caught if "before the ``update``" in str(entry.message)]

    for results, warned in run_distributed(run, pp * tp * dp):
        assert warned == []
        for computed in results:
            computed[-1], order = computed[-1].sort().values, expected[-1].sort().values
            assert_close(computed, [*expected[:-1], order], rtol=0, atol=1e-6)


def test_a_next_epoch_starts_anew() -> None:
    def run() -> list[float]:
        mesh, module = mesh_of(pp=2), nn.ModuleDict({"mean": MeanMetric()})
        MetricSync(module, mesh=mesh).apply()
        values = []
        for value in (1.0, 5.0):
            if mesh.pp.is_last:
                module["mean"].update(value + mesh.dp.rank)
            values.append(float(module["mean"].compute()))
            module["mean"].reset()
        return values

    assert run_distributed(run, 4) == [[1.5, 5.5]] * 4


def test_inside_a_step_nothing_is_sent_along_the_pipeline() -> None:
    def run() -> tuple[float, float]:
        mesh, module = mesh_of(pp=2), nn.ModuleDict({"mean": MeanMetric(), "sum": SumMetric()})
        sync = MetricSync(module, mesh=mesh)
        sync.apply()
        forward = computed = 0.0
        with sync.in_step():
            if mesh.pp.is_last:  # the other stage has left the step before this
                forward = float(module["mean"](1.0 + mesh.dp.rank))
                computed = float(module["mean"].compute())
        outside = float(module["sum"](float(mesh.rank)))  # the value of `forward` is local anywhere
        assert outside == mesh.rank
        return forward, computed

    # Global ranks 0 and 2 hold the last stage. As in stock torchmetrics `forward` is local and `compute` is not.
    assert run_distributed(run, 4) == [(1.0, 1.5), (0.0, 0.0), (2.0, 1.5), (0.0, 0.0)]


def test_a_last_stage_at_position_0_is_the_source_when_told_so() -> None:
    def run() -> float:
        mesh, module = mesh_of(pp=2), nn.ModuleDict({"mean": MeanMetric()})
        MetricSync(module, mesh=mesh, last_stage_rank=0).apply()
        if mesh.pp.is_first:
            module["mean"].update(3.0)
        return float(module["mean"].compute())

    assert run_distributed(run, 2) == [3.0, 3.0]


def test_context_parallel_ranks_are_reduced_over_as_replicas_are() -> None:
    def run() -> float:
        mesh, module = mesh_of(cp=2), nn.ModuleDict({"mean": MeanMetric()})
        MetricSync(module, mesh=mesh).apply()
        module["mean"].update(float(mesh.cp.rank))
        return float(module["mean"].compute())

    assert run_distributed(run, 2) == [0.5, 0.5]


def test_a_failing_compute_fails_on_every_stage() -> None:
    class Broken(MeanMetric):
        def compute(self) -> Tensor:
            raise ArithmeticError("no such mean")

    def run() -> str:
        mesh, module = mesh_of(pp=2), nn.ModuleDict({"mean": Broken()})
        MetricSync(module, mesh=mesh).apply()
        with pytest.raises((ArithmeticError, RuntimeError)) as error:
            module["mean"].compute()
        return str(error.value)

    last, first = run_distributed(run, 2)
    assert last == "no such mean"
    assert first.startswith("[pp=0] Broken.compute() failed on the last stage: ArithmeticError")


def compute_of(metric: Metric) -> Any:
    return vars(metric)["compute"]


def test_applying_again_changes_nothing_and_finds_new_metrics() -> None:
    module = nn.ModuleDict({"mean": MeanMetric()})
    sync = MetricSync(module, mesh=Mesh())
    sync.apply()
    before = compute_of(module["mean"])
    module["max"] = MaxMetric()
    unpatched = compute_of(module["max"])
    sync.apply()
    assert compute_of(module["mean"]) is before
    assert compute_of(module["max"]) is not unpatched


def test_restore_undoes_every_change() -> None:
    def run() -> None:
        mesh, module = mesh_of(pp=2), nn.ModuleDict({"mean": MeanMetric()})
        metric = module["mean"]
        before = dict(vars(metric))
        sync = MetricSync(module, mesh=mesh)
        sync.apply()
        assert vars(metric)["process_group"] is mesh.dp_cp.group
        sync.restore()
        sync.restore()
        assert set(vars(metric)) == set(before)
        assert all(vars(metric)[name] is before[name] for name in ("compute", "process_group", "distributed_available_fn"))

    run_distributed(run, 4)


def test_a_second_sync_takes_over_from_one_that_was_not_restored() -> None:
    def run() -> float:
        mesh, module = mesh_of(pp=2), nn.ModuleDict({"mean": MeanMetric()})
        original = compute_of(module["mean"])
        first, second = MetricSync(module, mesh=mesh), MetricSync(module, mesh=mesh)
        first.apply()
        second.apply()
        first.restore()  # too late: not its patch any more
        if mesh.pp.is_last:
            module["mean"].update(2.0)
        value = float(module["mean"].compute())
        second.restore()
        assert compute_of(module["mean"]) is original
        return value

    assert run_distributed(run, 2) == [2.0, 2.0]


def test_a_group_of_the_users_own_is_kept() -> None:
    def run() -> bool:
        mesh = mesh_of(pp=1)
        module = nn.ModuleDict({"mean": MeanMetric(process_group=mesh.world.group)})
        MetricSync(module, mesh=mesh).apply()
        return module["mean"].process_group is mesh.world.group

    assert run_distributed(run, 2) == [True, True]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_copies_and_pickles_are_plain_torchmetrics_with_the_same_state(world: int) -> None:
    def run() -> None:
        mesh, module = mesh_of(pp=min(world, 2)), Module()
        sync = MetricSync(module, mesh=mesh)
        sync.apply()
        update_own_part(module, sync, mesh)
        metric = module.accuracy
        copies: list[Any] = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        for other in [copies[0].accuracy, copies[1].accuracy, metric.clone()]:
            assert "__getstate__" not in vars(other)
            assert other.process_group is None
            assert other.distributed_available_fn is jit_distributed_available
            assert other.update_count == metric.update_count
            assert not hasattr(compute_of(other), "_metric_patch")
        assert_close(copies[0].confusion.confmat, module.confusion.confmat)
        again = MetricSync(copies[0], mesh=mesh)
        again.apply()
        assert_close(copies[0].accuracy.compute(), metric.compute())

    run_distributed(run, world)
