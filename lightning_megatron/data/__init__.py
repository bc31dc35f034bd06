"""Real text on every machine: a corpus, a tokenizer, a dataset of token windows and a ``LightningDataModule`` of it."""

from lightning_megatron.data.datamodule import TextDataModule
from lightning_megatron.data.packing import DynamicPackingCollator, PackingCollator, first_fit_decreasing
from lightning_megatron.data.text import TextCache, TokenDataset, prepare_text, standard_library_documents

__all__ = [
    "DynamicPackingCollator",
    "PackingCollator",
    "TextCache",
    "TextDataModule",
    "TokenDataset",
    "first_fit_decreasing",
    "prepare_text",
    "standard_library_documents",
]
