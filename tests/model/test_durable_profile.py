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
    if field.endswith("write_bytes_per_s"):
        if value is None:
            absent: dict[str, Any] = {field: None}
            assert DurableProfile(**absent) == DurableProfile()
            return
        unit = "bytes per second"
    with pytest.raises(ValueError, match=rf"DurableProfile: {field} is .*; give {unit} above 0"):
        DurableProfile(**{field: value})


@pytest.mark.parametrize(
    ("job", "own", "expected"),
    [(None, None, None), (None, 5e6, 5e6), (8e6, None, 2e6), (8e6, 1e6, 1e6), (8e6, 3e6, 2e6)],
)
def test_rate_of_a_job_is_divided_over_its_processes(
    job: float | None, own: float | None, expected: float | None
) -> None:
    """A thousand processes would take a thousand times the bandwidth that the job was given."""
    profile = DurableProfile(job_write_bytes_per_s=job, write_bytes_per_s=own)
    part = profile.for_one_of(4)
    assert (part.write_bytes_per_s, part.job_write_bytes_per_s) == (expected, None)
    assert part.for_one_of(4) == part, "divided once"


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
