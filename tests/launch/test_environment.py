"""Environment variables by layout: never the user's, never too late, and always said."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import GPTConfig, GPTModule
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.strategy import strategy
from lightning_megatron.strategy.environment import apply, set_environment, settings_for
from lightning_megatron.testing import run_distributed

HOPPER, BLACKWELL = (9, 0), (10, 0)
CONNECTIONS, ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("layout", "capability", "expected"),
    [
        ({"tp": 2}, HOPPER, "1"),
        ({"cp": 2}, (8, 0), "1"),
        ({"pp": 2}, HOPPER, None),
        ({}, HOPPER, None),
        ({"tp": 2, "cp": 2}, BLACKWELL, None),
        ({"tp": 2}, None, None),
    ],
    ids=str,
)
def test_one_connection_is_for_collectives_beside_products_before_blackwell(
    layout: dict[str, int], capability: tuple[int, int] | None, expected: str | None
) -> None:
    settings = {setting.name: setting for setting in settings_for(Parallelism(**layout), capability=capability)}
    assert (settings[CONNECTIONS].value if CONNECTIONS in settings else None) == expected
    if expected is not None:
        assert all(f"{name}={size}" in settings[CONNECTIONS].why for name, size in layout.items())


def test_what_is_set_is_said_in_one_line() -> None:
    environ: dict[str, str] = {}
    done, line = apply(settings_for(Parallelism(tp=2), capability=HOPPER), environ, cuda_has_started=False)
    warning = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
    assert environ == {CONNECTIONS: "1", ALLOCATOR: "expandable_segments:True", warning: "false"}
    assert [setting.name for setting in done] == list(environ)
    assert line.startswith("environment: CUDA_DEVICE_MAX_CONNECTIONS=1 (tp=2: ")
    assert "\n" not in line
    assert all(f"{name}={value} (" in line for name, value in environ.items())


@pytest.mark.parametrize("name", [ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stays(name: str) -> None:
    environ = {name: "max_split_size_mb:512", CONNECTIONS: "8"}
    before = dict(environ)
    _, line = apply(settings_for(Parallelism(tp=2), capability=HOPPER), environ, cuda_has_started=False)
    assert before.items() <= environ.items()
    assert ALLOCATOR not in environ or name == ALLOCATOR
    assert f"{name}=max_split_size_mb:512 (as it was set)" in line
    assert f"{CONNECTIONS}=8 (as it was set)" in line


def test_what_would_come_too_late_is_not_set() -> None:
    environ: dict[str, str] = {}
    _, line = apply(settings_for(Parallelism(tp=2), capability=HOPPER), environ, cuda_has_started=True)
    assert list(environ) == [ALLOCATOR, "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"]
    assert f"not {CONNECTIONS}=1: CUDA has started already" in line
    assert f"{ALLOCATOR}=expandable_segments:True (" in line  # torch's allocator is told itself, at any time


def test_an_allocator_that_does_not_listen_any_more_is_said() -> None:
    environ: dict[str, str] = {}
    settings = settings_for(Parallelism(), capability=HOPPER, allocator_listens=False)
    _, line = apply(settings, environ, cuda_has_started=True)
    assert ALLOCATOR not in environ
    assert f"not {ALLOCATOR}=expandable_segments:True: CUDA has started already" in line


def test_a_run_on_the_host_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOCATOR, raising=False)
    import os

    before = dict(os.environ)
    assert set_environment(Parallelism(), torch.device("cpu")) is None
    assert dict(os.environ) == before


def test_a_run_says_once_what_was_set(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(strategy, "set_environment", lambda parallelism, device: f"environment: for tp={parallelism.tp}.")

    def run() -> None:
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(strategy=MegatronStrategy(tp=2), accelerator="cpu", devices=2, fast_dev_run=1, **quiet)
        tokens: Any = torch.zeros(2, 8, dtype=torch.int64)
        config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, ffn_hidden_size=16, vocab_size=20, max_seq_len=8)
        trainer.fit(GPTModule(config), DataLoader(tokens, 2))

    run_distributed(run, 2)
    assert capfd.readouterr().out.count("environment: for tp=2.") == 1
