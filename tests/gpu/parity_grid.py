"""The parity grid on CUDA over NCCL. Started by torchrun, see docs/development.md; prints one line a case.

torchrun --no-python --nproc-per-node 4 bash tests/gpu/one_gpu_ranks.sh tests/gpu/parity_grid.py [part of a layout's name]
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.initialize import load_unsharded, materialize
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig
from tests.parity import harness
from tests.parity.harness import CONFIGS, SAMPLES, SEED, Outcome, Samples, strategy_run
from tests.parity.test_parity_grid import DTYPE, LAYOUTS, TOLERANCE


def reference_on_gpu(config: GPTConfig, dtype: torch.dtype, device: torch.device) -> Outcome:
    """The one-process step, on this GPU."""
    with use_mesh(Mesh(device=device)):
        model = GPT(config, dtype=dtype)
    materialize(model, device=device, seed=SEED)
    initial = {name: value.cpu() for name, value in harness._unpadded(model).items()}
    load_unsharded(model, harness.random_gains(GPT(config, seed=SEED, dtype=dtype)), strict=False)
    samples = Samples(config.vocab_size)
    tokens, labels = samples.tokens.to(device), samples.labels.to(device)
    loss = model(tokens, labels=labels).sum() / (labels != -100).sum()
    loss.backward()
    norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    final = {name: value.cpu() for name, value in harness._unpadded(model).items()}
    return Outcome(initial, final, [float(loss)], [norm])


def worst(outcome: Outcome, expected: Outcome) -> float:
    """Largest difference of any parameter's change, relative to that parameter's largest change."""
    errors = []
    for name, start in expected.initial.items():
        reference = expected.final[name] - start
        change = outcome.final[name] - outcome.initial[name]
        errors.append(float((change - reference).abs().max() / reference.abs().max()))
    return max(errors)


def main() -> None:
    """Run every layout of this world size and compare."""
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    one_gpu = torch.cuda.device_count() == 1
    options = {"devices": 1 if one_gpu else world_size, "num_nodes": world_size if one_gpu else 1}
    failed, only = 0, sys.argv[1] if len(sys.argv) > 1 else ""
    for name, (size, layout, accumulate) in LAYOUTS.items():
        for model, config in CONFIGS.items() if size == world_size and only in name else ():
            for precision, tolerance in TOLERANCE.items():
                faulthandler.dump_traceback_later(60)  # a hang shows where it hangs
                outcome = strategy_run(
                    config,
                    layout,
                    optimizer="sgd",
                    precision=precision,
                    steps=1,
                    accumulate=accumulate,
                    accelerator="gpu",
                    trainer_options=options,
                )
                if rank:
                    continue
                expected = reference_on_gpu(config, DTYPE[precision], device)
                same_start = all(torch.equal(outcome.initial[k], v) for k, v in expected.initial.items())
                error = worst(outcome, expected)
                norm_error = max(abs(norm / expected.norms[0] - 1) for norm in outcome.norms)
                passed = same_start and error < tolerance["rtol"] and norm_error < 1e-5
                failed += not passed
                verdict = "passed" if passed else "FAILED"
                errors = f"change {error:.1e} norm {norm_error:.1e} {same_start=}"
                print(f"{verdict} {name:34s} {model:10s} {precision} {errors}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    if rank == 0:
        print(f"{failed} failed of world size {world_size}, {SAMPLES} samples", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
