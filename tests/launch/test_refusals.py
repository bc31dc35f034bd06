"""What cannot work is refused by one message with the numbers and the fix, before training, mostly before launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, BatchSizeFinder, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_megatron import MegatronPrecision, MegatronStrategy
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.models.gpt_module import GPTModule
from lightning_megatron.strategy.finetuning import refuse_finetuning
from lightning_megatron.testing import run_distributed

from .failing_script import Model

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_steps": 2,
}
TINY = GPTConfig(num_layers=4, hidden_size=32, num_heads=4, ffn_hidden_size=48, vocab_size=67, max_seq_len=16)


class Plain(L.LightningModule):
    """A module whose model is whatever it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(devices: int, layout: dict[str, Any], **options: Any) -> L.Trainer:
    return L.Trainer(strategy=MegatronStrategy(**layout), accelerator="cpu", devices=devices, **(QUIET | options))


def samples(number: int = 16) -> TensorDataset:
    return TensorDataset(torch.randn(number, 4))


def refusal(run: Callable[[], Any], *parts: str, kind: type[Exception] = ValueError) -> str:
    """The message of what ``run`` raises, which must hold all the parts."""
    with pytest.raises(kind) as caught:
        run()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process may be started, and no process group made."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen.__init__", started)
    monkeypatch.setattr("os.fork", started)
    monkeypatch.setattr(dist, "init_process_group", started)


# By the strategy's constructor


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tp": 0}, ["tp=0", "1 or more"]),
        ({"tp": 2.0}, ["tp=2.0", "whole number"]),
        ({"pp": True}, ["pp=True", "whole number"]),
        ({"order": "tp-pp-dp"}, ["'tp-pp-dp'", "tp, cp, pp and dp once each", "'tp-cp-pp-dp'"]),
        ({"order": "tp-cp-pp-ep"}, ["'tp-cp-pp-ep'", "'tp-cp-pp-dp'"]),
        ({"vpp": 2}, ["vpp=2", "pp >= 2", "pp=1", "set vpp=1"]),
        ({"ep": 4}, ["ep=4", "expert parallelism is not there yet", "set ep=1"]),
        ({"etp": 2}, ["etp=2", "not there yet", "set etp=1"]),
        ({"schedule": "zigzag"}, ["'zigzag'", "auto, 1f1b, interleaved, gpipe, zbh1, zbv"]),
        ({"pp": 2, "schedule": "zbv"}, ["vpp=1", "set vpp=2"]),
        ({"pp": 2, "vpp": 2, "schedule": "1f1b"}, ["'1f1b'", "vpp=2", "'interleaved'"]),
        ({"pp": 2, "schedule": "interleaved"}, ["'interleaved'", "vpp >= 2", "vpp=1"]),
        ({"backend": "jax"}, ["'jax'", "unknown", "auto, torch, te"]),
        ({"plan": {"q": "column"}}, ["plan=", "not there yet", "plan=None"]),
        ({"recompute": []}, ["recompute=[]", "names no module", "full, selective, layer"]),
        ({"micro_batch_size": 2, "num_microbatches": 4}, ["micro_batch_size=2", "num_microbatches=4", "one of them"]),
        ({"micro_batch_size": 0}, ["micro_batch_size=0", "1 or more"]),
        ({"num_microbatches": -1}, ["num_microbatches=-1", "1 or more"]),
        ({"pp": 2, "vpp": 2, "schedule": "interleaved", "num_microbatches": 1}, ["num_microbatches=1", "pp=2", "2"]),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused_by_the_constructor(options: dict[str, Any], parts: list[str]) -> None:
    refusal(lambda: MegatronStrategy(**options), *parts)


# By the Trainer's constructor


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("layout", "devices", "num_nodes", "parts"),
    [
        ({"tp": 4}, 2, 1, ["tp(4) * cp(1) * pp(1) = 4", "world_size=2", "launch a multiple of 4"]),
        ({"tp": 2, "pp": 2}, 6, 1, ["tp(2) * cp(1) * pp(2) = 4", "world_size=6", "lower one axis"]),
        ({"tp": 3}, 2, 2, ["tp(3) * cp(1) * pp(1) = 3", "world_size=4"]),
        ({"pp": 2}, 1, 1, ["pp(2) = 2", "world_size=1"]),
    ],
    ids=str,
)
def test_a_world_that_does_not_divide_is_refused_by_the_trainer(
    layout: dict[str, int], devices: int, num_nodes: int, parts: list[str]
) -> None:
    refusal(lambda: trainer(devices, layout, num_nodes=num_nodes), *parts)


@pytest.mark.usefixtures("no_launch")
def test_plugins_that_would_be_ignored_are_refused_by_the_trainer() -> None:
    class OwnIO(TorchCheckpointIO):
        pass

    io = [AsyncCheckpointIO(TorchCheckpointIO())]
    refusal(
        lambda: trainer(2, {}, plugins=io), "AsyncCheckpointIO", "writes checkpoint directories itself", "Remove the plugin"
    )
    refusal(lambda: trainer(2, {}, plugins=[OwnIO()]), "OwnIO", "Remove the plugin")
    refusal(lambda: trainer(2, {}, sync_batchnorm=True), "sync_batchnorm=True", "not there yet", "Remove it")


@pytest.mark.usefixtures("no_launch")
def test_precisions_that_are_not_there_are_refused_by_the_trainer(recwarn: pytest.WarningsRecorder) -> None:
    supported = "32-true, bf16-mixed, bf16-true, 16-mixed, 16-true, 64-true"
    refusal(lambda: MegatronPrecision("fp8"), "'fp8'", supported)  # type: ignore[arg-type]
    refusal(lambda: trainer(1, {}, precision="transformer-engine"), "transformer_engine", kind=ModuleNotFoundError)
    # On the CPU Lightning itself makes bf16-mixed of 16-mixed, and says so, before a strategy is asked.
    assert str(trainer(1, {}, precision="16-mixed").precision_plugin.precision) == "bf16-mixed"
    assert any("Using `precision='bf16-mixed'` instead" in str(warning.message) for warning in recwarn)


@pytest.mark.usefixtures("no_launch")
def test_a_launcher_that_started_other_ranks_is_refused_by_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    started = ["TorchElastic started 4 ranks", "devices=2, num_nodes=1", "2 * 1 = 2", "their product is 4"]
    refusal(lambda: trainer(2, {"tp": 2}), *started)
    local = ["torchrun started 4 ranks on this machine", "devices=2, num_nodes=2", "set devices=4 and num_nodes=1"]
    refusal(lambda: trainer(2, {"tp": 2}, num_nodes=2), *local)
    assert trainer(4, {"tp": 2}).world_size == 4


# By fit, before a process is started


class Iterates(Plain):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.model(next(dataloader_iter)[0]).mean()


class Manual(Plain):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False


class OwnBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2.0).backward()


class TwoModels(Plain):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.teacher = Model()


class Temperature(Plain):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.temperature = nn.Parameter(torch.ones(()))


def config(**sizes: Any) -> GPTConfig:
    return GPTConfig(**{**vars(TINY), **sizes})


class NoHead(Model):
    last = None  # type: ignore[assignment]


class Unused(Model):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


PP2, TP2 = {"pp": 2}, {"tp": 2}


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("layout", "make", "parts"),
    [
        ({"tp": 8}, lambda: GPTModule(TINY), ["num_heads=4", "tp=8"]),
        ({"tp": 3}, lambda: GPTModule(TINY), ["num_heads=4", "tp=3"]),
        ({"tp": 4}, lambda: GPTModule(config(num_heads=12, num_kv_heads=6, hidden_size=48)), ["num_kv_heads=6", "tp=4"]),
        ({"tp": 4}, lambda: GPTModule(config(ffn_hidden_size=50)), ["ffn_hidden_size=50", "tp=4"]),
        ({"pp": 2, "vpp": 4}, lambda: GPTModule(TINY), ["num_layers=4", "pp(2) * vpp(4) = 8", "lower pp or vpp"]),
        ({"pp": 8}, lambda: GPTModule(TINY), ["num_layers=4", "pp(8)", "lower pp"]),
        ({"pp": 6}, lambda: Plain(Model()), ["Model has 4 layers", "pp(6) * vpp(1) = 6", "Lower pp or vpp, or add layers"]),
        (TP2, lambda: Plain(GPT(TINY)), ["self.model", "outside of configure_model", "tp=2", "Build it in"]),
        (PP2, lambda: Plain(nn.Linear(4, 1)), ["pp=2", "PipelineModel", "none was found", "or set pp=1"]),
        (PP2, lambda: TwoModels(Model()), ["several PipelineModels", "self.model, self.teacher", "pipelines one"]),
        (PP2, lambda: Temperature(Model()), ["Temperature.temperature", "outside the PipelineModel", "Move it into"]),
        (PP2, lambda: Plain(Unused()), ["Unused.extra", "neither first() nor last()", "Use it in"]),
        (PP2, lambda: Manual(Model()), ["Manual uses manual optimization", "pp=2", "automatic_optimization = True, or pp=1"]),
        (PP2, lambda: Iterates(Model()), ["Iterates.training_step(dataloader_iter)", "training_step(batch, batch_idx)"]),
        (PP2, lambda: OwnBackward(Model()), ["OwnBackward overrides backward", "on_after_backward", "training_step"]),
        ({}, lambda: OwnBackward(nn.Linear(4, 1)), ["OwnBackward overrides backward", "automatic_optimization = False"]),
        ({}, lambda: Iterates(nn.Linear(4, 1)), ["Iterates.training_step(dataloader_iter)", "write"]),
    ],
)
def test_models_that_do_not_fit_are_refused_before_a_process_starts(
    layout: dict[str, int], make: Callable[[], L.LightningModule], parts: list[str]
) -> None:
    ranks = max(2, layout.get("tp", 1) * layout.get("pp", 1))
    refusal(lambda: trainer(ranks, layout).fit(make(), DataLoader(samples())), *parts)


@pytest.mark.usefixtures("no_launch")
def test_a_model_without_a_head_and_a_compiled_module_are_refused_before_a_process_starts() -> None:
    refusal(lambda: trainer(2, PP2).fit(Plain(NoHead()), DataLoader(samples())), "NoHead must define last", kind=TypeError)
    compiled = torch.compile(Plain(Model()))
    parts = ["compiled model is incompatible", "MegatronStrategy", "avoid passing in compiled model"]
    refusal(lambda: trainer(2, PP2).fit(compiled, DataLoader(samples())), *parts, kind=RuntimeError)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("callback", "parts"),
    [
        (lambda: StochasticWeightAveraging(0.1), ["StochasticWeightAveraging", "pp=2", "set pp=1"]),
        (lambda: WeightAveraging(), ["WeightAveraging", "pp=2", "remove the callback"]),
        (lambda: BatchSizeFinder(), ["BatchSizeFinder", "other 1 would wait", "remove the callback"]),
    ],
)
def test_callbacks_that_break_are_refused_before_a_process_starts(callback: Any, parts: list[str]) -> None:
    refusal(lambda: trainer(2, PP2, callbacks=[callback()]).fit(Plain(Model()), DataLoader(samples())), *parts)


@pytest.mark.usefixtures("no_launch")
def test_finetuning_callbacks_are_refused_in_fit_with_what_to_do_instead() -> None:
    thaws = trainer(2, {}, callbacks=[BackboneFinetuning()])
    parts = ["BackboneFinetuning (a BaseFinetuning)", "Remove the callback", "self.optimizers().add_param_group"]
    refusal(lambda: thaws.fit(Plain(Model()), DataLoader(samples())), *parts)
    thaws.state.fn = TrainerFn.VALIDATING
    refuse_finetuning(thaws)


# On the ranks, before the first step


class Late(Plain):
    """Builds its model in configure_model and must never come to train."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: Any = torch.optim.SGD) -> None:
        super().__init__(nn.Identity())
        self._make, self._optimizer = make, optimizer

    def configure_model(self) -> None:
        self.model = self._make()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters(), lr=0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise AssertionError("training has started")


class Counts(IterableDataset[list[Tensor]]):
    """A stream of a given length, which nobody is told."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[list[Tensor]]:
        yield from ([torch.ones(4)] for _ in range(self.number))


def on_ranks(layout: dict[str, Any], make: Callable[[], L.LightningModule], data: Any = None, **options: Any) -> list[str]:
    """What two ranks raise from fit."""

    def run() -> str:
        loader = data(dist.get_rank()) if data else DataLoader(samples())
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is looked at by the caller)
            trainer(2, layout, **options).fit(make(), loader)
        return str(caught.value)

    return run_distributed(run, 2)


def five_layers() -> nn.Module:
    model = Model()
    del model.layers[1:]
    return model


@pytest.mark.parametrize(
    ("layout", "make", "parts"),
    [
        (PP2, lambda: Late(five_layers), ["Model has 1 layers", "pp(2) * vpp(1) = 2", "add layers"]),
        (PP2, lambda: Late(lambda: nn.Linear(4, 1)), ["pp=2", "none was found", "set pp=1"]),
        (PP2, lambda: Late(Model, torch.optim.LBFGS), ["LBFGS cannot be sharded", "AdamW or SGD"]),
        ({}, lambda: Late(Model, torch.optim.LBFGS), ["LBFGS cannot be sharded", "AdamW or SGD"]),
        ({"pp": 2, "vpp": 2}, lambda: Late(Model), ["batch_size=1 / micro_batch_size=1", "pp=2"]),
    ],
)
def test_what_shows_only_in_configure_hooks_is_refused_on_every_rank(
    layout: dict[str, Any], make: Callable[[], L.LightningModule], parts: list[str]
) -> None:
    for message in on_ranks(layout, make):
        for part in parts:
            assert part in message


def test_too_few_micro_batches_by_loader_and_size_are_refused_before_training() -> None:
    layout = {"pp": 2, "vpp": 2, "micro_batch_size": 4}
    for message in on_ranks(layout, lambda: Late(Model), lambda rank: DataLoader(samples(), batch_size=4)):
        assert "batch_size=4 / micro_batch_size=4" in message


# Every rank must see the same number of batches


class OfRank(Dataset[Tensor]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> list[Tensor]:
        return [torch.ones(4)]


@pytest.mark.parametrize("layout", [{}, PP2], ids=str)
def test_loaders_of_unequal_length_are_refused_before_training(layout: dict[str, int]) -> None:
    def data(rank: int) -> Any:
        return DataLoader(OfRank(3 + 2 * rank))

    options = {"use_distributed_sampler": False}
    for message in on_ranks(layout, lambda: Late(Model), data, **options):
        for part in ("3 batches on rank 0" if not layout else "3 batches", "5 batches", "all 2 ranks", "limit_train_batches"):
            assert part in message


def test_streams_of_unequal_length_are_refused_on_every_rank_where_the_shorter_ends() -> None:
    def data(rank: int) -> Any:
        return DataLoader(Counts(3 + rank), batch_size=None)

    options = {"max_steps": -1, "max_epochs": 2}
    for message in on_ranks({}, lambda: Plain(Model()), data, **options):
        for part in ("ended after 3 batches on 1 of 2 ranks", "limit_train_batches=3", "dp_rank"):
            assert part in message


def test_streams_of_equal_length_and_unequal_ones_under_a_limit_train() -> None:
    def run() -> int:
        rank, fits = dist.get_rank(), 0
        for number, options in ((3, {"max_epochs": 2, "max_steps": -1}), (3 + rank, {"limit_train_batches": 2})):
            fitted = trainer(2, {}, **options)
            fitted.fit(Plain(Model()), DataLoader(Counts(number), batch_size=None))
            fits += fitted.global_step
        return fits

    assert run_distributed(run, 2) == [8, 8]
