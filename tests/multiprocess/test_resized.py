"""A job that continues on fewer or more processes of a host: it uses the memory of the processes that have ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.mounts import Mounts
from tests.multiprocess.resized import SAVES
from tests.multiprocess.together import run_together


def launch(root: Path, count: int) -> list[dict[str, Any]]:
    """The words of every process."""
    output = run_together("tests.multiprocess.resized", count, str(count), str(root), devices=4 // count)
    lines = [[line for line in each.splitlines() if line.startswith("SAID ")] for each in output]
    assert all(lines), "\n".join(output)
    return [json.loads(each[-1].removeprefix("SAID ")) for each in lines]


def test_job_of_any_size_saves_on_a_ramdisk_that_holds_it_once(tmp_path: Path, mounts: Mounts) -> None:
    ramdisk = mounts.small(tmp_path / "ram", "26m")  # three slots of 8 MiB, and manifests
    last = None
    for count in (4, 2, 1, 4):
        said = launch(tmp_path, count)
        steps = list(range((last or 0) + 1, (last or 0) + 1 + SAVES))
        for each in said:
            assert each["last"] == last, each
            assert each["values"] == ([] if last is None else [last]), each
            assert each["committed"] == steps, json.dumps(said, indent=1)
        last = steps[-1]
        (home,) = ramdisk.glob("*/host")
        assert sorted(path.name for path in home.iterdir()) == [str(rank) for rank in range(count)]
