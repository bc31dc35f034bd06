"""Loading Transformer Engine, and what to say where it does not load.

Note [Two cuDNNs]
Torch brings a cuDNN of its own, and a machine may have another one, of the system, in seven parts that torch loads when it
first needs them. Transformer Engine asks for parts by name, which finds those of the system, while torch's entry is loaded
already: entry and parts of two versions in one process, or, once torch has used its own, symbols that are missing. So torch's
parts are loaded before the library looks for any: one cuDNN, the one that torch was tested with. Whoever imports
``transformer_engine`` themselves, or sets ``CUDNN_HOME`` or ``CUDNN_PATH``, decides otherwise.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

_PARTS = ("graph", "ops", "cnn", "adv", "engines_precompiled", "engines_runtime_compiled", "heuristic")
_LEAST_CUDNN = 91200  # that Transformer Engine takes
_CHOICES = ("CUDNN_HOME", "CUDNN_PATH")
_MAPPED = Path("/proc/self/maps")


@cache
def why_unavailable() -> str | None:
    """Load Transformer Engine; why it cannot be used here, or ``None``."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if find_spec("transformer_engine") is None:
        return "the package transformer_engine is not installed (pip install 'lightning-megatron[te]')"
    try:
        load()
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return _explained(error)
    return None


@cache
def load() -> ModuleType:
    """``transformer_engine.pytorch``, by torch's cuDNN.

    Raises:
        ImportError: it does not load; or another of the errors that ``why_unavailable`` explains.
    """
    with _one_cudnn():
        return import_module("transformer_engine.pytorch")


@contextmanager
def _one_cudnn() -> Iterator[None]:
    """Let what is imported inside find torch's cuDNN. See Note [Two cuDNNs]."""
    folder = None if "transformer_engine" in sys.modules or any(name in os.environ for name in _CHOICES) else _torch_cudnn()
    if folder is None:
        yield
        return
    for part in _PARTS:
        ctypes.CDLL(str(folder / f"libcudnn_{part}.so.9"))
    os.environ["CUDNN_HOME"] = str(folder)
    try:
        yield
    finally:
        del os.environ["CUDNN_HOME"]


def _torch_cudnn() -> Path | None:
    """The folder of the only cuDNN in this process, if it is whole and new enough."""
    if not _MAPPED.exists():
        return None
    paths = {Path(line.split(maxsplit=5)[5].rstrip("\n")) for line in _MAPPED.open() if "/libcudnn" in line}
    folders = {path.parent for path in paths}
    if len(folders) != 1:
        return None
    (folder,) = folders
    entry = folder / "libcudnn.so.9"
    if entry not in paths or not all((folder / f"libcudnn_{part}.so.9").exists() for part in _PARTS):
        return None
    version = ctypes.CDLL(str(entry)).cudnnGetVersion
    version.restype = ctypes.c_size_t
    return folder if version() >= _LEAST_CUDNN else None


def _explained(error: BaseException) -> str:
    text = f"transformer_engine does not load: {type(error).__name__}: {error}"
    if "cudnn" in text.lower() and "undefined symbol" in text:
        return (
            f"{text}. This process has loaded torch's own cuDNN already, which lacks what Transformer Engine needs: put "
            f"`import transformer_engine.pytorch` at the top of your script, before anything runs on the GPU"
        )
    if "undefined symbol" in text:
        return f"{text}. The package was built for another torch than {torch.__version__}: install a build for this one"
    return text
