"""A checkpoint as a directory: what makes it complete, how it takes its place, how it is removed."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

META_FILE = "meta.pt"
INDEX_FILE = ".metadata"


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a complete checkpoint (a link to one counts)."""
    return (Path(path) / META_FILE).is_file() and (Path(path) / INDEX_FILE).is_file()


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: a directory, a file or a link (never what the link points to). One rank calls it."""
    path = Path(path)
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)


def temporary(path: Path) -> Path:
    """Where a checkpoint is written before it takes its place: beside it, so that a rename is enough."""
    return path.with_name(f".{path.name}.tmp")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def prepare(path: Path) -> None:
    """Make an empty temporary directory for a checkpoint, without what an interrupted save has left there."""
    if _aside(path).exists() and not os.path.lexists(path):
        os.rename(_aside(path), path)  # a save was interrupted between its two renames
    for stale in (temporary(path), _aside(path)):
        if os.path.lexists(stale):
            remove(stale)
    temporary(path).mkdir(parents=True)


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write the rest of the checkpoint, whose presence says that the data is complete."""
    with open(folder / META_FILE, "wb") as stream:
        torch.save(meta, stream)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_directory(folder)


def commit(path: Path) -> None:
    """Let the temporary directory take the place of whatever is at ``path``.

    The old checkpoint is renamed before the new one arrives and deleted after, so that one of them is always whole.
    """
    replaced = os.path.lexists(path)
    if replaced:
        os.rename(path, _aside(path))
    os.rename(temporary(path), path)
    _sync_directory(path.parent)
    if replaced:
        remove(_aside(path))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(path: Path) -> None:
    """Make sure that a complete checkpoint lies at ``path``.

    Raises:
        FileNotFoundError: there is nothing, or the checkpoint is incomplete; the message says what is missing.
        ValueError: there is something else.
    """
    if not path.exists():
        old = _aside(path)
        hint = f" {old} holds an older one that a save was replacing when it was interrupted." if old.exists() else ""
        raise FileNotFoundError(f"there is no checkpoint at {path}.{hint}")
    if path.is_file():
        raise ValueError(f"{path} is a single file, not a checkpoint directory of this strategy.")
    missing = [name for name in (META_FILE, INDEX_FILE) if not (path / name).is_file()]
    if len(missing) == 2:
        raise ValueError(f"{path} is a directory but not a checkpoint: it has neither {META_FILE} nor {INDEX_FILE}.")
    if missing:
        raise FileNotFoundError(f"the checkpoint {path} is incomplete: {missing[0]} is missing. Was its save interrupted?")


def read_index(path: Path) -> Metadata:
    """The checkpoint's index: every tensor's shape, dtype and parts, and where they lie. Trusted files only (a pickle).

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with open(path / INDEX_FILE, "rb") as stream:
            index = pickle.load(stream)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"{path / INDEX_FILE} is damaged: {error}.") from error
    if not isinstance(index, Metadata) or index.storage_data is None:
        raise ValueError(f"{path / INDEX_FILE} is not the index of a checkpoint.")
    return index


def read_pickled(file: Path, weights_only: bool | None) -> dict[str, Any]:
    """A dict saved by ``torch.save``, on the CPU.

    Args:
        file: the file.
        weights_only: allow plain containers and tensors alone; ``None`` means ``True``, as in torch.

    Raises:
        ValueError: it cannot be read; where a type was refused the message names it.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise ValueError(
                f"{file} holds an object of type {found[1]}, which is not read with weights_only=True. If you trust the "
                f"file, load it with weights_only=False, or allow the type by torch.serialization.add_safe_globals."
            ) from error
        raise ValueError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is damaged: {str(error).splitlines()[0] if str(error) else 'it ends early'}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not the dict of a checkpoint.")
    return content
