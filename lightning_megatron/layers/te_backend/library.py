"""Loading Transformer Engine, and what to say where it does not load.

Note [Two cuDNNs]
Transformer Engine and torch each bring a cuDNN, and a process uses the one that is loaded first. Torch's, loaded by an
earlier convolution or attention, may lack symbols that Transformer Engine wants; the other way round both work. So the
library is loaded before a model is built.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch


@cache
def why_unavailable() -> str | None:
    """Load Transformer Engine; why it cannot be used here, or ``None``."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if find_spec("transformer_engine") is None:
        return "the package transformer_engine is not installed (pip install 'lightning-megatron[te]')"
    try:
        import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return _explained(error)
    return None


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
