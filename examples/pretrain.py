"""Pretrain a small Llama on the text that every machine with Python has: train, save, resume, continue a prompt.

python examples/pretrain.py                                              # 4 CPU ranks: tp=2 x pp=2
python examples/pretrain.py --accelerator gpu --precision bf16-mixed     # 4 GPUs
"""

from __future__ import annotations

import math
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import MegatronStrategy
from lightning_megatron.data import TextDataModule
from lightning_megatron.models import GPTConfig, GPTModule

RESUMED_STEPS, PROMPT = 20, "    def __init__(self"
OPTIONS = (
    ("tp", 2, "tensor-parallel size"),
    ("pp", 2, "pipeline-parallel size"),
    ("accelerator", "cpu", "cpu or gpu"),
    ("devices", 4, "ranks of one machine"),
    ("nodes", 1, "machines"),
    ("precision", "32-true", "32-true, bf16-mixed or bf16-true"),
    ("max-steps", 400, "optimizer steps before the checkpoint that is resumed"),
    ("seq-len", 128, "tokens a sample"),
    ("batch-size", 16, "samples a step and model replica"),
    ("micro-batch-size", 4, "samples that pass the pipeline together"),
    ("vocab-size", 512, "entries of the tokenizer"),
    ("corpus-mb", 2.0, "text to train on"),
    ("lr", 5e-3, "peak learning rate"),
    ("output", ".demo", "folder for text, logs and checkpoints"),
)


class LossHistory(Callback):
    """Keeps the training loss of every step; the strategy puts the same value on every rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def parse_options() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    for name, default, meaning in OPTIONS:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=meaning)
    return parser.parse_args()


def make_module(options: Namespace) -> GPTModule:
    sizes = {"vocab_size": options.vocab_size, "max_seq_len": options.seq_len, "num_layers": 4, "hidden_size": 128}
    config = GPTConfig(**sizes, num_heads=4, num_kv_heads=2, ffn_hidden_size=384, init_std=0.05)
    warmup_steps = min(20, options.max_steps // 10)
    return GPTModule(config, lr=options.lr, warmup_steps=warmup_steps, max_steps=options.max_steps + RESUMED_STEPS)


def make_trainer(options: Namespace, max_steps: int, callbacks: list[Callback]) -> Trainer:
    where = {"accelerator": options.accelerator, "devices": options.devices, "num_nodes": options.nodes}
    validation = {"val_check_interval": max(1, options.max_steps // 2), "check_val_every_n_epoch": None, "limit_val_batches": 8}
    training = {"max_steps": max_steps, "precision": options.precision, "gradient_clip_val": 1.0}
    strategy = MegatronStrategy(tp=options.tp, pp=options.pp, micro_batch_size=options.micro_batch_size)
    return Trainer(strategy=strategy, **where, **training, **validation, default_root_dir=options.output, callbacks=callbacks)


def main() -> None:
    options = parse_options()
    seed_everything(1)
    sizes = {"vocab_size": options.vocab_size, "corpus_mb": options.corpus_mb}
    data = TextDataModule(options.seq_len, options.batch_size, **sizes, cache_dir=f"{options.output}/text")
    history, checkpoint = LossHistory(), ModelCheckpoint(monitor="val_loss", save_last=True)
    make_trainer(options, options.max_steps, [history, checkpoint]).fit(make_module(options), data)

    saved = checkpoint.last_model_path
    module = make_module(options)  # new weights: all that it knows comes from the checkpoint
    trainer = make_trainer(options, options.max_steps + RESUMED_STEPS, [history, checkpoint])
    trainer.fit(module, data, ckpt_path=saved)

    prompt = torch.tensor([data.encode(PROMPT)], device=trainer.strategy.root_device)
    tokens = module.generate(prompt, 60, temperature=0.5, top_k=20)  # every rank of a pipeline takes part
    if trainer.is_global_zero:
        start, end = history.losses[0], sum(history.losses[-10:]) / 10
        print(f"resumed from {saved}; the model continues {PROMPT!r}:\n\n{data.decode(tokens[0].tolist())}\n")
        print(f"loss start {start:.3f} end {end:.3f} ln(vocab) {math.log(options.vocab_size):.3f}")


if __name__ == "__main__":
    main()
