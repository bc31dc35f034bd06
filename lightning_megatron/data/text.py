"""Text that needs no download: the Python standard library's own source, a BPE tokenizer trained on it, windows of tokens.

Nothing here knows about Lightning or about ranks. Files are written under a temporary name and renamed when complete, so
that several processes, on one host or on a shared file system, may prepare the same folder at once.
"""

from __future__ import annotations

import platform
import shutil
import sysconfig
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
BYTES_PER_MB = 1_000_000
_MIN_VOCAB_SIZE = 1 + 256  # the end-of-text token and every byte
# Tests and packages differ between machines; `encodings` is tables of numbers, not text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})


def standard_library_documents(max_mb: float, *, root: Path | None = None) -> Iterator[str]:
    """Yield source files of the running Python's standard library, one document a file, at most ``max_mb`` MB of UTF-8.

    The order is that of a hash of each file's relative path: the same on every machine with that Python, and such that a
    small cap, and the tail that is held out for validation, are samples of the whole library instead of one package.

    Args:
        max_mb: size cap in MB (10^6 bytes). The last document is cut to fit.
        root: folder to read ``*.py`` files from, instead of the standard library.

    Raises:
        ValueError: ``max_mb`` is not positive.
        FileNotFoundError: there is no source file below ``root``.
    """
    if max_mb <= 0:
        raise ValueError(f"max_mb={max_mb} leaves no text: give a size in MB above 0.")
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.py"))]
    names = [name for name in names if not _SKIPPED_FOLDERS.intersection(name.split("/"))]
    if not names:
        raise FileNotFoundError(f"no *.py file below {folder}: this Python ships without its library's source; pass root.")
    budget = int(max_mb * BYTES_PER_MB)
    for name in sorted(names, key=lambda name: blake2b(name.encode()).digest()):
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        encoded = text.encode()[:budget]
        if encoded:
            yield encoded.decode(errors="ignore")
        budget -= len(encoded)
        if budget <= 0:
            return


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; token 0 ends a document. Needs the ``hf`` extra.

    Raises:
        ValueError: ``vocab_size`` is too small to hold every byte.
        ImportError: ``tokenizers`` is not installed.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} is below {_MIN_VOCAB_SIZE} (256 bytes and the end-of-text token): give at least that."
        )
    tokenizers = _import_tokenizers()
    tokenizer: Tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


@dataclass(frozen=True)
class TextCache:
    """A prepared folder: ``tokenizer.json`` and ``tokens.bin`` (int32, documents end with token 0)."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The trained tokenizer, read from disk."""
        tokenizer: Tokenizer = _import_tokenizers().Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return tokenizer

    def tokens(self) -> Tensor:
        """All tokens, int32 ``[N]``, mapped from disk and read as they are used."""
        path = self.folder / "tokens.bin"
        num_tokens = path.stat().st_size // torch.int32.itemsize
        return torch.from_file(str(path), shared=False, size=num_tokens, dtype=torch.int32)


def prepare_text(cache_dir: Path | str, *, vocab_size: int, corpus_mb: float) -> TextCache:
    """Make the tokenizer and the tokens of the standard library's source once; later calls find them.

    Args:
        cache_dir: folder for prepared corpora; each setting and each Python version has its own folder in it.
        vocab_size: entries of the tokenizer.
        corpus_mb: text to read, in MB.

    Raises:
        ValueError: ``vocab_size`` cannot hold every byte, or the text is too small to make that many entries.
        ImportError: ``tokenizers`` is not installed.
    """
    cache_dir = Path(cache_dir)
    folder = cache_dir / f"stdlib-{platform.python_version()}-{corpus_mb:g}mb-vocab{vocab_size}"
    if folder.is_dir():
        return TextCache(folder)
    cache_dir.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache_dir))
    unfinished.chmod(0o755)  # mkdtemp makes it private; a shared cache is read by others
    try:
        _write_text(unfinished, vocab_size, corpus_mb)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return TextCache(folder)


def _write_text(folder: Path, vocab_size: int, corpus_mb: float) -> None:
    documents = list(standard_library_documents(corpus_mb))
    tokenizer = train_tokenizer(documents, vocab_size)
    if (made := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(
            f"{corpus_mb} MB of text made {made} tokenizer entries, not vocab_size={vocab_size}: "
            f"raise corpus_mb or lower vocab_size."
        )
    tokens = array("i")
    assert tokens.itemsize == torch.int32.itemsize
    for encoding in tokenizer.encode_batch(documents):
        tokens.extend(encoding.ids)
        tokens.append(END_OF_TEXT_ID)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokens.bin").write_bytes(tokens.tobytes())


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process has just made the same folder: keep that one
            raise


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Windows of a token stream for next-token prediction: ``{"tokens": [S], "labels": [S]}``, int64.

    ``labels[i]`` is the token after ``tokens[i]``, shifted here so that a later cut of the sequence needs no neighbour.
    Windows share no label; tokens after the last full window are not used.

    Args:
        tokens: integer tokens ``[N]``; may be mapped from disk.
        seq_len: S.

    Raises:
        ValueError: not even one window of S + 1 tokens.
    """

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        if seq_len < 1 or len(tokens) < seq_len + 1:
            raise ValueError(
                f"{len(tokens)} tokens make no window of seq_len + 1 = {seq_len + 1} tokens: lower seq_len or give more text."
            )
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._seq_len
        window = self._tokens[start : start + self._seq_len + 1].long()
        return {"tokens": window[:-1], "labels": window[1:]}


def _import_tokenizers() -> ModuleType:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(
            "The text corpus needs the 'tokenizers' package: pip install 'lightning-megatron[hf]' (or tokenizers alone)."
        ) from error
    return tokenizers
