"""Batches are cut before the user's step, which stays as it is; what it returns for each token comes back in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import GPT, GPTConfig, GPTModule
from lightning_megatron.sequence_batch import SequenceCut, sequence_length
from lightning_megatron.testing import run_distributed
from tests.parity.harness import LLAMA_GQA

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def cut_of(rank: int, *, size: int = 2, multiple: int = 4) -> SequenceCut:
    return SequenceCut(size, rank, multiple=multiple)


@dataclass
class Batch:
    tokens: Tensor
    extra: tuple[Tensor, str]


def test_every_tensor_whose_dim_1_is_the_sequence_is_cut_and_nothing_else() -> None:
    rows = torch.arange(16).view(2, 8)
    batch = {
        "tokens": rows,
        "embeddings": rows[..., None].expand(2, 8, 3),
        "lengths": torch.tensor([8, 8]),
        "image": torch.zeros(2, 3, 5),
        "nested": [rows, "text", Batch(rows, (rows, "b"))],
    }
    cut = cut_of(1)(batch)
    own = rows[:, [2, 3, 4, 5]]
    assert torch.equal(cut["tokens"], own)
    assert torch.equal(cut["embeddings"], own[..., None].expand(2, 4, 3))
    assert cut["lengths"] is batch["lengths"]
    assert cut["image"] is batch["image"]
    assert torch.equal(cut["nested"][0], own)
    assert torch.equal(cut["nested"][2].extra[0], own)
    assert cut["nested"][1] == "text"
    assert torch.equal(batch["tokens"], rows)  # the batch itself is left alone


def test_lengths_that_do_not_divide_are_padded_by_what_the_names_say() -> None:
    batch = {"tokens": torch.ones(1, 5), "labels": torch.ones(1, 5), "loss_mask": torch.ones(1, 5), "weights": torch.ones(1, 5)}
    cut = cut_of(0)
    part = cut(batch, padding={"weights": 9.0})
    assert cut.layout is not None
    assert (cut.layout.length, cut.layout.num_real) == (8, 5)
    assert part["tokens"].tolist() == [[1, 1, 0, 0]]
    assert part["labels"].tolist() == [[1, 1, -100, -100]]
    assert part["loss_mask"].tolist() == [[1, 1, 0, 0]]
    assert part["weights"].tolist() == [[1, 1, 9, 9]]


@pytest.mark.parametrize("batch", [(torch.ones(2, 5), torch.ones(2, 5)), {"tokens": torch.ones(2, 5), "y": torch.ones(2, 5)}])
def test_padding_by_nobody_knows_what_is_refused_with_the_numbers(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"5 tokens do not divide by 4 .*padded to 8 is not known"):
        cut_of(0)(batch)


def test_documents_that_do_not_divide_are_refused_with_the_numbers() -> None:
    batch = {"tokens": torch.ones(1, 16), "cu_seqlens": torch.tensor([0, 4, 10, 16])}
    with pytest.raises(ValueError, match=r"a packed document has 6 tokens, which do not divide by 2 \* cp\(2\) = 4"):
        cut_of(0)(batch)


def test_a_batch_without_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a batch of type list holds no tensor \[B, S, \.\.\.\]"):
        sequence_length([torch.ones(3), "x"])
    with pytest.raises(RuntimeError, match="before cut"):
        cut_of(0).tensor(torch.ones(2, 4))


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Bare tokens, so that labels are made by ``GPTModule``."""

    def __init__(self, number: int = 8, length: int = 10) -> None:
        self.rows = torch.randint(67, (number, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def one_step(config: GPTConfig, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """The logged loss of one SGD step, and what it made of the weights."""
    L.seed_everything(3, verbose=False)
    module = GPTModule(config)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)  # type: ignore[method-assign]
    strategy = MegatronStrategy(**options)
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = L.Trainer(strategy=strategy, devices=devices, precision="64-true", max_steps=1, **QUIET)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(Tokens(), batch_size=8))
    return float(trainer.callback_metrics["train_loss"]), strategy.full_state_dict()


@pytest.mark.parametrize("options", [{"cp": 2}, {"cp": 2, "pp": 2}], ids=["cp2", "cp2 pp2"])
def test_labels_are_shifted_before_the_cut_and_the_logged_loss_is_that_of_all_tokens(options: dict[str, Any]) -> None:
    ((expected_loss, expected),) = run_distributed(lambda: one_step(LLAMA_GQA, {}), 1)
    for loss, state in run_distributed(lambda: one_step(LLAMA_GQA, options), 2 * options.get("pp", 1)):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def validated(options: dict[str, Any]) -> float:
    """The validation loss over two batches with uneven masks."""
    L.seed_everything(3, verbose=False)
    samples = rows(number=8)
    for number, sample in enumerate(samples):
        sample["labels"][:number] = -100
    samples = [{name: value[0] if value.dim() > 1 else value for name, value in sample.items()} for sample in samples]
    (found,) = trainer_of(options).validate(GPTModule(LLAMA_GQA), DataLoader(samples, batch_size=4), verbose=False)
    return found["val_loss"]


def test_the_validation_loss_counts_tokens_as_one_process_does() -> None:
    (expected,) = run_distributed(lambda: validated({}), 1)
    for found in run_distributed(lambda: validated({"cp": 2}), 2):
        assert found == pytest.approx(expected, rel=1e-5)


class Plain(L.LightningModule):
    """What a user writes: a step of their own, per-token predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.seen: list[Any] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(LLAMA_GQA)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        losses: Tensor = self.model(batch["tokens"], labels=batch["labels"])
        return losses.mean()

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self.model(batch["tokens"])
        return {"best": logits.argmax(-1), "logits": logits, "number": batch_idx}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(length: int = 10, number: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(67, (number, 2, length), generator=generator)
    return [{"tokens": tokens, "labels": labels} for tokens, labels in drawn]


def trainer_of(options: dict[str, Any]) -> L.Trainer:
    L.seed_everything(3, verbose=False)
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return L.Trainer(strategy=MegatronStrategy(**options), devices=devices, max_steps=1, **QUIET)  # type: ignore[arg-type]


def predictions(options: dict[str, Any]) -> list[dict[str, Any]]:
    found = trainer_of(options).predict(Plain(), DataLoader(rows(), batch_size=4))
    assert found is not None
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, {"cp": 2}), (4, {"cp": 2, "pp": 2, "micro_batch_size": 2}), (4, {"cp": 4})]
)
def test_predictions_of_each_token_come_back_in_order_without_padding(world_size: int, options: dict[str, Any]) -> None:
    ((expected,),) = run_distributed(lambda: predictions({}), 1)
    for (found,) in run_distributed(lambda: predictions(options), world_size):
        assert torch.equal(found["best"], expected["best"])
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-4, atol=1e-5)
        assert found["number"] in (0, [0, 0])  # one for each micro-batch


BLOCKS = [(2, 8), (1, 2), (1, 6)]


def in_blocks(options: dict[str, Any]) -> list[Any]:
    rows = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(4))
    batch = {"tokens": rows, "cu_seqlens": torch.tensor([[0, 4, 8, 10, 16, 16], [0, 8, 10, 13, 14, 16]]), "cp_blocks": BLOCKS}
    return trainer_of(options).predict(Documents(), DataLoader([batch], batch_size=None))  # type: ignore[return-value]


class Documents(Plain):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        borders = batch["cu_seqlens"] if batch["cp_blocks"] is not None else None
        logits: Tensor = self.model(batch["tokens"], cu_seqlens=borders)
        return logits


def test_predictions_of_ranks_that_hold_unequal_blocks_come_back_in_order() -> None:
    ((expected,),) = run_distributed(lambda: in_blocks({}), 1)
    for (found,) in run_distributed(lambda: in_blocks({"cp": 4}), 4):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_gets_its_part_of_its_block(rank: int) -> None:
    tokens = torch.arange(16)[None]
    cut = cut_of(rank, size=4, multiple=8)
    batch = cut({"tokens": tokens, "cu_seqlens": torch.tensor([[0, 4, 8, 10, 16]]), "cp_blocks": BLOCKS})
    own = [[0, 3, 4, 7], [1, 2, 5, 6], [8, 9], [10, 11, 12, 13, 14, 15]][rank]
    assert batch["tokens"].tolist() == [own]
    assert cut.layout is not None
    assert (cut.layout.size, cut.layout.rank) == [(2, 0), (2, 1), (1, 0), (1, 0)][rank]
    assert cut.tensor(tokens[..., None])[..., 0].tolist() == [own]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([(2, 8), (1, 8)], "are 3 ranks and 16 tokens, but the rows have 16 tokens and cp=4"),
        ([(2, 8), (2, 4)], "are 4 ranks and 12 tokens, but the rows have 16 tokens and cp=4"),
        ([(1, 4), (2, 8), (1, 4)], r"block \(2, 8\) at rank 1 of cp=4"),
        ([(2, 10), (2, 6)], r"block \(2, 10\) at rank 0"),
        ([(2, 12), (2, 4)], "end at token 12, where cu_seqlens have no border"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(blocks: list[tuple[int, int]], message: str) -> None:
    batch = {"tokens": torch.ones(1, 16), "cu_seqlens": torch.tensor([0, 8, 16]), "cp_blocks": blocks}
    with pytest.raises(ValueError, match=message):
        cut_of(0, size=4, multiple=8)(batch)


def fitted(shard: str) -> list[Any]:
    """The batches that a step saw, with a cut of the user's own."""

    def own(batch: Any, cut: SequenceCut) -> Any:
        return {**cut(batch), "rank": cut.rank, "whole": batch["tokens"]}

    module = Plain()
    options: dict[str, Any] = {"cp": 2}
    if shard == "argument":
        options["shard_batch"] = own
    else:
        module.shard_batch = own  # type: ignore[assignment]
    trainer_of(options).fit(module, DataLoader(rows(), batch_size=4))
    return module.seen


@pytest.mark.parametrize("shard", ["argument", "method"])
def test_a_cut_of_the_users_own_is_used(shard: str) -> None:
    for rank, (batch,) in enumerate(run_distributed(lambda: fitted(shard), 2)):
        assert batch["rank"] == rank
        assert batch["whole"].shape == (4, 10)
        assert batch["tokens"].shape == batch["labels"].shape == (4, 6)


class ShiftsInTheStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses: Tensor = self.model(batch["tokens"][:, :-1], labels=batch["tokens"][:, 1:])
        return losses.mean()


def failing(make: Callable[[], L.LightningModule], options: dict[str, Any]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer_of(options).fit(make(), DataLoader(rows(), batch_size=4))
    return str(caught.value)


def test_labels_shifted_after_the_cut_are_refused() -> None:
    for message in run_distributed(lambda: failing(ShiftsInTheStep, {"cp": 2}), 2):
        assert "tokens have 5 positions, but this rank's part of the batch has 6 (S=12 cut over cp=2)" in message


def test_a_cut_that_was_not_called_is_refused() -> None:
    for message in run_distributed(lambda: failing(Plain, {"cp": 2, "shard_batch": lambda batch, cut: batch}), 2):
        assert "did not call cut(...)" in message


class Foreign(L.LightningModule):
    """A model that knows nothing of cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(67, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.embedding(batch["tokens"]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("make", "message"),
    [(Foreign, "Foreign holds no model that asks how they lie"), (Manual, "Manual uses manual optimization")],
)
def test_modules_that_would_not_see_the_whole_sequence_are_refused(make: Callable[[], Any], message: str) -> None:
    for found in run_distributed(lambda: failing(make, {"cp": 2}), 2):
        assert message in found


def test_a_module_without_attention_may_say_that_it_needs_no_other_tokens() -> None:
    def weights(options: dict[str, Any]) -> Tensor:
        module = Foreign()
        trainer_of(options).fit(module, DataLoader(rows(length=8), batch_size=4))
        return module.embedding.weight.detach()

    (expected,) = run_distributed(lambda: weights({}), 1)
    options = {"cp": 2, "shard_batch": lambda batch, cut: cut(batch)}
    for found in run_distributed(lambda: weights(options), 2):
        torch.testing.assert_close(found, expected)


def test_heads_that_do_not_divide_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"8 query heads .* do not divide over the 3 context-parallel ranks"):
        GPTModule(LLAMA_GQA).check_parallelism(MegatronStrategy(cp=3, cp_comm="a2a").parallelism)


def generated(options: dict[str, Any]) -> Tensor:
    """Tokens continued after a step: the model is called outside of one, with whole rows."""
    L.seed_everything(3, verbose=False)
    module = GPTModule(LLAMA_GQA, lr=1e-3)
    trainer_of(options).fit(module, DataLoader(Tokens(), batch_size=8))
    return module.generate(Tokens().rows[:2, :5], 3)


def test_outside_of_a_step_the_model_takes_whole_rows() -> None:
    (expected,) = run_distributed(lambda: generated({}), 1)
    assert all(torch.equal(found, expected) for found in run_distributed(lambda: generated({"cp": 2}), 2))


def dropped(options: dict[str, Any]) -> list[Tensor]:
    """Hidden states before the first layer, as a rank of cp sees them under dropout."""
    config = GPTConfig(**{**vars(LLAMA_GQA), "hidden_dropout": 0.5, "attention_dropout": 0.1})
    seen: list[Tensor] = []

    class Spy(Plain):
        def configure_model(self) -> None:
            if self.model is None:
                self.model = GPT(config)
                self.model.embedding_dropout.register_forward_hook(lambda _, inputs, output: seen.append(output == 0))

    tokens = torch.full((8,), 5)
    trainer_of(options).fit(Spy(), DataLoader([{"tokens": tokens, "labels": tokens}] * 4, batch_size=4))  # type: ignore[arg-type]
    return seen


def test_ranks_of_cp_drop_different_elements_and_ranks_of_tp_the_same() -> None:
    first, second = (zeros for (zeros,) in run_distributed(lambda: dropped({"cp": 2}), 2))
    assert not torch.equal(first, second)
    options = {"cp": 2, "tp": 2, "sequence_parallel": False}
    masks = [zeros for (zeros,) in run_distributed(lambda: dropped(options), 4)]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])
