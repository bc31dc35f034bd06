"""Every block of docs/pipeline-models.md runs, and its models train under a pipeline as on one process; so does the example."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.model import ownership
from lightning_megatron.pipeline.partition import layers_of_stages
from lightning_megatron.strategy.options import check_module
from lightning_megatron.testing import run_distributed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pipeline-models.md"
SAMPLES, SIZE = 24, 8
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2}),
    "zbv": (2, {"pp": 2, "vpp": 2, "schedule": "zbv"}),
    "uneven": (3, {"pp": 3, "pipeline_layout": "1,0,3"}),
}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page defines, its blocks run from top to bottom as one file."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


class Regressions(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.features = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
        self.target = self.features.sin().sum(dim=1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.target[index]


class Sentences(Dataset[dict[str, Tensor]]):
    """Padded sources, targets of another length, and labels of which some do not count."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.source = torch.randint(1, 23, (SAMPLES, 7), generator=generator)
        self.source[:, 5:] *= torch.randint(2, (SAMPLES, 1), generator=generator)
        self.target, self.labels = (torch.randint(23, (SAMPLES, 5), generator=generator) for _ in range(2))
        self.labels[torch.rand(SAMPLES, 5, generator=generator) < torch.linspace(0, 1, SAMPLES)[:, None]] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"source": self.source[index], "target": self.target[index], "labels": self.labels[index]}


DATA: dict[str, type[Dataset[Any]]] = {"Regression": Regressions, "Translation": Sentences}


def module_of(page: dict[str, Any], name: str, *, dropout: float) -> LightningModule:
    seed_everything(5, verbose=False)
    module: LightningModule = page[name]().double()
    for child in module.modules():
        if isinstance(child, torch.nn.Dropout):
            child.p = dropout
    return module


def trained(module: LightningModule, data: Dataset[Any], **layout: Any) -> dict[str, Tensor]:
    """Every parameter after an epoch under a layout. Called on each rank."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = MegatronStrategy(micro_batch_size=2, **layout)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=size, max_epochs=1, precision="64-true", gradient_clip_val=1.0, **quiet
    )
    trainer.fit(module, DataLoader(data, batch_size=SIZE))
    return {name: value.detach().clone() for name, value in strategy.full_state_dict().items()}


def by_hand(module: LightningModule, data: Dataset[Any]) -> dict[str, Tensor]:
    """The same by a plain loop over whole batches."""
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    for index, batch in enumerate(DataLoader(data, batch_size=SIZE)):
        output = module.training_step(batch, index)
        optimizer.zero_grad()
        (output["loss"] if isinstance(output, dict) else output).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return {name: value.detach() for name, value in module.named_parameters()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-11), f"{name} differs"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DATA)
def test_the_modules_of_the_page_train_under_a_pipeline_as_by_a_plain_loop(
    page: dict[str, Any], name: str, layout: str
) -> None:
    expected = by_hand(module_of(page, name, dropout=0.0), DATA[name]())
    world_size, options = LAYOUTS[layout]

    def run() -> dict[str, Tensor]:
        return trained(module_of(page, name, dropout=0.0), DATA[name](), **options)

    for got in run_distributed(run, world_size):
        assert_same(got, expected)


def test_dropout_drops_the_same_under_every_split(page: dict[str, Any]) -> None:
    def run(options: dict[str, Any]) -> dict[str, Tensor]:
        return trained(module_of(page, "Translation", dropout=0.3), Sentences(), **options)

    results = [run_distributed(run, *LAYOUTS[layout])[0] for layout in LAYOUTS]
    for got in results[1:]:
        assert_same(got, results[0])


class Normed(torch.nn.Module):
    """A layer with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.norm(self.linear(hidden)).relu()


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_batch_norm_takes_its_statistics_from_each_micro_batch(page: dict[str, Any], schedule: str) -> None:
    def module() -> LightningModule:
        made = module_of(page, "Regression", dropout=0.0)
        made.model.layers = torch.nn.ModuleList(Normed() for _ in range(4)).double()
        return made

    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mine = module()
        weights = trained(mine, Regressions(), pp=2, schedule=schedule)
        return weights, {name: buffer.clone() for name, buffer in mine.named_buffers()}

    alone = module()
    alone.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizer = alone.configure_optimizers()
    for batch in DataLoader(Regressions(), batch_size=SIZE):
        optimizer.zero_grad()
        for part in zip(*(tensor.split(2) for tensor in batch), strict=True):
            (alone.training_step(part, 0) * 2 / SIZE).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
    expected = dict(alone.named_buffers())
    ranks = run_distributed(run, 2)
    assert_same({name: ranks[0][0][name] for name, _ in alone.named_parameters()}, dict(alone.named_parameters()))
    assert_same({name: buffer for _, buffers in ranks for name, buffer in buffers.items()}, expected)


def test_ownership_is_what_the_page_says(page: dict[str, Any]) -> None:
    mlp, translator, by_name = (ownership(page[name]()) for name in ("ResidualMLP", "Translator", "ByName"))
    assert (mlp.first, mlp.last, mlp.tied) == ({"inlet"}, {"outlet"}, frozenset())
    assert translator.tied == {"embedding"}
    assert (by_name.first, by_name.last) == ({"inlet"}, {"outlet"})


def test_the_costs_that_a_model_states_move_layers_away_from_its_ends(page: dict[str, Any]) -> None:
    model = page["WithHeavyHead"](num_layers=9)
    costs = {"first_cost": model.first_cost, "last_cost": model.last_cost}
    assert [len(stage) for stage in layers_of_stages(9, 3, "auto", **costs)] == [3, 4, 2]
    module = page["Regression"]()
    module.model = model
    check_module(module, MegatronStrategy(pp=3, pipeline_layout="auto").parallelism)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    made = runpy.run_path(str(ROOT / "examples" / "pipeline_regression.py"), run_name="example")
    made["main"].__globals__["SAMPLES"] = 512
    return made


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, "--pp 2"), (2, "--pp 2 --vpp 2 --layout 2,1,1,2"), (2, "--layout auto")]
)
def test_the_example_learns_and_its_loss_does_not_depend_on_the_split(
    example: dict[str, Any], world_size: int, options: str
) -> None:
    def run(arguments: str) -> tuple[float, float]:
        losses = [float(example["main"]([*arguments.split(), f"--epochs={n}"]).callback_metrics["train_loss"]) for n in (1, 3)]
        return losses[0], losses[1]

    (start, end), *others = run_distributed(run, world_size, options)
    assert end < 0.6 * start
    assert all(other == (start, end) for other in others)
    alone = run_distributed(run, 1, "--pp 1")[0]
    assert (start, end) == pytest.approx(alone, rel=1e-4)


def test_the_page_names_no_file_that_is_not_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()) + re.findall(r"`(examples/\S+?)`", PAGE.read_text()):
        assert (PAGE.parent / target).exists() or (ROOT / target).exists(), target
