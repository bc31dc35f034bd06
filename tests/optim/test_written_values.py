"""Values that others write into parameters while an optimizer is laid out: the next step goes on from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm import all_reduce
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed
from tests.lightning_features.harness import Regression, Run, Scenarios, regression_data
from tests.optim.main_values import main_values

STEPS, WRITTEN = 5, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "copies": {},
    "copies, fused": {"fused_adam": True},
    "no overlap": {"overlap_param_gather": False},
    "remainder": {"main_param": "remainder"},
    "remainder, fused": {"main_param": "remainder", "fused_adam": True},
    "half on the host": {"offload_fraction": 0.5},
}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(5, 23, dtype=dtype), nn.Linear(23, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def in_place(param: nn.Parameter) -> None:
    param[0].zero_()  # with a remainder that was negative these would be NaN


def replaced(param: nn.Parameter) -> None:
    data = param.detach().clone()
    data[0] = 0.5
    param.data = data


WRITES = {"in place": in_place, "replaced": replaced}


@torch.no_grad()
def write(net: Net, copies: dict[str, Tensor], how: str, remainder: bool) -> None:
    """Write one parameter in a part, and another as it is; the same into its fp32 values."""
    WRITES[how](net.up.weight)
    net.down.weight.copy_(net.down.weight.clone())
    copies["up.weight"][0] = net.up.weight[0]
    for name in ("up.weight", "down.weight"):
        if remainder:  # all of a parameter that was written is read
            copies[name].copy_(copies[name].bfloat16())


def follow(variant: str, how: str, dtype: torch.dtype) -> None:
    """The same gradients go to an unsharded fp32 copy of the model, which is written alike."""
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net(dtype)
    copies = {name: nn.Parameter(p.detach().float()) for name, p in net.named_parameters()}
    plain = torch.optim.AdamW(list(copies.values()), lr=1e-2)
    config = DistributedOptimizerConfig(bucket_mb=1e-4, **VARIANTS[variant])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=mesh, config=config)
    places = [p.data_ptr() for p in net.parameters()]
    for step in range(STEPS):
        if step == WRITTEN:
            write(net, copies, how, "remainder" in variant)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step * 10 + mesh.rank)).to(dtype)
        net(x).float().square().mean().backward()
        for slot in (slot for bucket in sharded._buckets for slot in bucket.slots):
            name = next(name for name, p in net.named_parameters() if p is slot.param)
            copies[name].grad = all_reduce(slot.view, mesh.dp).clone()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None)
        sharded.step()
        plain.step()
        sharded.update_parameters()
        sharded.wait_parameters()
        tolerance = {"rtol": 1e-5, "atol": 1e-7} if "fused" in variant else {"rtol": 0, "atol": 0}
        with main_values(sharded):
            for shard in sharded.shards:
                torch.testing.assert_close(shard.main, copies[shard.name].flatten()[shard.start : shard.stop], **tolerance)
    assert [p.data_ptr() for p in net.parameters()] == places
    for name, param in net.named_parameters():
        torch.testing.assert_close(param.float(), copies[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_on_16_bit_parameters_go_on_from_what_was_written_into_them(variant: str, how: str) -> None:
    run_distributed(follow, 2, variant, how, torch.bfloat16)


@pytest.mark.parametrize("how", WRITES)
def test_steps_on_fp32_parameters_go_on_from_what_was_written_into_them(how: str) -> None:
    run_distributed(follow, 2, "copies", how, torch.float32)


def swap_out_and_in(net: Net, sharded: DistributedOptimizer) -> None:
    before = {shard.name: shard.main.detach().clone() for shard in sharded.shards}
    kept = {name: p.detach().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(0.25)
        for name, param in net.named_parameters():
            param.copy_(kept[name])
    sharded.take_in_values()
    assert all(torch.equal(shard.main, before[shard.name]) for shard in sharded.shards)
    assert any(not torch.equal(main, main.bfloat16().float()) for main in before.values())


def test_weights_that_are_swapped_out_and_in_again_lose_no_bit_of_their_fp32_values() -> None:
    net = Net(torch.bfloat16)
    sharded = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), mesh=Mesh())
    net(torch.ones(1, 5).bfloat16()).sum().backward()
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    sharded.step()
    sharded.update_parameters()
    swap_out_and_in(net, sharded)


def test_data_of_another_shape_or_dtype_is_refused_with_its_name() -> None:
    net = Net(torch.float32)
    sharded = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), mesh=Mesh())
    net.up.weight.data = torch.zeros(23, 6)
    with pytest.raises(ValueError, match=r"'up.weight' has been replaced by a tensor of shape \(23, 6\).*it was \(23, 5\)"):
        sharded.take_in_values()
    net.up.weight.data = torch.zeros(23, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"torch.float64 on cpu; it was \(23, 5\), torch.float32"):
        sharded.take_in_values()


scenario = Scenarios({"megatron": (1, {}), "dp2": (2, {}), "pp2": (2, {"pp": 2, "micro_batch_size": 4})})
DATA = regression_data(48, 1)


class Loads(Regression):
    def on_fit_start(self) -> None:
        self.load_state_dict({name: torch.full_like(value, 0.125) for name, value in self.state_dict().items()})


@scenario
def weights_loaded_in_a_hook(run: Run) -> Any:
    result = run.fit(Loads(lr=1e-3), run.loader(DATA, 8), max_steps=3, precision="bf16-mixed")
    return {name: value.float() for name, value in result["parameters"].items()}


class Clamps(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            for param in self.model.parameters():
                param.data = param.data.clamp(-0.1, 0.1)


@scenario
def data_replaced_in_a_hook(run: Run) -> Any:
    return run.fit(Clamps(), run.loader(DATA, 8), max_steps=5)["parameters"]


class Zeroes(Regression):
    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            for param in self.model.parameters():
                param.zero_()


@scenario
def what_a_checkpoint_after_a_write_holds(run: Run) -> Any:
    module = Zeroes()
    trainer = run.trainer(max_steps=3, precision="bf16-mixed")
    trainer.fit(module, run.loader(DATA, 8))
    path = f"{run.folder}/written.ckpt"
    trainer.save_checkpoint(path)
    again = run.trainer(max_steps=4, precision="bf16-mixed")
    resumed = Regression(lr=0.0)
    again.fit(resumed, run.loader(DATA, 8), ckpt_path=path)
    return {name: value.float().abs().max() for name, value in run.parameters(again, resumed).items() if "head" not in name}


@pytest.mark.parametrize("layout", scenario.layouts)
@pytest.mark.parametrize("name", scenario.names)
def test_a_run_in_which_hooks_write_parameters_equals_one_process(
    name: str, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tolerance = 2e-3 if name == "weights_loaded_in_a_hook" else 2e-5  # a step of bf16
    scenario.compare(name, layout, tmp_path_factory.mktemp("written"), tolerance=tolerance)
