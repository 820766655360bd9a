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
    given: dict[str, Any] = {field: value}
    is_rate = field in ("write_bytes_per_s", "read_bytes_per_s", "start_spread_s")
    if (is_rate or field.startswith("job_")) and value is None:
        assert DurableProfile(**given) == DurableProfile()
        return
    if field.endswith("_bytes_per_s"):
        unit = "bytes per second"
    with pytest.raises(ValueError, match=rf"DurableProfile: {field} is .*; give {unit} above 0"):
        DurableProfile(**given)


@pytest.mark.parametrize(
    ("job", "own", "expected"),
    [(None, None, None), (None, 5e6, 5e6), (8e6, None, 2e6), (8e6, 1e6, 1e6), (8e6, 3e6, 2e6)],
)
def test_rate_of_a_job_is_divided_over_its_processes(
    job: float | None, own: float | None, expected: float | None
) -> None:
    """A thousand processes would take a thousand times the bandwidth that the job was given."""
    profile = DurableProfile(
        job_write_bytes_per_s=job, write_bytes_per_s=own, job_read_bytes_per_s=job, read_bytes_per_s=own
    )
    part = profile.for_one_of(4)
    assert (part.write_bytes_per_s, part.job_write_bytes_per_s) == (expected, None)
    assert (part.read_bytes_per_s, part.job_read_bytes_per_s) == (expected, None)
    assert part.read_ahead_bytes == min(DurableProfile().read_ahead_bytes, expected or 1 << 40)
    assert part.for_one_of(4) == part, "divided once"


@pytest.mark.parametrize(
    ("job", "processes", "own", "expected", "writers"),
    [(None, 4, 32, 32, 4), (64, 4, 32, 16, 4), (6, 4, 32, 1, 4), (100, 1000, 32, 1, 100), (1000, 4, 32, 32, 4)],
)
def test_requests_of_a_job_are_divided_over_its_processes(
    job: int | None, processes: int, own: int, expected: int, writers: int
) -> None:
    """A thousand processes would send 32,000 requests at a time, and the bucket answers 429."""
    profile = DurableProfile(
        write_concurrency=own, read_concurrency=own, job_write_concurrency=job, job_read_concurrency=job
    )
    part = profile.for_one_of(processes)
    assert (part.write_concurrency, part.read_concurrency) == (expected, expected)
    assert part.writers_at_once(processes) == writers
    assert part.for_one_of(processes) == part, "divided once"


def test_start_of_a_job_is_spread_by_its_processes() -> None:
    """All processes of a job that starts again would send their first requests at the same time."""
    assert DurableProfile().for_one_of(1).start_spread_s is None, "one process has nobody to wait for"
    assert DurableProfile().for_one_of(1000).start_spread_s == pytest.approx(1.0)
    assert DurableProfile(start_spread_s=7.0).for_one_of(1000).start_spread_s == pytest.approx(7.0)


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
