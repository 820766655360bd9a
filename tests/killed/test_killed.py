"""Commands that are killed after any of their storage operations: a few points of some on each medium."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from ckptkit.cli import main
from ckptkit.conversion.destination import Destination
from ckptkit.durable.lifecycle import delete
from ckptkit.store import Store
from tests.killed.campaign import Campaign
from tests.killed.commands import COMMANDS
from tests.killed.judge import Failure
from tests.strace import needs_strace

pytest.importorskip("model_signing", reason="ckptkit-jax[sign] is not installed")

SHORT = {
    "disk": ("prune", "copy as newest", "convert to hf"),
    "bucket": ("prune unread", "copy step", "convert to npz"),
}
MEDIA = [pytest.param("disk", marks=needs_strace), "bucket"]


def found(campaign: Campaign, seed: int = 0) -> Iterator[tuple[str, int, str, Failure]]:
    for name in campaign.names:
        for number, what, failures in campaign.checked(name, full=False, seed=seed):
            yield from ((name, number, what, each) for each in failures)


def assert_nothing_is_found(home: Path, medium: str, names: Sequence[str]) -> None:
    with Campaign(home, medium, [COMMANDS[name] for name in names], main) as campaign:
        lines = [
            f"{each.kind}: after {number} {what}: {each.text}\n"
            f"  repeat: python -m tests.killed --medium {medium} --command {name!r} --point {number}"
            for name, number, what, each in found(campaign)
        ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("medium", MEDIA)
def test_killed_command_is_completed_by_itself_and_harms_no_other(tmp_path: Path, medium: str) -> None:
    """The leftovers of a killed command could refuse the next one always, or look like damage."""
    assert_nothing_is_found(tmp_path, medium, SHORT[medium])


@pytest.mark.slow
@pytest.mark.parametrize("medium", MEDIA)
def test_every_command_is_completed_after_a_few_points(tmp_path: Path, medium: str) -> None:
    """The same for the commands that the short test leaves out."""
    assert_nothing_is_found(tmp_path, medium, [name for name in COMMANDS if name not in SHORT[medium]])


def test_records_that_nothing_removes_are_found(tmp_path: Path) -> None:
    """The generator could overlook what is left over: it has to find it where a finished work keeps its records."""
    with (
        patch.object(Destination, "drop_finished", lambda _: None),
        Campaign(tmp_path, "bucket", [COMMANDS["convert to npz"]], main) as campaign,
    ):
        (made,) = (number for number, what in enumerate(campaign.points("convert to npz")) if what.endswith("/new"))
        checked = campaign.checked("convert to npz", point=made)
        texts = [(each.kind, each.text) for *_, failures in checked for each in failures]
    assert {kind for kind, _ in texts} == {"unfinished"}
    assert any("left over: .new.ckptkit-part/journal/plan.json" in text for _, text in texts), texts


def test_deletion_in_the_wrong_order_is_found(tmp_path: Path) -> None:
    """The generator could overlook harm: a step that loses its arrays before its mark is a damaged one to readers."""

    def arrays_first(store: Store, name: str, is_it: object) -> bool:
        del is_it
        for key in sorted(store.list_all(name), key=lambda key: "/d/" not in key):
            store.delete(key)
        return True

    with (
        patch.object(delete, "_remove_objects", arrays_first),
        Campaign(tmp_path, "bucket", [COMMANDS["prune"]], main) as campaign,
    ):
        failures = [each for _, _, each in campaign.checked("prune", point=2)]
    assert any(each.kind == "harmed" and "exit code 11" in each.text for some in failures for each in some), failures
