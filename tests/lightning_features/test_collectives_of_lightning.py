"""Lightning's collectives mean the data-parallel replicas for values, and the whole job for decisions."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron.models import GPTConfig, GPTModule
from tests.lightning_features.harness import Regression, Run, on_ranks, regression_data

TRAIN = regression_data(8, 1)


class Asks(Regression):
    """Calls every collective that a user may call in a hook."""

    def on_train_end(self) -> None:
        strategy, rank = self.trainer.strategy, self.trainer.global_rank
        value = torch.tensor(float(rank))
        self.answers = {
            "mean": float(strategy.reduce(value)),
            "sum": float(strategy.reduce(value, reduce_op="sum")),
            "max": float(strategy.reduce(value, reduce_op=torch.distributed.ReduceOp.MAX)),
            "mean of whole numbers": float(strategy.reduce(torch.tensor(rank))),
            "not a tensor": strategy.reduce("text"),
            "over the world": float(strategy.reduce(value, group=torch.distributed.group.WORLD)),
            "gathered": self.all_gather(value).tolist(),
            "all": strategy.reduce_boolean_decision(rank < 3),
            "any": strategy.reduce_boolean_decision(rank == 3, all=False),
            "broadcast": strategy.broadcast({"from": rank}),
            "position": (strategy.dp_rank, strategy.dp_size, strategy.is_last_stage, self.trainer.world_size),
        }


def test_values_are_reduced_over_replicas_and_decisions_over_the_world(tmp_path: Any) -> None:
    def run_it(run: Run) -> dict[str, Any]:
        module = Asks()
        run.trainer(max_epochs=1).fit(module, run.loader(TRAIN, 8))
        return module.answers

    for rank, answers in enumerate(on_ranks(run_it, 4, tmp_path, pp=2)):
        replicas = [rank % 2, rank % 2 + 2]
        assert answers["mean"] == answers["mean of whole numbers"] == sum(replicas) / 2
        assert answers["sum"] == sum(replicas)
        assert answers["max"] == max(replicas)
        assert answers["not a tensor"] == "text"
        assert answers["over the world"] == 1.5
        assert answers["gathered"] == replicas
        assert answers["all"] is False
        assert answers["any"] is True
        assert answers["broadcast"] == {"from": 0}
        assert answers["position"] == (rank // 2, 2, rank % 2 == 0, 4)  # global rank 0 holds the last stage


CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, ffn_hidden_size=24, vocab_size=32, max_seq_len=8)


class Logs(L.Callback):
    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def gpt(run: Run) -> Any:
    L.seed_everything(3, verbose=False)
    tokens = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(1))
    logs, module = Logs(), GPTModule(CONFIG, lr=0.01)
    trainer = run.trainer(logs, max_epochs=2, gradient_clip_val=1.0)
    loader = DataLoader(tokens, batch_size=8)
    trainer.fit(module, loader, loader)
    tested = trainer.test(module, loader, verbose=False)
    return logs.epochs, tested, torch.cat(trainer.predict(module, loader)), module.generate(tokens[:2, :3], 3)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, {"tp": 2}), (4, {"tp": 2, "pp": 2, "micro_batch_size": 4})], ids=["tp2", "tp2 pp2"]
)
def test_a_tensor_parallel_model_logs_and_predicts_on_every_rank_what_one_rank_does(
    world_size: int, layout: dict[str, Any], tmp_path: Any
) -> None:
    epochs, tested, predicted, generated = on_ranks(gpt, 1, tmp_path)[0]
    for outcome in on_ranks(gpt, world_size, tmp_path, **layout):
        assert outcome[0] == [pytest.approx(epoch, rel=1e-4) for epoch in epochs]
        assert outcome[1] == [pytest.approx(one, rel=1e-4) for one in tested]
        assert torch.equal(outcome[2], predicted)
        assert torch.equal(outcome[3], generated)
