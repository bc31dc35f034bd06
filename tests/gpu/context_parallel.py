"""Context parallelism on CUDA: one line a case.

python tests/gpu/context_parallel.py                # tiles of every form in fused kernels against fp32, rank by rank; speed
python tests/gpu/context_parallel.py reference      # one rank through the Trainer, written to a file for the layouts
torchrun --no-python --nproc-per-node 2 bash tests/gpu/one_gpu_ranks.sh tests/gpu/context_parallel.py      # layouts, after it
torchrun --no-python --nproc-per-node 4 bash tests/gpu/one_gpu_ranks.sh tests/gpu/context_parallel.py

Further words leave only cases whose titles hold them all: ``tests/gpu/context_parallel.py ring window flash``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.context_parallel.attention import ContextParallelAttention
from lightning_megatron.context_parallel.block import BlockAttention, Kernel
from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.context_parallel.merge import Merge
from lightning_megatron.context_parallel.parts import add, put, take
from lightning_megatron.context_parallel.tiles import Pattern, Tile
from lightning_megatron.context_parallel.tiling import Tiling
from lightning_megatron.data.packing import DynamicPackingCollator, PackingCollator
from lightning_megatron.layers.te_backend.context import TeContextAttention
from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from tests.parity import harness
from tests.parity.harness import Outcome

REFERENCE = Path(tempfile.gettempdir()) / "context_parallel_reference.pt"
FAILED: list[str] = []
RAN: list[str] = []
KERNELS: set[tuple[str, str]] = set()
"""Forms of tiles and the kernels that computed them, since the last comparison."""
HEADS, KV_HEADS, SIZE, ROWS, LENGTH = 8, 2, 64, 2, 1024
FUSED = ["flash", "cudnn"]
with contextlib.suppress(ImportError, OSError):
    import flash_attn  # noqa: F401

    FUSED.append("flash_attn")
BORDERS = [[0, 256, 256, 640, LENGTH], [0, LENGTH, LENGTH, LENGTH, LENGTH]]
# Windows shorter than a chunk of 4 ranks (128 tokens), longer, and about as long as a document.
WINDOWS = {"causal": Pattern(), "full": Pattern(causal=False), "window 100": Pattern(window=100)}
WINDOWS |= {"window 300": Pattern(window=300), "window 100 both ways": Pattern(causal=False, window=100)}
WINDOWS |= {"window 300 both ways": Pattern(causal=False, window=300)}
FORMS = {
    f"{name}{end}": (pattern, LENGTH, packed)
    for end, packed in (("", False), (" packed", True))
    for name, pattern in WINDOWS.items()
}
FORMS |= {f"{name} padded": (pattern, LENGTH - 40, False) for name, pattern in WINDOWS.items() if not pattern.causal}


def report(name: str, passed: bool, text: str) -> None:
    RAN.append(name)
    FAILED.extend([] if passed else [name])
    print(f"{'passed' if passed else 'FAILED'} {name:58s} {text}", flush=True)


def is_wanted(title: str) -> bool:
    """Whether the words of the command line, those apart that say what is run, all stand in the title."""
    words = [word for argument in sys.argv[1:] for word in argument.split() if word != "reference"]
    return all(word in title for word in words)


def case(name: str, run: Callable[[], None]) -> None:
    if not is_wanted(name):
        return
    try:
        run()
    except Exception as error:
        report(name, False, f"{type(error).__name__}: {error}".splitlines()[0][:300])
        traceback.print_exc(limit=4)


# One process: each rank's tiles in turn


def ring_of_all(tensors: list[Tensor], layout: SequenceLayout, pattern: Pattern, block: BlockAttention) -> list[Tensor]:
    """Output and gradients of every rank of a ring, computed tile by tile on this one, in natural order, fp32."""
    q, k, v, grad = tensors
    found = [torch.zeros(tensor.shape, device="cuda") for tensor in (q, q, k, v)]
    index = [layout.index(rank, q.device) for rank in range(layout.size)]
    for rank in range(layout.size):
        tiling = Tiling(layout.over(layout.size, rank), pattern, q.device)
        tiles = []  # with the rank that the keys are from
        for source in [(rank - step) % layout.size for step in range(layout.size)]:
            tiles += [(tile, source, (take(k, index[source]), take(v, index[source]))) for tile in tiling.ring(source)]
        own = (take(q, index[rank]), take(grad, index[rank]))
        for tensor, part in zip(found[:2], of_tiles(tiles, own, block, found[2:], index), strict=True):
            put(tensor, index[rank], part)
    return found


def gathered_of_all(tensors: list[Tensor], layout: SequenceLayout, pattern: Pattern, block: BlockAttention) -> list[Tensor]:
    """The same for keys and values that each rank has gathered."""
    q, k, v, grad = tensors
    found = [torch.zeros(tensor.shape, device="cuda") for tensor in (q, q, k, v)]
    every = {-1: torch.arange(layout.length, device="cuda")[None]}
    for rank in range(layout.size):
        tiling = Tiling(layout.over(layout.size, rank), pattern, q.device)
        index = layout.index(rank, q.device)
        tiles = [(tile, -1, (k, v)) for tile in tiling.gathered()]
        own = (take(q, index), take(grad, index))
        for tensor, part in zip(found[:2], of_tiles(tiles, own, block, found[2:], every), strict=True):
            put(tensor, index, part)
    return found


def of_tiles(tiles: Any, own: tuple[Tensor, Tensor], block: BlockAttention, found_kv: list[Tensor], index: Any) -> list[Tensor]:
    """Output and gradient of one rank's queries; gradients of keys and values are added where those are from."""
    q, grad = own
    merge, random = Merge(q), []
    for tile, _, (k, v) in tiles:
        parts = take(q, tile.q), take(k, tile.k), take(v, tile.k)
        KERNELS.add((tile.form, block._kernel(parts[0], parts[1], tile)))
        out, lse, state = block.forward(*parts, tile)
        merge.add(tile.q, out=out, lse=lse)
        random.append(state)
    out, lse = merge.done()
    grad_q = torch.zeros(q.shape, device="cuda")
    for (tile, source, (k, v)), state in zip(tiles, random, strict=True):
        given = take(grad, tile.q), take(q, tile.q), take(k, tile.k), take(v, tile.k)
        after = {"out": take(out, tile.q), "lse": take(lse, tile.q)}
        grads = block.backward(*given, **after, tile=tile, random=state)
        add(grad_q, tile.q, grads[0])
        for total, share in zip(found_kv, grads[1:], strict=True):
            there = torch.zeros(k.shape, device="cuda")
            add(there, tile.k, share)
            add(total, index[source], there)
    return [out.float(), grad_q]


def check_tiles() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    narrow = [torch.randn(LENGTH, ROWS, n, SIZE, device="cuda", generator=generator).bfloat16() for n in heads]
    wide = [tensor.float() for tensor in narrow]
    for name, (pattern, num_real, packed) in FORMS.items():
        borders = torch.tensor(BORDERS, device="cuda") if packed else None
        one = SequenceLayout(LENGTH, num_real, cu_seqlens=borders)
        exact = gathered_of_all(wide, one, pattern, BlockAttention(kernel="math"))
        for size in (1, 2, 4):
            layout = SequenceLayout(LENGTH, num_real, size, 0, borders)
            for way, run in (("ring", ring_of_all), ("gathered", gathered_of_all)):
                for kernel in ("math", *FUSED):
                    title = f"{way} cp{size} {name} {kernel}"
                    given = wide if kernel == "math" else narrow
                    tolerance = 2e-4 if kernel == "math" else 2e-2
                    case(title, lambda: compare(title, run(given, layout, pattern, block_of(kernel)), exact, tolerance, kernel))  # noqa: B023


def block_of(kernel: str) -> BlockAttention:
    chosen: Kernel = kernel  # type: ignore[assignment]
    return BlockAttention(kernel=chosen)


def compare(title: str, found: list[Tensor], exact: list[Tensor], tolerance: float, kernel: str) -> None:
    used = sorted(f"{form} {own}" for form, own in KERNELS)
    fused = kernel == "math" or not any(own == "math" for _, own in KERNELS)
    KERNELS.clear()
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in found)
    report(
        title,
        finite and fused and max(errors) < tolerance,
        " ".join(f"{n} {e:.1e}" for n, e in zip(["o", "q", "k", "v"], errors, strict=True)) + f"  ({', '.join(used)})",
    )


def check_speed() -> None:
    """Milliseconds of one rank's step of a ring over 4 ranks, llama-8b heads, 32k tokens: forward and backward of a tile."""
    layout, device = SequenceLayout(32768, 32768, 4, 1), torch.device("cuda")
    tensors = [torch.randn(8192, 1, n, 128, device=device, dtype=torch.bfloat16) for n in (32, 8, 8, 32)]
    for name, source in (("own", 1), ("earlier", 0), ("later", 2)):
        (tile,) = Tiling(layout, Pattern(), device).ring(source)
        for kernel in FUSED:
            case(f"speed {name} {kernel}", lambda: time_tile(f"speed {name} {kernel}", tensors, tile, block_of(kernel)))  # noqa: B023


def time_tile(title: str, tensors: list[Tensor], tile: Tile, block: BlockAttention) -> None:
    q, k, v, grad = take(tensors[0], tile.q), take(tensors[1], tile.k), take(tensors[2], tile.k), take(tensors[3], tile.q)
    out, lse, random = block.forward(q, k, v, tile)
    times = []
    for run in (
        lambda: block.forward(q, k, v, tile),
        lambda: block.backward(grad, q, k, v, out=out.to(q.dtype), lse=lse, tile=tile, random=random),
    ):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for repeat in range(8):
            if repeat == 3:
                start.record()
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 5)
    report(title, True, f"forward {times[0]:.2f} ms, backward {times[1]:.2f} ms")


# Several ranks: Transformer Engine's attention over cut sequences against this project's


def check_library(world: int, rank: int) -> None:
    """Each way of communicating and each form that both have, packed and not: output and gradients, in bf16."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    patterns = {"causal": Pattern(), "full": Pattern(causal=False), "window 100": Pattern(window=100)}
    for comm in ("p2p", "all_gather", "a2a", *(("a2a+p2p",) if world == 4 else ())):
        parallelism = Parallelism(cp=world, cp_comm=comm, cp_kernel="te")  # type: ignore[arg-type]
        mesh = Mesh.create(parallelism, device=device)
        for name, pattern in patterns.items():
            for packed in (False, True):
                title = f"library cp{world} {comm} {name}{' packed' if packed else ''}"
                case(title, lambda: compare_library(title, mesh, pattern, packed=packed))  # noqa: B023


def compare_library(title: str, mesh: Mesh, pattern: Pattern, *, packed: bool) -> None:
    """On each rank; rank 0 says whether any of them is far off."""
    borders = torch.tensor(BORDERS, device="cuda") if packed else None
    layout = SequenceLayout(LENGTH, LENGTH, mesh.cp.size, mesh.cp.rank, borders)
    generator = torch.Generator("cuda").manual_seed(0)
    whole = [torch.randn(LENGTH, ROWS, n, SIZE, device="cuda", generator=generator).bfloat16() for n in (HEADS, 4, 4, HEADS)]
    ours = ContextParallelAttention.of(mesh, BlockAttention())
    try:
        theirs = TeContextAttention(ours, dropout=0.0)
        found = attended_by(lambda *qkv: theirs(*qkv, layout=layout, pattern=pattern, training=True), whole, layout)
    except ValueError as error:
        refused = "no sliding window" in str(error)
        if mesh.rank == 0:
            report(title, refused, f"refused: {str(error)[:200]}")
        return
    expected = attended_by(lambda *qkv: ours(*qkv, layout=layout, pattern=pattern), whole, layout)
    errors = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]).float()
    torch.distributed.all_reduce(errors, op=torch.distributed.ReduceOp.MAX)
    if mesh.rank == 0:
        text = " ".join(f"{n} {e:.1e}" for n, e in zip(["o", "q", "k", "v"], errors.tolist(), strict=True))
        report(title, bool(errors.isfinite().all()) and float(errors.max()) < 2e-2, text)


def attended_by(run: Callable[..., Tensor], whole: list[Tensor], layout: SequenceLayout) -> list[Tensor]:
    """Output and gradients of this rank."""
    q, k, v, grad = (take(tensor, layout.own_index(tensor.device)) for tensor in whole)
    given = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = run(*given)
    return [out.detach().float(), *(g.float() for g in torch.autograd.grad(out, given, grad))]


# Layouts, through the Trainer

SIZES: dict[str, Any] = {"hidden_size": 256, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 512}
CONFIG = replace(harness.LLAMA_GQA, **SIZES)
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one rank": {}},
    2: {
        "cp2 p2p": {"cp": 2},
        "cp2 all_gather": {"cp": 2, "cp_comm": "all_gather"},
        "cp2 a2a": {"cp": 2, "cp_comm": "a2a"},
        "cp2 p2p library": {"cp": 2, "cp_kernel": "te"},
    },
    4: {
        "cp4 p2p": {"cp": 4},
        "cp4 all_gather": {"cp": 4, "cp_comm": "all_gather"},
        "cp4 a2a": {"cp": 4, "cp_comm": "a2a"},
        "cp4 a2a+p2p": {"cp": 4, "cp_comm": "a2a+p2p"},
        "cp4 p2p library": {"cp": 4, "cp_kernel": "te"},
        "cp2 tp2": {"cp": 2, "tp": 2},
        "cp2 pp2": {"cp": 2, "pp": 2, "micro_batch_size": 2},
        "cp2 dp2": {"cp": 2},
    },
}
RUNS = (("32-true", "torch"), ("bf16-mixed", "torch"), ("bf16-mixed", "te"))


@contextlib.contextmanager
def longer_samples() -> Iterator[None]:
    before = harness.SAMPLES, harness.SEQUENCE
    harness.SAMPLES, harness.SEQUENCE = 8, 512
    yield
    harness.SAMPLES, harness.SEQUENCE = before


def documents() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(8, 500, (16,), generator=generator).tolist()
    return [dict(zip(("tokens", "labels"), torch.randint(67, (2, n), generator=generator), strict=True)) for n in lengths]


def trained(options: dict[str, Any], precision: str, *, packed: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and norms of one step of SGD, and the change of every parameter where it is in fp32."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer_options = {"devices": 1 if torch.cuda.device_count() == 1 else world, "num_nodes": 1}
    trainer_options["num_nodes"] = world // trainer_options["devices"]
    if not packed:
        with longer_samples():
            outcome = harness.strategy_run(
                CONFIG,
                options,
                optimizer="sgd",
                precision=precision,
                steps=1,
                accelerator="gpu",
                trainer_options=trainer_options,
            )
    else:
        outcome = packed_run(options, precision, trainer_options, dynamic=packed == "dynamic")
    changes = {name: outcome.final[name] - start for name, start in outcome.initial.items()} if precision == "32-true" else {}
    return outcome.losses, outcome.norms, changes


def packed_run(options: dict[str, Any], precision: str, trainer_options: dict[str, Any], *, dynamic: bool) -> Outcome:
    L.seed_everything(harness.SEED, verbose=False)
    strategy, module = MegatronStrategy(**options), harness.ParityModule(CONFIG, optimizer="sgd", dtype=torch.float32)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(strategy=strategy, accelerator="gpu", precision=precision, max_steps=1, **quiet, **trainer_options)  # type: ignore[arg-type]
    samples = documents()
    packed = DynamicPackingCollator(512, strategy.parallelism.cp) if dynamic else PackingCollator(512, multiple_of=8)
    loader = DataLoader(samples, batch_size=16 // strategy.dp_size, collate_fn=packed)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    return Outcome(module.initial, strategy.full_state_dict(), module.losses, module.norms)


def check_layout(title: str, found: Any, expected: Any, tolerance: float, *, losses: bool) -> None:
    loss = abs(found[0][0] / expected[0][0] - 1) if losses else 0.0
    norm = abs(found[1][0] / expected[1][0] - 1)
    errors = [float((found[2][n] - c).abs().max() / c.abs().max().clamp(min=1e-12)) for n, c in expected[2].items()]
    change = max(errors, default=0.0)
    text = f"loss {loss:.1e} norm {norm:.1e} change {change:.1e}"
    report(title, max(loss, norm) < tolerance and change < 100 * tolerance, text)


def main() -> None:
    """Run what the arguments and the number of ranks say."""
    warnings.filterwarnings("ignore")
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world == 1 and "reference" not in sys.argv:
        check_tiles()
        check_speed()
    else:
        expected = {} if world == 1 else torch.load(REFERENCE, weights_only=False)
        for name, layout in CASES[world].items():
            for precision, backend in RUNS:
                for packed in ("", "packed", *(["dynamic"] if world > 1 and precision == "32-true" else [])):
                    title = f"{name} {precision} {backend} {packed}"
                    if not is_wanted(title) or ("library" in name and precision == "32-true"):
                        continue
                    faulthandler.dump_traceback_later(90)  # a hang shows where it hangs
                    try:
                        found = trained({**layout, "backend": backend}, precision, packed=packed)
                    except Exception as error:
                        report(title, False, f"{type(error).__name__}: {error}"[:300])
                        traceback.print_exc(limit=6)
                        continue
                    if world == 1:
                        expected[precision, packed] = expected.get((precision, packed), found)
                    if rank == 0:
                        tolerance = 2e-5 if precision == "32-true" else 2e-2
                        wanted = expected[precision, "packed" if packed else ""]
                        check_layout(title, found, wanted, tolerance, losses="dp2" not in name)
        faulthandler.cancel_dump_traceback_later()
        if world == 1:
            torch.save(expected, REFERENCE)
        else:
            check_library(world, rank)
    if rank == 0:
        print(f"{len(FAILED)} of {len(RAN)} failed: {FAILED}", flush=True)
    sys.exit(bool(FAILED) or (rank == 0 and not RAN))


if __name__ == "__main__":
    main()
