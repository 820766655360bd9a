"""Which sidecars of an item are its save's: one set of rules for every reader of durable steps."""

from __future__ import annotations

import pytest

from ckptkit.durable.sidecars import (
    has_sidecar_sign,
    incomplete,
    marked_save,
    marker_text,
    of_one_save,
    several_saves,
    sidecars_among,
    wrong_step,
)
from ckptkit.model.manifest import Manifest, SaveId, Writer

SAVE, OTHER = SaveId(2, 4, 1), SaveId(1, 4, 1)


def sidecar(process: int, count: int, save: SaveId = SAVE) -> Manifest:
    writer = Writer(process=process, count=count, host="host")
    return Manifest(save_id=save, writer=writer, arrays={"state": ()}, inline={}, slot="")


def test_a_late_sidecar_of_a_larger_run_is_left_out() -> None:
    """A fenced writer that goes on would make a whole step unreadable."""
    own, late = {0: sidecar(0, 2), 1: sidecar(1, 2)}, {2: sidecar(2, 4, OTHER)}
    assert of_one_save(own | late, lambda: SAVE) == own
    assert incomplete("root/4/state", own, own, item="state") is None
    asked: list[None] = []
    assert of_one_save(own, lambda: asked.append(None)) == own
    assert of_one_save({}, lambda: asked.append(None)) == {}
    assert not asked, "the marker is read where it is needed"


@pytest.mark.parametrize("marked", [None, SaveId(3, 4, 1)])
def test_without_a_marker_nobody_knows_whose_sidecars_are_late(marked: SaveId | None) -> None:
    """The sidecars of any run would be taken for the step's."""
    found = {0: sidecar(0, 1), 1: sidecar(1, 2, OTHER)}
    own = of_one_save(found, lambda: marked)
    assert own == found
    assert incomplete("root/4/state", own, own) == (
        "root/4/state has sidecars of processes 0, 1 and saves 4@1.1, 4@2.1, expected processes 0 and one save"
    )


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({0: sidecar(0, 2)}, "processes 0 and saves 4@2.1, expected processes 0, 1 and one save"),
        ({0: sidecar(0, 1), 1: sidecar(1, 2)}, "processes 0, 1 and saves 4@2.1, expected processes 0 and one save"),
        ({0: sidecar(0, 10**17)}, "expected processes 0, 1, 2, 3, 4, 5, 6, 7 and 99999999999999992 more"),
        ({0: sidecar(1, 2), 1: sidecar(1, 2)}, "the sidecar of process 0 names process 1 as its writer"),
    ],
)
def test_an_item_without_all_sidecars_of_one_save_is_incomplete(found: dict[int, Manifest], why: str) -> None:
    """Arrays would be restored of which some boxes are missing, or another save's."""
    assert why in str(incomplete("root/4/state", found, found))


def test_the_identity_of_a_save_in_a_marker() -> None:
    """A marker that another writer put, or a damaged one, would name the step's save."""
    marker = marker_text("root/4", SAVE)
    assert marker != marker_text("root/4", SAVE)
    assert marked_save(marker.encode()) == SAVE
    assert marked_save(marker.replace("save 2 4 1", "save 3 4 1").encode()) is None
    assert [marked_save(mark) for mark in (b"", b"\xff\xfe", b"Checkpoint commit was successful")] == [None] * 3


def test_sidecars_of_another_item_step_or_save() -> None:
    """Copied files would prove bytes under a name that nobody saved them with."""
    found = {0: sidecar(0, 1)}
    assert incomplete("root/4/params", found, found, item="params") == "root/4/params has sidecars of item state"
    assert wrong_step("root/4/state", SAVE, 4) is None
    assert wrong_step("root/5/state", SAVE, 5) == "root/5/state has sidecars of step 4, found in step 5"
    assert several_saves("root/4", [SAVE, SAVE]) is None
    assert several_saves("root/4", [SAVE, OTHER]) == "root/4 has items of saves 4@1.1, 4@2.1"


def test_names_and_signs() -> None:
    """An item that lost its sidecars would be taken for one of stock Orbax."""
    assert sidecars_among(["process-10.json", "process-2.json", "notes", "process-x.json"]) == [2, 10]
    assert has_sidecar_sign(b'{"ckptkit_sidecars": true}')
    assert not any(map(has_sidecar_sign, (b"{}", b"[", b"[]")))
