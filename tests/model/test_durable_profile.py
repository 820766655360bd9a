"""Profiles: a wrong one is refused with its field, and a file gives back what was saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ckptkit.model.durable_profile import DurableProfile


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(DurableProfile)])
@pytest.mark.parametrize("value", [0, -1, "64", None, True])
def test_invalid_value_is_refused(field: str, value: Any) -> None:
    """The mistake would be found in the background, at the first durable save."""
    if field == "compression":
        if value is not None:
            with pytest.raises(ValueError, match=r"compression is .*; give None or one of \('zstd', 'zstd_shuffle'"):
                DurableProfile(compression=value)
        return
    unit = "seconds" if field.endswith("_s") else "bytes" if field.endswith("_bytes") else "a count"
    if field == "write_bytes_per_s":
        if value is None:
            assert DurableProfile(write_bytes_per_s=None) == DurableProfile()
            return
        unit = "bytes per second"
    with pytest.raises(ValueError, match=rf"DurableProfile: {field} is .*; give {unit} above 0"):
        DurableProfile(**{field: value})


def test_profile_file_round_trips(tmp_path: Path) -> None:
    """A tuned profile would be another one in the job."""
    profile = DurableProfile(data_file_bytes=1 << 20, copied_bytes=7, operation_timeout_s=0.5, compression="zstd")
    profile.save(tmp_path / "profile.json")
    assert DurableProfile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize("text", ["", "[]", '{"zstd": 1}', '{"data_file_bytes": 0}'])
def test_invalid_profile_file_is_named(text: str, tmp_path: Path) -> None:
    """A person would look for the mistake in the job."""
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ValueError, match=r"profile\.json is not a durable profile: "):
        DurableProfile.load(tmp_path / "profile.json")
