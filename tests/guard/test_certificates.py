"""Certificates name saves, and do not outlive them for long."""

from __future__ import annotations

from ckptkit.durable.lifecycle.root_record import certified_saves
from ckptkit.guard.replaying import certify_saves
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import MemoryStore


def test_certificates_of_deleted_saves_are_removed() -> None:
    """A long run would leave one file for each save that it ever certified."""
    store = MemoryStore()
    old, kept, new = SaveId(1, 5, 0), SaveId(1, 10, 1), SaveId(2, 10, 0)
    certify_saves(store, [old, kept], held=[old, kept])
    assert certified_saves(store) == {old, kept}
    certify_saves(store, [new], held=[kept, new])
    assert certified_saves(store) == {kept, new}, "of the same step, in two epochs"
    certify_saves(store, [], held=[])
    assert certified_saves(store) == {kept, new}


def test_other_files_are_no_certificates() -> None:
    """A stray file would end every restore of a certified step."""
    store = MemoryStore()
    for name in ("x", "1-2-3", paths.certificate_name(1, 2, 3, "")):
        store.put(f"{paths.CERTIFIED_DIR}/{name}", b"")
    assert certified_saves(store) == {SaveId(1, 2, 3)}
