"""Loss curves in FP8 beside one in bf16: the same model, seed and batches of real text.

    python benchmarks/fp8_curve.py --fp8 delayed
    python benchmarks/fp8_curve.py --fp8 delayed --head-dim 128 --untied --best

Trains the shape from its first values on the source text of Python's standard library, in bf16 and in FP8, prints the mean
loss of every 20 steps of both, and the relative difference of the means over the last 20 steps. Exits with 1 if that is more
than 1 %. The text is cut into pieces (words, runs of spaces, single marks); the most frequent pieces are a token each, the
bytes of the others one each. Curves are written to ``--save`` and read from there if they are there, so that a call need run
only what is new.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.model_shapes import SHAPES, config_of
from lightning_megatron import MegatronStrategy
from lightning_megatron.data.text import TokenDataset, standard_library_documents
from lightning_megatron.models import GPTModule
from lightning_megatron.precision import MegatronPrecision

_PIECE = re.compile(r"\w+| +|[^\w ]")
_NUM_BYTES = 256
MEAN_OF, LIMIT = 20, 0.01


def text_tokens(num_tokens: int, *, vocab_size: int, text_mb: float) -> Tensor:
    """The first tokens of the standard library's source, int32 ``[num_tokens]``; repeated if it has fewer.

    Args:
        num_tokens: how many.
        vocab_size: 256 bytes and so many less of the most frequent pieces.
        text_mb: text to count pieces in and to read, in MB.
    """
    pieces = [piece for text in standard_library_documents(text_mb) for piece in _PIECE.findall(text)]
    frequent = Counter(pieces).most_common(vocab_size - _NUM_BYTES)
    number = {piece: _NUM_BYTES + place for place, (piece, _) in enumerate(frequent)}
    tokens: list[int] = []
    for piece in pieces:
        if piece in number:
            tokens.append(number[piece])
        else:
            tokens += piece.encode()
        if len(tokens) >= num_tokens:
            break
    found = torch.tensor(tokens, dtype=torch.int32)
    return found.repeat(-(-num_tokens // len(found)))[:num_tokens]


class Losses(Callback):
    """Keeps the loss of each step on the device, and says how fast it goes."""

    def __init__(self) -> None:
        self.losses = list[Tensor]()
        self.start = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """Keep it; the first step, which compiles and plans, is not timed."""
        self.losses.append(outputs["loss"].detach())
        if len(self.losses) == 1:
            self.start = time.perf_counter()


def curve(options: argparse.Namespace, tokens: Tensor, fp8: dict[str, Any]) -> list[float]:
    """The loss of each step."""
    L.seed_everything(options.seed, verbose=False)
    changed: dict[str, Any] = {"tied_embeddings": False} if options.untied else {}
    changed |= {"vocab_size": options.vocab} if options.vocab else {}
    if options.head_dim:
        hidden = SHAPES[options.shape]["hidden_size"]
        changed |= {"num_heads": hidden // options.head_dim, "num_kv_heads": max(1, hidden // options.head_dim // 4)}
    config = config_of(options.shape, options.seq, **changed)
    noted = Losses()
    on_gpu = torch.cuda.is_available()
    trainer = L.Trainer(
        strategy=MegatronStrategy(micro_batch_size=options.mbs),
        plugins=[MegatronPrecision("bf16-mixed", **fp8)],
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[noted],
    )
    module = GPTModule(config, lr=options.lr, warmup_steps=options.steps // 10, max_steps=options.steps)
    data = TokenDataset(tokens, options.seq)
    trainer.fit(module, DataLoader(data, batch_size=options.gbs, shuffle=False))
    losses = torch.stack(noted.losses).float().tolist()
    seconds = time.perf_counter() - noted.start
    rate = options.gbs * options.seq * (len(losses) - 1) / seconds
    print(
        f"{len(losses)} steps, {seconds:.1f} s after the first, {rate:,.0f} tokens/s, loss {losses[0]:.3f} to {losses[-1]:.4f}"
    )
    return [float(loss) for loss in losses]


def kept(options: argparse.Namespace, name: str, tokens: Tensor, fp8: dict[str, Any]) -> list[float]:
    """A curve, from the file if it is there."""
    names = ("shape", "seq", "mbs", "gbs", "steps", "lr", "seed", "head_dim", "untied", "vocab")
    key = json.dumps({"name": name, **{each: getattr(options, each) for each in names}})
    path = Path(options.save) if options.save else None
    known: dict[str, list[float]] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if key not in known:
        print(f"{name}: ", end="", flush=True)
        known[key] = curve(options, tokens, fp8)
        if path is not None:
            path.write_text(json.dumps(known))
    return known[key]


def compare(name: str, narrow: list[float], wide: list[float]) -> bool:
    """Print both curves; whether they end within the limit."""
    length = min(len(narrow), len(wide))
    print(f"{'steps':>9}  {'bf16':>8}  {name:>8}  difference")
    for start in range(0, length, MEAN_OF):
        one, other = (sum(c[start : start + MEAN_OF]) / len(c[start : start + MEAN_OF]) for c in (wide, narrow))
        print(f"{start:>4}-{min(start + MEAN_OF, length) - 1:<4}  {one:8.4f}  {other:8.4f}  {other / one - 1:+.3%}")
    one, other = (sum(c[-MEAN_OF:]) / len(c[-MEAN_OF:]) for c in (wide, narrow))
    difference = other / one - 1
    is_good = abs(difference) <= LIMIT
    print(
        f"{'passed' if is_good else 'FAILED'} {name}: the last {MEAN_OF} steps differ by {difference:+.3%} (limit {LIMIT:.0%})"
    )
    return is_good


def main() -> None:
    """Run both curves and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b" if torch.cuda.is_available() else "tiny")
    for name, default in {"seq": 2048, "mbs": 4, "gbs": 4, "steps": 200, "seed": 1, "head_dim": 0, "vocab": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--text-mb", type=float, default=16.0)
    parser.add_argument("--untied", action="store_true", help="a head of its own weight, which can be in 8 bits")
    parser.add_argument("--fp8", default="delayed", help="recipes with commas between them: delayed,current,blockwise")
    parser.add_argument("--fp8-head", action="store_true")
    parser.add_argument("--fp8-attention", action="store_true")
    parser.add_argument("--fp8-params", action="store_true")
    parser.add_argument("--fp8-fast-gradients", action="store_true")
    parser.add_argument("--best", action="store_true", help="head, attention and parameters in 8 bits")
    parser.add_argument("--save", default="", metavar="PATH", help="a JSON file of curves, read and added to")
    options = parser.parse_args()
    vocab_size = min(32768, options.vocab or SHAPES[options.shape]["vocab_size"])
    num_tokens = options.steps * options.gbs * options.seq + 1
    tokens = text_tokens(num_tokens, vocab_size=vocab_size, text_mb=options.text_mb)
    share = float((tokens < _NUM_BYTES).float().mean())
    print(f"{num_tokens:,} tokens of {int(tokens.unique().numel()):,} kinds, {share:.1%} of them single bytes", flush=True)
    wide = kept(options, "bf16", tokens, {})
    passed = []
    for recipe in options.fp8.split(","):
        names = ("fp8_head", "fp8_attention", "fp8_params", "fp8_fast_gradients")
        wanted = {name: getattr(options, name) or options.best for name in names}
        chosen = {"fp8": recipe, **{name: True for name, value in wanted.items() if value}}
        name = "+".join([recipe, *(name.removeprefix("fp8_") for name in chosen if name != "fp8")])
        passed.append(compare(name, kept(options, name, tokens, chosen), wide))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
