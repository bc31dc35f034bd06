"""What layers save comes back as it was, each storage once, the next ones before they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from lightning_megatron.layers import offload as offload_file
from lightning_megatron.layers.offload import ActivationOffload, offload
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.models import GPT
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.testing import run_distributed
from tests.layers.test_recompute import INPUT, LLAMA, Block, Plain, Stack, assert_same_bits, kept_by, made, outcome, tokens
from tests.parity.harness import GPT2_TIED, Outcome, strategy_run

CPU = torch.device("cpu")


class Logged:
    """Copies to where the test's count of live bytes does not look, and notes what happens."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._numbers: dict[int, int] = {}

    def to_host(self, data: Tensor) -> Tensor:
        with _disable_current_modes():
            host = data.clone()
        self._numbers[host.data_ptr()] = number = len(self._numbers)
        self.log.append(("out", number))
        return host

    def to_device(self, data: Tensor) -> tuple[Tensor, Callable[[], None]]:
        number = self._numbers[data.data_ptr()]
        self.log.append(("back", number))
        return data.clone(), lambda: self.log.append(("wait", number))

    def of(self, kind: str) -> list[int]:
        return [number for what, number in self.log if what == kind]


def moving(model: nn.Module, way: Any = None) -> Logged:
    recompute(model, Recompute.of(way))
    transfer = Logged()
    offload(model, ActivationOffload(CPU, transfer=transfer, min_bytes=1))
    return transfer


@pytest.mark.parametrize("way", [None, "full", "selective", ["mlp"]], ids=str)
def test_gradients_are_the_same_bit_by_bit(way: Any) -> None:
    model = GPT(LLAMA, seed=0, dtype=torch.bfloat16)
    expected = outcome(model, tokens(), labels=tokens())
    before = kept_by(model, tokens(), labels=tokens())
    transfer = moving(model, way)
    assert_same_bits(outcome(model, tokens(), labels=tokens()), expected)
    assert transfer.log
    moving(model, way)
    outside = kept_by(model, tokens(), labels=tokens())  # embedding, final norm, logits, loss
    assert outside < before / 3


def test_each_storage_is_copied_once_and_comes_back_in_the_opposite_order_ahead_of_its_use() -> None:
    model = GPT(LLAMA, seed=0, dtype=torch.bfloat16)
    transfer = moving(model)
    outcome(model, tokens(), labels=tokens())
    num = len(transfer.of("out"))
    # x, norm, scale; rotation (2), q k v together, attention, its sums; x, norm, scale; gate and up, activation.
    assert num == 2 * 13
    assert sorted(transfer.of("back")) == list(range(num))
    first_use = {number: transfer.log.index(("wait", number)) for number in range(num)}
    started = {number: transfer.log.index(("back", number)) for number in range(num)}
    early = [number for number in range(num - 5) if started[number] < min(first_use[n] for n in range(number + 1, number + 4))]
    assert len(early) > num / 2


def test_a_split_backward_lets_go_of_what_its_second_part_does_not_need() -> None:
    model = made(Stack)
    expected = outcome(model, INPUT)
    moving(model, "selective")
    torch.manual_seed(5)
    model.zero_grad()
    output = model(INPUT)
    loss = output.float().square().mean()
    split = SplitBackward([(get_gradient_edge(loss), torch.ones(()))], [])
    split.run_input_part()
    assert split.num_late == 8
    split.run_weight_part()
    assert_same_bits({"output": output.detach(), **{name: p.grad for name, p in model.named_parameters()}}, expected)


def test_parameters_and_evaluation_stay() -> None:
    model = made(Stack)
    transfer = moving(model)
    with torch.no_grad():
        model(INPUT)
    assert not transfer.log
    moved: list[Tensor] = []
    transfer.to_host = lambda data: moved.append(data) or data  # type: ignore[method-assign, func-returns-value]
    model(INPUT)
    weights = {param.data_ptr() for param in model.parameters()}
    assert moved
    assert not weights & {data.data_ptr() for data in moved}


def test_a_change_in_place_is_found() -> None:
    class Changing(Block):
        def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
            up = self.up(hidden)
            result = self.down(up)
            up.zero_()
            return result

    model = made(Stack)
    model.layers[1] = Changing()
    moving(model)
    with pytest.raises(RuntimeError, match="changed in place since it was saved: it is at version 1 instead of 0"):
        outcome(model, INPUT)


def test_small_storages_and_indices_stay() -> None:
    transfer = Logged()
    offloading = ActivationOffload(CPU, transfer=transfer, min_bytes=64)
    with offloading.saving(nn.Module()):
        for tensor in (torch.zeros(15), torch.zeros(100, dtype=torch.int64)):
            assert offloading.keep(tensor).get() is tensor
        assert not transfer.log
        assert offloading.keep(torch.zeros(16)).get().shape == (16,)
    assert transfer.of("out") == [0]


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="offload_activations=True: Plain has no layers"):
        offload(made(Plain), ActivationOffload(CPU))


@pytest.mark.parametrize("options", [{}, {"schedule": "zbh1"}, {"recompute": "selective"}], ids=str)
def test_a_pipeline_trains_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_file, "MIN_BYTES", 1)
    logs: list[Logged] = []
    monkeypatch.setattr(offload_file, "PassThrough", lambda: logs.append(Logged()) or logs[-1])
    layout = {"pp": 2, "micro_batch_size": 4, **options}

    def step(**offloads: bool) -> Outcome:
        return strategy_run(GPT2_TIED, {**layout, **offloads}, optimizer="sgd", precision="32-true", steps=1)

    def steps() -> tuple[Outcome, Outcome, list[int]]:
        return step(), step(offload_activations=True), [len(each.of("back")) for each in logs]

    for plain, moved, nums in run_distributed(steps, 2):
        assert len(nums) == 1
        assert nums[0] > 0
        assert plain.losses == moved.losses
        assert_same_bits(moved.final, plain.final)
