"""The Transformer Engine backend on a GPU: against plain torch, against fp32, and under layouts; one line a case.

python tests/gpu/te_backend.py reference      # losses of one rank, written to a file for the layouts
python tests/gpu/te_backend.py                # one rank: operations, models, twenty steps, loss curves
torchrun --no-python --nproc-per-node 2 bash tests/gpu/one_gpu_ranks.sh tests/gpu/te_backend.py      # layouts, after it
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.choice import choose_backend
from lightning_megatron.layers.rope import Rope
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, Scales, TeBackend
from lightning_megatron.layers.te_backend.operations import Rotation
from lightning_megatron.layers.te_backend.te_operations import TeOperations
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.precision import MegatronPrecision

REFERENCE = Path(tempfile.gettempdir()) / "te_backend_reference.json"
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 1024, "max_seq_len": 256}
LLAMA = GPTConfig(**SIZES, num_kv_heads=4, ffn_hidden_size=1024, init_std=0.05)
GPT2 = GPTConfig(
    **SIZES, init_std=0.05, position="learned", norm="layernorm", activation="gelu", bias=True, tied_embeddings=True
)
WIDE_HEADS = replace(LLAMA, num_heads=4, num_kv_heads=2)  # heads of 128, the only ones for attention in 8 bits
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}
STEPS, BATCH = 20, 8
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp2+sp": {"tp": 2},
        "tp2": {"tp": 2, "sequence_parallel": False},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "pp2 zbh1": {"pp": 2, "schedule": "zbh1"},
        "dp2": {},
    },
    4: {"tp2 pp2": {"tp": 2, "pp": 2}, "tp4+sp": {"tp": 4}},
}
BEST = "delayed+head+attention+params"
FURTHER = ("delayed+attention", "current+attention", "delayed+params", BEST)
FURTHER_UNDER = {"tp2+sp": ("delayed+attention", BEST), "dp2": ("delayed+params", BEST)}
CURVES: dict[Any, list[float]] = {}
FAILED: list[str] = []


def case(name: str, run: Callable[[], str]) -> None:
    """Run one case and print its line; a failure does not stop the others."""
    faulthandler.dump_traceback_later(100)
    try:
        print(f"passed {name}: {run()}", flush=True)
    except Exception:
        FAILED.append(name)
        print(f"FAILED {name}: {traceback.format_exc(limit=8)}", flush=True)
    faulthandler.cancel_dump_traceback_later()


def text(num: int = 4, seed: int = 5, length: int = 257) -> Tensor:
    """Token sequences with something to learn: each token follows from the one before it, most of the time."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1024, (num,), generator=generator)]
    for _ in range(length - 1):
        noise = torch.randint(1024, (num,), generator=generator)
        follows = torch.rand(num, generator=generator) < 0.8
        rows.append(torch.where(follows, (rows[-1] * 5 + 7) % 1024, noise))
    return torch.stack(rows, dim=1)


def relative(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    return float(torch.linalg.vector_norm(one.float() - other.float()) / torch.linalg.vector_norm(other.float()))


# One rank


def operations(device: torch.device) -> str:
    """The library's and this project's kernels, against the same in plain torch."""
    options = Fp8Options()
    scales = Scales(options)
    slots = [scales.slot(torch.float8_e4m3fn), scales.slot(torch.float8_e5m2)]
    scales.prepare(device)
    fast, plain = TeOperations(options, device=device), PlainOperations(options)
    torch.manual_seed(0)
    hidden, added = (torch.randn(512, 1024, device=device, dtype=torch.bfloat16) for _ in range(2))
    gain = torch.rand(1024, device=device, dtype=torch.bfloat16) + 0.5
    grad = torch.randn(512, 512, device=device, dtype=torch.bfloat16) * 1e-3
    worst: dict[str, float] = {}
    for is_warm in (False, True):
        worst |= pointwise(fast, plain, slots, {"hidden": hidden, "added": added, "gain": gain, "grad": grad}, is_warm)
        for slot, amax in zip(slots, (20.0, 0.03), strict=True):
            slot.amax.fill_(amax)
        if not is_warm:
            scales.advance(lambda numbers: numbers)
    made = []
    weight = torch.randn(256, 1024, device=device, dtype=torch.bfloat16) * 0.02
    upper = torch.randn(512, 256, device=device, dtype=torch.bfloat16) * 1e-3
    for ops in (fast, plain):
        x, w, g = (
            ops.quantize(hidden, slots[0], record=True),
            ops.quantize_weight(weight),
            ops.quantize(upper, slots[1], record=True),
        )
        total = torch.ones(256, 1024, device=device)
        ops.add_weight_gradient(x, g, total)
        results = [
            ops.product(w, x, None, hidden),
            ops.input_gradient(w, g, hidden),
            ops.weight_gradient(x, g, weight),
            total - 1,
        ]
        made.append(results)
    products = {name: relative(one, other) for name, one, other in zip(("y", "dx", "dw", "dw added"), *made, strict=True)}
    worst |= products
    assert max(products.values()) < 0.01, worst
    return " ".join(f"{name} {value:.0e}" for name, value in worst.items())


def pointwise(fast: Any, plain: Any, slots: list[Any], inputs: dict[str, Tensor], is_warm: bool) -> dict[str, float]:
    """Differences of norm, cast and SwiGLU, and that columns are the rows turned."""
    hidden, added, gain, grad = inputs.values()
    made: list[Any] = []
    for ops in (fast, plain):
        for slot in slots:
            slot.amax.zero_()
        narrow, wide = {"cast": ops.quantize(hidden, slots[0], record=True)}, {}
        wide["sum"], narrow["norm"], rstd = ops.add_norm_quantized(hidden, added, gain, 1e-5, slot=slots[0], record=True)
        wide["rstd"] = rstd.flatten()
        narrow["norm alone"] = ops.add_norm_quantized(hidden, None, gain, 1e-5, slot=slots[0], record=False)[1]
        narrow["swiglu"] = ops.activate_quantized(hidden, "swiglu", slots[0], record=True)
        narrow["cast again"] = ops.quantize(hidden, slots[0], record=True)
        narrow["cast backward"] = ops.quantize(grad, slots[1], record=True)
        heads = tuple(part.view(256, 2, -1, 64) * 1e-3 for part in hidden.split([512, 256, 256], dim=-1))
        tables = Rope(head_dim=64).tables(torch.arange(256, device=hidden.device))
        narrow["rotation backward"] = ops.turned_back_quantized(heads, Rotation((8, 4), tables), slots[1])
        narrow["swiglu backward"] = ops.activate_backward_quantized(grad, hidden, "swiglu", slots[1])
        wide["amax"] = torch.cat([slot.amax for slot in slots])
        made.append((wide, narrow))
    worst = {name: relative(made[0][0][name], made[1][0][name]) for name in made[0][0]}
    turned = []
    for name, mine in made[0][1].items():
        rows = mine._data.view(torch.float8_e5m2 if "backward" in name else torch.float8_e4m3fn).float() * mine._scale_inv
        turned += [name] if not torch.equal(mine._data.t(), mine._transpose) else []
        worst[name] = relative(rows, made[1][1][name].wide())
    assert not turned, f"columns are not the rows of {turned}, {worst}"
    assert max(worst.values()) < 0.03, worst  # plain torch rounds to bf16 in between
    return {f"{'known' if is_warm else 'own'} {name}": value for name, value in worst.items()}


def model(config: GPTConfig, device: torch.device, dtype: torch.dtype, backend: Any = None) -> GPT:
    """On one rank, the same values whatever the backend."""
    with use_mesh(Mesh(device=device)):
        made = GPT(config, dtype=dtype, backend=backend)
    from lightning_megatron.initialize import materialize

    materialize(made, device=device, seed=3)
    return made


def losses_and_gradients(made: GPT, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    made.zero_grad()
    loss = made(tokens[:, :-1], labels=tokens[:, 1:]).mean()
    loss.backward()
    return float(loss), {name: param.grad.float() for name, param in made.named_parameters() if param.grad is not None}


def against_fp32(config: GPTConfig, device: torch.device, fp8: Any, name: str = "te") -> str:
    """Loss and gradients of the first and a later step, against plain torch in fp32."""
    tokens = text().to(device)
    options = None if fp8 is None else Fp8Options(recipe=fp8)
    backend = choose_backend(name, device=device, dtype=torch.bfloat16, fp8=options)  # type: ignore[arg-type]
    wide, narrow = model(config, device, torch.float32), model(config, device, torch.bfloat16, backend)
    with torch.no_grad():
        for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
            one.copy_(other)
    expected, expected_grads = losses_and_gradients(wide, tokens)
    shown = []
    for _ in range(2):
        loss, grads = losses_and_gradients(narrow, tokens)
        errors = {key: relative(grads[key], expected_grads[key]) for key in expected_grads}
        key = max(errors, key=lambda k: errors[k])
        shown.append(f"loss {abs(loss / expected - 1):.1e} gradient {errors[key]:.1e} ({key})")
        assert abs(loss / expected - 1) < (2e-3 if fp8 is None else 1e-2), shown
        assert errors[key] < (0.03 if fp8 is None else 0.4), errors
        if isinstance(backend, TeBackend) and backend.scales is not None:
            backend.scales.advance(lambda numbers: numbers)
    return "; ".join(shown)


def twenty_steps(device: torch.device) -> str:
    """AdamW through the Trainer in bf16 on both backends, and in fp32."""
    torch_losses, te_losses = train({}, None, backend="torch"), train({}, None, backend="te")
    wide = train({}, None, backend="torch", precision="32-true")
    errors = [max(abs(a / b - 1) for a, b in zip(losses, wide, strict=True)) for losses in (torch_losses, te_losses)]
    assert max(errors) < 5e-3, (torch_losses, te_losses, wide)
    return f"from {wide[0]:.3f} to {wide[-1]:.3f}; largest difference to fp32: torch {errors[0]:.1e}, te {errors[1]:.1e}"


def loss_curve(fp8: str, steps: int = 80) -> str:
    """FP8 against bf16: the mean loss of each tenth of the run."""
    config = config_for(fp8)
    if (config, steps) not in CURVES:
        CURVES[config, steps] = train({}, None, steps=steps, backend="te", config=config)
    curves = [CURVES[config, steps], train({}, fp8, steps=steps, backend="te", config=config)]
    tenths = [torch.tensor(curve).view(-1, steps // 10).mean(1) for curve in curves]
    error = float((tenths[1] / tenths[0] - 1).abs().max())
    assert error < 0.02, tenths
    return f"from {tenths[0][0]:.3f} to {tenths[0][-1]:.3f} (bf16), {tenths[1][-1]:.3f}; largest difference {error:.1e}"


def parameters(fp8: str) -> str:
    """Training with parameters in 8 bits is that without, bit for bit; memory is not."""
    found = []
    for name in (fp8, f"{fp8}+params"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses = train({}, name)
        found.append((losses, (torch.cuda.max_memory_allocated() - before) / 2**20))
        print(f"  {name}: {losses[0]:.6f} to {losses[-1]:.6f}, peak {found[-1][1]:.1f} MiB", flush=True)
    (wide, _), (narrow, _) = found
    equal = sum(one == other for one, other in zip(wide, narrow, strict=True))
    largest = max(abs(one / other - 1) for one, other in zip(narrow, wide, strict=True))
    assert largest < 5e-3, (wide, narrow)
    return f"{equal} of {len(wide)} losses equal, largest difference {largest:.1e}"


def translated() -> str:
    """``Trainer(precision="transformer-engine")`` is ``fp8="delayed"``."""
    losses, expected = train({}, None, steps=5, precision="transformer-engine"), train({}, "delayed", steps=5)
    largest = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
    assert largest < 1e-3, (losses, expected)
    return f"largest difference {largest:.1e}"


# Under layouts


class Module(L.LightningModule):
    """A GPT as any user would train it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model: GPT | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Build it under the strategy's mesh and backend."""
        if self.model is None:
            self.model = GPT(self.config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean loss."""
        assert self.model is not None
        loss: Tensor = self.model(batch[0][:, :-1], labels=batch[0][:, 1:]).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss that all replicas share."""
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))


def config_for(fp8: str | None) -> GPTConfig:
    """The model for a recipe and what goes with it: ``delayed+attention``."""
    return WIDE_HEADS if fp8 is not None and "attention" in fp8 else LLAMA


def train(
    layout: dict[str, Any],
    fp8: str | None,
    *,
    steps: int = STEPS,
    backend: str = "te",
    precision: Any = "bf16-mixed",
    config: GPTConfig | None = None,
) -> list[float]:
    """Losses of a run through the Trainer, the same global batches under every layout. ``fp8``: see ``config_for``."""
    L.seed_everything(3, verbose=False)
    world, one_gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count() == 1
    strategy = MegatronStrategy(**layout, micro_batch_size=2, backend=backend)  # type: ignore[arg-type]
    module = Module(config or config_for(fp8))
    recipe, *options = (fp8 or "").split("+")
    narrow: dict[str, Any] = {"fp8": recipe or None, **{f"fp8_{name}": True for name in options}}
    by_lightning = precision == "transformer-engine"
    trainer = L.Trainer(
        strategy=strategy,
        precision=precision if by_lightning else None,
        plugins=None if by_lightning else [MegatronPrecision(precision, **narrow)],
        accelerator="gpu",
        devices=1 if one_gpu else world,
        num_nodes=world if one_gpu else 1,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = TensorDataset(text(BATCH * steps))
    trainer.fit(module, DataLoader(samples, batch_size=BATCH // strategy.dp_size))
    return module.losses


def under_layout(layout: dict[str, Any], fp8: Any, reference: list[float]) -> str:
    """Twenty steps against those of one rank."""
    losses = train(layout, fp8)
    errors = [abs(a / b - 1) for a, b in zip(losses, reference, strict=True)]
    limit = 4e-3 if fp8 is None else 2e-2
    assert max(errors) < limit, (losses, reference)
    return f"first loss {errors[0]:.1e}, largest difference {max(errors):.1e} (from {losses[0]:.3f} to {losses[-1]:.3f})"


def main() -> None:
    """Run the cases of this world size; arguments pick those whose name holds one of them."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    recipes: tuple[Any, ...] = (None, "delayed", "current")
    cases: dict[str, Callable[[], str]] = {}
    if sys.argv[1:] == ["reference"]:
        REFERENCE.write_text(json.dumps({str(fp8): train({}, fp8) for fp8 in (*recipes, *FURTHER)}))
        return
    if world_size == 1:
        cases["operations"] = partial(operations, device)
        cases["translated"] = translated
        for fp8 in ("delayed", "current"):
            cases[f"parameters {fp8}"] = partial(parameters, fp8)
        for name, config in CONFIGS.items():
            cases[f"{name} torch bf16 against fp32"] = partial(against_fp32, config, device, None, "torch")
            for fp8 in (*recipes, "blockwise"):
                cases[f"{name} te {fp8 or 'bf16'} against fp32"] = partial(against_fp32, config, device, fp8)
        cases["twenty steps"] = partial(twenty_steps, device)
        for fp8 in ("delayed", "current"):
            cases[f"loss curve {fp8}"] = partial(loss_curve, fp8)
        for fp8 in FURTHER:
            cases[f"loss curve {fp8}"] = partial(loss_curve, fp8, steps=40)
    else:
        reference = json.loads(REFERENCE.read_text())
        for name, layout in LAYOUTS[world_size].items():
            for fp8 in recipes if "vpp" in name or "sp" in name else recipes[:2]:
                cases[f"{name} {fp8 or 'bf16'}"] = partial(under_layout, layout, fp8, reference[str(fp8)])
            for fp8 in FURTHER_UNDER.get(name, ()):
                cases[f"{name} {fp8}"] = partial(under_layout, layout, fp8, reference[fp8])
    wanted = sys.argv[1:]
    for name, run in cases.items():
        if not wanted or any(part in name for part in wanted):
            case(name, run)
    if rank == 0:
        print(f"{len(FAILED)} failed of world size {world_size}: {FAILED}", flush=True)
    if dist.is_initialized():
        dist.barrier()
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
