"""What the sharded optimizer does to the user's own optimizer, its groups, its state and the parameters' ``grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig, buffers
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Stands for another package's class of that name."""


class MyLBFGS(torch.optim.LBFGS):
    """A user's subclass."""


def make(params: Any, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> DistributedOptimizer:
    optimizer = optimizer or torch.optim.SGD(list(params), lr=1.0)
    return DistributedOptimizer(optimizer, [(f"p{i}", p) for i, p in enumerate(params)], mesh=Mesh(), **options)


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def step(sharded: DistributedOptimizer) -> None:
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    sharded.optimizer.step()
    sharded.update_parameters()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (torch.optim.LBFGS, "one direction"),
        (MyLBFGS, "one direction"),
        (torch.optim.SparseAdam, "sparse"),
        (ZeroRedundancyOptimizer, "itself"),
    ],
)
def test_optimizers_that_cannot_be_sharded_are_refused_by_name_with_the_reason(cls: Any, reason: str) -> None:
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=f"{cls.__name__} cannot be sharded.*{reason}"):
        make([param], cls([param]))
    assert param.grad is None


def test_a_state_that_is_not_elementwise_is_refused_by_name() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([param], lr=1.0)
    optimizer.state[param]["row_means"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'row_means' of shape \(2,\) for parameter 'p0' of shape \(2, 3\)"):
        make([param], optimizer)


def test_a_parameter_from_elsewhere_is_refused() -> None:
    mine, other = ones(2, 3)
    with pytest.raises(ValueError, match=r"param group 1 of SGD holds a parameter of shape \(3,\)"):
        make([mine], torch.optim.SGD([{"params": [mine]}, {"params": [other]}], lr=1.0))


def test_a_dtype_that_cannot_be_trained_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'p0' has dtype torch\.complex64"):
        make([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


def test_groups_keep_their_order_options_and_names_and_lose_frozen_parameters() -> None:
    params = ones(2, 3, 4, 5)
    params[2].requires_grad_(False)
    named = [("d", params[3]), ("c", params[2]), ("a", params[0])]
    optimizer = torch.optim.SGD([{"params": named, "lr": 0.5}, {"params": [("b", params[1])], "weight_decay": 0.1}], lr=1.0)
    groups = list(optimizer.param_groups)
    sharded = make(params, optimizer)
    assert [group["param_names"] for group in optimizer.param_groups] == [["d", "a"], ["b"]]
    assert [[p.numel() for p in group["params"]] for group in optimizer.param_groups] == [[5, 2], [3]]
    assert all(new is old for new, old in zip(optimizer.param_groups, groups, strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0]
    assert {shard.name: shard.param for shard in sharded.shards} == {"p0": params[0], "p1": params[1], "p3": params[3]}
    assert {id(shard.main) for shard in sharded.shards} == {id(p) for g in optimizer.param_groups for p in g["params"]}


def test_shards_share_memory_with_fp32_parameters_and_not_with_bf16_ones() -> None:
    fp32, bf16 = ones(3)[0], ones(3, dtype=torch.bfloat16)[0]
    mains = {shard.name: shard.main for shard in make([fp32, bf16]).shards}
    assert mains["p0"].data_ptr() == fp32.data_ptr()
    assert mains["p1"].dtype == torch.float32
    assert make(ones(3, dtype=torch.bfloat16), main_params=False).shards[0].main.dtype == torch.bfloat16


def test_an_lr_scheduler_on_the_same_optimizer_still_drives_it() -> None:
    (param,) = ones(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    sharded = make([param], optimizer)
    for expected in (0.0, -0.5, -0.75):
        param.sum().backward()
        step(sharded)
        scheduler.step()
        torch.testing.assert_close(param.detach(), torch.full((2,), expected))


def test_state_dict_and_load_state_dict_work_on_shards() -> None:
    params = ones(2, 3)
    sharded = make(params, torch.optim.AdamW(params, lr=0.1))
    params[0].sum().backward()
    step(sharded)
    saved = sharded.optimizer.state_dict()
    assert saved["param_groups"][0]["params"] == [0, 1]
    assert [saved["state"][i]["exp_avg"].shape for i in (0, 1)] == [(2,), (3,)]
    sharded.optimizer.load_state_dict(saved)
    assert torch.equal(
        sharded.optimizer.state[sharded.optimizer.param_groups[0]["params"][0]]["exp_avg"], torch.full((2,), 0.1)
    )


def cut_premade_state() -> list[tuple[str, int, int, list[float], float]]:
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    params = ones(100, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.Adagrad(params, initial_accumulator_value=0.5)
    optimizer.state[params[0]]["sum"].copy_(torch.arange(100))
    sharded = DistributedOptimizer(optimizer, [("a", params[0]), ("b", params[1])], mesh=mesh)
    assert set(optimizer.state) == {shard.main for shard in sharded.shards}
    states = [(shard, optimizer.state[shard.main]) for shard in sharded.shards]
    assert all(state["sum"].dtype == torch.float32 for _, state in states)
    return [(shard.name, shard.start, shard.stop, state["sum"].tolist(), state["step"].item()) for shard, state in states]


def test_state_that_adagrad_made_in_its_constructor_is_cut_to_the_shard() -> None:
    first, second = run_distributed(cut_premade_state, 2)
    # b lies at 0..3, a at 64..164 of a bucket of 256 elements, of which each rank owns 128
    assert first == [("b", 0, 3, [0.5] * 3, 0.0), ("a", 0, 64, list(range(64)), 0.0)]
    assert second == [("a", 64, 100, list(range(64, 100)), 0.0)]


def train_small_on_two_ranks() -> None:
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    (param,) = ones(3)
    optimizer = torch.optim.AdamW([{"params": []}, {"params": [param]}], lr=0.1, fused=True)
    sharded = DistributedOptimizer(optimizer, [("p", param)], mesh=mesh)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1 if mesh.rank == 0 else 0]
    param.sum().backward()
    step(sharded)
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.9 - 0.001))  # Adam's first step is lr; decay is lr * 0.01


def test_a_rank_whose_shard_is_empty_steps_with_empty_groups() -> None:
    run_distributed(train_small_on_two_ranks, 2)


def test_a_model_without_a_trainable_parameter_steps_with_norm_zero() -> None:
    params = ones(2)
    params[0].requires_grad_(False)
    sharded = make(params)
    step(sharded)
    sharded.clip_by_norm(1.0)
    assert sharded.shards == []
    assert sharded.grad_norm.item() == 0.0


def test_trainable_parameters_that_the_optimizer_does_not_have_are_left_alone() -> None:
    mine, other = ones(2, 2)
    sharded = make([mine, other], torch.optim.SGD([mine], lr=1.0))
    (mine + other).sum().backward()
    step(sharded)
    assert torch.equal(other.detach(), torch.ones(2))
    assert torch.equal(mine.detach(), torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_zeroed_or_replaced_behind_our_back_are_those_that_count(dtype: torch.dtype) -> None:
    params = ones(2, 2, 2, dtype=dtype)
    sharded = make(params)
    sum(p.sum() for p in params).backward()
    params[0].grad = None  # as module.zero_grad() does
    params[1].grad = None
    params[1].sum().mul(3).backward()
    step(sharded)
    assert [p.detach().tolist() for p in params] == [[1.0, 1.0], [-2.0, -2.0], [0.0, 0.0]]
    assert all(p.grad is not None and not p.grad.any() for p in params)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_backward_that_builds_a_graph_still_reaches_the_buffer() -> None:
    (param,) = ones(2)
    sharded = make([param])
    (param.square().sum()).backward(create_graph=True)
    step(sharded)
    assert not param.grad.requires_grad
    assert torch.equal(param.detach(), -torch.ones(2))


def test_autograd_accumulates_into_the_flat_buffer_without_another_tensor() -> None:
    (param,) = ones(4)
    sharded = make([param])
    pointer = param.grad.data_ptr()
    for _ in range(3):
        param.sum().backward()
        assert param.grad.data_ptr() == pointer
    assert sharded._buckets[0].gradients.data_ptr() == pointer


def test_zeroed_gradients_leave_nothing_of_a_skipped_step() -> None:
    (param,) = ones(2)
    sharded = make([param], config=DistributedOptimizerConfig(nonfinite="ignore"))
    param.sum().mul(torch.inf).backward()
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    assert not sharded.grad_norm.isfinite()
    sharded.zero_gradients()
    assert sharded.shards[0].main.grad is None
    param.sum().backward()
    step(sharded)
    assert torch.equal(param.detach(), torch.zeros(2))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_parameters_are_plain_again_and_can_be_laid_out_anew(
    dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "HAS_GRAD_DTYPE", native)
    (param,) = ones(2, dtype=dtype)
    first = make([param])
    param.sum().backward()
    step(first)
    first.close()
    assert param.grad is None
    param.sum().backward()
    assert param.grad.dtype == dtype
    assert torch.equal(param.grad, torch.ones(2, dtype=dtype))
    second = make([param])
    for _ in range(2):
        param.sum().backward()
        step(second)
    assert torch.equal(param.detach(), torch.full((2,), -2.0, dtype=dtype))


def test_a_shared_parameter_is_laid_out_once() -> None:
    (param,) = ones(2)
    sharded = DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("a", param), ("b", param)], mesh=Mesh())
    assert [shard.name for shard in sharded.shards] == ["a"]


def test_parameters_become_contiguous_views_with_their_values_kept() -> None:
    values = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    param = nn.Parameter(values.clone(memory_format=torch.preserve_format))
    make([param])
    assert torch.equal(param.detach(), values)
    assert param.is_contiguous()


def test_a_bucket_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_mb=0"):
        DistributedOptimizerConfig(bucket_mb=0)


def test_nothing_reads_a_value_back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    (param,) = ones(2)
    sharded = make([param], config=DistributedOptimizerConfig(nonfinite="ignore"))
    param.sum().backward()

    def forbidden(self: Tensor) -> Any:
        raise AssertionError("a value was read back")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, forbidden)
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=torch.tensor(3))
    sharded.clip_by_norm(1.0)
    sharded.clip_by_value(1.0)
    sharded.update_parameters()
