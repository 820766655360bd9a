"""`ckptkit convert` that is interrupted, whose source changes, that is not alone, or that has no room."""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.conversion import convert, plan_convert
from ckptkit.conversion.destination import Destination
from ckptkit.conversion.journal import Journal
from ckptkit.errors import CheckpointError
from ckptkit.formats import open_checkpoint
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer
from tests.cli.conftest import Run
from tests.conversion.test_convert import TARGETS, assert_same_bits, read
from tests.formats import writers
from tests.formats.writers import flat, tree


@pytest.mark.parametrize("to", TARGETS)
def test_conversion_resumes_after_an_interruption_at_any_tensor(
    to: str, ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted conversion would leave half a file under the target's name, or be resumed into wrong bytes."""
    nested = tree(("float32",))
    source = writers.by_flax(tmp_path / "a.msgpack", nested)
    monkeypatch.setattr("ckptkit.conversion.converting._PROGRESS_BYTES", 1)
    stops = sum(to != "orbax" or leaf.size > 0 for leaf in flat(nested).values())  # empty arrays have no cell
    for stop in range(1, stops + 1, 3):
        target, seen = tmp_path / f"b{stop}", []

        def interrupt(written: int, total: int, seen: list[int] = seen, stop: int = stop) -> None:
            seen.append(written)
            if len(seen) == stop:
                raise KeyboardInterrupt

        with open_checkpoint(str(source)) as opened:
            plan = plan_convert(opened, str(target), to)  # pyright: ignore[reportArgumentType]
            with pytest.raises(KeyboardInterrupt):
                convert(opened, plan, progress=interrupt)
        assert not target.exists()
        assert ckpt("convert", source, target, "--to", to, "--resume").code == 0
        assert_same_bits(read(target), flat(nested))
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("changed", ["memory", "rules"])
def test_resume_of_a_different_conversion_is_refused(
    changed: str, ckpt: Run, tmp_path: Path, ended_at: Callable[..., None]
) -> None:
    """Cells of two sizes, or halves made by two rules, would become one checkpoint that nobody can read."""
    square = {name: np.arange(1 << 18, dtype=np.float32).reshape(512, 512) for name in "ab"}  # 1 MiB each
    source = writers.by_safetensors(tmp_path / "s.safetensors", square)
    rules = {}
    for name, axes in (("one", [1, 0]), ("two", [0, 1])):
        rules[name] = tmp_path / f"{name}.toml"
        rules[name].write_text(f'[[rule]]\nfrom = "*"\nto = "*"\ntranspose = {axes}\n')
    words = ("convert", source, tmp_path / "t", "--to", "orbax")
    first, other = ("--memory", "16MB", "--map", rules["one"]), ("--memory", "16MB", "--map", rules["two"])
    if changed == "memory":
        first, other = ("--memory", "16MB"), ("--memory", "1MB")
    ended_at(Destination, "commit", *words, *first)
    said = ckpt(*words, *other, "--resume")
    assert said.code == 1
    assert "is other work than this" in said.err
    assert "leave --resume out to begin anew" in said.err
    assert ckpt(*words, *first, "--resume").code == 0
    assert ckpt("verify", tmp_path / "t").code == 0


@pytest.mark.parametrize("to", TARGETS)
def test_source_changed_during_the_read_is_refused(to: str, ckpt: Run, tmp_path: Path) -> None:
    """One half of the old file and one of the new would be a checkpoint that nobody has ever saved."""
    one, two = ({f"w{at}": np.full(8, at + more, np.float32) for at in range(4)} for more in (0, 10))
    source = writers.by_flax(tmp_path / "a.msgpack", one)
    other = writers.by_flax(tmp_path / "b.msgpack", two).read_bytes()
    (tmp_path / "b.msgpack").unlink()

    def overwrite(written: int, total: int) -> None:
        del written, total
        with open(source, "r+b") as file:  # never shorter
            file.write(other)

    with open_checkpoint(str(source)) as opened:
        plan = plan_convert(opened, str(tmp_path / "t"), to)  # pyright: ignore[reportArgumentType]
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            convert(opened, plan, progress=overwrite)
    assert os.listdir(tmp_path) == ["a.msgpack"]
    assert ckpt("convert", source, tmp_path / "t", "--to", to).code == 0
    assert_same_bits(read(tmp_path / "t"), two)


@pytest.mark.parametrize("resume", [False, True])
def test_concurrent_conversion_to_the_same_target_is_refused(ckpt: Run, tmp_path: Path, resume: bool) -> None:
    """The second would clear what the first still writes, and the first commit what the second has begun."""
    nested = tree(("float32",))
    source = writers.by_flax(tmp_path / "a.msgpack", nested)
    words = ("convert", source, tmp_path / "t", "--to", "orbax", *["--resume"] * resume)
    said = []

    def begins(written: int, total: int) -> None:
        if not said:
            said.append(ckpt(*words))

    with open_checkpoint(str(source)) as opened:
        convert(opened, plan_convert(opened, str(tmp_path / "t"), "orbax"), progress=begins)
    assert (said[0].code, "another process is making" in said[0].err) == (1, True), said
    assert_same_bits(read(tmp_path / "t"), flat(nested))
    assert sorted(os.listdir(tmp_path)) == ["a.msgpack", "t"]


def test_resume_is_refused_if_the_bucket_source_changed(
    ckpt: Run, server: BucketServer, tmp_path: Path, ended_at: Callable[..., None]
) -> None:
    """Tensors of two files of the same size would become one checkpoint."""
    store, words = open_store("gs://runs/run"), ("convert", "gs://runs/run/s.npz", tmp_path / "t", "--to", "npz")
    one, two = ({f"w{at}": np.full(8, at + more, np.float32) for at in range(4)} for more in (0, 10))
    store.put("s.npz", writers.by_numpy(tmp_path / "a.npz", one).read_bytes())
    ended_at(Destination, "commit", *words)
    store.put("s.npz", writers.by_numpy(tmp_path / "a.npz", two).read_bytes())
    said = ckpt(*words, "--resume")
    assert (said.code, "is other work than this" in said.err) == (1, True), said.err
    assert ckpt(*words).code == 0
    assert_same_bits(read(tmp_path / "t"), two)


@pytest.mark.parametrize("to", ["orbax", "npz", "hf"])
def test_full_disk_leaves_a_resumable_conversion(
    to: str, ckpt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of work would be thrown away, or left where nobody knows of them."""
    nested = tree(("float32", "int8"))
    source = writers.by_flax(tmp_path / "a.msgpack", nested)
    taken = []

    def full(self: Journal, entry: Any) -> None:
        taken.append(entry)
        raise OSError(errno.ENOSPC, "No space left on device", "there")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", full)
        said = ckpt("convert", source, tmp_path / "b", "--to", to)
    assert taken
    assert said.code == 1
    error, hint = said.err.splitlines()
    assert "No space left on device" in error
    assert (
        f"the written part is kept in {tmp_path}/.b.ckptkit-part: the same command with --resume continues it" in hint
    )
    assert sorted(os.listdir(tmp_path)) == [".b.ckptkit-part", "a.msgpack"]
    assert ckpt("convert", source, tmp_path / "b", "--to", to, "--resume").code == 0
    assert_same_bits(read(tmp_path / "b"), flat(nested))
    assert sorted(os.listdir(tmp_path)) == ["a.msgpack", "b"]


@pytest.mark.disk
@pytest.mark.parametrize("to", ["safetensors", "npz", "torch"])
def test_large_tensors_use_direct_io_and_resume(to: str, ckpt: Run, tmp_path: Path) -> None:
    """Tensors that begin inside a page would be written to a wrong place, or a zip have a wrong checksum."""
    rng = np.random.default_rng(0)
    nested = {"small": np.arange(3, dtype=np.int8), "w": rng.normal(size=(1 << 10, 701)), "x": np.ones(1 << 19)}
    source = writers.by_safetensors(tmp_path / "a.safetensors", nested)
    assert ckpt("convert", source, tmp_path / "o", "--to", "orbax").code == 0

    def interrupt(written: int, total: int) -> None:
        if 2 * written > total:
            raise KeyboardInterrupt

    with open_checkpoint(str(tmp_path / "o")) as opened:
        plan = plan_convert(opened, str(tmp_path / "b"), to, memory_bytes=1 << 25)  # pyright: ignore[reportArgumentType]
        with pytest.raises(KeyboardInterrupt):
            convert(opened, plan, memory_bytes=1 << 25, progress=interrupt)
    assert ckpt("convert", tmp_path / "o", tmp_path / "b", "--to", to, "--resume", "--memory", 1 << 25).code == 0
    assert_same_bits(read(tmp_path / "b"), flat(nested))
    if to != "safetensors":
        with zipfile.ZipFile(tmp_path / "b") as archive:
            assert archive.testzip() is None
