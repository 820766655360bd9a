"""Names on disk: what is written under a name is found under it again, and nothing else is."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptkit.model import paths

NUMBERS = st.integers(0, 10**8 - 1)


@given(step=st.integers(0, 10**12 - 1), epoch=NUMBERS, number=NUMBERS)
@settings(deadline=None)
def test_manifest_name_encodes_the_save(step: int, epoch: int, number: int) -> None:
    """If it failed, a committed save would not be found after a restart."""
    assert paths.save_of_manifest(paths.manifest_name(step, epoch, number)) == (step, epoch, number)


@given(step=st.integers(-(10**14), 10**14))
@example(step=10**12)
@example(step=-1)
@settings(deadline=None)
def test_step_without_a_readable_name_is_refused(step: int) -> None:
    """If it failed, a save would be reported as committed under a name that no reader looks at."""
    try:
        name = paths.manifest_name(step, 1, 0)
    except ValueError as error:
        assert str(step) in str(error)  # noqa: PT017  refusing is one of two right answers
        return
    assert paths.save_of_manifest(name) == (step, 1, 0)


@given(index=st.integers(0, 999))
@settings(deadline=None)
def test_slots_sidecars_and_epochs_are_found_by_name(index: int) -> None:
    """If it failed, a slot, a sidecar or an epoch record would be written and never read."""
    assert paths.slot_index(paths.slot_name(index)) == index
    assert paths.process_of_sidecar(paths.sidecar_name(index)) == index
    assert paths.epoch_of_name(paths.epoch_name(index)) == index


@pytest.mark.parametrize(
    "name",
    [
        "step-1.json",
        ".put-step-000000000001-e00000001-n00000001.json",
        "step-000000000001-e00000001-n00000001.json.tmp",
        "step-000000000001-e00000001-n00000001.json\n",
        "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661-e00000001-n00000001.json",
        "slot-x.bin",
        "slot-1.bin.old",
        "slot-../1.bin",
        "slot-\u0661.bin",
        "process-.json",
        "0000001.json",
        "\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.json",
        "lock",
        "",
    ],
)
def test_foreign_names_are_not_parsed(name: str) -> None:
    """If it failed, an unfinished put or a user's file would be taken for a save."""
    found = paths.save_of_manifest, paths.slot_index, paths.process_of_sidecar, paths.epoch_of_name
    assert [parse(name) for parse in found] == [None] * 4


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\0b", "a b", "a\n", "-rf", "x" * 129, "\u00e9"])
def test_name_that_leaves_its_directory_is_refused(name: str) -> None:
    """If it failed, a host id or a job name could point a tier anywhere on the machine."""
    with pytest.raises(ValueError, match=rf"host id {re.escape(repr(name))} cannot be a directory name: use letters"):
        paths.checked_name(name, "host id")


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True))
@settings(deadline=None)
def test_safe_names_are_unchanged(name: str) -> None:
    """If it failed, a host would not find its own directory after a restart."""
    assert paths.checked_name(name, "host id") == name


def test_jobs_of_different_roots_never_share_a_directory() -> None:
    """If it failed, two jobs on one host would restore each other's ramdisk."""
    assert paths.job_name("gs://bucket/run") != paths.job_name("gs://bucket/run2")
    assert paths.job_name("gs://bucket/run/") == paths.job_name("gs://bucket/run")
    assert paths.job_name("/data/run", "big").startswith("big-")
    with pytest.raises(ValueError, match=r"job name 'a/b' cannot be a directory name"):
        paths.job_name("/data/run", "a/b")
