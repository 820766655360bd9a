"""From a path to the checkpoint at that path, in any format."""

from __future__ import annotations

import stat
from dataclasses import replace

from ckptkit.durable.lifecycle.classify import content_of
from ckptkit.durable.lifecycle.places import Place, local_kind, nothing_at
from ckptkit.errors import CheckpointError, CorruptCheckpointError
from ckptkit.formats.msgpack import open_msgpack
from ckptkit.formats.npz import open_npz
from ckptkit.formats.ranges import open_ranges
from ckptkit.formats.safetensors import INDEX, SUFFIX, is_sharded, open_safetensors, open_sharded
from ckptkit.formats.tensors import Checkpoint
from ckptkit.formats.torch import open_torch, pickle_member
from ckptkit.formats.zips import read_entries
from ckptkit.inspection import Inspection, Item
from ckptkit.inspection import inspect as inspect_orbax
from ckptkit.inspection.roots import nothing_there
from ckptkit.model import paths
from ckptkit.store.backends import properties_of
from ckptkit.store.remote import RemoteStore
from ckptkit.store.roots import root_url
from ckptkit.util.gc_pause import collection_paused
from ckptkit.util.words import first_of

_MSGPACK_MAPS = (*range(0x80, 0x90), 0xDE, 0xDF)
_PICKLES = b"\x80"
_NAMED = 5  # files in a note


@collection_paused()  # 100,000 leaves are a million objects that all stay
def open_checkpoint(path: str, *, timeout_s: float = 20.0) -> Checkpoint:
    """The checkpoint at `path`, ready to be read box by box; close it, or use it as a context manager.

    A directory is a step, an item, a root (its newest step), a fast tier's slots, or else one of Hugging Face's with
    safetensors. A file is safetensors, npz, a zip of `torch.save`, Flax's msgpack, or a manifest. The bytes of a file
    determine its format, not its name. Cost: metadata only.

    Raises `StepNotFoundError` where nothing of the kind is there, `CorruptCheckpointError` for what cannot be read,
    `StoreError` for what cannot be reached.
    """
    url = root_url(path)
    if _is_file(url, timeout_s):
        return _open_file(url, timeout_s)
    if properties_of(url).file_system and local_kind(url) is None:
        raise nothing_there(url, "there is no such file or directory; check the path")
    place = Place.open(url, timeout_s=timeout_s)
    if _is_model_directory(place):
        return open_sharded(place)
    return _open_orbax(path, timeout_s, place)


@collection_paused()
def inspect(path: str, *, timeout_s: float = 20.0) -> Inspection:
    """Describes the checkpoint at `path`, in every format of `open_checkpoint`, from its metadata alone.

    Where something of an Orbax directory is damaged and the rest can be read, the rest is returned and the damage is in
    `problems`. Cost: small reads only: one per process of a step with our sidecars, one per node of
    another OCDBT tree, one per leaf of anything else.

    Raises `StepNotFoundError` where nothing that can be inspected is there, `CorruptCheckpointError` where what is
    there cannot be read, `StoreError` where it cannot be reached.
    """
    url = root_url(path)
    if not _is_file(url, timeout_s) or _is_manifest(url):
        known = not properties_of(url).file_system or local_kind(url) == stat.S_IFDIR
        place = Place.open(url, timeout_s=timeout_s) if known else None
        if place is None or not _is_model_directory(place):
            return _with_unread_files(inspect_orbax(path, timeout_s=timeout_s), place)
    with open_checkpoint(path, timeout_s=timeout_s) as opened:
        return inspection_of(opened)


def inspection_of(opened: Checkpoint) -> Inspection:
    """An open checkpoint that is neither an Orbax directory nor a slot, as `inspect` returns it."""
    leaves = [(tensor.item, tensor.leaf) for tensor in opened.tensors] + list(opened.others)
    names = dict.fromkeys(item for item, _ in leaves)
    return Inspection(
        path=opened.path,
        kind=opened.facts.kind,
        step=opened.facts.step,
        origin=opened.facts.origin,
        items=tuple(
            Item(
                name=name,
                kind="arrays",
                layout=f"{opened.format}, {opened.layout}",
                stored_bytes=opened.facts.stored_bytes if len(names) < 2 else None,
                leaves=tuple(leaf for item, leaf in leaves if item == name),
            )
            for name in names or {"tensors": None}
        ),
        notes=opened.facts.notes,
        problems=opened.facts.problems,
    )


def _open_orbax(path: str, timeout_s: float, place: Place | None = None) -> Checkpoint:
    from ckptkit.formats.orbax import open_orbax  # imports Orbax, which what reads metadata or files does not need

    found = inspect_orbax(path, timeout_s=timeout_s, passes_over=False)
    return open_orbax(_with_unread_files(found, place), timeout_s=timeout_s)


def _with_unread_files(found: Inspection, place: Place | None) -> Inspection:
    """`found`, with a note that names the files of safetensors next to it."""
    files = [] if place is None else [name for name in place.names() if name.endswith((SUFFIX, INDEX))]
    note = f"not read: {first_of(files, _NAMED)}; name a file to read it"
    return replace(found, notes=(*found.notes, note)) if files else found


def _is_manifest(url: str) -> bool:
    """Whether a file's name is that of a record of ours."""
    name = url.rpartition("/")[2]
    return paths.save_of_manifest(name) is not None or paths.process_of_sidecar(name) is not None


def _is_model_directory(place: Place) -> bool:
    """Whether it is one of Hugging Face's. A file that was exported into a root, a step or an item does not change what
    the directory is: that file has a path of its own."""
    names = place.names()
    if not is_sharded(names) or paths.STEP_METADATA in names or paths.COMMIT_MARK in names:
        return False
    return content_of(names, lambda below: place.below(below).names()) in ("nothing", "step")


def _is_file(url: str, timeout_s: float) -> bool:
    """Whether a path names one file. A path that is neither a directory nor a regular file is refused when it is
    opened."""
    if properties_of(url).file_system:
        return local_kind(url) not in (None, stat.S_IFDIR)
    directory, _, name = url.rpartition("/")
    return (
        bool(name)
        and not directory.endswith(":/")
        and RemoteStore(directory, timeout_s=timeout_s).stat(name) is not None
    )


def _open_file(url: str, timeout_s: float) -> Checkpoint:
    if _is_manifest(url):
        return _open_orbax(url, timeout_s)
    ranges = open_ranges(url)
    try:
        begin = ranges.read(0, min(16, ranges.size))
        if begin[:4] == b"PK\x03\x04" or begin[:4] == b"PK\x05\x06":
            kind = "torch" if pickle_member(read_entries(ranges)) else "npz"
        elif url.endswith(SUFFIX) or begin[8:9] == b"{":
            kind = "safetensors"
        elif begin[:1] == _PICKLES and begin[1:2] in b"\x02\x03\x04\x05":
            raise CheckpointError(
                f"{url} is a bare pickle, as torch wrote before version 1.6; only its zip archives are read. Load it "
                "where it can be trusted and save it anew.",
                path=url,
            )
        elif begin[:1] and begin[0] in _MSGPACK_MAPS:
            kind = "msgpack"
        elif begin:
            raise nothing_at(
                url,
                "its first bytes are those of no format known here (safetensors, npz, torch's zip, Flax's msgpack)",
            )
        else:
            raise CorruptCheckpointError(f"{url} is empty", path=url)
    finally:
        ranges.close()
    return {"torch": open_torch, "npz": open_npz, "safetensors": open_safetensors, "msgpack": open_msgpack}[kind](url)
