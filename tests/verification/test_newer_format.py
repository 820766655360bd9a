"""Files of a newer version of ckptkit are not damaged for an older one: its error names them, and nothing changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import NewerFormatError
from ckptkit.inspection import list_steps
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import FORMAT
from tests.cli.conftest import Run
from tests.states import abstract, make_state, restore_args
from tests.verification.conftest import HOST, Job
from tests.verification.test_scrub import content

WHERE = {"slots": ["ram", "ssd"], "ramdisk": ["ram"], "steps": ["root"], "everywhere": ["ram", "ssd", "root"]}


def make_newer(path: Path) -> None:
    body = {**json.loads(path.read_bytes())["manifest"], "format": FORMAT + 1, "more": "than this version knows"}
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    path.write_text(f'{{"digest":"{digest_of(text.encode())}","manifest":{text}}}')


@pytest.mark.parametrize("where", WHERE)
def test_files_of_a_newer_version_are_neither_damage_nor_touched(job: Job, ckpt: Run, where: str) -> None:
    """After a downgrade a restart took an older step, and a repair moved the newer ones to the quarantine."""
    for name in WHERE[where]:
        for path in [*(job.home / name).rglob("step-*.json"), *(job.home / name).rglob("process-*.json")]:
            make_newer(path)
    before = content(job.home)
    said = f"has format {FORMAT + 1}, of a newer ckptkit, and this version reads"
    make = job.manager if where != "steps" else lambda: ckptkit.CheckpointManager(job.root)  # else a tier has it all
    with pytest.raises(NewerFormatError, match=said), make() as manager:
        manager.restore(None, args=restore_args(abstract(make_state(0))))
    shown = ckpt("scrub", job.root, "--repair", "--host-id", HOST)
    assert "damaged" not in shown.err
    assert "put aside" not in shown.out
    assert content(job.home) == before
    assert shown.code == (13 if where in ("steps", "everywhere") else 1), "a cron job would call it well"
    if where == "steps":
        found = ckptkit.verify(str(job.root))
        assert [(proof.state, len(proof.unread)) for proof in found.steps] == [("unproven", 1)] * 2
        assert ckpt("verify", job.root).code == 13
        assert [each.step for each in list_steps(str(job.root), host_id=HOST).steps] == [0, 1]


def test_newer_slots_of_one_host_are_an_error_that_all_processes_hear(job: Job) -> None:
    """A host that joined later has no slots: its process waited 600 s for those whose look at the tiers had raised."""
    left = job.slots("ram").with_name("1")  # of a process that this job does not have: one of the host adopts it
    shutil.copytree(job.slots("ram"), left)
    for path in left.glob("step-*.json"):
        make_newer(path)
    before = content(left)
    said = rf"process 0: .*has format {FORMAT + 1}, of a newer ckptkit.*: install it$"
    with pytest.raises(NewerFormatError, match=said), job.manager():
        pass
    assert content(left) == before
