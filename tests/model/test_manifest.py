"""Manifests: what is written is read back as it was, and anything else is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import CorruptCheckpointError, NewerFormatError
from ckptkit.model.boxes import Box, cell_shape, cells_of
from ckptkit.model.cells import cell_ranges, copy_proven
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer, describe

DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "int4",
    "uint4",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "uint32",
    "bool",
    "complex64",
    "complex128",
]
NAMES = st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def leaves(draw: st.DrawFn) -> LeafRecord:
    """Leaves as a writer makes them: scalars, zero-size, whole or a part of their boxes, several cells."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    dtype = draw(st.sampled_from(DTYPES))
    cell = cell_shape(shape, shape, np.dtype(dtype).itemsize, draw(st.integers(1, 100)))
    path = tuple(draw(st.lists(NAMES, max_size=3)))
    box = Box.whole(shape)
    digests = tuple(digest_of(bytes([i])) for i, _ in enumerate(cells_of(box, cell)))
    held = draw(st.booleans())
    return LeafRecord(
        path=path,
        keys="".join(draw(st.sampled_from("dsa")) for _ in path),
        kind=draw(st.sampled_from(["jax", "numpy"])),
        shape=shape,
        dtype=dtype,
        cell=cell,
        extra=draw(
            st.fixed_dictionaries(
                {}, optional={"key_impl": NAMES, "sharding": st.dictionaries(NAMES, JSON, max_size=2).map(json.dumps)}
            )
        ),
        boxes=(BoxRecord(box=box, offset=draw(st.integers(-1, 2**50)), digests=digests),) if held else (),
    )


ITEMS = NAMES.filter(lambda name: name not in ("", ".", "..") and not {"/", "\0"} & set(name))


def apart(manifest: Manifest) -> Manifest:
    """The same, with boxes that have a place in the slot each at one of its own."""
    numbers = itertools.count()

    def placed(leaf: LeafRecord) -> LeafRecord:
        offsets = [box.offset if box.offset < 0 else box.offset + (next(numbers) << 52) for box in leaf.boxes]
        return replace(leaf, boxes=tuple(replace(box, offset=at) for box, at in zip(leaf.boxes, offsets, strict=True)))

    return replace(manifest, arrays={item: tuple(map(placed, found)) for item, found in manifest.arrays.items()})


MANIFESTS = st.builds(
    Manifest,
    save_id=st.builds(SaveId, *[st.integers(0, 2**40)] * 3),
    writer=st.integers(1, 4096).flatmap(
        lambda count: st.builds(
            Writer, process=st.integers(0, count - 1), count=st.just(count), host=st.text(max_size=9)
        )
    ),
    slot=st.sampled_from(["", "slot-0.bin", "slot-12.bin"]),
    arrays=st.dictionaries(
        ITEMS, st.lists(leaves(), max_size=3, unique_by=lambda leaf: leaf.path).map(tuple), max_size=2
    ),
    inline=st.dictionaries(ITEMS, st.fixed_dictionaries({"kind": st.just("json"), "value": JSON}), max_size=2),
).map(apart)


def small_manifest() -> Manifest:
    """One of each: a split leaf with two cells, a scalar, an inline item."""
    split = LeafRecord(
        path=("w", "0"),
        keys="ds",
        kind="jax",
        shape=(4, 2),
        dtype="bfloat16",
        cell=(1, 2),
        extra={"sharding": "{}"},
        boxes=(BoxRecord(box=Box((2, 0), (4, 2)), offset=4096, digests=(digest_of(b"a"), digest_of(b"b"))),),
    )
    scalar = LeafRecord(
        path=("n",),
        keys="d",
        kind="int",
        shape=(),
        dtype="int64",
        cell=(),
        boxes=(BoxRecord(box=Box((), ()), offset=0, digests=(digest_of(b"c"),)),),
    )
    return Manifest(
        save_id=SaveId(3, 1200, 7),
        writer=Writer(process=1, count=2, host="host-a"),
        slot="slot-1.bin",
        arrays={"state": (split, scalar)},
        inline={"data": {"kind": "json", "value": {"at": 1.5}}},
    )


def signed(body: dict[str, Any]) -> bytes:
    """A manifest with a right digest over a body that no writer writes."""
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    return f'{{"digest":"{digest_of(text.encode())}","manifest":{text}}}'.encode()


def body_of(manifest: Manifest) -> dict[str, Any]:
    return json.loads(manifest.to_bytes())["manifest"]


@given(manifest=MANIFESTS)
@settings(deadline=None, max_examples=200)
def test_manifest_round_trips(manifest: Manifest) -> None:
    """If it failed, a committed step would be restored as something else, or not at all."""
    found = Manifest.from_bytes(manifest.to_bytes(), path="here")
    assert found == manifest
    assert found.to_bytes() == manifest.to_bytes()
    assert found.held_bytes == manifest.held_bytes


@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_single_byte_change_is_refused_or_equivalent(data: st.DataObject) -> None:
    """If it failed, one damaged byte of a manifest could turn one save into another."""
    manifest = small_manifest()
    whole = manifest.to_bytes()
    mask = data.draw(st.integers(1, 255))
    refused = 0
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :]
        try:
            assert Manifest.from_bytes(damaged, path="here") == manifest, (at, mask)
        except CorruptCheckpointError as error:
            refused += 1
            assert "manifest here" in str(error)  # noqa: PT017  reading it equal is the other right answer
    assert refused > len(whole) - 10  # nearly every byte counts


@given(at=st.integers(0, 10_000))
@settings(deadline=None)
def test_truncated_manifest_is_refused(at: int) -> None:
    """If it failed, a manifest torn by a power failure would pass for a step with fewer leaves."""
    whole = small_manifest().to_bytes()
    with pytest.raises(CorruptCheckpointError, match=r"^manifest here cannot be read: "):
        Manifest.from_bytes(whole[: at % len(whole)], path="here")


def test_wrong_digest_is_reported_with_the_file() -> None:
    """If it failed, the user would not learn which file to look at."""
    text = small_manifest().to_bytes().replace(b'"step":1200', b'"step":1201')
    with pytest.raises(CorruptCheckpointError, match=r"^manifest /a/b\.json does not match its own digest$") as caught:
        Manifest.from_bytes(text, path="/a/b.json")
    assert caught.value.path == "/a/b.json"


def test_another_format_is_refused_by_number() -> None:
    """If it failed, a newer release's manifest would be misread by this one."""
    for kind, number in ((NewerFormatError, 4), (CorruptCheckpointError, -1)):
        with pytest.raises(kind, match=rf"x has format {number}, .*this version reads formats 1 to 3"):
            Manifest.from_bytes(signed({**body_of(small_manifest()), "format": number}), path="x")


def test_format_1_is_read() -> None:
    """If it failed, an update of the package would lose every step of the runs before."""
    body = {**body_of(small_manifest()), "format": 1}
    del body["shardings"], body["meshes"], body["arrays"]["state"][0]["sharding"]
    body["arrays"]["state"][0]["extra"] = {"sharding": "{}"}
    assert Manifest.from_bytes(signed(body), path="x") == small_manifest()


def test_shardings_and_device_lists_are_written_once() -> None:
    """A manifest of 4,000 leaves on 16,384 devices would have 850 MB, and no restore would read it."""
    devices = json.dumps({"mesh": [{"id": number} for number in range(1000)]})
    texts = [f'{{"partition_spec": [{axis}], "device_mesh": {devices}}}' for axis in range(3)]
    (split, _) = small_manifest().arrays["state"]
    leaves = tuple(replace(split, path=("w", str(n)), extra={"sharding": texts[n % 3]}, boxes=()) for n in range(300))
    manifest = replace(small_manifest(), arrays={"state": leaves})
    data = manifest.to_bytes()
    assert data.count(b"999") == 1
    assert len(data) < len(devices) * 1.2 + 300 * 200
    found = Manifest.from_bytes(data, path="x")
    assert found == manifest
    assert len({id(leaf.extra["sharding"]) for leaf in found.arrays["state"]}) == 3, "each is parsed once"


def change(*where: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Sets one field of a manifest's body."""

    def apply(body: Any) -> None:
        for key in where[:-1]:
            body = body[key]
        body[where[-1]] = to

    return apply


LEAF = ("arrays", "state", 0)
BOX = (*LEAF, "boxes", 0)
HOSTILE = {
    "negative size": (change(*LEAF, "shape", to=[-4, 2]), r"has shape \[-4, 2\]"),
    "size of text": (change(*LEAF, "shape", to=["4", 2]), r"has shape \['4', 2\]"),
    "shape of true": (change(*LEAF, "shape", to=[True, 2]), r"has shape \[True, 2\]"),
    "empty cell": (change(*LEAF, "cell", to=[0, 2]), r"cells of .0, 2."),
    "cell of another rank": (change(*LEAF, "cell", to=[2]), r"leaf w\.0 has cells of \(2,\)"),
    "cell of fractions": (change(*LEAF, "cell", to=[0.5, 2]), r"cells of \[0\.5, 2\]"),
    "dtype unknown": (change(*LEAF, "dtype", to="float99"), r"leaf w\.0.*float99|float99"),
    "dtype object": (change(*LEAF, "dtype", to="object"), r"leaf w\.0.*object"),
    "dtype number": (change(*LEAF, "dtype", to=4), r"leaf .*w.*0"),
    "kind unknown": (change(*LEAF, "kind", to="pickle"), r"leaf w\.0.*pickle"),
    "keys too short": (change(*LEAF, "keys", to="d"), r"leaf .*w.*0"),
    "keys unknown": (change(*LEAF, "keys", to="dx"), r"leaf .*w.*0"),
    "path of numbers": (change(*LEAF, "path", to=["w", 0]), r"cannot be read"),
    "extra is a list": (change(*LEAF, "extra", to=[]), r"cannot be read"),
    "box outside": (change(*BOX, 1, to=[5, 2]), r"leaf w\.0 has a box .* outside its shape \(4, 2\)"),
    "box of another rank": (change(*BOX, to=[[2], [4], 0, []]), r"leaf w\.0 has a box"),
    "box of fractions": (change(*BOX, 0, to=[2.0, 0]), r"leaf .*w.*0"),
    "box is null": (change(*BOX, to=None), r"cannot be read"),
    "digest missing": (change(*BOX, 3, to=[digest_of(b"a")]), r"leaf w\.0 has 1 digests for 2 cells"),
    "digests of numbers": (change(*BOX, 3, to=[1, 2]), r"leaf .*w.*0"),
    "offset below -1": (change(*BOX, 2, to=-2), r"leaf w\.0 has a box at offset -2"),
    "offset infinite": (change(*BOX, 2, to=float("inf")), r"cannot be read"),
    "offset is text": (change(*BOX, 2, to="12"), r"leaf w\.0"),
    "same box twice": (
        lambda body: body["arrays"]["state"][0]["boxes"].extend(body["arrays"]["state"][0]["boxes"]),
        r"leaf w\.0",
    ),
    "same leaf twice": (
        lambda body: body["arrays"]["state"].append(body["arrays"]["state"][0]),
        r"item 'state' has a leaf twice",
    ),
    "step is text": (change("save_id", "step", to="1200"), r"cannot be read"),
    "step is negative": (change("save_id", "step", to=-1), r"cannot be read"),
    "save_id has more": (change("save_id", "evil", to=1), r"cannot be read"),
    "epoch missing": (lambda body: body["save_id"].pop("epoch"), r"cannot be read"),
    "process beyond count": (change("writer", "process", to=2), r"cannot be read"),
    "slot is a number": (change("slot", to=1), r"cannot be read"),
    "arrays is a list": (change("arrays", to=[]), r"cannot be read"),
    "inline is a list": (change("inline", to=[]), r"cannot be read"),
    "inline without kind": (change("inline", "data", to={"value": 1}), r"cannot be read"),
    "sharding beyond the table": (change(*LEAF, "sharding", to=1), r"leaf w\.0 has sharding 1 of 1"),
    "sharding before the table": (change(*LEAF, "sharding", to=-1), r"leaf w\.0 has sharding -1 of 1"),
    "sharding is text": (change(*LEAF, "sharding", to="0"), r"leaf w\.0"),
    "sharding of another type": (change("shardings", 0, 0, to="[]"), r"leaf w\.0 has the sharding"),
    "mesh beyond the table": (change("shardings", 0, 1, to=0), r"sharding 0 is on mesh 0 of 0"),
    "no format": (lambda body: body.pop("format"), r"cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_field_value_is_refused(name: str) -> None:
    """If it failed, a manifest could make a restore allocate, index or return what nobody saved."""
    alter, text = HOSTILE[name]
    body = body_of(small_manifest())
    alter(body)
    with pytest.raises(CorruptCheckpointError, match=text) as caught:
        Manifest.from_bytes(signed(body), path="here")
    assert "manifest here" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b'{"digest":"x"}', b"\xff\xfe", b"[" * 100_000, b'{"digest":1,"manifest":null}'],
    ids=["empty", "null", "list", "object", "half", "utf16", "deep", "none"],
)
def test_file_that_is_not_a_manifest_is_refused(data: bytes) -> None:
    """If it failed, a file of zeros after a power failure would end the restart with a traceback."""
    with pytest.raises(CorruptCheckpointError, match=r"^manifest here (cannot be read|does not match its own digest)"):
        Manifest.from_bytes(data, path="here")


def test_save_ids_are_ordered_by_epoch_then_step() -> None:
    """If it failed, a higher step of an abandoned run would be taken for newer."""
    assert sorted([SaveId(2, 5, 9), SaveId(1, 90, 1), SaveId(2, 4, 8)]) == [
        SaveId(1, 90, 1),
        SaveId(2, 4, 8),
        SaveId(2, 5, 9),
    ]
    assert str(SaveId(2, 5, 9)) == "5@2.9"


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_names_round_trip(dtype: str) -> None:
    """If it failed, a leaf of this dtype could be saved and never be read."""
    leaf = replace(small_manifest().arrays["state"][0], dtype=dtype)
    assert np.dtype(leaf.dtype).name == dtype
    assert leaf.itemsize == np.dtype(dtype).itemsize
    assert leaf.describe() == describe(dtype, (4, 2)) == f"{dtype}[4,2]"
    assert ml_dtypes.bfloat16 is not None


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), limit=st.integers(1, 60))
@settings(deadline=None)
def test_copy_proven_copies_the_wanted_part_and_nothing_else(
    data: st.DataObject, shape: tuple[int, ...], limit: int
) -> None:
    """If it failed, a resharded restore would have right bytes in the wrong place."""
    values = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    leaf, record = proven_leaf(values, limit)
    pairs = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    wanted = Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
    into = np.full(wanted.shape, -1, np.int16)
    copy_proven(leaf, record, wanted, into, lambda _, a, b, into: values.reshape(-1).view(np.uint8)[a:b], where="here")
    np.testing.assert_array_equal(into, values[wanted.slices()])


@given(data=st.data(), bit=st.integers(0, 7), limit=st.integers(1, 60))
@settings(deadline=None)
def test_copy_proven_names_the_cell_of_a_flipped_bit(data: st.DataObject, bit: int, limit: int) -> None:
    """If it failed, silent corruption would reach the model."""
    values = np.arange(24, dtype=np.int16).reshape(6, 4)
    leaf, record = proven_leaf(values, limit)
    stored = values.reshape(-1).view(np.uint8).copy()
    at = data.draw(st.integers(0, stored.size - 1))
    stored[at] ^= 1 << bit
    bad = next(cell for cell, start, stop in cell_ranges(record, leaf) if start <= at < stop)
    into = np.zeros(values.shape, np.int16)
    words = re.escape(f"here: leaf w, cell {bad.start} to {bad.stop} has digest ")
    with pytest.raises(CorruptCheckpointError, match=f"^{words}[0-9a-f]{{32}}, expected [0-9a-f]{{32}}$"):
        copy_proven(leaf, record, Box.whole((6, 4)), into, lambda _, a, b, into: stored[a:b], where="here")


def proven_leaf(values: np.ndarray, limit: int) -> tuple[LeafRecord, BoxRecord]:
    """The record of one whole box with its digests."""
    box = Box.whole(values.shape)
    cell = cell_shape(values.shape, values.shape, values.itemsize, limit)
    digests = tuple(digest_of(values[each.slices()].tobytes()) for each in cells_of(box, cell))
    record = BoxRecord(box=box, offset=0, digests=digests)
    leaf = LeafRecord(
        path=("w",), keys="d", kind="numpy", shape=values.shape, dtype=values.dtype.name, cell=cell, boxes=(record,)
    )
    return leaf, record
