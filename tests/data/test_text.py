"""The corpus is deterministic and capped, the cache survives races and failures, windows predict the next token."""

from __future__ import annotations

import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_megatron.data import TextDataModule, TokenDataset, prepare_text, standard_library_documents, text

VOCAB_SIZE = 400
CORPUS_MB = 0.1


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    prepare_text(folder, vocab_size=VOCAB_SIZE, corpus_mb=CORPUS_MB)
    return folder


def test_the_corpus_is_capped_and_the_same_every_time() -> None:
    documents = list(standard_library_documents(0.2))
    size = sum(len(document.encode()) for document in documents)
    assert 0.2e6 - 4 < size <= 0.2e6  # a cut in the middle of a character drops its few bytes
    assert documents == list(standard_library_documents(0.2))


def test_the_corpus_is_the_source_of_the_standard_library_and_nothing_installed() -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documents = set(standard_library_documents(1000.0))
    assert (stdlib / "argparse.py").read_text() in documents
    assert (stdlib / "asyncio" / "tasks.py").read_text() in documents
    assert Path(pytest.__file__).read_text() not in documents


def test_the_order_of_documents_does_not_depend_on_the_order_on_disk(tmp_path: Path) -> None:
    names = ["a.py", "b/c.py", "d.py", "test/x.py"]
    for folder, order in (("one", names), ("two", names[::-1])):
        for name in order:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {name}\n")
    one = list(standard_library_documents(1.0, root=tmp_path / "one"))
    assert one == list(standard_library_documents(1.0, root=tmp_path / "two"))
    assert sorted(one) == ["# a.py\n", "# b/c.py\n", "# d.py\n"]


def test_a_folder_without_source_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        list(standard_library_documents(1.0, root=tmp_path))


@pytest.mark.parametrize("max_mb", [0, -1.0])
def test_an_empty_corpus_is_refused(max_mb: float) -> None:
    with pytest.raises(ValueError, match="leaves no text"):
        list(standard_library_documents(max_mb))


def test_tokens_decode_to_the_text_that_they_were_made_of(cache_dir: Path) -> None:
    cache = prepare_text(cache_dir, vocab_size=VOCAB_SIZE, corpus_mb=CORPUS_MB)
    tokens = cache.tokens()
    assert tokens.dtype == torch.int32
    assert int(tokens.max()) < VOCAB_SIZE
    documents = list(standard_library_documents(CORPUS_MB))
    assert int((tokens == text.END_OF_TEXT_ID).sum()) == len(documents)
    assert cache.tokenizer.decode(tokens.tolist(), skip_special_tokens=True) == "".join(documents)


def test_a_tokenizer_round_trips_bytes_that_it_never_saw(cache_dir: Path) -> None:
    tokenizer = prepare_text(cache_dir, vocab_size=VOCAB_SIZE, corpus_mb=CORPUS_MB).tokenizer
    assert tokenizer.decode(tokenizer.encode("汉字 \t\x07 é").ids) == "汉字 \t\x07 é"


def _prepare(folder: Path) -> bytes:
    return (prepare_text(folder, vocab_size=VOCAB_SIZE, corpus_mb=CORPUS_MB).folder / "tokens.bin").read_bytes()


def test_processes_that_prepare_one_folder_at_once_all_get_the_same_complete_text(tmp_path: Path, cache_dir: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("fork")) as pool:
        results = list(pool.map(_prepare, [tmp_path] * 3))
    assert results == [_prepare(cache_dir)] * 3
    assert len(list(tmp_path.iterdir())) == 1, "temporary folders were left behind"


def test_a_failed_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="raise corpus_mb or lower vocab_size"):
        prepare_text(tmp_path, vocab_size=50_000, corpus_mb=0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_without_room_for_every_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size=256 is below 257"):
        prepare_text(tmp_path, vocab_size=256, corpus_mb=0.01)


def test_a_missing_tokenizers_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"lightning-megatron\[hf\]"):
        prepare_text(tmp_path, vocab_size=VOCAB_SIZE, corpus_mb=CORPUS_MB)


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(5, 1), (8, 1), (9, 2), (13, 3)])
def test_windows_predict_every_token_but_the_first_exactly_once(num_tokens: int, num_windows: int) -> None:
    dataset = TokenDataset(torch.arange(num_tokens, dtype=torch.int32), seq_len=4)
    assert len(dataset) == num_windows
    items = [dataset[i] for i in range(len(dataset))]
    labels = torch.cat([item["labels"] for item in items])
    assert labels.tolist() == list(range(1, 4 * num_windows + 1))
    assert torch.equal(torch.cat([item["tokens"] for item in items]) + 1, labels)
    assert labels.dtype == torch.int64


def test_a_window_past_the_end_is_an_index_error_so_that_iteration_stops() -> None:
    dataset = TokenDataset(torch.arange(9), seq_len=4)
    assert len(list(dataset)) == 2
    with pytest.raises(IndexError):
        dataset[-1]


def test_too_few_tokens_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"4 tokens make no window of seq_len \+ 1 = 5"):
        TokenDataset(torch.arange(4), seq_len=4)


def _data(cache_dir: Path, **options: float) -> TextDataModule:
    return TextDataModule(16, 4, vocab_size=VOCAB_SIZE, corpus_mb=CORPUS_MB, cache_dir=str(cache_dir), **options)  # type: ignore[arg-type]


def test_training_and_validation_windows_come_from_different_text(cache_dir: Path) -> None:
    data = _data(cache_dir, val_fraction=0.25)
    data.setup("fit")
    tokens = data.cache().tokens()
    num_train = int(len(tokens) * 0.75)
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    assert isinstance(data.val_dataloader().sampler, SequentialSampler)
    validation = torch.cat([batch["tokens"].flatten() for batch in data.val_dataloader()])
    assert torch.equal(validation, tokens[num_train : num_train + len(validation)].long())
    train = data.train_dataloader().dataset
    assert torch.equal(train[len(train) - 1]["labels"], tokens[len(train) * 16 - 15 : len(train) * 16 + 1].long())  # type: ignore[arg-type]
    assert len(train) * 16 + 1 <= num_train  # type: ignore[arg-type]


def test_encode_and_decode_are_inverse(cache_dir: Path) -> None:
    data = _data(cache_dir)
    assert data.decode(data.encode("def f(self):\n    return 1\n")) == "def f(self):\n    return 1\n"


def test_a_loader_before_setup_says_what_to_call(cache_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="setup"):
        _data(cache_dir).train_dataloader()


@pytest.mark.parametrize("val_fraction", [0.0, 1.0])
def test_a_split_without_one_side_is_refused(val_fraction: float, cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="val_fraction"):
        _data(cache_dir, val_fraction=val_fraction)


class _Bigram(LightningModule):
    """Next-token table: learns what little it can, to show that batches fit a plain Lightning module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)
        self.losses: list[float] = []

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.table(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_a_stock_trainer_learns_from_the_data_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = _Bigram()
    trainer = Trainer(
        max_steps=150,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=2,
    )
    trainer.fit(module, datamodule=_data(tmp_path))  # an empty folder: Lightning's prepare_data fills it
    assert sum(module.losses[-5:]) < 0.8 * sum(module.losses[:5])
