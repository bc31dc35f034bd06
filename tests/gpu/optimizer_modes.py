"""Ways of keeping and reducing what the optimizer has, through the Trainer on CUDA over NCCL; prints a line a case.

torchrun --no-python --nproc-per-node 2 bash tests/gpu/one_gpu_ranks.sh tests/gpu/optimizer_modes.py
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron import MegatronPrecision
from lightning_megatron.optim import DistributedOptimizerConfig
from lightning_megatron.optim.loss_scale import DynamicLossScale
from tests.optim.test_in_trainer import Module, Net, Overflowing, data, loader, trainer

STEPS, CLIP = 5, 0.5
failed: list[str] = []


def verdict(name: str, passed: bool, what: str) -> None:
    """One line a case, on rank 0."""
    if not passed:
        failed.append(name)
    if os.environ["RANK"] == "0":
        print(f"{'passed' if passed else 'FAILED'} {name:50s} {what}", flush=True)


def on_gpu(config: DistributedOptimizerConfig, precision: Any, **options: Any) -> Any:
    """The Trainer of the CPU tests, on this machine's GPUs."""
    world_size = int(os.environ["WORLD_SIZE"])
    one_gpu = torch.cuda.device_count() == 1
    place = {"devices": 1 if one_gpu else world_size, "num_nodes": world_size if one_gpu else 1}
    return trainer({}, config, precision, accelerator="gpu", max_steps=STEPS, **place, **options)


def fit(config: DistributedOptimizerConfig, precision: Any, optimizer: str) -> dict[str, Tensor]:
    """Final parameters after a run."""
    module, run = Module(optimizer), on_gpu(config, precision)
    run.fit(module, loader(run.strategy))
    return {name: value.cpu() for name, value in run.strategy.full_state_dict().items()}


def plain(optimizer: str) -> dict[str, Tensor]:
    """The same by plain torch on one GPU, in fp32."""
    module = Module(optimizer).cuda()
    stepped = module.configure_optimizers()
    x, y = (t[:8].cuda() for t in data().tensors)
    for _ in range(STEPS):
        stepped.zero_grad()
        (module.model(x).squeeze(-1) - y).square().mean().backward()
        nn.utils.clip_grad_norm_([p for group in stepped.param_groups for p in group["params"]], CLIP)
        stepped.step()
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any parameter's change, relative to the parameter's largest change."""
    start = {f"model.{name}": value for name, value in Net().state_dict().items()}
    changes = [
        (float((found[name] - value).abs().max()), float((value - start[name]).abs().max())) for name, value in expected.items()
    ]
    return max(error / change if change else error for error, change in changes)


def against_plain() -> None:
    """Every optimizer and way of reducing against plain torch."""
    cases: dict[str, tuple[DistributedOptimizerConfig, Any, str, float]] = {
        "AdamW": (DistributedOptimizerConfig(), "32-true", "adamw", 1e-3),
        "SGD": (DistributedOptimizerConfig(), "32-true", "sgd", 1e-4),
        "Muon": (DistributedOptimizerConfig(), "32-true", "muon", 3e-2),  # its matrices are orthogonalised in bf16
        "Muon without overlap": (DistributedOptimizerConfig(1e-9, False, False), "32-true", "muon", 3e-2),
        "SGD, gradients travel in bf16": (DistributedOptimizerConfig(grad_reduce_dtype="bf16"), "32-true", "sgd", 2e-2),
        "SGD in fp16": (DistributedOptimizerConfig(), MegatronPrecision("16-mixed"), "sgd", 3e-2),
        "AdamW, half on the host": (DistributedOptimizerConfig(offload_fraction=0.5), "32-true", "adamw", 1e-3),
    }
    for name, (config, precision, optimizer, limit) in cases.items():
        faulthandler.dump_traceback_later(60)
        error = difference(fit(config, precision, optimizer), plain(optimizer))
        verdict(name, error < limit, f"change {error:.1e}, limit {limit:.0e}")
    wide, narrow = (fit(DistributedOptimizerConfig(grad_reduce_dtype=dtype), "bf16-mixed", "sgd") for dtype in ("fp32", "bf16"))
    error = difference(narrow, wide)
    verdict("SGD in bf16, gradients travel in bf16", error < 2e-2, f"change {error:.1e}, limit 2e-02")


def remainders() -> None:
    """Remainders give the bits that fp32 copies give."""
    for state_dtype in ("fp32", "bf16", "fp8"):
        copies = fit(DistributedOptimizerConfig(state_dtype=state_dtype), "bf16-mixed", "adamw")
        rests = fit(DistributedOptimizerConfig(main_param="remainder", state_dtype=state_dtype), "bf16-mixed", "adamw")
        same = all(torch.equal(rests[name], value) for name, value in copies.items())
        verdict(f"remainders, moments in {state_dtype}", same, "bit-equal to fp32 copies")


def overflow(folder: str) -> None:
    """An overflow on the last replica: every rank skips the step, scales and weights stay equal, also after a resume."""
    scale = {"growth_interval": 2, "hysteresis": 1}
    found = []
    for first, path in ((6, None), (3, None), (6, f"{folder}/three")):
        module, precision = Overflowing(), MegatronPrecision("16-mixed", loss_scale=DynamicLossScale(2.0**8, **scale))
        run = on_gpu(DistributedOptimizerConfig(), precision)
        run.fit_loop.epoch_loop.max_steps = first
        run.fit(module, loader(run.strategy), ckpt_path=path)
        if first == 3:
            run.save_checkpoint(f"{folder}/three")
        found.append((module.scales, run.strategy.num_skipped_steps, module.sums, run.strategy.full_state_dict()))
    (scales, skipped, sums, weights), _, (late_scales, _, _, late_weights) = found
    verdict("fp16 overflow: scales", scales == [256, 512, 256, 256, 512, 512], f"{scales}")
    verdict("fp16 overflow: skipped on every rank", skipped == 1 and sums[2] == sums[1] != sums[3], f"{skipped} skipped")
    same = late_scales == scales[3:] and all(torch.equal(late_weights[name], value) for name, value in weights.items())
    verdict("fp16 overflow: resumed with the same scale", same, f"{late_scales}")
    parts: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    torch.distributed.all_gather_object(parts, (scales, sums))
    verdict("fp16 overflow: ranks are equal", all(part == parts[0] for part in parts), "")


def main() -> None:
    """Run all."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    folder = Path(tempfile.gettempdir()) / f"optimizer_modes_{os.environ['MASTER_PORT']}"
    against_plain()
    remainders()
    overflow(str(folder))
    faulthandler.cancel_dump_traceback_later()
    if os.environ["RANK"] == "0":
        print(f"{len(failed)} failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
