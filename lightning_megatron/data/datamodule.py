"""``TextDataModule``: the text of ``lightning_megatron.data.text`` as Lightning wants it."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron.data.text import TextCache, TokenDataset, prepare_text


class TextDataModule(LightningDataModule):
    """Batches ``{"tokens": [B, S], "labels": [B, S]}`` of the Python standard library's source.

    Args:
        seq_len: S, tokens a sample.
        batch_size: B, samples of one Lightning batch of one model replica. The strategy cuts it into micro-batches.
        vocab_size: entries of the tokenizer; give the model the same.
        corpus_mb: text to use, in MB.
        cache_dir: where the tokenizer and the tokens are kept; on several machines each prepares its own copy.
        num_workers: worker processes of each loader.
        val_fraction: share of the text, at its end, that is kept for validation.

    Raises:
        ValueError: a size that leaves the training or the validation set empty.
    """

    def __init__(
        self,
        seq_len: int = 128,
        batch_size: int = 16,
        *,
        vocab_size: int = 1024,
        corpus_mb: float = 4.0,
        cache_dir: str = ".demo/text",
        num_workers: int = 0,
        val_fraction: float = 0.05,
    ) -> None:
        super().__init__()
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must lie between 0 and 1, both ends excluded.")
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.corpus_mb = corpus_mb
        self.cache_dir = Path(cache_dir)
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self._train: TokenDataset | None = None
        self._val: TokenDataset | None = None

    @override
    def prepare_data(self) -> None:
        """Make the cache. Lightning calls it on one process of each host; several at once do no harm either."""
        self.cache()

    @override
    def setup(self, stage: str) -> None:
        """Open the cache on every rank and cut the token stream into a training part and, after it, a validation part."""
        tokens = self.cache().tokens()
        num_train = int(len(tokens) * (1 - self.val_fraction))
        self._train = TokenDataset(tokens[:num_train], self.seq_len)
        self._val = TokenDataset(tokens[num_train:], self.seq_len)

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled; under a strategy of several replicas Lightning swaps in a sampler that shuffles and divides."""
        return self._loader(self._train, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The held-out windows in order."""
        return self._loader(self._val, shuffle=False)

    def cache(self) -> TextCache:
        """The prepared folder, made if it is missing."""
        return prepare_text(self.cache_dir, vocab_size=self.vocab_size, corpus_mb=self.corpus_mb)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ids: list[int] = self.cache().tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, end-of-text marks left out."""
        text: str = self.cache().tokenizer.decode(tokens)
        return text

    def _loader(self, dataset: TokenDataset | None, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        if dataset is None:
            raise RuntimeError("TextDataModule has no data yet: call prepare_data() and setup('fit'), or let a Trainer do it.")
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
