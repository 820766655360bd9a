"""The cases of Orbax's own tests of its emergency manager, for ours: four processes, and the cases that differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.emergency.orbax_cases import cases
from tests.multiprocess.together import run_together

_COPIES = "the slots of the ramdisk belong to the root that was emptied, and never continue another one"
_OLDER = "of the saves that lost a slice, the newest is listed; an older one is restored by its number"
_SKIPS = "a save to the ramdisk while the one before is not committed is skipped, with an event; Orbax waits"
EXCEPTED = {  # each is a row of docs/departures.md, "The emergency manager"
    "restored_locally[False] 0": _COPIES,
    "restored_locally[True] 0": _COPIES,
    "restored_locally[True] 1": _COPIES,
    "slices_change_places[] 0": _OLDER,
    "slices_change_places[] 1": _OLDER,
    "process_metadata[] 0": "the local directory has slots, not Orbax's files",
    "one_slice_has_no_local_steps[] (1,8)": "a job of one slice saves to its ramdisk too",
}
MAY_SKIP = {  # it depends on the speed of the disk
    "save[True] 0": _SKIPS,
    "local_copy_lost[True] 0": _SKIPS,
    "local_copy_lost[True] 1": _SKIPS,
}
FEW = ("save[False]", "(8,) axis 1", "(8,1)", "slices_change", "should_save[1, 2, 2", "process_metadata", "dataset")


def failed_of(root: Path, names: Sequence[str]) -> dict[str, str]:
    """The cases that failed on some process, with the first error."""
    failed: dict[str, str] = {}
    for text in run_together("tests.emergency.orbax_cases", 4, str(root), *names):
        results = [line for line in text.splitlines() if line.startswith("RESULT ")]
        assert results, text[-3000:]
        failed |= {name: error for name, error in json.loads(results[-1][7:]).items() if name not in failed}
    return failed


@pytest.mark.parametrize("names", [FEW, pytest.param((), marks=pytest.mark.long, id="all")])
def test_differs_from_orbax_as_documented_alone(tmp_path: Path, names: Sequence[str]) -> None:
    """A program for Orbax's emergency manager would behave in a way that no page mentions."""
    run = [name for name in cases() if not names or any(each in name for each in names)]
    expected = {name for name in EXCEPTED if name in run}
    failed = failed_of(tmp_path, names)
    assert set(failed) - set(MAY_SKIP) == expected, failed


def test_exceptions_are_cases() -> None:
    """A case with another name would be excepted in vain."""
    assert {*EXCEPTED, *MAY_SKIP} <= set(cases())
    assert len(cases()) == 43
