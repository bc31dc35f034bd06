"""Whose cuDNN Transformer Engine finds, with files that stand for it; a GPU machine with two of them runs tests/gpu."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_megatron.layers.te_backend import library

PARTS = ("graph", "ops", "cnn", "adv", "engines_precompiled", "engines_runtime_compiled", "heuristic")


class Process:
    """What is mapped into the process, what it loads, and where its imports would look."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[str] = []
        self.seen: list[str | None] = []
        self.version = 91900
        self._maps = folder / "maps"
        for name in ("CUDNN_HOME", "CUDNN_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
        monkeypatch.setattr(library, "_MAPPED", self._maps)
        monkeypatch.setattr(library.ctypes, "CDLL", self._load)
        monkeypatch.setattr(library, "import_module", self._import)
        self.holds()

    def holds(self, *paths: Path) -> None:
        lines = ["7f00-7f01 r-xp 00000000 08:01 1", *(f"7f0{n}-7f0a r-xp 0 08:01 2   {path}" for n, path in enumerate(paths))]
        self._maps.write_text("\n".join(lines) + "\n")

    def _load(self, path: str) -> Any:
        self.loaded.append(path)
        return SimpleNamespace(cudnnGetVersion=lambda: self.version)

    def _import(self, name: str) -> ModuleType:
        self.seen.append(os.environ.get("CUDNN_HOME"))
        return ModuleType(name)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    library.load.cache_clear()
    return Process(tmp_path, monkeypatch)


def cudnn(folder: Path, *, missing: str = "") -> Path:
    folder.mkdir(parents=True)
    for name in ("libcudnn", *(f"libcudnn_{part}" for part in PARTS if part != missing)):
        (folder / f"{name}.so.9").touch()
    return folder / "libcudnn.so.9"


def test_parts_of_torchs_cudnn_are_loaded_before_the_library(tmp_path: Path, process: Process) -> None:
    entry = cudnn(tmp_path / "of torch")
    process.holds(entry, entry, entry.with_name("libcudnn_ops.so.9"))
    assert library.load().__name__ == "transformer_engine.pytorch"
    assert process.loaded == [str(entry), *(str(entry.with_name(f"libcudnn_{part}.so.9")) for part in PARTS)]
    assert process.seen == [str(entry.parent)]
    assert "CUDNN_HOME" not in os.environ
    library.load()
    assert len(process.seen) == 1


def test_the_environment_is_as_before_after_a_failure(
    tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> ModuleType:
        raise ImportError(name)

    process.holds(cudnn(tmp_path / "of_torch"))
    monkeypatch.setattr(library, "import_module", fails)
    with pytest.raises(ImportError):
        library.load()
    assert "CUDNN_HOME" not in os.environ


@pytest.mark.parametrize("name", ["CUDNN_HOME", "CUDNN_PATH"])
def test_what_the_user_has_chosen_stays(tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    process.holds(cudnn(tmp_path / "of_torch"))
    monkeypatch.setenv(name, "/opt/mine")
    library.load()
    assert process.loaded == []
    assert os.environ[name] == "/opt/mine"


def test_what_is_imported_already_stays(tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process.holds(cudnn(tmp_path / "of_torch"))
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    library.load()
    assert (process.loaded, process.seen) == ([], [None])


@pytest.mark.parametrize("case", ["none", "two", "in parts", "no entry", "old", "no list"])
def test_other_cudnns_are_left_alone(tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    entry = cudnn(tmp_path / "of_torch", missing="cnn" if case == "in parts" else "")
    if case == "two":
        process.holds(entry, cudnn(tmp_path / "of_system"))
    elif case == "no entry":
        process.holds(entry.with_name("libcudnn_ops.so.9"))
    elif case != "none":
        process.holds(entry)
    if case == "old":
        process.version = 91002
    if case == "no list":
        monkeypatch.setattr(library, "_MAPPED", tmp_path / "nothing")
    library.load()
    assert process.loaded in ([], [str(entry)])  # the entry is asked for its version
    assert process.seen == [None]
