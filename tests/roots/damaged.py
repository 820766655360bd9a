"""Roots with a damaged step: every kind of file, changed, cut, zeroed or missing, in saves of both writers."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any, Final

from ckptkit.testing.damage import DamageKind
from tests.roots.tree import ROOT, StepState, StrangeRoot, Tree, registered

DAMAGED: Final[dict[str, StrangeRoot]] = {}
OURS, STOCK = "ckptkit composite", "orbax composite"
SHARING = "ckptkit unchanged leaf"  # its steps 2 and 3 have a data file in common: on a disk, a hard link
NEWEST, MIDDLE = f"{ROOT}/3", f"{ROOT}/2"


def _inflicted(kind: str, pattern: str, how: DamageKind, state: StepState, path: str) -> StrangeRoot:
    def build(tree: Tree) -> None:
        tree.run(kind)
        tree.damage(path, pattern, how, state)
        if pattern in _BESIDE_ARRAYS:
            tree.beside_arrays(path)

    file = pattern.replace("*/", "").replace("/*", "").replace("*", "")
    name = re.sub("[^a-z0-9]+", "-", f"{kind} {how} {file} of {path.rpartition('/')[2]}".lower()).strip("-")
    line = f"{kind}: {how} in {pattern} of step {path.rpartition('/')[2]}."
    return StrangeRoot(name=name, line=line, build=build)


_BESIDE_ARRAYS: Final = ("data/metadata", "meta/data.json", "state/_METADATA", "state/_strings.json")

# Every kind of file of ckptkit's saves, and the files of stock Orbax's saves of which damage is found by reading.
_FILES: Final[list[tuple[str, str, DamageKind, StepState, str]]] = [
    *((OURS, "state/d/*", how, "damaged", NEWEST) for how in ("bit flip", "truncation", "zeroed block")),
    (OURS, "state/d/*", "missing file", "damaged", NEWEST),
    (OURS, "state/d/*", "bit flip", "damaged", MIDDLE),
    *((OURS, "state/manifest.ocdbt", how, "damaged", NEWEST) for how in ("bit flip", "truncation", "missing file")),
    *((OURS, "state/_ckptkit/process-0.json", how, "unproven", NEWEST) for how in ("bit flip", "truncation")),
    (OURS, "state/_METADATA", "truncation", "damaged", NEWEST),
    (OURS, "state/_METADATA", "missing file", "blemished", NEWEST),
    *((OURS, "state/_sharding", how, "blemished", NEWEST) for how in ("truncation", "missing file")),
    *((OURS, "_CHECKPOINT_METADATA", how, "blemished", NEWEST) for how in ("truncation", "missing file")),
    (OURS, "state/array_metadatas/process_0", "missing file", "blemished", NEWEST),
    (OURS, "data/metadata", "truncation", "damaged", NEWEST),
    *(("ckptkit text leaves", "state/_strings.json", how, "damaged", NEWEST) for how in ("truncation", "missing file")),
    (STOCK, "state/manifest.ocdbt", "truncation", "damaged", NEWEST),
    (STOCK, "state/manifest.ocdbt", "missing file", "damaged", NEWEST),
    (STOCK, "state/manifest.ocdbt", "missing file", "damaged", MIDDLE),
    (STOCK, "state/_sharding", "truncation", "blemished", NEWEST),
    (STOCK, "state/_sharding", "missing file", "blemished", NEWEST),
    (STOCK, "_CHECKPOINT_METADATA", "truncation", "blemished", NEWEST),
    (STOCK, "_CHECKPOINT_METADATA", "missing file", "blemished", NEWEST),
    (STOCK, "state/_METADATA", "missing file", "blemished", NEWEST),
    (STOCK, "data/metadata", "truncation", "damaged", NEWEST),
    ("orbax zarr2 files", "state/params.w/0.0", "missing file", "damaged", NEWEST),
    ("orbax zarr2 files", "state/params.w/0.0", "truncation", "damaged", NEWEST),
    ("orbax zarr2 files", "state/params.w/0.0", "bit flip", "undetectable", NEWEST),
    ("orbax zarr2 files", "state/params.w/.zarray", "missing file", "damaged", NEWEST),
    ("orbax zarr2 files chunks", "state/params.w/1.0", "missing file", "damaged", NEWEST),
    ("orbax zarr3 files", "state/params.w/c/0/0", "missing file", "damaged", NEWEST),
    ("orbax zarr3 files", "state/params.w/c/0/0", "missing file", "damaged", MIDDLE),
    ("orbax zarr3 files", "state/params.w/zarr.json", "missing file", "damaged", NEWEST),
    ("orbax zarr3 files chunks", "state/params.w/c/1/0", "missing file", "damaged", NEWEST),
    ("orbax direct", "manifest.ocdbt", "missing file", "damaged", NEWEST),
    ("orbax v1", "state/manifest.ocdbt", "missing file", "damaged", NEWEST),
    ("orbax v1", "_CHECKPOINT_METADATA", "truncation", "blemished", NEWEST),
    ("orbax v1 json", "meta/data.json", "truncation", "damaged", NEWEST),
    ("ckptkit v1", "state/d/*", "bit flip", "damaged", NEWEST),
    ("ckptkit custom handler", "state/d/*", "bit flip", "damaged", NEWEST),
    ("ckptkit bare array", "default/d/*", "bit flip", "damaged", NEWEST),
    ("ckptkit random keys", "state/d/*", "bit flip", "damaged", NEWEST),
    *((SHARING, "default/d/unchanged.*", how, "damaged", NEWEST) for how in ("bit flip", "truncation", "missing file")),
    (SHARING, "default/d/unchanged.*", "bit flip", "damaged", MIDDLE),
]
for _each in _FILES:
    _made = _inflicted(*_each)
    DAMAGED[_made.name] = _made


@registered(DAMAGED)
def unreferenced_data_missing(tree: Tree) -> None:
    """Stock Orbax's newest step without the data files that its database does not refer to any more."""
    tree.run(STOCK)
    tree.remove(NEWEST, "state/ocdbt.process_0/d/*", state="good")


@registered(DAMAGED)
def merged_data_missing(tree: Tree) -> None:
    """Stock Orbax's newest step without the directory `d`, as in Orbax's compatibility corpus."""
    tree.run(STOCK)
    tree.remove(NEWEST, "state/d")


@registered(DAMAGED)
def sidecars_missing(tree: Tree) -> None:
    """A step of ckptkit without the directory of its checksums."""
    tree.run(OURS)
    tree.remove(NEWEST, "state/_ckptkit", state="unproven")


@registered(DAMAGED)
def sidecars_missing_and_flip(tree: Tree) -> None:
    """A step of ckptkit without its checksums, and with a changed bit in its arrays."""
    sidecars_missing(tree)
    tree.damage(NEWEST, "state/d/*", "bit flip")


@registered(DAMAGED)
def sidecar_cut_and_flip(tree: Tree) -> None:
    """A step of ckptkit with a cut checksum file, and with a changed bit in its arrays."""
    tree.run(OURS)
    tree.damage(NEWEST, "state/_ckptkit/process-0.json", "truncation")
    tree.damage(NEWEST, "state/d/*", "bit flip")


@registered(DAMAGED)
def every_sidecar_missing(tree: Tree) -> None:
    """No step of the run has its checksums any more."""
    tree.run(OURS)
    for step in (1, 2, 3):
        tree.remove(f"{ROOT}/{step}", "state/_ckptkit", state="unproven")


@registered(DAMAGED)
def every_step_damaged(tree: Tree) -> None:
    """A bit is changed in every step of the run."""
    tree.run(OURS)
    for step in (1, 2, 3):
        tree.damage(f"{ROOT}/{step}", "state/d/*", "bit flip")


@registered(DAMAGED)
def item_missing(tree: Tree) -> None:
    """A step of ckptkit without its item of arrays."""
    tree.run(OURS)
    tree.remove(NEWEST, "state")


@registered(DAMAGED)
def pinned_and_damaged(tree: Tree) -> None:
    """The damaged step is pinned: it is not to be touched."""
    tree.run(OURS)
    tree.damage(NEWEST, "state/d/*", "bit flip")
    tree.pin(3, NEWEST)


@registered(DAMAGED)
def leased_and_damaged(tree: Tree) -> None:
    """Somebody reads the damaged step."""
    tree.run(OURS)
    tree.damage(NEWEST, "state/d/*", "bit flip")
    tree.lease(3, NEWEST)


@registered(DAMAGED)
def shared_file_damaged_and_pinned(tree: Tree) -> None:
    """Two steps have a damaged file in common, and the older one is pinned."""
    tree.run(SHARING)
    tree.damage(NEWEST, "default/d/unchanged.*", "bit flip")
    tree.pin(2, MIDDLE)


@registered(DAMAGED)
def damaged_beside_a_shared_file(tree: Tree) -> None:
    """Two steps have a data file in common, and the newest is damaged in a file of its own."""
    tree.run(SHARING)
    tree.damage(NEWEST, "default/manifest.ocdbt", "truncation")


@registered(DAMAGED)
def stock_copy_of_damaged_step(tree: Tree) -> None:
    """The newest step of ckptkit is damaged, and a user has a good copy of it in the same root."""
    tree.run(OURS)
    tree.step(OURS, 3, f"{ROOT}/good_3")
    tree.damage(NEWEST, "state/d/*", "bit flip")


@registered(DAMAGED)
def custom_metadata_changed(tree: Tree) -> None:
    """A digit was changed in Orbax's description of a step of ckptkit."""
    tree.run(OURS)
    later = partial(re.sub, r'("init_timestamp_nsecs": )\d', r"\g<1>9")
    tree.rewrite(NEWEST, "_CHECKPOINT_METADATA", later, "blemished")


@registered(DAMAGED)
def shape_grown_in_zarr2(tree: Tree) -> None:
    """A digit in `.zarray` makes an array of 24 elements one of 256 GiB."""
    tree.run("orbax zarr2 files")
    _grow(tree, "state/params.w/.zarray")


@registered(DAMAGED)
def shape_grown_in_zarr3(tree: Tree) -> None:
    """The same in `zarr.json`."""
    tree.run("orbax zarr3 files")
    _grow(tree, "state/params.w/zarr.json")


def _grow(tree: Tree, file: str) -> None:
    def grown(text: str) -> str:
        found: dict[str, Any] = json.loads(text)
        found["shape"] = [1 << 36, *found["shape"][1:]]
        return json.dumps(found)

    tree.rewrite(NEWEST, file, grown)


@registered(DAMAGED)
def metadata_garbage(tree: Tree) -> None:
    """Orbax's description of a stock step is not JSON."""
    tree.run(STOCK)
    tree.rewrite(NEWEST, "_CHECKPOINT_METADATA", lambda _: "[" * 5000, "blemished")


@registered(DAMAGED)
def epochs_damaged(tree: Tree) -> None:
    """Both copies of the run's record of epochs are cut."""
    tree.run(OURS)
    for name in ("00000001.json", "00000001.copy.json"):
        tree.put(f"{ROOT}/_ckptkit/epochs/{name}", '{"epoch": 1,')
    tree.records_damaged = True


@registered(DAMAGED)
def one_epoch_record_damaged(tree: Tree) -> None:
    """One of the two copies of the run's record of epochs is empty."""
    tree.run(OURS)
    tree.put(f"{ROOT}/_ckptkit/epochs/00000001.json", "")
    tree.records_damaged = True
