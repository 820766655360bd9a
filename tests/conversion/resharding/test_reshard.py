"""`ckptkit reshard` from end to end: stock Orbax reads whole chunks; many processes; interrupted; into buckets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gcsfs
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.conversion.destination import Destination
from ckptkit.conversion.resharding import Mesh, open_source, plan_reshard, reshard
from ckptkit.formats import open_checkpoint
from ckptkit.formats.tensors import Tensor
from ckptkit.launch import free_port
from ckptkit.model.boxes import Box
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind, Status
from ckptkit.upkeep import copy, plan_copy
from ckptkit.verification import verify
from tests.cli.conftest import Ours, Run
from tests.forked import run_forked
from tests.multiprocess.starters import environment, run, skip_without
from tests.states import abstract, make_state, raw, restore_args

ROOT = Path(__file__).parents[3]
MESH = "data=2,model=4"


def read(path: Any) -> dict[str, Any]:
    with open_checkpoint(str(path)) as opened:
        return {name: raw(tensor.read()) for name, tensor in opened.by_name().items()}


@pytest.fixture(scope="session")
def striped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of stock Orbax, split by rows, of 3 MB."""
    home = tmp_path_factory.mktemp("striped")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = {f"w{at}": jax.device_put(jnp.arange(512 * 256.0).reshape(512, 256) + at, by_rows) for at in range(5)}
    state |= {"b": jax.device_put(jnp.arange(64, dtype=jnp.int8), by_rows), "count": 3}
    with ocp.CheckpointManager(home) as manager:
        manager.save(9, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return home / "9"


def test_stock_orbax_reads_whole_chunks_on_the_mesh(tmp_path: Path) -> None:
    """The point of it all: otherwise bits are lost, or every process still reads what others need."""
    command = [sys.executable, "-m", "tests.conversion.resharding.eight_devices", str(tmp_path)]
    done = run_forked(command, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for found in json.loads(done.stdout.splitlines()[-1]).values():
        assert (found["code"], found["wrong"], found["data"]) == (0, [], {"at": 1})
        assert found["after"] <= 1.05
        assert found["before_by_device"] > 2  # else this proves nothing
        assert found["after_by_device"] <= 1.05


def test_resharded_step_keeps_its_name_and_digests(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """A resharded step of ours would be another save, or one that nothing proves, and our manager would not take it."""
    (tmp_path / "root").mkdir()
    assert ckpt("reshard", ours.root / "8", tmp_path / "root/8", "--mesh", "a=2,b=2").code == 0
    before, after = (json.loads(ckpt("inspect", path, "--json").out) for path in (ours.root / "8", tmp_path / "root/8"))
    assert after["origin"]["proven"]
    assert after["origin"]["save_id"] == before["origin"]["save_id"]
    assert [item["name"] for item in after["items"]] == [item["name"] for item in before["items"]]
    assert ckpt("verify", tmp_path / "root").code == 0
    assert ckpt("diff", ours.root / "8", tmp_path / "root/8").code == 0
    with ckptkit.CheckpointManager(tmp_path / "root") as manager:
        found = manager.restore(8)
    for path, leaf in jax.tree_util.tree_flatten_with_path(make_state(8))[0]:
        there = found["state"]
        for key in path:
            there = there[getattr(key, "key", getattr(key, "idx", None))]
        assert raw(there) == raw(leaf), path


def test_small_items_are_restored_after_a_reshard(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """The position in the data would be in Orbax's files only: our manager would not find it, and a run would begin its
    data anew."""
    (tmp_path / "root").mkdir()
    assert ckpt("reshard", ours.root / "8", tmp_path / "root/8", "--mesh", "a=2").code == 0
    with ckptkit.CheckpointManager(tmp_path / "root") as manager:
        assert manager.restore(8)["data"] == {"step": 8}
        found = manager.restore(8, args=restore_args(abstract(make_state(8))))
    assert found["data"] == {"step": 8}
    assert {proof.state for proof in verify(str(tmp_path / "root")).steps} == {"proven"}


def test_resume_is_refused_if_the_bucket_source_changed(
    ckpt: Run, striped: Path, server: BucketServer, tmp_path: Path, ended_at: Callable[..., None]
) -> None:
    """Blocks of two checkpoints would become one, which proves as whole."""
    store = open_store("gs://runs/run")
    for path in striped.rglob("*"):
        if path.is_file():
            store.put(f"9/{path.relative_to(striped)}", path.read_bytes())
    store.put("9/commit_success.txt", b"")
    words = ("reshard", "gs://runs/run/9", tmp_path / "9", "--mesh", MESH)
    ended_at(Destination, "commit", *words)
    name = store.list("9/default/d")[0]
    store.put(f"9/default/d/{name}", store.get(f"9/default/d/{name}"))  # another object of the same size
    said = ckpt(*words, "--resume")
    assert said.code == 1
    assert "is other work than this" in said.err
    assert ckpt(*words).code == 0
    assert read(tmp_path / "9") == read(striped)


def test_dry_run_prints_the_plan_and_writes_nothing(ckpt: Run, striped: Path, tmp_path: Path) -> None:
    """A dry run would write, or print another plan."""
    words = ["--mesh", MESH, "--mesh", "x=4"]
    said = ckpt("reshard", striped, tmp_path / "9", *words, "--dry-run")
    assert "largest dimension" in said.out
    assert "4.00x" not in said.out.split("devices")[1].split("x=4")[0].split("after")[0]
    assert "would be written" in said.out
    assert os.listdir(tmp_path) == []
    plan = json.loads(ckpt("reshard", striped, tmp_path / "9", *words, "--dry-run", "--json").out)
    assert [mesh["after"]["worst_process"] for mesh in plan["meshes"]] == [1.0, 1.0]
    assert not plan["written"]
    done = json.loads(ckpt("reshard", striped, tmp_path / "9", *words, "--json").out)
    assert {**done, "written": False} == plan
    chunks = {leaf["name"]: leaf["chunks"] for leaf in plan["leaves"]}
    with open_checkpoint(str(tmp_path / "9")) as opened:
        assert {tensor.name: list(tensor.leaf.cell or ()) for tensor in opened.tensors} == chunks


def test_undivided_leaves_are_reported(ckpt: Run, striped: Path, tmp_path: Path) -> None:
    """A typing error in a mesh would be a checkpoint that every process reads completely, without a message."""
    words = ("reshard", striped, tmp_path / "9", "--mesh", "x=7", "--mesh", "x=3,y=64", "--dry-run")
    said = ckpt(*words).out
    assert "warning: on x=7 6 of 7 leaves, 2621504 bytes, stay whole on every device" in said
    assert "no axis divides a dimension of theirs: b, w0, w1, w2, w3, ..." in said
    assert "warning: on x=3" not in said
    plan = json.loads(ckpt(*words, "--json").out)
    assert {leaf["name"]: leaf["stays_whole"] for leaf in plan["leaves"]} == {
        "count": [False, False],
        "b": [True, False],
        **{f"w{at}": [True, False] for at in range(5)},
    }
    assert plan["notes"] == [line.strip() for line in said.splitlines() if "warning" in line]


def test_column_chunks_are_written_into_a_zip(ckpt: Run, striped: Path, tmp_path: Path) -> None:
    """A zip that is not written from its begin to its end would have a checksum of other bytes."""
    (tmp_path / "rules.toml").write_text("[[rule]]\nleaf = 'w*'\nspec = ['', 'x']")
    words = ("--mesh", "x=4", "--rules", tmp_path / "rules.toml")
    assert ckpt("reshard", striped, tmp_path / "9", *words).code == 0
    assert ckpt("convert", tmp_path / "9", tmp_path / "a.npz", "--to", "npz", "--memory", "512KiB").code == 0
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None
    assert read(tmp_path / "a.npz") == read(striped)


def test_like_copies_the_specs_of_another_checkpoint(ckpt: Run, striped: Path, ours: Ours, tmp_path: Path) -> None:
    """The specs of the run that will read it would be guessed instead."""
    plan = json.loads(
        ckpt("reshard", striped, tmp_path / "9", "--mesh", "x=8", "--like", striped, "--dry-run", "--json").out
    )
    assert {leaf["name"]: leaf["specs"] for leaf in plan["leaves"]}["w0"] == ["P('x')"]
    said = ckpt("reshard", striped, tmp_path / "9", "--mesh", "x=8", "--like", ours.root / "8")
    assert said.code == 1
    assert "has no sharding in the checkpoint that --like names" in said.err


@pytest.mark.parametrize("content", ["no JSON", '{"dzA=": "no JSON"}', '{"dzA=": "{\\"sharding_type\\": 3"}'])
def test_damaged_shardings_of_the_other_checkpoint_are_named(
    ckpt: Run, striped: Path, tmp_path: Path, content: str
) -> None:
    """A checkpoint that recorded its layout would seem to be one that never did."""
    shutil.copytree(striped, tmp_path / "8")
    (tmp_path / "8/default/_sharding").write_text(content)
    said = ckpt("reshard", striped, tmp_path / "9", "--mesh", "x=4", "--like", tmp_path / "8")
    assert said.code == 11
    assert "_sharding cannot be" in said.err
    assert not (tmp_path / "9").exists()


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("[[rule]]\nleaf = 'w*'\nspec = ['tensor']", "names axis tensor, which no mesh has; the axes are data, model"),
        ("[[rule]]\nleaf = 'count'\nspec = ['data']", "matches no leaf of arrays on devices"),
        ("[[rule]]\nleaf = 'w*'\nspec = ['data', 'data']", "uses an axis twice"),
        ("[[rule]]\nleaf = 'w*'\nspec = ['', '', 'data']", "has 3 dimensions"),
        ("[[rule]]\nleaf = 'w*'\nspec = [3]", "is neither an axis nor a list of axes"),
        ("[[rule]]\nleaf = 'w*'", "a rule has leaf"),
        ("[[rule", "rules.toml"),
    ],
)
def test_unfitting_rules_are_refused(ckpt: Run, striped: Path, tmp_path: Path, rules: str, why: str) -> None:
    """A typing error in a rule would be a layout that nobody asked for."""
    (tmp_path / "rules.toml").write_text(rules)
    said = ckpt("reshard", striped, tmp_path / "9", "--mesh", MESH, "--rules", tmp_path / "rules.toml")
    assert said.code == (10 if "matches no leaf" in why else 1)
    assert why in said.err
    assert os.listdir(tmp_path) == ["rules.toml"]


def test_unsupported_sources_and_targets_are_refused(ckpt: Run, striped: Path, tmp_path: Path) -> None:
    """A chunk above the budget would be read all the same, a target overwritten, another format half understood."""
    said = ckpt("reshard", striped, tmp_path / "9", "--mesh", MESH, "--memory", "256KiB")
    assert said.code == 2
    assert "has chunks of 131072 bytes" in said.err
    assert "give --memory at least 524288 bytes" in said.err
    (tmp_path / "9").mkdir()
    assert "exists already" in ckpt("reshard", striped, tmp_path / "9", "--mesh", MESH).err
    np.savez(tmp_path / "a.npz", a=np.arange(3))
    assert "only Orbax's checkpoints" in ckpt("reshard", tmp_path / "a.npz", tmp_path / "b", "--mesh", MESH).err
    assert ckpt("reshard", tmp_path / "c", tmp_path / "b", "--mesh", MESH).code == 10
    assert ckpt("reshard", striped, tmp_path / "b", "--mesh", "data=x").code == 2
    assert sorted(os.listdir(tmp_path)) == ["9", "a.npz"]


def test_damaged_cell_is_not_copied(ckpt: Run, ours: Ours, tmp_path: Path) -> None:
    """The result would prove what nobody ever saved."""
    shutil.copytree(ours.root / "8", tmp_path / "8")
    for data in (tmp_path / "8/state/d").iterdir():
        raw_bytes = bytearray(data.read_bytes())
        raw_bytes[len(raw_bytes) // 2] ^= 1
        data.write_bytes(raw_bytes)
    assert ckpt("reshard", tmp_path / "8", tmp_path / "out", "--mesh", MESH).code == 11
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_text_leaves_are_copied_without_digests(ckpt: Run, tmp_path: Path) -> None:
    """Leaves that are not arrays would be lost, or the item claim proofs that leave them out."""
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, args=ocp.args.PyTreeSave({"a": jnp.arange(8), "text": "hello", "n": (None, 2.5)}))
        manager.wait_until_finished()
    (tmp_path / "new").mkdir()
    assert "it gets no digests" in ckpt("reshard", tmp_path / "root/1", tmp_path / "new/1", "--mesh", "x=4").out
    with ocp.CheckpointManager(tmp_path / "new") as manager:
        found = manager.restore(1, args=ocp.args.PyTreeRestore())
    assert found["text"] == "hello"
    assert found["n"][1] == 2.5
    assert json.loads(ckpt("inspect", tmp_path / "new/1", "--json").out)["origin"]["writer"] == "orbax"


def test_renamed_item_keeps_its_records(ckpt: Run, striped: Path, tmp_path: Path) -> None:
    """The records of an item that is named anew would be looked for under its old name, and not be found."""
    assert ckpt("reshard", striped / "default", tmp_path / "state", "--mesh", MESH).code == 0
    assert ckpt("reshard", tmp_path / "state", tmp_path / "again", "--mesh", "x=4").code == 0
    assert ckpt("verify", tmp_path / "again").code == 0
    assert read(tmp_path / "again") == read(striped / "default")


@pytest.mark.parametrize(
    "starter", [pytest.param("mpirun", marks=pytest.mark.long), pytest.param("flags", marks=pytest.mark.slow)]
)
def test_two_processes_write_one_checkpoint(starter: str, striped: Path, tmp_path: Path) -> None:
    """On many hosts each would write all of it, or one the other's."""
    words = [sys.executable, "-m", "ckptkit.cli", "reshard", str(striped), str(tmp_path / "9"), "--mesh", MESH]
    if starter == "mpirun":
        skip_without(starter)
        code, said = run(starter, [*words, "--cluster", "detect"], processes=2, devices=1, root=tmp_path)
        assert code == 0, said
    else:
        words += ["--coordinator", f"localhost:{free_port()}", "--processes", "2"]
        jobs = [
            subprocess.Popen([*words, "--process", str(at)], env=environment(1), stdout=subprocess.PIPE, text=True)
            for at in range(2)
        ]
        said = "".join(job.communicate(timeout=200)[0] for job in jobs)
        assert [job.returncode for job in jobs] == [0, 0]
    assert said.count("written") == 1  # process 0 alone speaks
    proof = verify(str(tmp_path / "9")).steps[0]
    assert proof.state == "proven", proof.findings
    assert read(tmp_path / "9") == read(striped)
    held = [json.loads((tmp_path / f"9/default/_ckptkit/process-{at}.json").read_text()) for at in range(2)]
    boxes = [sum(len(leaf["boxes"]) for leaf in each["manifest"]["arrays"]["default"]) for each in held]
    assert min(boxes) > 0
    assert sorted(os.listdir(tmp_path)) == ["9"]


def test_reshard_resumes_after_an_interruption_at_any_commit(
    striped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted reshard would begin anew, skip what was lost, or leave something at the target."""
    read_boxes: list[Box] = []
    plain = Tensor.read

    def counted(self: Tensor, box: Box | None = None) -> np.ndarray:
        read_boxes.append(box or Box.whole(self.shape))
        return plain(self, box)

    monkeypatch.setattr(Tensor, "read", counted)
    memory = 1 << 20
    for stop in range(1, 24, 4):
        target, seen = tmp_path / f"b{stop}_9", []

        def interrupt(written: int, total: int, seen: list[int] = seen, stop: int = stop) -> None:
            seen.append(written)
            if len(seen) == stop:
                raise KeyboardInterrupt

        opened = open_source(str(striped), timeout_s=20)
        plan = plan_reshard(opened, str(target), [Mesh.parse(MESH)], memory_bytes=memory)
        with opened.opened, pytest.raises(KeyboardInterrupt):
            reshard(opened, plan, memory_bytes=memory, progress=interrupt)
        assert not target.exists()
        done = len(list(tmp_path.glob(f".b{stop}_9.ckptkit-part/journal/done-0-*.json")))
        read_boxes.clear()
        opened = open_source(str(striped), timeout_s=20)
        with opened.opened:
            reshard(opened, plan, memory_bytes=memory, resume=True)
        total = plan.written_bytes // 4
        assert sum(box.size for box in read_boxes) <= total - done * (memory // 8 // 4) + (memory // 4)
        proof = verify(str(target)).steps[0]
        assert proof.state == "proven", proof.findings
        assert read(target) == read(striped)
        assert not list(tmp_path.glob(".*"))


def test_bucket_marker_is_written_last(ckpt: Run, striped: Path, server: BucketServer, tmp_path: Path) -> None:
    """A half-written step in a bucket would be taken for a step, or another checkpoint be overwritten."""
    target = "gs://runs/run/9"
    opened = open_source(str(striped), timeout_s=20)
    plan = plan_reshard(opened, target, [Mesh.parse(MESH)], memory_bytes=1 << 20)

    def interrupt(written: int, total: int) -> None:
        if written > total // 2:
            raise KeyboardInterrupt

    with opened.opened, pytest.raises(KeyboardInterrupt):
        reshard(opened, plan, memory_bytes=1 << 20, progress=interrupt)
    assert not gcsfs.GCSFileSystem().exists("runs/run/9/commit_success.txt")
    assert ckpt("reshard", striped, target, "--mesh", MESH, "--memory", "1MB", "--resume").code == 0
    assert ckpt("verify", target).code == 0
    assert read(target) == read(striped)
    with ocp.CheckpointManager("gs://runs/run") as manager:
        assert manager.all_steps() == [9]
    left = gcsfs.GCSFileSystem().find("runs")
    assert not [name for name in left if "ckptkit-part" in name]
    assert "exists already" in ckpt("reshard", striped, target, "--mesh", MESH).err


@pytest.mark.parametrize("resume", [False, True])
def test_newer_step_at_the_bucket_target_is_kept(
    resume: bool, ckpt: Run, striped: Path, server: BucketServer, tmp_path: Path, ended_at: Callable[..., None]
) -> None:
    """It would be deleted, or written over, although somebody has committed it since."""
    words = ("reshard", striped, "gs://runs/run/9", "--mesh", MESH, "--memory", "1MB")
    ended_at(Destination, "commit", *words)
    store = open_store("gs://runs/run")
    store.delete_many(store.list_all("9"))
    copy(plan_copy(str(striped), "gs://runs/run"))
    before = store.stat_all("9")
    said = ckpt(*words, *["--resume"] * resume)
    assert (said.code, "exists already" in said.err) == (1, True), said.err
    assert {key: stat.generation for key, stat in store.stat_all("9").items()} == {
        key: stat.generation for key, stat in before.items()
    }


@pytest.mark.parametrize("to", ["orbax", "hf", "safetensors"])
def test_converts_into_a_bucket(to: str, ckpt: Run, striped: Path, server: BucketServer) -> None:
    """People would need a disk as large as the checkpoint to move it."""
    target = "gs://runs/out" + ".safetensors" * (to == "safetensors")
    # The answer is lost, and the client below repeats the put.
    lost = Fault(effect=Status(code=503, stage="after"), kinds=(Kind.WRITE,), objects="out/commit_success.txt", count=1)
    server.faults = FaultPlan(faults=(lost,))
    words = ["convert", striped, target, "--to", to, "--shard-size", "600KiB"]
    assert ckpt(*words).code == 0
    assert read(target) == read(striped)
    assert not [name for name in gcsfs.GCSFileSystem().find("runs") if "ckptkit-part" in name]
    assert "exists already" in ckpt(*words).err
