"""Keywords that became fields of option records: they work, and the warning names the replacement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit.manager.settings import DEPRECATED_KEYWORDS, option_records
from ckptkit.v1 import Checkpointer

SPELLED = (
    r"CheckpointManager: in_flight_max, verify, peers, timeout_s are deprecated as arguments; write "
    r"saving=ckptkit\.SaveOptions\(in_flight_max=\.\.\.\), restoring=ckptkit\.RestoreOptions\(verify=\.\.\.\), "
    r"processes=ckptkit\.ProcessOptions\(timeout_s=\.\.\., peers=\.\.\.\)"
)


@pytest.mark.parametrize("make", [ckptkit.CheckpointManager, Checkpointer])
def test_deprecated_keywords_work_with_one_warning(tmp_path: Path, make: Any) -> None:
    """A job would fail after an upgrade, or get no hint how to write its options."""
    with pytest.warns(DeprecationWarning, match=SPELLED) as warned:
        made = make(tmp_path, in_flight_max=2, verify="never", peers=None, timeout_s=7.0)
    made.close()
    (warning,) = warned
    assert warning.filename == __file__, "shown only where it points at the caller's line"
    settings = getattr(made, "manager", made)._settings
    assert settings.saving == ckptkit.SaveOptions(in_flight_max=2)
    assert settings.restoring == ckptkit.RestoreOptions(verify="never")
    assert settings.processes == ckptkit.ProcessOptions(timeout_s=7.0, peers=None)


def test_every_deprecated_keyword_has_a_field() -> None:
    """A keyword of the last release would be refused, or be taken and ignored."""
    for name in DEPRECATED_KEYWORDS:
        given: Any = {name: None}
        with pytest.raises(ValueError, match=rf"{name}: given together with \w+; put it into \w+ alone"):
            option_records(ckptkit.SaveOptions(), ckptkit.RestoreOptions(), ckptkit.ProcessOptions(), given)


def test_a_keyword_beside_its_record_is_refused(tmp_path: Path) -> None:
    """One of the two values would be ignored without a message."""
    with pytest.raises(
        ValueError, match="in_flight_max, durable_busy: given together with saving; put it into saving alone"
    ):
        ckptkit.CheckpointManager(tmp_path, saving=ckptkit.SaveOptions(), durable_busy="skip", in_flight_max=2)


def test_a_keyword_that_no_release_had_is_refused(tmp_path: Path) -> None:
    """A typing error would be taken for an option."""
    with pytest.raises(TypeError, match="CheckpointManager: in_flight: no such argument"):
        ckptkit.CheckpointManager(tmp_path, in_flight=2)  # pyright: ignore[reportCallIssue]
    assert not list(tmp_path.iterdir())
