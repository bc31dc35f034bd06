"""What several files of this folder start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lightning_megatron.kernels.products import TorchProducts, set_products
from tests.tensor_parallel.gating import Gating


@pytest.fixture
def gating() -> Iterator[Callable[[], Gating]]:
    """Gates from when it is called."""

    def start(products: Gating | None = None) -> Gating:
        made = products or Gating()
        set_products(made)
        return made

    yield start
    set_products(TorchProducts())
