"""Files that were cut, changed or made to do harm: one sentence, never a traceback, a hang or memory without bound."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptkit
from ckptkit.cli import main
from ckptkit.conversion.statistics import diff, statistics_of
from ckptkit.formats import open_checkpoint, torch
from tests.cases import long_except
from tests.cli.conftest import Run
from tests.formats import writers
from tests.formats.writers import npy, tree, zipped

ROOT = Path(__file__).parents[2]


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], start: int, stop: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def ext(code: int, data: bytes) -> bytes:
    return b"\xc9" + struct.pack(">I", len(data)) + bytes([code]) + data


def torch_file(pickled: bytes, storage: bytes = b"\0" * 16) -> dict[str, bytes]:
    return {"a/data.pkl": pickled, "a/data/0": storage, "a/version": b"3"}


class Calls:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ckptkit-was-here",)


def tensor_pickle(size: str, stride: str, offset: str = "K\x00") -> bytes:
    """A tensor by torch's own operations; the arguments are pickled already."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
    head = b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n("
    return head + storage + (offset + size + stride).encode("latin1") + b"\x89ccollections\nOrderedDict\n)RtRs."


def nested_pickle() -> bytes:
    """Sixty tuples, each twice the one before: 2**60 leaves in 300 bytes."""
    return b"\x80\x02N" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60)) + b"."


def zip_with(data: bytes, change: Callable[[bytearray], None]) -> bytes:
    changed = bytearray(data)
    change(changed)
    return bytes(changed)


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return buffer.getvalue()


def npy_header(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


def overlapping() -> bytes:
    data = archive({"a.npy": npy(np.arange(9)), "b.npy": npy(np.arange(9))})
    at = data.rindex(b"PK\x01\x02")  # the last entry's offset becomes the first's
    return data[: at + 42] + struct.pack("<I", 0) + data[at + 46 :]


def claiming_more() -> bytes:
    data = bytearray(archive({"a.npy": npy(np.zeros(1000))}, zipfile.ZIP_DEFLATED))
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 1 << 31)
    return bytes(data)


NOTE = json.dumps({"a": {"dtype": "O", "shape": [1]}})
COPIES = b"\x80\x02](" + b"N" * 100_000 + b"eq\x00" + b"ctorch\nSize\nh\x00\x85R" * 100_000 + b"."
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "safetensors-length": safetensors({}, length=1 << 63),
    "safetensors-header-larger-than-file": safetensors(b"{}", length=100),
    "safetensors-overlap": safetensors({"a": entry([4], 0, 4), "b": entry([4], 2, 6)}, b"\0" * 6),
    "safetensors-hole": safetensors({"a": entry([2], 2, 4)}, b"\0" * 4),
    "safetensors-behind-the-end": safetensors({"a": entry([8], 0, 8)}, b"\0" * 4),
    "safetensors-negative-shape": safetensors({"a": entry([-4], 0, 4)}, b"\0" * 4),
    "safetensors-negative-offset": safetensors({"a": entry([4], -4, 0)}, b"\0" * 4),
    "safetensors-huge-shape": safetensors({"a": entry([1 << 40, 1 << 40], 0, 4)}, b"\0" * 4),
    "safetensors-many-dimensions": safetensors({"a": entry([1] * 5000, 0, 1)}, b"\0"),
    "safetensors-deep": safetensors(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "safetensors-twice": safetensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "safetensors-no-object": safetensors(b"[1, 2]" + b" " * 20) + b"{",
    "safetensors-dtype": safetensors({"a": entry([1], 0, 8, "OBJ")}, b"\0" * 8),
    "safetensors-note": safetensors({"__metadata__": {"ckptkit": NOTE}, "a": entry([1], 0, 1)}, b"1"),
    "npz-object": archive({"a.npy": npy(np.array([{}], dtype=object))}),
    "npz-records": archive({"a.npy": npy(np.zeros(2, [("x", "f4")]))}),
    "npz-negative": archive({"a.npy": npy_header("{'descr':'<f4','fortran_order':False,'shape':(-1,)}", b"\0" * 4)}),
    "npz-more-than-there-is": archive({"a.npy": npy_header("{'descr':'<f4','fortran_order':False,'shape':(99,)}")}),
    "npz-deep-header": archive({"a.npy": npy_header("(" * 9000)}),
    "npz-long-header": archive({"a.npy": npy_header("{" + " " * 20_000)}),
    "npz-calls": archive({"a.npy": npy_header("__import__('os').system('true')")}),
    "npz-overlap": overlapping(),
    "npz-claims-more": claiming_more(),
    "npz-cut": archive({"a.npy": npy(np.zeros(1000))})[:-40],
    "zip-of-nothing": archive({"readme": b"x"}) and archive({"a.npy": b""}),
    "msgpack-map-of-4-billion": b"\xdf\xff\xff\xff\xff",
    "msgpack-deep": b"\x81\xa1a" * 100_000 + b"\xc0",
    "msgpack-many": b"\x81\xa1a\xdd\x00\x0f\x00\x00" + b"\x80" * 0x0F0000,
    "msgpack-cut-array": b"\x81\xa1a" + ext(1, b"\x93\x91\x04\xa7float32\xc4\x10\0\0\0\0"),
    "msgpack-negative-shape": b"\x81\xa1a" + ext(1, b"\x93\x91\xff\xa7float32\xc4\x04\0\0\0\0"),
    "msgpack-object": b"\x81\xa1a" + ext(1, b"\x93\x91\x01\xa6object\xc4\x08" + b"\0" * 8),
    "msgpack-foreign-extension": b"\x81\xa1a" + ext(77, b"\0" * 4),
    "msgpack-tail": b"\x81\xa1a\x01\x01",
    "torch-calls": archive(torch_file(pickle.dumps({"w": Calls()}, protocol=2))),
    "torch-calls-late": archive(torch_file(pickle.dumps({"w": Calls()}, protocol=4))),
    "torch-imports": archive(torch_file(b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.")),
    "torch-object": archive(torch_file(pickle.dumps(np.zeros(2), protocol=2))),
    "torch-attribute": archive(torch_file(b"\x80\x02ctorch\nhub\n.")),
    "torch-memo": archive(torch_file(b"\x80\x02Nr\xff\xff\xff\xffj\xfe\xff\xff\xff.")),
    "torch-deep-key": archive(torch_file(b"\x80\x02}N" + b"\x85" * 2_000_000 + b"K\x01s.")),
    "torch-many": archive(torch_file(b"\x80\x02(" + b"]" * 6_000_000 + b"l.")),
    "torch-doubling": archive(torch_file(nested_pickle())),
    "torch-no-end": archive(torch_file(b"\x80\x02}")),
    "torch-cyclic": archive(torch_file(b"\x80\x02]q\x00h\x00a.")),
    "torch-mark": archive(torch_file(b"\x80\x02((((u.")),
    "torch-behind-the-end": archive(torch_file(tensor_pickle("K\x05\x85", "K\x01\x85"))),
    "torch-expanded": archive(torch_file(tensor_pickle("J\xff\xff\xff\x7f\x85", "K\x00\x85"))),
    "torch-negative": archive(torch_file(tensor_pickle("J\xff\xff\xff\xff\x85", "K\x01\x85"))),
    "torch-negative-offset": archive(torch_file(tensor_pickle("K\x01\x85", "K\x01\x85", "J\xff\xff\xff\xff"))),
    "torch-no-storage": archive({"a/data.pkl": tensor_pickle("K\x01\x85", "K\x01\x85")}),
    "torch-bare-pickle": pickle.dumps({"w": Calls()}, protocol=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", long_except(set(HOSTILE) - {"torch-many", "torch-deep-key"}, HOSTILE))
def test_hostile_file_is_refused(kind: str, tmp_path: Path, ckpt: Run) -> None:
    """A file made to do harm would crash the command, hang it, be executed, or pass for a checkpoint."""
    path = tmp_path / "file"
    path.write_bytes(HOSTILE[kind])
    said = ckpt("inspect", path)
    # A file whose kind cannot be told, or without an array that may be read, is "nothing of the kind"; everything else
    # is damage, or refused.
    nothing = kind in ("safetensors-no-object", "npz-object", "npz-records")
    assert said.code in ((10, 11) if nothing else (1, 11)), said
    assert len(said.err.splitlines()) == 1
    assert len(said.err) < 700
    assert not Path("/tmp/ckptkit-was-here").exists()


def test_views_of_one_storage_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound would be that of each tensor: a file of 3.8 KB became 20 GiB."""
    view = tensor_pickle("K\x04\x85", "K\x00\x85")
    path = zipped(tmp_path / "t.pt", torch_file(view, np.arange(4, dtype="f4").tobytes()))
    with open_checkpoint(str(path)) as opened:
        stored_bytes = sum(tensor.nbytes for tensor in opened.tensors)
    assert stored_bytes == 16
    one = view[view.index(b"ctorch._utils") : -2]  # from its first operation to before it is put into the tree
    many = b"\x80\x02}(" + b"".join(b"X\x01\x00\x00\x00" + name.encode() + one for name in "abcdefgh") + b"u."
    path = zipped(tmp_path / "many.pt", torch_file(many, np.arange(4, dtype="f4").tobytes()))
    with open_checkpoint(str(path)) as opened:
        assert len(opened.tensors) == 8
    monkeypatch.setattr(torch, "_REPEATED_BYTES_MAX", 32)
    monkeypatch.setattr(torch, "_REPEATED_TIMES_MAX", 1)
    with pytest.raises(ckptkit.CheckpointError, match="expanded from storages of 16 bytes to more than 48"):
        open_checkpoint(str(path))


def test_statistics_of_absent_chunks_read_one_element(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every element of a shape that a file only claims would be read: no command would end."""
    item = writers.by_orbax(tmp_path / "item", {"w": np.arange(24.0)}, use_ocdbt=False)
    tree_file = item / "_METADATA"
    described = json.loads(tree_file.read_text()) | {"store_array_data_equal_to_fill_value": False}
    tree_file.write_text(json.dumps(described))
    zarr = json.loads((item / "w/.zarray").read_text()) | {"shape": [1 << 59], "chunks": [24], "fill_value": 2.0}
    (item / "w/.zarray").write_text(json.dumps(zarr))
    with open_checkpoint(str(item)) as opened:
        found = statistics_of(opened.tensors[0])
    size = 1 << 59
    assert (found.minimum, found.maximum, found.nan) == (0.0, 23.0, 0)
    assert found.norm == pytest.approx((4.0 * size) ** 0.5)
    assert found.mean == pytest.approx(2.0)
    changed = tmp_path / "changed"
    shutil.copytree(item, changed)
    zarr["fill_value"] = 3.0
    (changed / "w/.zarray").write_text(json.dumps(zarr))
    with open_checkpoint(str(item)) as one, open_checkpoint(str(changed)) as two:
        assert diff(one.by_name(), one.by_name()).same
        (leaf,) = diff(one.by_name(), two.by_name()).values
    assert (leaf.changed, leaf.max_abs) == (1.0, 1.0), "all but 24 of 2^59 elements"
    target = tmp_path / "there"
    assert main(["reshard", str(item), str(target), "--mesh", "data=77", "--dry-run"]) in (0, 1, 2), "it ends"
    (item / "w/0").unlink()
    with open_checkpoint(str(item)) as opened:
        assert statistics_of(opened.tensors[0]).std == 0.0


def test_valid_torch_tensor_is_read(tmp_path: Path) -> None:
    """The hand-made pickles above would be refused for another reason than the one that they are meant for."""
    path = zipped(
        tmp_path / "t.pt", torch_file(tensor_pickle("K\x04\x85", "K\x01\x85"), np.arange(4, dtype="f4").tobytes())
    )
    with open_checkpoint(str(path)) as opened:
        assert opened.by_name()["w"].read().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "gone.safetensors", "x.py"]
)
def test_index_that_names_outside_files_is_refused(name: str, tmp_path: Path, ckpt: Run) -> None:
    """An index would make the command read files outside its directory."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    said = ckpt("inspect", tmp_path)
    assert (said.code, len(said.err.splitlines())) == (11, 1)


def test_pipe_does_not_block(tmp_path: Path, ckpt: Run) -> None:
    """A named pipe would hang the command."""
    os.mkfifo(tmp_path / "model.safetensors")
    assert ckpt("inspect", tmp_path / "model.safetensors").code == 11
    assert ckpt("inspect", tmp_path).code == 11


BOMBS = {
    "headers": safetensors(b'{"a":[' + b"[]," * (10 << 20) + b"0]}"),
    "pickle": archive(torch_file(b"\x80\x02" + b"]" * (31 << 20) + b".")),
    "pickle-copies": archive(torch_file(COPIES)),
    "maps": b"\x81\xa1a\xdd\x03\x00\x00\x00" + b"\x80" * 0x03000000,
}  # fmt: skip

LIMITED = """
import resource, sys
from ckptkit.cli import main
import ckptkit.formats, ckptkit.durable
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
codes = [main(["inspect", path]) for path in sys.argv[1:]]
print(list(map(int, codes)))
"""


@pytest.mark.long
def test_reader_memory_is_bounded(tmp_path: Path) -> None:
    """A small file would fill the memory of whoever looks at it: 1 GiB more is all that each may take."""
    paths = []
    for kind, data in BOMBS.items():
        (tmp_path / f"{kind}.safetensors" if kind == "headers" else tmp_path / kind).write_bytes(data)
        paths.append(next(path for path in tmp_path.iterdir() if path.name.startswith(kind) and path not in paths))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, paths)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [11] * len(paths), done.stderr


FUZZED: dict[str, Callable[[Path], Path]] = {
    "safetensors": lambda path: writers.by_safetensors(path, tree(("float32", "bfloat16"))),
    "npz": lambda path: writers.by_numpy(path, tree(("float32", "bool"))),
    "npz-compressed": lambda path: writers.by_numpy(path, tree(("float32", "bool")), compressed=True),
    "msgpack": lambda path: writers.by_flax(path, tree(("float32", "bfloat16"))),
    "torch": lambda path: writers.by_torch(path, tree(("float32", "bool"))),
}
CHANGES = ["flip", "cut", "drop", "insert", "repeat", "huge"]
_ALL_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_MUTATIONS = st.lists(
    st.tuples(st.sampled_from(CHANGES), st.integers(0, 1 << 30), st.binary(max_size=8)),
    min_size=1,
    max_size=4,
)  # fmt: skip


def mutated(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    made = bytearray(data)
    for kind, where, extra in mutations:
        # Half of the places are at the ends, where headers and directories are.
        at = where % max(1, len(made)) if where % 2 else (where % 512 if where % 4 else -(where % 2048))
        at = max(0, min(len(made) - 1, at if at >= 0 else len(made) + at))
        if not made:
            break
        if kind == "flip":
            made[at] ^= 1 << (where % 8)
        elif kind == "cut":
            del made[at:]
        elif kind == "drop":
            del made[at : at + 1 + where % 16]
        elif kind == "insert":
            made[at:at] = extra
        elif kind == "repeat":
            made[at:at] = made[at : at + 64]
        else:
            made[at : at + 4] = b"\xff\xff\xff\x7f"
    return bytes(made)


def read_all(path: Path) -> None:
    """Every byte, within a small budget; what is refused raises one of our errors, and nothing else."""
    with open_checkpoint(str(path)) as opened:
        for tensor in opened.by_name().values():
            for box in tensor.blocks(1 << 20):
                tensor.read(box)


@pytest.mark.parametrize("kind", FUZZED)
def test_mutated_file_raises_only_known_errors(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Some damage to a file would make its reader raise what nobody expects."""
    directory = tmp_path_factory.mktemp(kind)
    pytest.importorskip({"torch": "torch", "safetensors": "safetensors"}.get(kind, "numpy"))
    whole = FUZZED[kind](directory / "whole.npz").read_bytes()
    path = directory / "mutated"

    @settings(max_examples=int(os.environ.get("CKPTKIT_FUZZ", "150")), deadline=None, derandomize=True,
              suppress_health_check=_ALL_CHECKS, database=None)  # fmt: skip
    @given(_MUTATIONS)
    def fuzz(mutations: list[tuple[str, int, bytes]]) -> None:
        path.write_bytes(mutated(whole, mutations))
        with suppress(ckptkit.CheckpointError):
            read_all(path)

    fuzz()


@pytest.mark.parametrize(
    "layout", [{"use_ocdbt": False}, {"use_zarr3": True, "use_ocdbt": False}], ids=["zarr2", "zarr3"]
)
def test_mutated_orbax_metadata_raises_only_known_errors(layout: dict[str, Any], tmp_path: Path) -> None:
    """Some damage to Orbax's or zarr's metadata would make the reader raise what nobody expects, or take all memory."""
    item = writers.by_orbax(tmp_path / "item", {"w": np.arange(24.0).reshape(4, 6), "b": np.ones(3, np.int8)}, **layout)
    names = ["_METADATA", "w/.zarray" if "use_zarr3" not in layout else "w/zarr.json"]
    whole = {name: (item / name).read_bytes() for name in names}

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=_ALL_CHECKS, database=None)
    @given(st.sampled_from(names), _MUTATIONS)
    def fuzz(name: str, mutations: list[tuple[str, int, bytes]]) -> None:
        (item / name).write_bytes(mutated(whole[name], mutations))
        with suppress(ckptkit.CheckpointError):
            read_all(item)
        (item / name).write_bytes(whole[name])

    fuzz()


def test_huge_shape_in_zarr_metadata_is_refused(tmp_path: Path) -> None:
    """A shape that was changed to 2**40 would be read, and written, as a terabyte of zeros."""
    item = writers.by_orbax(tmp_path / "item", {"w": np.arange(24.0)}, use_ocdbt=False)
    described = json.loads((item / "w/.zarray").read_text())
    described["shape"] = [1 << 40]
    (item / "w/.zarray").write_text(json.dumps(described))
    with pytest.raises(ckptkit.CorruptCheckpointError, match="leaf w"):
        read_all(item)
    assert main(["inspect", str(item)]) == 0
