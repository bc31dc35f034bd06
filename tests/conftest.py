"""Shared test set-up: one thread for each process, and everything imported before ranks are forked."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from collections.abc import Iterator

import lightning  # noqa: F401  (imported once here, so that forked ranks do not pay for it)
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Put environment variables back after each test: a seed that one leaves behind would seed the ranks of the next."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
