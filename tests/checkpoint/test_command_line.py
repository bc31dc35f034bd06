"""``lightning-megatron checkpoint``: what it tells, what it finds, what it writes."""

from __future__ import annotations

import json
import os
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint import save
from lightning_megatron.checkpoint.files import read_index
from lightning_megatron.checkpoint.inspection import summarize
from lightning_megatron.cli import main
from lightning_megatron.testing import run_distributed

META = {"global_step": 12, "epoch": 3, "lightning_megatron": {"seed": 5, "layout": {"tp": 2, "pp": 1, "world_size": 2}}}


@pytest.fixture
def path(make: Any, tmp_path: Path) -> Path:
    def write() -> None:
        job = make({"tp": 2})
        job.fill()
        save(tmp_path / "a.ckpt", module=job.module, optimizers=[job.optimizer], meta=META, mesh=job.mesh)

    run_distributed(write, 2)
    return tmp_path / "a.ckpt"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, arguments)])
    output = capsys.readouterr()
    return code, " ".join((output.out + output.err).split())


def test_inspect_tells_layout_step_tensors_and_sizes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "inspect", path)
    assert code == 0
    for fact in ("complete", "12", "tp=2 over 2 rank(s)", "model.layers.3.qkv", "16×6", "float32", "B"):
        assert fact in text
    assert "optimizer_0.state" not in text
    assert "optimizer_0.state.embed.exp_avg" in run(capsys, "inspect", path, "--all")[1]


def test_an_incomplete_checkpoint_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "meta.pt").unlink()
    for command in ("inspect", "verify"):
        code, text = run(capsys, command, path)
        assert code == 1
        assert "is incomplete: meta.pt is missing" in text


def test_a_sound_checkpoint_is_sound(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "verify", path)
    assert code == 0
    assert "is sound" in text


@pytest.mark.parametrize("damage", ["data", "index", "meta", "cut", "gone"])
def test_verify_finds_any_damage(path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = {"index": ".metadata", "meta": "meta.pt"}.get(damage, "__1_0.distcp")
    file = path / name
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[content.rindex(b"embed") if damage == "index" else len(content) // 2] ^= 1
        file.write_bytes(content)
    for command in (["verify"], ["consolidate", path.parent / "one.ckpt"]):
        code, text = run(capsys, command[0], path, *command[1:])
        assert code == 1
        assert name in text
        assert bool(re.search(r"(model|optimizer_0)\.", text)) == (damage in ("data", "cut", "gone"))
    assert not (path.parent / "one.ckpt").exists()


def test_verify_compares_shapes_with_the_index(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = read_index(path)
    saved = index.state_dict_metadata["model.head"]
    saved.size = saved.chunks[0].sizes = torch.Size((7,))  # type: ignore[union-attr]
    changed = pickle.dumps(index)
    (path / ".metadata").write_bytes(changed)
    sums = json.loads((path / "checksums.json").read_bytes())
    sums["files"][".metadata"] = [(0, len(changed), zlib.crc32(changed))]
    del sums["own"]
    own = zlib.crc32(json.dumps({key: sums[key] for key in ("files", "elements")}).encode())
    (path / "checksums.json").write_text(json.dumps({**sums, "own": own}))
    code, text = run(capsys, "verify", path)
    assert code == 1
    assert "model.head: a part of shape (6,) torch.float32, where the index has ((7,), torch.float32)" in text


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_checkpoint_without_all_of_its_data_is_not_complete(
    path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summarize(path).missing == ()
    data = path / "__1_0.distcp"
    if damage == "cut":
        os.truncate(data, data.stat().st_size - 1)
    else:
        data.unlink()
    (problem,) = summarize(path).missing
    assert problem.startswith("__1_0.distcp: this data file")
    code, text = run(capsys, "inspect", path)
    assert code == 0
    assert "incomplete" in text
    assert "__1_0.distcp: this data file" in text


def test_consolidate_refuses_a_directory_and_makes_those_that_are_missing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, "consolidate", path, path.parent)
    assert code == 1
    assert "is a directory; give the name of a file" in text
    assert run(capsys, "consolidate", path, path.parent / "new" / "one.ckpt")[0] == 0
    assert os.listdir(path.parent / "new") == ["one.ckpt"]


def test_consolidate_writes_the_unsharded_state_dict(make: Any, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(capsys, "consolidate", path, path.parent / "one.ckpt", "--optimizer")
    assert code == 0
    content = torch.load(path.parent / "one.ckpt", weights_only=True)
    whole = make()
    whole.fill()
    state = whole.module.state_dict()
    assert content["state_dict"].keys() == state.keys()
    assert all(torch.equal(content["state_dict"][name], state[name]) for name in state)
    assert content["global_step"] == 12
    states = content["optimizer_states"][0]["state"]
    assert torch.equal(states["layers.1.qkv"]["exp_avg"], make.full("exp_avg.layers.1.qkv", (16, 6)))
