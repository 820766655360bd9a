"""Files at the target of an interrupted conversion: only its own are deleted or continued, never others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.conversion.destination import Destination
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer
from tests.cli.conftest import Run
from tests.conversion.test_convert import assert_same_bits, read
from tests.forked import run_forked
from tests.formats import writers

ROOT = Path(__file__).parents[2]
TREE = {name: np.arange(1 << 12, dtype=np.float32) + at for at, name in enumerate("abcd")}
SMALL = ("--memory", "64KiB", "--shard-size", "33KiB")

# Each target is made by a child that kills itself at one of its puts: before it where the number is odd, else after.
_KILLED = """
import itertools, os, signal, sys, tempfile
from ckptkit.cli import main
from ckptkit.store.local import LocalStore
from ckptkit.store.remote import RemoteStore
import ckptkit.cli.convert

def dies_at(stop):
    numbers = itertools.count(1)  # of the puts of all threads
    def dying(plain):
        def put(*arguments, **options):
            number = next(numbers)
            if number == stop and stop % 2: os.kill(os.getpid(), signal.SIGKILL)
            plain(*arguments, **options)
            if number == stop: os.kill(os.getpid(), signal.SIGKILL)
        return put
    for owner in (LocalStore, RemoteStore):
        owner.put = dying(owner.put)
    RemoteStore.put_file = dying(RemoteStore.put_file)

source, above, to, tempfile.tempdir, *stops = sys.argv[1:]
for stop in stops:
    child = os.fork()
    if not child:
        dies_at(int(stop))
        code = main(["convert", source, f"{above}/t{stop}", "--to", to, "--memory", "64KiB", "--shard-size", "33KiB"])
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL, (stop, status)
"""


def everything(url: str) -> dict[str, tuple[int, int | None]]:
    """The files below a place: the size and the generation of each."""
    return {key: (stat.size_bytes, stat.generation) for key, stat in open_store(url).stat_all("").items()}


def test_killed_conversion_leaves_no_temporary_file(ckpt: Run, server: BucketServer, tmp_path: Path) -> None:
    """After `kill -9` at any write, the file of a model would be left in the directory for temporary files."""
    source = writers.by_safetensors(tmp_path / "a.safetensors", TREE)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    stops = [1, 3, 4, 6, 7]
    command = [sys.executable, "-c", _KILLED, str(source), "gs://runs/made", "hf", str(temporary), *map(str, stops)]
    done = run_forked(command, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(temporary.iterdir())
    for stop in stops:
        target = f"gs://runs/made/t{stop}"
        assert ckpt("convert", source, target, "--to", "hf", *SMALL, *["--resume"] * (stop % 3 > 0)).code == 0
        assert_same_bits(read(target), TREE)


@pytest.mark.parametrize("resume", [False, True])
def test_steps_of_a_job_at_an_interrupted_target_are_kept(
    resume: bool, ckpt: Run, server: BucketServer, tmp_path: Path, ended_at: Callable[..., None]
) -> None:
    """The journal of an old conversion would be a licence to delete the run that has saved there since."""
    source = writers.by_safetensors(tmp_path / "a.safetensors", TREE)
    words = ("convert", source, "gs://runs/exp", "--to", "orbax")
    ended_at(Destination, "commit", *words)
    store = open_store("gs://runs/exp")
    store.delete_many(store.list_all(""))
    with ckptkit.CheckpointManager("gs://runs/exp") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(3.0)}))
    before = everything("gs://runs/exp")
    said = ckpt(*words, *["--resume"] * resume)
    assert said.code == 1
    assert "was not written by the interrupted run whose journal is in gs://runs/.exp.ckptkit-part" in said.err
    assert everything("gs://runs/exp") == before
    assert ckpt("verify", "gs://runs/exp").code == 0


def test_target_that_fills_while_it_is_made_is_not_committed(ckpt: Run, server: BucketServer, tmp_path: Path) -> None:
    """A job that begins to save at the target would find its root marked as an item."""
    source = writers.by_safetensors(tmp_path / "a.safetensors", TREE)
    plain = Destination.commit

    def saves_first(self: Destination, marker: str | None = None) -> None:
        open_store("gs://runs/exp").put("1/default/_METADATA", b"{}")
        plain(self, marker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Destination, "commit", saves_first)
        said = ckpt("convert", source, "gs://runs/exp", "--to", "orbax")
    assert (said.code, "gs://runs/exp/1/default/_METADATA was not written by" in said.err) == (1, True), said.err
    assert "commit_success.txt" not in everything("gs://runs/exp")


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_foreign_files_in_the_directory_of_an_interrupted_run_are_kept(
    to: str, ckpt: Run, tmp_path: Path, ended_at: Callable[..., None]
) -> None:
    """A foreign file next to the written ones would be deleted with them."""
    source = writers.by_safetensors(tmp_path / "a.safetensors", TREE)
    words = ("convert", source, tmp_path / "t", "--to", to, *SMALL)
    ended_at(Destination, "commit", *words)
    part = tmp_path / ".t.ckptkit-part"
    for name in ("t/notes.txt", "t/d/0123456789abcdef0123456789abcdef", "beside"):
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).write_text("mine")
        for flags in ([], ["--resume"]):
            said = ckpt(*words, *flags)
            assert (said.code, "was not written by the interrupted run" in said.err) == (1, True), said.err
        assert (part / name).read_text() == "mine"
        (part / name).unlink()
    assert ckpt(*words).code == 0
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_manifest_of_a_killed_write_is_of_the_interrupted_run(
    flags: list[str], ckpt: Run, tmp_path: Path, ended_at: Callable[..., None]
) -> None:
    """A conversion that was killed between the open and the rename of a manifest could not be resumed or begun anew."""
    source = writers.by_safetensors(tmp_path / "a.safetensors", TREE)
    words = ("convert", source, tmp_path / "t", "--to", "orbax", *SMALL)
    ended_at(Destination, "commit", *words)
    (tmp_path / ".t.ckptkit-part/t/manifest.ocdbt_0123456789abcdef.__lock").write_bytes(b"")  # TensorStore's name
    assert ckpt(*words, *flags).code == 0
    assert not list((tmp_path / "t").rglob("*__lock"))
    assert_same_bits(read(tmp_path / "t"), TREE)


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_resume_is_refused_if_written_files_were_deleted(
    where: str, ckpt: Run, server: BucketServer, tmp_path: Path, ended_at: Callable[..., None]
) -> None:
    """A target whose data somebody has deleted would be committed without it."""
    source = writers.by_safetensors(tmp_path / "a.safetensors", TREE)
    target = "gs://runs/exp" if where == "bucket" else str(tmp_path / "t")
    words = ("convert", source, target, "--to", "orbax", *SMALL)
    ended_at(Destination, "commit", *words)
    written = open_store(target if where == "bucket" else f"{tmp_path}/.t.ckptkit-part/t")
    data = [key for key in written.list_all("") if key.startswith("d/")]
    written.delete_many(data[:1])
    said = ckpt(*words, "--resume")
    assert said.code == 1
    assert "was deleted or changed since" in said.err
    assert "leave --resume out" in said.err
    assert ckpt(*words).code == 0
    assert_same_bits(read(target), TREE)


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz", "hf"])
def test_nothing_is_written_that_is_not_read_again(
    tmp_path: Path, ckpt: Run, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """A conversion of hundreds of thousands of leaves would end well, and its file be called damaged."""
    layers: Any = {f"layer{at}": np.zeros(2, np.float32) for at in range(100)}
    np.savez(tmp_path / "a.npz", **layers)
    for module in ("conversion.flat_files", "formats.ranges", "formats.safetensors", "formats.torch"):
        monkeypatch.setattr(f"ckptkit.{module}.METADATA_BYTES_MAX", 20_000)
    assert ckpt("convert", tmp_path / "a.npz", tmp_path / f"fits.{to}", "--to", to).code == 0
    assert ckpt("inspect", tmp_path / f"fits.{to}").code == 0
    for limit in range(100, 20_000, 250):
        for module in ("conversion.flat_files", "formats.safetensors", "formats.torch"):
            monkeypatch.setattr(f"ckptkit.{module}.METADATA_BYTES_MAX", limit)
        target = tmp_path / f"at-{limit}.{to}"
        done = ckpt("convert", tmp_path / "a.npz", target, "--to", to)
        if done.code:
            assert (done.code, target.exists()) == (1, False)
            assert "are read; choose a part" in done.err
            continue
        monkeypatch.setattr("ckptkit.formats.ranges.METADATA_BYTES_MAX", limit)
        assert ckpt("inspect", target).code == 0, limit
        return
    raise AssertionError("no limit was enough")


@pytest.mark.parametrize("how", [("convert", "--to", "npz"), ("reshard", "--mesh", "x=2")], ids=lambda how: how[0])
def test_dry_run_leaves_the_records_of_a_killed_work(how: tuple[str, ...], ckpt: Run, tmp_path: Path) -> None:
    """A command that only plans would delete files."""
    run, left = tmp_path / "run", tmp_path / ".new.ckptkit-part/journal"
    with ckptkit.CheckpointManager(run) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones((4, 4))}))
    command, *flags = how
    assert ckpt(command, run / "1", tmp_path / "new", *flags).code == 0
    left.mkdir(parents=True)
    (left / "plan.json").write_text('{"plan": "0"}')
    assert ckpt(command, run / "1", tmp_path / "new", *flags, "--dry-run").code == 1
    assert (left / "plan.json").exists()
    assert ckpt(command, run / "1", tmp_path / "new", *flags).code == 1
    assert not left.parent.exists()
