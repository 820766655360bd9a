"""Every format is read as its own package wrote it, bit for bit, whole and in parts."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

import ckptkit
from ckptkit.conversion import plan_convert
from ckptkit.formats import open_checkpoint
from ckptkit.model.boxes import Box
from tests.cli.conftest import Ours, Run
from tests.formats import writers
from tests.formats.writers import LOW, PLAIN, Write, flat, same_bits, tree, values
from tests.states import make_state, raw

TORCH_PLAIN = tuple(name for name in PLAIN)


def assert_reads(path: Path, expected: dict[str, np.ndarray]) -> None:
    """Whole, and in the blocks of a tiny budget."""
    with open_checkpoint(str(path)) as opened:
        tensors = opened.by_name()
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert same_bits(tensor.read(), expected[name]), name
            made = np.empty(tensor.shape, tensor.dtype)
            for box in tensor.blocks(8 * 256):
                made[box.slices()] = tensor.read(box)
            assert same_bits(made, expected[name]), name
            inner = Box(tuple(n // 3 for n in tensor.shape), tuple(n - n // 4 for n in tensor.shape))
            assert same_bits(tensor.read(inner), expected[name][inner.slices()]), name


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (writers.by_safetensors, (*PLAIN, *LOW)),
        (writers.by_numpy, (*PLAIN, "complex64", "complex128")),
        (lambda path, nested: writers.by_numpy(path, nested, compressed=True), PLAIN),
        (writers.by_flax, (*PLAIN, *LOW, "complex64")),
    ],
    ids=["safetensors", "npz", "npz-compressed", "msgpack"],
)
def test_files_of_every_format_are_read(write: Write, names: tuple[str, ...], tmp_path: Path) -> None:
    """A dtype, an empty shape or a scalar would come out wrong."""
    pytest.importorskip("safetensors")
    nested = tree(names)
    assert_reads(write(tmp_path / "file.npz", nested), flat(nested))


def test_torch_tensors_views_and_storages_are_read(tmp_path: Path) -> None:
    """Tensors, views and shared storages of torch would come out wrong, or need torch to be read."""
    torch = pytest.importorskip("torch")
    nested = tree((*TORCH_PLAIN, *LOW, "complex64", "complex128"))
    assert_reads(writers.by_torch(tmp_path / "whole.pt", nested), flat(nested))
    base = torch.arange(60.0).reshape(6, 10)
    state = {
        "turned": base.t(),
        "part": base[1:5, 2:8],
        "wide": base[:, :1].expand(6, 4),
        "parameter": torch.nn.Parameter(base[2]),
        "list": [torch.tensor(3), (torch.tensor([True]), {"x": torch.zeros(0, 3)})],
        "step": 7,
        "rate": 0.5,
        "name": "adam",
        "none": None,
    }
    torch.save(state, tmp_path / "views.pt")
    expected = {name: state[name].detach().numpy() for name in ("turned", "part", "wide", "parameter")}
    expected |= {"list.0": np.array(3), "list.1.0": np.array([True]), "list.1.1.x": np.zeros((0, 3), np.float32)}
    expected |= {"step": np.array(7), "rate": np.array(0.5)}
    assert_reads(tmp_path / "views.pt", expected)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert_reads(tmp_path / "model.pt", {name: leaf.numpy() for name, leaf in model.state_dict().items()})


def test_expanded_torch_views_are_read(tmp_path: Path) -> None:
    """A view that repeats the elements of a small storage is sound, and would be called damaged."""
    torch = pytest.importorskip("torch")
    base = torch.arange(3.0).reshape(3, 1)
    views = {"wide": base.expand(3, 40), "one": torch.tensor(7.0).expand(500), "part": base[1:].expand(2, 30).t()}
    torch.save(views, tmp_path / "views.pt")
    assert_reads(tmp_path / "views.pt", {name: view.numpy() for name, view in views.items()})
    torch.save({"huge": base.expand(3, 1 << 30)}, tmp_path / "huge.pt")
    with pytest.raises(ckptkit.CheckpointError, match=r"huge is float32\[3,1073741824\], .* not supported") as error:
        open_checkpoint(str(tmp_path / "huge.pt"))
    assert not isinstance(error.value, ckptkit.CorruptCheckpointError)


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (np.float64(3), r"value.item\(\)"),
        (np.arange(3), "torch.from_numpy"),
        (1 + 2j, r"torch.tensor\(value\)"),
        (Path("x"), "save its tensors alone"),
        ({(1, 2): 3}, "text as the key"),
    ],
    ids=["numpy scalar", "numpy array", "complex", "path", "tuple as a key"],
)
def test_unsupported_value_in_a_torch_file_is_not_called_damage(value: Any, instead: str, tmp_path: Path) -> None:
    """The owner of a sound file would look for a damaged disk, and not know what to save."""
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2), "value": value}, tmp_path / "t.pt")
    with pytest.raises(ckptkit.CheckpointError, match=rf"t.pt: it has .* not supported.*{instead}") as error:
        open_checkpoint(str(tmp_path / "t.pt"))
    assert not isinstance(error.value, ckptkit.CorruptCheckpointError)


@pytest.mark.parametrize(
    ("tree", "name", "both"),
    [
        ({"a.b": 2, "a": {"b": 3}}, "a.b", ("['a.b']", "['a', 'b']")),
        ({1: 2, "1": 3}, "1", ("['1'] of item tree, float32[2]", "['1'] of item tree, float32[3]")),
    ],
)
def test_names_that_collide_are_both_named(
    tree: Any, name: str, both: tuple[str, str], tmp_path: Path, ckpt: Run
) -> None:
    """A sound file would be called damaged, and its owner would not know which names collide."""
    torch = pytest.importorskip("torch")

    def made(node: Any) -> Any:
        return {key: made(inner) for key, inner in node.items()} if isinstance(node, dict) else torch.ones(node)

    torch.save(made(tree), tmp_path / "t.pt")
    assert ckpt("inspect", tmp_path / "t.pt").code == 0
    said = ckpt("convert", tmp_path / "t.pt", tmp_path / "t.npz", "--to", "npz")
    assert (said.code, f"has two leaves of the name {name}: " in said.err) == (1, True), said.err
    assert all(each in said.err for each in both), said.err


@pytest.mark.parametrize("mark", ["conj", "neg"])
def test_unresolved_conj_or_neg_torch_views_are_refused(tmp_path: Path, mark: str) -> None:
    """The storage has the numbers before they are conjugated, or negated: these would be given out as the tensor's."""
    torch = pytest.importorskip("torch")
    base = torch.tensor([1 + 2j, 3 - 4j])
    view = base.conj() if mark == "conj" else base.conj().imag
    torch.save({"z": view}, tmp_path / "views.pt")
    with pytest.raises(ckptkit.CorruptCheckpointError, match=f"{mark}.*resolve_conj"):
        open_checkpoint(str(tmp_path / "views.pt"))
    torch.save({"z": view.resolve_conj().resolve_neg()}, tmp_path / "done.pt")
    assert_reads(tmp_path / "done.pt", {"z": view.resolve_conj().resolve_neg().numpy()})


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=["ocdbt", "files", "zarr3"])
def test_stock_orbax_checkpoints_are_read(options: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint that stock Orbax wrote would be read wrong."""
    nested = tree(("float32", "bfloat16", "int8", "bool", "uint16"))
    for leaves in nested.values():
        del leaves["s4"], leaves["s5"]  # stock Orbax refuses arrays without elements
    writers.by_orbax(tmp_path / "item", nested, **options)
    assert_reads(tmp_path / "item", flat(nested))


def test_orbax_v1_checkpoints_are_read(tmp_path: Path) -> None:
    """Checkpoints of Orbax's new interface would not be read."""
    from orbax.checkpoint import v1

    state = {"a": jnp.arange(6.0).reshape(2, 3), "b": {"c": jnp.ones(4, jnp.bfloat16)}}
    v1.save(str(tmp_path / "v1"), state)
    assert_reads(tmp_path / "v1", {"a": np.asarray(state["a"]), "b.c": np.asarray(state["b"]["c"])})


def test_ckptkit_steps_and_slots_are_read(ours: Ours) -> None:
    """Our own steps and slots would be read wrong, sharded leaves and keys first."""
    for path, step in ((ours.root / "4", 4), (ours.root, 4), (ours.slots, 5), (ours.manifest(7), 7)):
        expected = {
            ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys): leaf
            for keys, leaf in jax.tree_util.tree_leaves_with_path(make_state(step))
        }
        with open_checkpoint(str(path)) as opened:
            found = opened.by_name()
            assert found.keys() == expected.keys()
            for name, leaf in expected.items():
                assert raw(found[name].read()) == raw(leaf), (path, name)
            assert found["key"].leaf.key_impl == "threefry2x32"


def test_changed_cell_of_a_ckptkit_step_is_refused(mine: Ours) -> None:
    """Data that was damaged after its save would be converted into an apparently intact checkpoint."""
    base = f"file://{mine.root}/4/state/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "w/"}}
    ts.open(spec, open=True).result()[0, 0].write(-1.0).result()
    with open_checkpoint(str(mine.root / "4")) as opened, pytest.raises(ckptkit.CorruptCheckpointError, match="leaf w"):
        opened.by_name()["w"].read()


@pytest.mark.parametrize("block_bytes", [1 << 20, 64])
@pytest.mark.parametrize("compressed", [False, True])
def test_flipped_bit_in_npz_is_refused(tmp_path: Path, compressed: bool, block_bytes: int) -> None:
    """NumPy refuses the file; a conversion would make something of it that looks whole."""
    path, array = tmp_path / "a.npz", np.arange(1000.0)
    writers.by_numpy(path, {"w": array}, compressed=compressed)
    assert_reads(path, {"w": array})
    with zipfile.ZipFile(path) as archive:
        data = bytearray(archive.read("w.npy"))
        (info,) = archive.infolist()
    data[-5] ^= 1
    with zipfile.ZipFile(tmp_path / "b.npz", "w", info.compress_type) as archive:
        archive.writestr("w.npy", bytes(data))
        archive.infolist()[0].CRC = info.CRC  # the content of the directory
    with pytest.raises(zipfile.BadZipFile):
        np.load(tmp_path / "b.npz")["w"]
    with open_checkpoint(str(tmp_path / "b.npz")) as opened:
        (tensor,) = opened.tensors
        with pytest.raises(ckptkit.CorruptCheckpointError, match="does not match its checksum"):
            list(map(tensor.read, tensor.blocks(block_bytes)))


def test_fortran_order_and_big_endian_are_read(tmp_path: Path) -> None:
    """An array that NumPy stored by columns, or in the other byte order, would come out scrambled."""
    array = np.arange(24.0).reshape(2, 3, 4)
    np.savez(tmp_path / "a.npz", f=np.asfortranarray(array), b=array.astype(">f4"))
    assert_reads(tmp_path / "a.npz", {"f": array, "b": array.astype(np.float32)})


def test_flax_chunks_and_scalars_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flax's arrays above 1 GiB, which it stores in chunks, would be many small leaves; its scalars would be lost."""
    from flax import serialization

    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    state = {"big": np.arange(100, dtype=np.float32).reshape(4, 25), "n": 3, "z": 1 + 2j, "s": np.float32(2), "t": "x"}
    (tmp_path / "checkpoint_3").write_bytes(serialization.to_bytes(state))
    expected = {"big": state["big"], "n": np.array(3), "z": np.array(1 + 2j), "s": np.array(2, np.float32)}
    assert_reads(tmp_path / "checkpoint_3", expected)


def test_flax_chunks_are_ordered_by_name(tmp_path: Path) -> None:
    """Flax goes by the chunks' names: a writer that sorts them as text puts "10" before "2", and rows change places."""
    import msgpack
    from flax import serialization

    chunks = {str(at): np.full(2, at, np.float32) for at in range(11)}
    tree = {"__msgpack_chunked_array__": True, "shape": {"0": 22}, "chunks": dict(sorted(chunks.items()))}
    packed: Any = msgpack.packb({"w": tree}, default=serialization._msgpack_ext_pack, strict_types=True)
    (tmp_path / "checkpoint_1").write_bytes(packed)
    with pytest.raises(ckptkit.CorruptCheckpointError, match="entry 2 of an array in chunks is named '10'"):
        open_checkpoint(str(tmp_path / "checkpoint_1"))


def test_incomplete_hugging_face_directory_is_refused(tmp_path: Path) -> None:
    """A model that was uploaded or downloaded in part, its index last, would be taken for a smaller one."""
    pytest.importorskip("safetensors")
    for at, of in ((1, 3), (3, 3)):
        writers.by_safetensors(
            tmp_path / f"model-{at:05d}-of-{of:05d}.safetensors", {f"w{at}": values("float32", (2,))}
        )
    with pytest.raises(ckptkit.CorruptCheckpointError, match=r"1 of the 3 files model-\S+ are missing, or not"):
        open_checkpoint(str(tmp_path))
    writers.by_safetensors(tmp_path / "model-00002-of-00003.safetensors", {"w2": values("float32", (2,))})
    with open_checkpoint(str(tmp_path)) as opened:
        assert sorted(opened.by_name()) == ["w1", "w2", "w3"]


def test_unread_safetensors_content_is_reported(tmp_path: Path) -> None:
    """Tensors that an index forgot, and a writer's other entries, would be lost without a message."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    name = "model-00001-of-00001.safetensors"
    save_file({"a": np.zeros(2), "b": np.ones(2)}, tmp_path / name, metadata={"format": "pt", "title": "mine"})
    expected = ("not read: metadata: title",)
    assert ckptkit.inspect(str(tmp_path / name)).notes == expected
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    expected = ("not read: tensors that the index does not name: b", *expected)
    with open_checkpoint(str(tmp_path)) as opened:
        assert opened.facts.notes == expected
        assert plan_convert(opened, str(tmp_path.parent / "t.npz"), "npz").notes == expected


def test_bytes_of_linked_files_are_counted(tmp_path: Path) -> None:
    """A model in Hugging Face's cache, whose files are links, would take 0 bytes."""
    pytest.importorskip("safetensors")
    blob = writers.by_safetensors(tmp_path / "blob.safetensors", {"a": values("float32", (2,))})
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").symlink_to(blob)
    assert ckptkit.inspect(str(model)).items[0].stored_bytes == blob.stat().st_size


def test_files_that_an_index_leaves_out_are_named(tmp_path: Path) -> None:
    """A shard that an index forgot would be dropped without a message, and its bytes be counted."""
    pytest.importorskip("safetensors")
    index = tmp_path / "model.safetensors.index.json"
    first = writers.by_safetensors(tmp_path / "a.safetensors", {"a": values("float32", (2,))})
    writers.by_safetensors(tmp_path / "b.safetensors", {"b": values("float32", (2,))})
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    found = ckptkit.inspect(str(tmp_path))
    assert found.notes == ("not read: files that the index does not name: b.safetensors",)
    assert found.items[0].stored_bytes == first.stat().st_size
    for at in (1, 2):
        name = f"model-{at:05d}-of-00002.safetensors"
        writers.by_safetensors(tmp_path / name, {f"w{at}": values("float32", (2,))})
    index.write_text(json.dumps({"weight_map": {"w1": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ckptkit.CorruptCheckpointError, match=r"1 of the 2 files model-\S+ are not in the index"):
        open_checkpoint(str(tmp_path))


def test_hugging_face_directory_is_read(tmp_path: Path) -> None:
    """A model in several files would be read in part, or a neighbouring file be taken for a part."""
    pytest.importorskip("safetensors")
    a, b = {"a.x": values("float32", (3, 4))}, {"b": values("bfloat16", (5,))}
    writers.by_safetensors(tmp_path / "model-00001-of-00002.safetensors", a)
    writers.by_safetensors(tmp_path / "model-00002-of-00002.safetensors", b)
    assert_reads(tmp_path, {**a, **b})
    writers.by_safetensors(tmp_path / "adapter.safetensors", {"other": values("float32", (2,))})
    mapped = {"a.x": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 58}, "weight_map": mapped}))
    assert_reads(tmp_path, {**a, **b})


def test_chunk_above_a_quarter_of_the_budget_is_refused(tmp_path: Path) -> None:
    """A chunk that is read whole would take more memory than the caller allowed."""
    writers.by_orbax(tmp_path / "item", {"w": np.zeros((64, 1024), np.float32)})
    with open_checkpoint(str(tmp_path / "item")) as opened:
        with pytest.raises(ckptkit.CheckpointError, match="give --memory at least 1048576 bytes"):
            list(opened.tensors[0].blocks(1 << 19))
        assert len(list(opened.tensors[0].blocks(1 << 20))) == 1


def test_remote_file_is_read_by_range(tmp_path: Path) -> None:
    """Files on a bucket could not be read by range."""
    import fsspec

    pytest.importorskip("safetensors")
    nested = tree(("float32",))
    data = writers.by_safetensors(tmp_path / "m.safetensors", nested).read_bytes()
    fsspec.filesystem("memory").pipe_file("/formats/m.safetensors", data)
    with open_checkpoint("memory://formats/m.safetensors") as opened:
        for name, leaf in flat(nested).items():
            assert same_bits(opened.by_name()[name].read(), leaf)


def test_arrays_without_numbers_are_left_out_by_name(tmp_path: Path, ckpt: Run) -> None:
    """A sound archive with one text would be called damaged, and its weights could not be read."""
    note, when = np.array("of the 3rd try"), np.datetime64("2020-01-01")
    table = np.zeros(2, [("x", "f4"), ("y", "f4")])
    np.savez(tmp_path / "a.npz", w=np.arange(4.0), note=note, when=when, table=table, objects=np.array([{}]))
    said = ckpt("inspect", tmp_path / "a.npz")
    assert said.code == 0
    for name in ("note (text)", "when (dates)", "table (records)", "objects (objects, which are pickles)"):
        assert name in said.out
    assert ckpt("extract", tmp_path / "a.npz", tmp_path / "only.npz", "--only", "w", "--to", "npz").code == 0
    done = ckpt("convert", tmp_path / "a.npz", tmp_path / "b.npz", "--to", "npz")
    assert (done.code, "note (text)" in done.out + done.err) == (0, True)
    assert np.load(tmp_path / "b.npz")["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["report.docx", "report.npz"])
def test_zip_without_arrays_is_no_checkpoint(tmp_path: Path, ckpt: Run, name: str) -> None:
    """A document would be inspected as a checkpoint with no arrays."""
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("word/document.xml", "<x/>")
    said = ckpt("inspect", tmp_path / name)
    assert (said.code, said.out) == (10, "")
    assert "no array of numbers: word/document.xml (not an array)" in said.err
