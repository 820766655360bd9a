"""Arguments of another type: refused when the manager is made, with what is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"options": {"max_to_keep": 2}},
            r"options=.* of type dict, expected orbax.checkpoint.CheckpointManagerOptions",
        ),
        ({"tiers": ["/dev/shm/x"]}, r"'/dev/shm/x' in tiers is of type str, expected ckptkit.Tier.ram\(path\)"),
        ({"tiers": "/dev/shm/x"}, r"tiers='/dev/shm/x', expected a list: \[ckptkit.Tier.ram"),
        ({"tiers": ckptkit.Tier.ram("/dev/shm/x")}, r"expected a list: \[ckptkit.Tier.ram"),
        ({"events": "/tmp/events"}, r"events='/tmp/events' is of type str, expected ckptkit.EventLog"),
        ({"durable": "profile.json"}, r"expected ckptkit.DurableProfile\(...\), or DurableProfile.load\(file\)"),
        ({"saving": {}}, r"saving={} is of type dict, expected ckptkit.SaveOptions"),
        ({"processes": 60}, r"processes=60 is of type int, expected ckptkit.ProcessOptions"),
        ({"host_id": 3}, r"host_id=3, expected the name of this host"),
    ],
)
def test_wrong_argument_type_names_the_right_one(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    """A job would start, and end in its first save with an AttributeError."""
    with pytest.raises(TypeError, match=message):
        ckptkit.CheckpointManager(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists(), "refused before anything is made"


@pytest.mark.parametrize(
    ("record", "field", "expected"),
    [
        (ckptkit.SaveOptions, "on_failure", "FailurePolicy"),
        (ckptkit.SaveOptions, "replicas", "ReplicaPolicy"),
        (ckptkit.ProcessOptions, "broadcast", "BroadcastOptions"),
        (ckptkit.ProcessOptions, "peers", "PeerOptions"),
    ],
)
def test_wrong_type_of_an_option_names_the_right_one(record: Any, field: str, expected: str) -> None:
    """`on_failure="raise"` would be taken, and end the first save."""
    with pytest.raises(TypeError, match=rf"{record.__name__}\({field}='raise'\): expected ckptkit.{expected}\(...\)"):
        record(**{field: "raise"})


def test_bucket_is_not_a_fast_tier() -> None:
    """Slots would be written to a directory `gs:` of the working directory."""
    with pytest.raises(ValueError, match="gs://bucket/run is not a directory of this host; give it as `directory`"):
        ckptkit.Tier.ssd("gs://bucket/run")


def test_tiers_may_be_given_as_a_generator(tmp_path: Path) -> None:
    """A check of the types would use them up."""
    tiers = (ckptkit.Tier.ram(str(tmp_path / name)) for name in ["ram"])
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:  # pyright: ignore[reportArgumentType]
        assert manager.save(0, args=ocp.args.JsonSave({}))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        assert manager.steps()[0].tiers == ("durable", "ram")
