"""The joined record of an item's sidecars: a restore reads it in place of one file of each process."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import ckptkit
from ckptkit.durable import sidecars
from ckptkit.durable.orbax.host_shards import HostShards, HostTreeSave
from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.sidecars import join_sidecars, split_sidecars
from ckptkit.durable.write_part import PartWriter
from ckptkit.durable.write_step import StepWriter
from ckptkit.errors import CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer, Kind
from ckptkit.upkeep import signing
from ckptkit.upkeep.adoption import restamp_sidecars
from tests.durable.test_write_step import Meeting

_COUNT = 5
_ROWS = 100
_JOINED = f"state/{paths.JOINED_SIDECARS}"
_SAVE = SaveId(1, 3, 7)


def _items(process: int, save_id: SaveId) -> dict[str, Any]:
    shape = (_ROWS * _COUNT, 10)
    box = Box((_ROWS * process, 0), (_ROWS * (process + 1), 10))
    block = np.full((_ROWS, 10), process, np.float32)
    leaf = LeafRecord(
        path=("w",),
        keys="d",
        kind="jax",
        shape=shape,
        dtype="float32",
        cell=(_ROWS, 10),
        boxes=(BoxRecord(box=box, offset=-1, digests=(digest_of(block.tobytes()),)),),
    )
    writer = Writer(process=process, count=_COUNT, host=f"h{process}")
    text = Manifest(save_id=save_id, writer=writer, slot="", arrays={"state": (leaf,)}, inline={}).to_bytes()
    shards = {"w": HostShards(record=leaf, blocks=[(box, block)])}
    return {"state": HostTreeSave(shards, sidecar=text)}


def _write(url: str, save_id: SaveId = _SAVE) -> None:
    """One step, by `_COUNT` processes as threads."""
    meeting, raised = Meeting(_COUNT), list[BaseException]()

    def run(process: int) -> None:
        try:
            writer = StepWriter(url, meeting.of(process), DurableProfile())
            writer.write(str(save_id.step), save_id, _items(process, save_id), {})
        except BaseException as error:  # noqa: BLE001  looked at below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(process,)) for process in range(_COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error


def _read(url: str, **how: Any) -> list[tuple[SaveId, int]]:
    found = DurableReader(url, step=_SAVE.step).manifests(**how)
    return [(each.save_id, each.writer.process) for each in found]


def _sidecars_read(server: BucketServer) -> list[str]:
    return sorted(
        entry.name.rpartition("/")[2]
        for entry in server.log.entries()
        if entry.kind is Kind.READ and f"/{paths.SIDECAR_DIR}/" in entry.name
    )


_WHOLE = [(_SAVE, process) for process in range(_COUNT)]
_EACH = sorted(paths.sidecar_name(process) for process in range(_COUNT))


def test_restore_reads_two_records_for_any_number_of_processes(server: BucketServer) -> None:
    """A job of 1,000 hosts would read 1,000,000 sidecars: 200 s of a bucket that serves 5,000 a second."""
    _write("gs://runs/run")
    server.log.clear()
    assert _read("gs://runs/run/3", to_read=True) == _WHOLE
    assert _sidecars_read(server) == ["joined.jsonl.z", "process-0.json"]


def test_joined_record_is_put_after_the_sidecars_and_before_the_marker(server: BucketServer) -> None:
    """A record of a part of the sidecars would be committed, or a step without what the commit has promised."""
    _write("gs://runs/run")
    entries = server.log.entries()
    written = {entry.name: number for number, entry in enumerate(entries) if entry.kind is Kind.WRITE}
    (marked,) = [number for number, entry in enumerate(entries) if entry.kind is Kind.COPY]
    joined = written[f"run/3/{_JOINED}"]
    assert all(written[f"run/3/state/_ckptkit/{each}"] < joined for each in _EACH)
    assert joined < marked


def test_step_on_a_disk_has_a_joined_record_too(tmp_path: Path) -> None:
    """Orbax's reader, or a repair, would trip over it; a network's disk has round trips as well."""
    _write(str(tmp_path))
    assert (tmp_path / "3" / _JOINED).exists()
    assert _read(str(tmp_path / "3")) == _WHOLE
    (tmp_path / "3/state/_ckptkit/process-2.json").write_text("{")
    assert _read(str(tmp_path / "3")) == _WHOLE, "process 2 is read from the joined record"
    found = ts.open(
        {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/3/state/", "path": "w"}}
    )
    assert found.result().shape == (_ROWS * _COUNT, 10)


def test_root_that_is_another_disk_on_another_host_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step would be committed without the parts of the other hosts; or the error would name a file, and no cause."""
    write_part = PartWriter.write

    def part(self: PartWriter, *args: Any) -> None:
        write_part(self, *args)
        if self._process == 2:  # the host of process 0 does not see what this one has written
            for sidecar in tmp_path.rglob("process-2.json"):
                sidecar.unlink()

    monkeypatch.setattr(PartWriter, "write", part)
    with pytest.raises(
        ckptkit.CheckpointError, match=r"process 2 has written .* a durable root that every process sees"
    ):
        _write(str(tmp_path))
    assert not (tmp_path / "3").exists()


def _of_another_save(store: Any) -> None:
    other = [_items(process, SaveId(1, 3, 8))["state"].sidecar for process in range(_COUNT)]
    joined = join_sidecars(other)
    assert joined is not None
    store.put(_JOINED, joined)


def _one_digest_flipped(store: Any) -> None:
    texts = split_sidecars(store.get(_JOINED))
    texts[2] = texts[2].replace(b'"host":"h2"', b'"host":"h3"')
    store.put(_JOINED, join_sidecars(texts))


_FALLBACKS: dict[str, Callable[[Any], object]] = {
    "missing, as in older steps": lambda store: store.delete(_JOINED),
    "empty": lambda store: store.put(_JOINED, b""),
    "cut off": lambda store: store.put(_JOINED, store.get(_JOINED)[:-5]),
    "other bytes": lambda store: store.put(_JOINED, b"\x00" * 100),
    "a changed sidecar": _one_digest_flipped,
    "too few sidecars": lambda store: store.put(_JOINED, join_sidecars(split_sidecars(store.get(_JOINED))[:-1])),
    "another order": lambda store: store.put(_JOINED, join_sidecars(split_sidecars(store.get(_JOINED))[::-1])),
    "another save": _of_another_save,
}


@pytest.mark.parametrize("how", _FALLBACKS)
def test_sidecars_are_read_where_the_joined_record_is_not_whole(server: BucketServer, how: str) -> None:
    """A damaged record that nobody needs would lose the step, or a record of another save be believed."""
    _write("gs://runs/run")
    store = open_store("gs://runs/run/3")
    _FALLBACKS[how](store)
    server.log.clear()
    assert _read("gs://runs/run/3") == _WHOLE
    assert set(_EACH) <= set(_sidecars_read(server))
    found = ckptkit.verify("gs://runs/run")
    assert [step.state for step in found.steps] == ["proven"]
    assert any("joined.jsonl.z" in note for note in found.notes) == ("missing" not in how)


def test_joined_record_does_not_hide_that_a_sidecar_is_lost(server: BucketServer) -> None:
    """Restores would continue without a message until the joined record is lost too; a scrub rebuilds a sidecar."""
    _write("gs://runs/run")
    open_store("gs://runs/run/3").delete("state/_ckptkit/process-3.json")
    with pytest.raises(CorruptCheckpointError, match="sidecars of processes 0, 1, 2, 4 and"):
        _read("gs://runs/run/3")
    assert ckptkit.verify("gs://runs/run").corrupt
    del server


def test_late_sidecar_of_a_larger_run_does_not_change_the_step(server: BucketServer) -> None:
    """A run that was fenced off may put a sidecar under a number for which the step has no process."""
    _write("gs://runs/run")
    store = open_store("gs://runs/run/3")
    other = Writer(process=_COUNT, count=_COUNT + 1, host="late")
    text = Manifest(save_id=SaveId(0, 3, 0), writer=other, slot="", arrays={"state": ()}, inline={}).to_bytes()
    store.put(f"state/_ckptkit/process-{_COUNT}.json", text)
    assert _read("gs://runs/run/3") == _WHOLE
    del server


def test_signing_reads_every_sidecar_itself(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged sidecar would be signed, because the joined record has it whole."""
    _write("gs://runs/run")
    store = open_store("gs://runs/run/3")
    store.put("state/_ckptkit/process-3.json", b"{")
    assert _read("gs://runs/run/3") == _WHOLE
    monkeypatch.setattr(signing, "SigningKey", lambda key: key)
    with pytest.raises(CorruptCheckpointError, match=r"process-3\.json cannot be read"):
        signing.sign("gs://runs/run/3", "key")
    assert ckptkit.verify("gs://runs/run").corrupt
    del server


def test_copy_with_a_new_identity_has_a_joined_record_of_it(server: BucketServer) -> None:
    """Each process of a restore of the copy would read every sidecar."""
    _write("gs://runs/run")
    restamp_sidecars(open_store("gs://runs/run/3"), ["state"], SaveId(4, 3, 0))
    server.log.clear()
    assert {save_id for save_id, _ in _read("gs://runs/run/3")} == {SaveId(4, 3, 0)}
    assert _sidecars_read(server) == ["joined.jsonl.z", "process-0.json"]


def test_sidecars_that_are_too_large_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 and every reader would hold more than a manifest may have, or a small file unpack to any size."""
    record = join_sidecars([b"a" * 50, b"b" * 50])
    assert record is not None
    assert split_sidecars(record) == [b"a" * 50, b"b" * 50]
    monkeypatch.setattr(sidecars, "_JOINED_SMALL_BYTES", 1000)
    zeros = zlib.compress(bytes(1 << 20))
    with pytest.raises(ValueError, match="cut off, or too large"):
        split_sidecars(zeros)
    assert join_sidecars([bytes(1 << 20)]) is None, "readers would refuse what we wrote"
    monkeypatch.setattr(sidecars, "_JOINED_BYTES_MAX", 100)
    assert join_sidecars([b"a" * 50, b"b" * 50]) is None
    with pytest.raises(ValueError, match="cut off, or too large"):
        split_sidecars(record)
