"""A checkpoint as a directory: what makes it complete, how it takes its place, how it is removed."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import shutil
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

META_FILE = "meta.pt"
INDEX_FILE = ".metadata"
SUMS_FILE = "checksums.json"
_WORKPLACE = ".incomplete"  # apart, as Lightning makes numbers of all digits in names that it finds beside checkpoints
_QUIET_SECONDS = 600.0
_TRIES = 100


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a complete checkpoint (a link to one counts)."""
    return (Path(path) / META_FILE).is_file() and (Path(path) / INDEX_FILE).is_file()


def temporary(path: Path) -> Path:
    """Where this process writes a checkpoint before it takes its place: on the same disk, so that a rename is enough."""
    return _hidden(path, "tmp")


def prepare(path: Path) -> Path:
    """Make an empty temporary directory for a checkpoint, without what interrupted saves have left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent)
    folder = temporary(path)
    _in_workplace(folder.parent, folder.mkdir)
    return folder


def discard(path: Path) -> None:
    """Delete the temporary directory of a save that has failed, as far as that is possible."""
    with suppress(OSError):
        _delete(temporary(path))


def write_file(folder: Path, name: str, content: bytes) -> None:
    """Write a small file and flush it to the disk."""
    with open(folder / name, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    sync_directory(folder)


def commit(path: Path) -> None:
    """Let the temporary directory take the place of whatever is at ``path``.

    The two are exchanged in one step, so that there is a whole checkpoint at any time. File systems that cannot do that
    get two renames; ``recover`` undoes the first if the second does not come.
    """
    folder = temporary(path)
    if not os.path.lexists(path):
        os.rename(folder, path)
        replaced = None
    elif _exchange(folder, path):
        replaced = folder
    else:
        replaced = _aside(path)
        os.rename(path, replaced)
        os.rename(folder, path)
    sync_directory(path.parent)
    if replaced is not None:
        _delete(replaced)
    _leave(folder.parent)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: a directory, a file or a link (never what the link points to). One rank calls it.

    A directory goes out of sight first: interrupted, it leaves nothing that looks like a checkpoint.
    """
    path = Path(path)
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    gone = _hidden(path, "removed")
    if os.path.lexists(gone):
        _delete(gone)
    _in_workplace(gone.parent, lambda: os.rename(path, gone))
    _delete(gone)


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)
    _leave(path.parent)


def _in_workplace(workplace: Path, action: Callable[[], object]) -> None:
    """Do something in the directory, made if need be: what ends on another thread removes it when it is empty."""
    for _ in range(_TRIES):
        workplace.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            action()
            return
    action()


def _leave(workplace: Path) -> None:
    if workplace.name == _WORKPLACE:
        with suppress(OSError):
            workplace.rmdir()  # unless something else is going on there


def hold_place(path: Path, older: Path) -> None:
    """Let ``path`` mean an older checkpoint until ``commit`` puts the new one there: links to it lead somewhere meanwhile."""
    if not os.path.lexists(path) and is_checkpoint(older):
        os.symlink(os.path.relpath(older.resolve(), path.parent.resolve()), path, target_is_directory=True)


def announce_link(path: Path, target: Path) -> None:
    """Say that the link ``path`` is about to be replaced by one to ``target``: ``recover_links`` makes it if that fails.

    Lightning removes ``last.ckpt``, and what it led to, before it makes the new link.
    """
    announced = path.parent / _WORKPLACE / f"{path.name}.link"
    announced.unlink(missing_ok=True)
    to = os.path.relpath(target, path.parent)
    _in_workplace(announced.parent, lambda: os.symlink(to, announced, target_is_directory=True))


def recover_links(folder: Path) -> None:
    """Make announced links that are missing or lead nowhere. At the start of a job; any number of ranks may call it at once."""
    for announced in (folder / _WORKPLACE).glob("*.link"):
        path = folder / announced.stem
        if not path.exists() and is_checkpoint(folder / os.readlink(announced)):
            with suppress(FileNotFoundError):  # another rank has done it
                os.replace(announced, path)


def forget_links(folder: Path) -> None:
    """Forget what was announced: all links are there."""
    for announced in (folder / _WORKPLACE).glob("*.link"):
        announced.unlink(missing_ok=True)
        _leave(announced.parent)


def recover(folder: Path) -> list[str]:
    """Undo replacements that were interrupted between their two renames. Any number of ranks may call it at once.

    Returns:
        The names of the checkpoints that are there again.
    """
    found = []
    for old in (folder / _WORKPLACE).glob("*.old"):
        path = folder / old.stem
        if not os.path.lexists(path):
            try:
                os.rename(old, path)
            except FileNotFoundError:
                continue  # another rank has done it
            found.append(path.name)
    return found


def leftovers(folder: Path) -> list[Path]:
    """Directories and links that interrupted saves and removals have left in a folder of checkpoints."""
    return sorted(entry for entry in (folder / _WORKPLACE).glob("*") if entry.suffix != ".link")


def clean(folder: Path) -> None:
    """Put replaced checkpoints back where they are missing, delete leftovers, and report both as warnings. One rank calls it.

    What another process may still be writing stays: one that is alive on this machine, or on another machine one that has
    written something in the last minutes.
    """
    for name in recover(folder):
        warnings.warn(f"{folder / name} is there again: a save was interrupted while it was replaced.", stacklevel=2)
    for entry in leftovers(folder):
        if _is_stale(entry):
            _delete(entry)
            warnings.warn(f"{entry} was left by a save or removal that was interrupted; it has been deleted.", stacklevel=2)


def _hidden(path: Path, kind: str) -> Path:
    return path.parent / _WORKPLACE / f"{path.name}.{socket.gethostname()}-{os.getpid()}.{kind}"


def _aside(path: Path) -> Path:
    return path.parent / _WORKPLACE / f"{path.name}.old"


def _is_stale(entry: Path) -> bool:
    owner = re.search(r"-(\d+)\.(?:tmp|removed)$", entry.name)
    if owner is None:
        return True
    if entry.name.endswith(f".{socket.gethostname()}-{owner[1]}{entry.suffix}"):
        return int(owner[1]) == os.getpid() or not _is_alive(int(owner[1]))
    times = [item.lstat().st_mtime for item in (entry, *entry.glob("*"))]
    return time.time() - max(times) > _QUIET_SECONDS


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Swap two entries in one step, where the system can."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
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
        kind = "a link that leads nowhere" if path.is_symlink() else "no checkpoint"
        old = f" {_aside(path)} holds an older one that a save was replacing when it was interrupted."
        raise FileNotFoundError(f"there is {kind} at {path}.{old if _aside(path).exists() else ''}")
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
    except Exception as error:  # a pickle that is not one may raise anything
        raise ValueError(f"{path / INDEX_FILE} is damaged: {str(error) or type(error).__name__}.") from error
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
        raise ValueError(f"{file} is damaged, or torch.save has not written it.") from error  # torch's own text is advice
    except OSError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else "it ends early"
        raise ValueError(f"{file} is damaged, or torch.save has not written it ({why}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not the dict of a checkpoint.")
    return content
