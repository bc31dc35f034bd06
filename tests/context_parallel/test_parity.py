"""One optimizer step under context parallelism equals one process: the loss, the gradient norm, every parameter's change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.data.packing import DynamicPackingCollator, PackingCollator
from lightning_megatron.initialize import load_unsharded
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.models.gpt import IGNORE_INDEX
from lightning_megatron.testing import run_distributed
from tests.parity import harness
from tests.parity.harness import GPT2_TIED, LLAMA_GQA, SEED, Outcome

WINDOW = replace(LLAMA_GQA, sliding_window=3)
FULL = replace(LLAMA_GQA, causal=False)
ONE_KV_HEAD = replace(LLAMA_GQA, num_kv_heads=1, qk_norm=True)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}  # everything here is fp64

# Name, ranks, options, and the model.
CASES: dict[str, tuple[int, dict[str, Any], GPTConfig]] = {
    "cp2": (2, {"cp": 2}, LLAMA_GQA),
    "cp2, learned positions": (2, {"cp": 2}, GPT2_TIED),
    "cp4": (4, {"cp": 4}, LLAMA_GQA),
    "cp2 tp2": (4, {"cp": 2, "tp": 2}, LLAMA_GQA),
    "cp2 tp2, learned positions": (4, {"cp": 2, "tp": 2}, GPT2_TIED),
    "cp2 tp2 without sp": (4, {"cp": 2, "tp": 2, "sequence_parallel": False}, LLAMA_GQA),
    "cp2 pp2": (4, {"cp": 2, "pp": 2, "micro_batch_size": 4}, LLAMA_GQA),
    "cp2 pp2 vpp2": (4, {"cp": 2, "pp": 2, "vpp": 2, "micro_batch_size": 3}, GPT2_TIED),
    "cp2 pp2 zbv": (4, {"cp": 2, "pp": 2, "vpp": 2, "schedule": "zbv", "micro_batch_size": 4}, LLAMA_GQA),
    "cp2 dp2": (4, {"cp": 2}, LLAMA_GQA),
    "cp2 tp2 pp2": (8, {"cp": 2, "tp": 2, "pp": 2, "micro_batch_size": 4}, LLAMA_GQA),
    "cp2 another order": (4, {"cp": 2, "tp": 2, "order": "cp-tp-pp-dp"}, LLAMA_GQA),
    "cp2 all_gather": (2, {"cp": 2, "cp_comm": "all_gather"}, LLAMA_GQA),
    "cp2 a2a": (2, {"cp": 2, "cp_comm": "a2a"}, LLAMA_GQA),
    "cp4 a2a, fewer kv heads than ranks": (4, {"cp": 4, "cp_comm": "a2a"}, ONE_KV_HEAD),
    "cp4 a2a+p2p": (4, {"cp": 4, "cp_comm": "a2a+p2p"}, LLAMA_GQA),
    "cp2 tp2 a2a": (4, {"cp": 2, "tp": 2, "cp_comm": "a2a"}, LLAMA_GQA),
    "cp2 recompute": (2, {"cp": 2, "recompute": "full"}, LLAMA_GQA),
    "cp2 loss in chunks": (2, {"cp": 2}, replace(LLAMA_GQA, loss_chunks=2)),
    "cp2 window": (2, {"cp": 2}, WINDOW),
    "cp2 all_gather window": (2, {"cp": 2, "cp_comm": "all_gather"}, WINDOW),
    "cp2 full": (2, {"cp": 2}, FULL),
    "cp4 a2a+p2p full": (4, {"cp": 4, "cp_comm": "a2a+p2p"}, FULL),
    "cp2 tp2 full": (4, {"cp": 2, "tp": 2, "cp_comm": "all_gather"}, FULL),
}


@cache
def whole(config: GPTConfig) -> Outcome:
    return harness.reference_run(config, optimizer="sgd", dtype=torch.float64, steps=1)


def assert_same(outcomes: list[Outcome], expected: Outcome, *, losses: bool) -> None:
    for outcome in outcomes:
        assert outcome.initial.keys() == expected.initial.keys()
        for name, start in expected.initial.items():
            assert torch.equal(outcome.initial[name], start), f"{name} does not start at the same bits"
            change, wanted = outcome.final[name] - start, expected.final[name] - start
            torch.testing.assert_close(change, wanted, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(torch.tensor(outcome.norms), torch.tensor(expected.norms), rtol=1e-6, atol=0.0)
        if losses:
            torch.testing.assert_close(torch.tensor(outcome.losses), torch.tensor(expected.losses), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("case", CASES)
def test_one_sgd_step_equals_one_process(case: str) -> None:
    """Sequences of 10 tokens are padded to 12 or 16, masks are uneven, the first sample has no label at all."""
    world_size, options, config = CASES[case]
    ranks = run_distributed(
        lambda: harness.strategy_run(config, options, optimizer="sgd", precision="64-true", steps=1), world_size
    )
    assert_same(ranks, whole(config), losses="dp2" not in case)


def test_accumulated_batches_equal_one_process() -> None:
    run = lambda: harness.strategy_run(  # noqa: E731
        LLAMA_GQA, {"cp": 2}, optimizer="sgd", precision="64-true", steps=1, accumulate=3
    )
    assert_same(run_distributed(run, 2), whole(LLAMA_GQA), losses=False)


def test_recomputed_layers_draw_the_same_dropout_masks() -> None:
    config = replace(LLAMA_GQA, attention_dropout=0.3, hidden_dropout=0.2)

    def run(recompute: str | None) -> Outcome:
        options = {"cp": 2, "recompute": recompute}
        return harness.strategy_run(config, options, optimizer="sgd", precision="64-true", steps=1)

    kept, again = (run_distributed(lambda: run(recompute), 2) for recompute in (None, "full"))  # noqa: B023
    assert all(torch.equal(kept[0].final[name], value) for name, value in again[0].final.items())


def test_replicas_are_bitwise_equal_after_three_adamw_steps() -> None:
    run = lambda: harness.strategy_run(LLAMA_GQA, {"cp": 2}, optimizer="adamw", precision="32-true", steps=3)  # noqa: E731
    ranks = run_distributed(run, 4)
    assert len({tuple(sorted((str(key), bits) for key, bits in rank.fingerprints.items())) for rank in ranks}) == 1


# Packed documents. The reference runs each document by itself, so it knows nothing of packing.

LENGTHS = (3, 16, 1, 7, 5, 8, 11, 2, 9, 4, 6, 13)
SEQUENCE = 24


def documents(vocab_size: int, lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Documents with unequal masks; the second has no label that counts."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number, length in enumerate(lengths):
        tokens, labels = torch.randint(vocab_size, (2, length), generator=generator)
        keep = torch.rand(length, generator=generator) < (0.7 if number != 1 else 0.0)
        made.append({"tokens": tokens, "labels": labels.masked_fill(~keep, IGNORE_INDEX)})
    return made


@cache
def one_by_one(config: GPTConfig, lengths: Sequence[int] = LENGTHS) -> Outcome:
    model = GPT(config, seed=SEED, dtype=torch.float64)
    initial = {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    load_unsharded(model, harness.random_gains(model), strict=False)
    samples = documents(config.vocab_size, lengths)
    num_tokens = sum(int((sample["labels"] != IGNORE_INDEX).sum()) for sample in samples)
    losses = [model(sample["tokens"][None], labels=sample["labels"][None]).sum() for sample in samples]
    loss = torch.stack(losses).sum() / num_tokens
    loss.backward()
    norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    final = harness._unpadded(model)
    return Outcome({k: harness._cut(v, final[k]) for k, v in initial.items()}, final, [float(loss.detach())], [norm])


def packed_run(
    config: GPTConfig,
    options: dict[str, Any],
    *,
    collate: Callable[..., Any],
    lengths: Sequence[int] = LENGTHS,
    shared: bool = False,
) -> Outcome:
    """One step; with ``shared`` every replica gets all documents."""
    L.seed_everything(SEED, verbose=False)
    strategy = MegatronStrategy(**options)
    module = harness.ParityModule(config, optimizer="sgd", dtype=torch.float64)
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    quiet["use_distributed_sampler"] = not shared
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_steps=1, **quiet)
    samples = documents(config.vocab_size, lengths)
    batch_size = len(samples) if shared else len(samples) // strategy.dp_size
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    return Outcome(module.initial, strategy.full_state_dict(), module.losses, module.norms)


PACKED: dict[str, tuple[int, dict[str, Any], GPTConfig, int]] = {
    "one rank": (1, {}, LLAMA_GQA, 1),
    "tp2, odd rows": (2, {"tp": 2}, GPT2_TIED, 1),
    "pp2": (2, {"pp": 2, "micro_batch_size": 1}, GPT2_TIED, 1),
    "cp2": (2, {"cp": 2}, LLAMA_GQA, 4),
    "cp2, learned positions": (2, {"cp": 2}, GPT2_TIED, 4),
    "cp4": (4, {"cp": 4}, LLAMA_GQA, 8),
    "cp2 tp2": (4, {"cp": 2, "tp": 2}, LLAMA_GQA, 4),
    "cp2 pp2": (4, {"cp": 2, "pp": 2, "micro_batch_size": 1}, LLAMA_GQA, 4),
    "cp2 dp2": (4, {"cp": 2}, LLAMA_GQA, 4),
    "cp4 a2a": (4, {"cp": 4, "cp_comm": "a2a"}, LLAMA_GQA, 8),
    "cp4 a2a+p2p": (4, {"cp": 4, "cp_comm": "a2a+p2p"}, LLAMA_GQA, 8),
    "cp2 window": (2, {"cp": 2}, WINDOW, 4),
}


@dataclass(frozen=True)
class Cell:
    """One cell of the grid of layouts, ways of communicating, patterns and packing; grouped key/value heads throughout."""

    layout: str
    comm: str
    causal: bool
    packed: bool

    def __str__(self) -> str:
        return f"{self.layout} {self.comm} {'causal' if self.causal else 'full'}{' packed' if self.packed else ''}"


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"cp": 2}),
    "cp4": (4, {"cp": 4}),
    "cp2 tp2": (4, {"cp": 2, "tp": 2}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2}),
    "cp2 dp2": (4, {"cp": 2}),
}
GRID = [
    Cell(layout, comm, causal, packed)
    for layout in LAYOUTS
    for comm in ("p2p", "all_gather", "a2a", *(["a2a+p2p"] if layout == "cp4" else []))
    for causal in (True, False)
    for packed in (False, True)
]
# The suite runs those that the cases above leave out two by two; `python -m tests.context_parallel.test_parity` runs all 64.
CHOSEN = [
    Cell("cp2", "a2a", False, True),
    Cell("cp4", "all_gather", False, True),
    Cell("cp4", "a2a", False, False),
    Cell("cp2 tp2", "all_gather", True, True),
    Cell("cp2 tp2", "a2a", False, True),
    Cell("cp2 pp2", "all_gather", False, False),
    Cell("cp2 pp2", "a2a", True, True),
    Cell("cp2 dp2", "all_gather", True, True),
    Cell("cp2 dp2", "a2a", False, False),
]
# Full attention sees the padding of a document, so these have none (they divide by 2 * cp).
WHOLE_LENGTHS = (8, 16, 8, 24, 16, 8, 8, 16)


@pytest.mark.parametrize("cell", CHOSEN, ids=str)
def test_a_cell_of_the_grid_equals_one_process(cell: Cell) -> None:
    assert cell in GRID
    world_size, layout = LAYOUTS[cell.layout]
    options = {**layout, "cp_comm": cell.comm}
    if "pp" in options:
        options["micro_batch_size"] = 1 if cell.packed else 4
    config = replace(LLAMA_GQA if cell.causal else FULL, max_seq_len=24)
    if cell.packed:
        collate, lengths = PackingCollator(SEQUENCE, multiple_of=2 * options["cp"]), LENGTHS if cell.causal else WHOLE_LENGTHS
        expected = one_by_one(config, lengths)
        ranks = run_distributed(lambda: packed_run(config, options, collate=collate, lengths=lengths), world_size)
    else:
        expected = whole(config)
        run = lambda: harness.strategy_run(config, options, optimizer="sgd", precision="64-true", steps=1)  # noqa: E731
        ranks = run_distributed(run, world_size)
    assert_same(ranks, expected, losses="dp2" not in cell.layout)


@pytest.mark.parametrize("case", PACKED)
def test_packed_documents_train_as_they_would_one_by_one(case: str) -> None:
    world_size, options, config, multiple_of = PACKED[case]
    collate = PackingCollator(SEQUENCE, multiple_of=multiple_of)
    ranks = run_distributed(lambda: packed_run(config, options, collate=collate), world_size)
    assert_same(ranks, one_by_one(config), losses="dp2" not in case)


# Documents that need one, two and all of four ranks.
MIXED_LENGTHS = (*LENGTHS, 30, 20, 3, 7)
DYNAMIC: dict[str, tuple[int, dict[str, Any], GPTConfig]] = {
    "cp2": (2, {"cp": 2}, LLAMA_GQA),
    "cp4": (4, {"cp": 4}, LLAMA_GQA),
    "cp4, learned positions": (4, {"cp": 4}, GPT2_TIED),
    "cp4 all_gather": (4, {"cp": 4, "cp_comm": "all_gather"}, LLAMA_GQA),
    "cp4 a2a": (4, {"cp": 4, "cp_comm": "a2a"}, LLAMA_GQA),
    "cp4 a2a+p2p": (4, {"cp": 4, "cp_comm": "a2a+p2p"}, LLAMA_GQA),
    "cp4 window": (4, {"cp": 4}, WINDOW),
    "cp4 tp2": (8, {"cp": 4, "tp": 2}, LLAMA_GQA),
    "cp4 pp2": (8, {"cp": 4, "pp": 2}, LLAMA_GQA),
    "cp4 dp2": (8, {"cp": 4}, LLAMA_GQA),
}


@pytest.mark.parametrize("case", DYNAMIC)
def test_documents_on_as_few_ranks_as_they_need_train_the_same(case: str) -> None:
    world_size, options, config = DYNAMIC[case]
    config = replace(config, max_seq_len=32)
    collate = DynamicPackingCollator(32, options["cp"], round_to=2)
    used = {ranks for part in collate(documents(67, MIXED_LENGTHS)) for ranks, _ in part["cp_blocks"]}
    assert used == ({1, 2, 4} if options["cp"] == 4 else {1, 2})
    ranks = run_distributed(lambda: packed_run(config, options, collate=collate, lengths=MIXED_LENGTHS), world_size)
    assert_same(ranks, one_by_one(config, MIXED_LENGTHS), losses="dp2" not in case)


def test_replicas_that_plan_together_train_the_same() -> None:
    config = replace(LLAMA_GQA, max_seq_len=32)

    def run() -> Outcome:
        replica = torch.distributed.get_rank() // 2
        collate = DynamicPackingCollator(32, 2, round_to=2, num_replicas=2, replica=replica)
        return packed_run(config, {"cp": 2}, collate=collate, lengths=MIXED_LENGTHS, shared=True)

    assert_same(run_distributed(run, 4), one_by_one(config, MIXED_LENGTHS), losses=False)


# A rank without any valid token.


class OneChunk(harness.Samples):
    """Labels in the first two of twelve or sixteen tokens alone: rank 0 has them."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.labels[:, 2:] = IGNORE_INDEX


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_ranks_without_a_valid_token_add_nothing(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "Samples", OneChunk)
    expected = harness.reference_run(LLAMA_GQA, optimizer="sgd", dtype=torch.float64, steps=1)
    options = {"cp": 4, "cp_comm": comm}
    run = lambda: harness.strategy_run(LLAMA_GQA, options, optimizer="sgd", precision="64-true", steps=1)  # noqa: E731
    assert_same(run_distributed(run, 4), expected, losses=True)


if __name__ == "__main__":
    for chosen in GRID:
        test_a_cell_of_the_grid_equals_one_process(chosen)
        print("passed", chosen, flush=True)
