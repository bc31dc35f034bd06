"""Train on long sequences of packed documents, each sequence cut over context-parallel ranks.

python examples/long_context.py                                                          # 2 CPU ranks: cp=2
python examples/long_context.py --devices 4 --cp 4 --packing dynamic                     # short documents on fewer ranks
python examples/long_context.py --accelerator gpu --precision bf16-mixed --seq-len 131072 --hidden-size 1024
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.data import DynamicPackingCollator, PackingCollator, standard_library_documents
from lightning_megatron.models import GPTConfig, GPTModule

OPTIONS = (
    ("cp", 2, "ranks over which each sequence is cut"),
    ("cp-comm", "p2p", "p2p (ring), all_gather, a2a or a2a+p2p"),
    ("packing", "static", "static: each document over all cp ranks; dynamic: over as few as it needs"),
    ("tp", 1, "tensor-parallel size"),
    ("accelerator", "cpu", "cpu or gpu"),
    ("devices", 2, "ranks of one machine"),
    ("precision", "32-true", "32-true, bf16-mixed or bf16-true"),
    ("seq-len", 512, "tokens of a row, into which documents are packed"),
    ("hidden-size", 64, "width of the model"),
    ("documents", 8, "documents a step and model replica"),
    ("max-steps", 10, "optimizer steps"),
    ("corpus-mb", 1.0, "text to train on"),
    ("lr", 5e-3, "peak learning rate"),
)


def documents(options: Namespace) -> list[Tensor]:
    """Source files of Python's standard library as bytes, one document a file, cut to the length of a row."""
    texts = standard_library_documents(options.corpus_mb)
    return [torch.tensor(list(text.encode()[: options.seq_len]), dtype=torch.int64) for text in texts]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    for name, default, meaning in OPTIONS:
        known = {"packing": ("static", "dynamic")}.get(name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=meaning, choices=known)
    options = parser.parse_args()
    seed_everything(0, verbose=False)
    sizes = {"vocab_size": 256, "max_seq_len": options.seq_len, "num_layers": 2, "hidden_size": options.hidden_size}
    config = GPTConfig(**sizes, num_heads=4, num_kv_heads=2, init_std=0.05)
    module = GPTModule(config, lr=options.lr, warmup_steps=min(2, options.max_steps - 1), max_steps=options.max_steps)
    # Every document is cut into 2 * cp chunks of its own, and rank r holds chunks r and 2 * cp - 1 - r.
    collate: PackingCollator | DynamicPackingCollator = PackingCollator(options.seq_len, multiple_of=2 * options.cp)
    if options.packing == "dynamic":
        collate = DynamicPackingCollator(options.seq_len, options.cp)
    loader = DataLoader(documents(options), batch_size=options.documents, shuffle=True, drop_last=True, collate_fn=collate)
    trainer = Trainer(
        strategy=MegatronStrategy(tp=options.tp, cp=options.cp, cp_comm=options.cp_comm, micro_batch_size=1),
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['train_loss']):.3f} nats a byte", flush=True)


if __name__ == "__main__":
    main()
