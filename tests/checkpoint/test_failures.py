"""A checkpoint is whole or refused, and what was there before stays until the new one is whole."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import nn

from lightning_megatron.checkpoint import files, is_checkpoint, load, load_state_file, remove, save, writing
from lightning_megatron.sharding import replicated, set_sharding
from lightning_megatron.testing import run_distributed


def written(make: Any, path: Path, layout: dict[str, int] | None = None, **options: Any) -> Any:
    job = make(layout)
    job.fill()
    save(path, module=job.module, optimizers=[job.optimizer], mesh=job.mesh, **{"meta": {"version": 1}, **options})
    return job


def loaded(job: Any, path: Path, **options: Any) -> Any:
    return load(path, module=job.module, optimizers=[job.optimizer], mesh=job.mesh, **options)


def failing_item(writer: Any, name: str, item: Any, resolve: Any) -> Any:
    if name.startswith("__1_") and writer.position > 0:
        raise OSError(28, "No space left on device")
    return _write_item(writer, name, item, resolve)


_write_item = writing.write_item


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_checkpoint(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def attempt() -> tuple[str, list[str], int]:
        job = written(make, path)
        writing.write_item = failing_item
        with pytest.raises(RuntimeError) as error:
            save(path, module=job.module, optimizers=[job.optimizer], mesh=job.mesh, meta={"version": 2})
        writing.write_item = _write_item
        old = loaded(job, path).meta["version"]
        wrong = job.wrong()
        save(path, module=job.module, optimizers=[job.optimizer], mesh=job.mesh, meta={"version": 3})
        assert loaded(job, path).meta["version"] == 3
        return str(error.value), wrong, old

    for text, wrong, old in run_distributed(attempt, 2):
        assert "rank 1: OSError" in text
        assert "No space left" in text
        assert "Traceback" not in text
        assert (wrong, old) == ([], 1)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_the_checkpoint_appears_only_with_its_last_file(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "commit", fail)
    with pytest.raises(KeyboardInterrupt):
        written(make, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_every_file_is_flushed_before_the_checkpoint_takes_its_place_the_meta_file_last(make: Any, tmp_path: Path) -> None:
    def attempt() -> tuple[list[int], dict[str, int]]:
        flushed: list[int] = []  # inodes, as files are renamed
        commit, fsync, there = files.commit, os.fsync, {}

        def noted(descriptor: int) -> None:
            fsync(descriptor)
            flushed.append(os.fstat(descriptor).st_ino)

        def committed(path: Path) -> None:
            folder = files.temporary(path)
            there.update({entry.name: entry.stat().st_ino for entry in (*folder.iterdir(), folder)})
            flushed.append(0)
            commit(path)

        os.fsync, files.commit = noted, committed  # type: ignore[assignment]
        written(make, tmp_path / "a.ckpt", {"tp": 2})
        return flushed, there

    (first, there), (second, _) = run_distributed(attempt, 2)
    *names, folder = there
    assert sorted(names) == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "meta.pt"]
    assert set(there.values()) <= {*first[: first.index(0)], *second}
    assert first[-4:] == [there["meta.pt"], there[folder], 0, tmp_path.stat().st_ino]


@pytest.mark.parametrize("kind", ["file", "link", "broken link", "directory"])
def test_whatever_is_in_the_way_is_replaced_and_a_link_is_not_followed(make: Any, tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "last.ckpt", tmp_path / "top.ckpt"
    written(make, other)
    if kind == "file":
        path.write_text("old")
    elif kind == "directory":
        (path / "inner").mkdir(parents=True)
    else:
        path.symlink_to(other if kind == "link" else tmp_path / "gone", target_is_directory=True)
    written(make, path, meta={"version": 2})
    assert not path.is_symlink()
    assert (loaded(make(), path).meta["version"], loaded(make(), other).meta["version"]) == (2, 1)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "top.ckpt"]


def test_where_two_entries_cannot_be_exchanged_an_interrupted_save_is_undone(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    written(make, path)
    written(make, path, meta={"version": 2})
    assert os.listdir(tmp_path) == ["a.ckpt"]
    rename = os.rename

    def interrupted(source: Any, target: Any) -> None:
        if Path(source).parent.name == ".incomplete" and str(source).endswith(".tmp"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(make, path, meta={"version": 3})
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(FileNotFoundError, match=r"a\.ckpt\.old holds an older one"):
        loaded(make(), path)
    with pytest.warns(UserWarning, match="is there again"):
        files.clean(tmp_path)
    assert loaded(make(), path).meta["version"] == 2
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_removing_a_link_keeps_what_it_points_to(make: Any, tmp_path: Path) -> None:
    path, link, file = tmp_path / "a.ckpt", tmp_path / "last.ckpt", tmp_path / "b.ckpt"
    written(make, path)
    link.symlink_to(path, target_is_directory=True)
    file.write_text("x")
    assert is_checkpoint(link)
    remove(link)
    remove(file)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    remove(path)
    remove(path)
    assert not path.exists()


def test_what_is_no_checkpoint_is_named(make: Any, tmp_path: Path) -> None:
    job, path = make(), tmp_path / "a.ckpt"
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        loaded(job, path)
    path.mkdir()
    with pytest.raises(ValueError, match="not a checkpoint"):
        loaded(job, path)
    written(make, path)
    (path / "meta.pt").unlink()
    assert not is_checkpoint(path)
    with pytest.raises(FileNotFoundError, match=r"incomplete: meta\.pt is missing"):
        loaded(job, path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="single file"):
        loaded(job, tmp_path / "file")


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_data_is_refused_before_anything_changes(make: Any, tmp_path: Path, damage: str) -> None:
    written(make, tmp_path / "a.ckpt")
    data = tmp_path / "a.ckpt" / "__0_0.distcp"
    if damage == "cut":
        os.truncate(data, data.stat().st_size // 2)
    else:
        data.unlink()
    job = make()
    with pytest.raises(ValueError, match=r"__0_0\.distcp: this data file"):
        loaded(job, tmp_path / "a.ckpt")
    assert all(not param.any() for param in job.module.parameters())
    (tmp_path / "a.ckpt" / ".metadata").write_bytes(b"\x80\x04garbage")
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        loaded(job, tmp_path / "a.ckpt")


def test_a_changed_byte_is_found_before_anything_is_loaded_and_its_tensor_is_named(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def attempt() -> str:
        written(make, path, {"tp": 2})
        if torch.distributed.get_rank() == 1:
            file = path / "__1_0.distcp"
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        torch.distributed.barrier()
        job = make({"pp": 2})
        with pytest.raises(ValueError, match="does not fit") as error:
            loaded(job, path)
        assert all(not param.any() for param in job.module.parameters())
        assert not job.optimizer.optimizer.state
        loaded(job, path, verify=False)  # for whoever knows better
        return str(error.value)

    for text in run_distributed(attempt, 2):
        assert "__1_0.distcp are not those that were written" in text
        assert "layers." in text


def damaged(content: bytes, kind: str, dice: random.Random) -> bytes:
    """A file's content with damage of a kind somewhere."""
    begin = dice.randrange(len(content))
    if kind == "cut":
        return content[:begin]
    length = 1 if kind == "bit" else dice.randrange(1, 3000)
    middle = bytes(byte ^ (1 << dice.randrange(8)) if kind == "bit" else 0 for byte in content[begin : begin + length])
    return content[:begin] + middle + content[begin + length :]


def test_no_damage_anywhere_in_any_file_is_loaded(make: Any, tmp_path: Path) -> None:
    path, dice = tmp_path / "a.ckpt", random.Random(7)
    written(make, path)
    job, changed = make(), 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for number in range(15):
            file.write_bytes(damaged(content, ("bit", "cut", "zero")[number % 3], dice))
            if file.read_bytes() != content:
                changed += 1
                with pytest.raises(ValueError, match=re.escape(file.name)):
                    loaded(job, path)
        file.write_bytes(content)
    assert changed > 50
    assert all(not param.any() for param in job.module.parameters())
    assert not job.optimizer.optimizer.state
    loaded(job, path)
    assert job.wrong() == []


def test_a_checkpoint_without_checksums_is_loaded_with_a_warning(make: Any, tmp_path: Path) -> None:
    written(make, tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "checksums.json").unlink()
    job = make()
    with pytest.warns(UserWarning, match=r"has no checksums\.json"):
        loaded(job, tmp_path / "a.ckpt")
    assert job.wrong() == []


def test_files_of_other_programs_are_refused(make: Any, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.ckpt"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(b"\x80\x04K\x01.")  # a pickled number
    torch.save([1], foreign / "meta.pt")
    with pytest.raises(ValueError, match="is not the index of a checkpoint"):
        loaded(make(), foreign)


def test_tensors_that_do_not_fit_are_named_with_both_shapes_and_nothing_changes(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def attempt() -> str:
        written(make, path)
        job = make()
        layer = job.module.layers[1]
        layer.norm = set_sharding(nn.Parameter(torch.zeros(7)), replicated((7,)))
        layer.gain = nn.Parameter(torch.zeros((), dtype=torch.float64))
        layer.new = nn.Parameter(torch.zeros(2))
        del layer.out
        with pytest.raises(ValueError, match="does not fit") as error:
            load(path, module=job.module, mesh=job.mesh)
        assert all(not param.any() for param in job.module.parameters())
        return str(error.value)

    for text in run_distributed(attempt, 2):
        assert "model.layers.1.norm: saved as (6,) float32, wanted as (7,) float32" in text
        assert "model.layers.1.gain: saved as () float32, wanted as () float64" in text
        assert "model.layers.1.new: not in the checkpoint (wanted with shape (2,))" in text
        assert "model.layers.1.out: in the checkpoint with shape (6, 8), but not in the model" in text
        assert text.count("\n") == 4


def test_a_lenient_load_takes_what_is_there(make: Any, tmp_path: Path) -> None:
    written(make, tmp_path / "a.ckpt")
    job = make()
    job.module.new = nn.Parameter(torch.ones(2))
    del job.module.layers[1].out
    load(tmp_path / "a.ckpt", module=job.module, mesh=job.mesh, strict=False)
    assert job.module.new.tolist() == [1, 1]
    assert torch.equal(job.module.head, make.full("head", (6,)))


def test_another_number_of_optimizers_or_groups_is_refused(make: Any, tmp_path: Path) -> None:
    written(make, tmp_path / "a.ckpt")
    job = make()
    with pytest.raises(ValueError, match="1 optimizers, and 2 are configured"):
        load(tmp_path / "a.ckpt", module=job.module, optimizers=[job.optimizer] * 2, mesh=job.mesh)
    job.optimizer.optimizer.add_param_group({"params": []})
    with pytest.raises(ValueError, match="optimizer 0 has 3 param groups, and 2 in the checkpoint"):
        loaded(job, tmp_path / "a.ckpt")


def test_a_tensor_that_the_ranks_do_not_hold_whole_is_not_saved(make: Any, tmp_path: Path) -> None:
    def attempt() -> str:
        job = make({"tp": 2})
        if job.mesh.tp.rank:
            del job.module.layers[2].out
        with pytest.raises(ValueError, match=r"model\.layers\.2\.out") as error:
            save(tmp_path / "a.ckpt", module=job.module, optimizers=[], meta={}, mesh=job.mesh)
        return str(error.value)

    assert len(set(run_distributed(attempt, 2))) == 1
    assert not (tmp_path / "a.ckpt").exists()


def test_a_refused_type_in_the_meta_file_is_named(make: Any, tmp_path: Path) -> None:
    written(make, tmp_path / "a.ckpt", meta={"hyper_parameters": {"root": Path("/data")}})
    with pytest.raises(ValueError, match=r"type pathlib\.\w+.*weights_only=False"):
        loaded(make(), tmp_path / "a.ckpt")
    assert loaded(make(), tmp_path / "a.ckpt", weights_only=False).meta["hyper_parameters"]["root"] == Path("/data")


def test_a_single_file_checkpoint_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 4}, file)
    assert load_state_file(file)["epoch"] == 4
    torch.save({"weights": 1}, file)
    with pytest.raises(ValueError, match="has no state_dict"):
        load_state_file(file)
    for foreign in (b"PK\x03\x04 not a zip", b"some text", b"\x93" * 100, b""):
        file.write_bytes(foreign)
        with pytest.raises(ValueError, match=r"a\.ckpt is damaged, or torch\.save has not written it") as error:
            load_state_file(file)
        assert "weights_only" not in str(error.value)  # torch advises to trust it
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_state_file(tmp_path / "gone")
    with pytest.raises(ValueError, match="is a directory"):
        load_state_file(tmp_path)


class WithExtra(nn.Linear):
    """A module with state of its own, as low-precision layers have."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [torch.arange(5, dtype=torch.uint8), {"scale": [1.0]}], ids=["tensor", "value"])
def test_extra_state_of_modules_is_restored_and_may_be_absent(make: Any, tmp_path: Path, extra: Any) -> None:
    job = make()
    for name in ("source", "target"):
        module = nn.Sequential(WithExtra(2, 2))
        module[0].extra = extra if name == "source" else torch.empty(0)
        if name == "source":
            save(tmp_path / "a.ckpt", module=module, optimizers=[], meta={}, mesh=job.mesh)
        else:
            load(tmp_path / "a.ckpt", module=module, mesh=job.mesh)
            assert str(module[0].extra) == str(extra)
    load(tmp_path / "a.ckpt", module=nn.Sequential(nn.Linear(2, 2)), mesh=job.mesh)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "vpp": 2}], ids=["tp2-dp2", "pp2-vpp2-dp2"])
def test_the_stock_consolidation_gives_a_checkpoint_of_plain_torch(make: Any, tmp_path: Path, layout: dict[str, int]) -> None:
    run_distributed(lambda: written(make, tmp_path / "a.ckpt", layout) and None, 4)
    checkpoint = _format_checkpoint(_load_distributed_checkpoint(tmp_path / "a.ckpt"))
    whole = make()
    whole.fill()
    state = whole.module.state_dict()
    assert checkpoint["state_dict"].keys() == state.keys()
    assert all(torch.equal(checkpoint["state_dict"][name], state[name]) for name in state)
    assert checkpoint["version"] == 1
    plain = make.Sharded(whole.mesh)
    matrices = [(name, p) for name, p in plain.named_parameters() if p.dim() == 2]
    vectors = [(name, p) for name, p in plain.named_parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": [p for _, p in group]} for group in (matrices, vectors)], lr=9.0)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for name, param in matrices + vectors:
        assert torch.equal(optimizer.state[param]["exp_avg"], make.full(f"exp_avg.{name}", tuple(param.shape)))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 5e-3]
