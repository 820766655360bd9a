"""Checkpoints of earlier releases: restored from every tier, and what is written today has their names and fields."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from ckptkit import verify
from ckptkit.model.paths import job_name
from tests.golden.make import STEPS, make, manager, state
from tests.states import assert_same

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if re.fullmatch(r"[0-9.]+", path.name))
TIERS = ("ram", "ssd", "root")


def copy_of(version: str, home: Path, tiers: tuple[str, ...]) -> Path:
    """Some tiers of what a release has written, elsewhere: a fast tier's job is named by the path of its root. The
    records of the root are always there: they tell whose slots these are."""
    shutil.copytree(HERE / version / "root" / "_ckptkit", home / "root" / "_ckptkit")
    for tier in tiers:
        shutil.copytree(HERE / version / tier, home / tier, dirs_exist_ok=True)
        for job in (home / tier).glob("job-*"):
            root = job.name.partition("-")[2].partition("-")[2]
            job.rename(job.with_name(job_name(str(home / "root"), root=root)))
    return home


def restored(home: Path, step: int) -> Any:
    args = ocp.args.Composite(state=ocp.args.StandardRestore(state(step)), notes=ocp.args.JsonRestore())
    with manager(home) as made:
        return made.restore(step, args=args)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tier", TIERS)
def test_step_of_an_earlier_release_is_restored(version: str, tier: str, tmp_path: Path) -> None:
    """An upgrade would lose the checkpoints of the release before it."""
    home = copy_of(version, tmp_path, (tier,))
    for step in STEPS:
        found = restored(home, step)
        assert_same(found["state"], state(step))
        assert found["notes"] == {"step": step}


@pytest.mark.parametrize("version", VERSIONS)
def test_durable_step_of_an_earlier_release_is_verified(version: str, tmp_path: Path) -> None:
    """Digests of an earlier release would be called damage."""
    found = verify(str(copy_of(version, tmp_path, ("root",)) / "root"))
    assert [proof.state for proof in found.steps] == ["proven"] * len(STEPS)


def described(home: Path) -> dict[str, Any]:
    """Each file by its name, with what in it does not change from run to run."""
    found: dict[str, Any] = {}
    for path in sorted(home.rglob("*")):
        if not path.is_file():
            continue
        name = re.sub(r"job-[0-9a-f]{12}(-[0-9a-f]{16})?|(?<=/d/)[0-9a-f]{32}", "*", str(path.relative_to(home)))
        found[name] = content(path)
    return found


def content(path: Path) -> Any:
    """Slots and metadata whole; of other JSON everything but times, random names and digests of these."""
    if path.suffix == ".bin":
        return path.read_bytes()
    if path.name in ("manifest.ocdbt", "lock") or path.parent.name == "d":
        return None
    text = path.read_text()
    if path.name == "commit_success.txt":
        return re.sub(r"/\S+/root/|[0-9a-f]{32}|[0-9a-f]{16}", "*", text)
    return plain(json.loads(text))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        times = {"init_timestamp_nsecs", "commit_timestamp_nsecs", "ts_metrics"}
        varying = {"digest", "provenance", *times}  # provenance: of this Python, these packages, this command
        return {key: plain(each) for key, each in value.items() if key not in varying}
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value):  # the id of a root or of a run
        return "*"
    return [plain(each) for each in value] if isinstance(value, list) else value


def test_files_are_those_of_the_newest_release(tmp_path: Path) -> None:
    """An older release, or somebody's script, would not read what this one writes."""
    make(tmp_path)
    assert described(tmp_path) == described(HERE / VERSIONS[-1])
