"""How far a restore reaches for a save: this host, other processes, the durable tier; and its final error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError
from ckptkit.events import EventLog
from ckptkit.model.manifest import Manifest, SaveId, Writer
from ckptkit.restore.local_tiers import Holdings
from ckptkit.restore.plan import Candidate, Source
from ckptkit.restore.sources import PeerShares, SourceSearch

SAVE = SaveId(1, 4, 0)


def share(process: int, save: SaveId = SAVE) -> Manifest:
    return Manifest(save_id=save, writer=Writer(process=process, count=4, host="h"), arrays={}, inline={}, slot="")


def own(*processes: int) -> Holdings:
    sources = tuple(Source(tier="ram", manifests=(share(process),)) for process in processes)
    readers: Any = (never,) * len(sources)
    return Holdings(sources=sources, readers=readers)


def never(*_: Any) -> None:
    raise AssertionError("nothing is read")


class Peers:
    """Process `p` holds share `p`; those of `silent` do not answer."""

    def __init__(self, silent: tuple[int, ...] = ()):
        self.silent = silent
        self.asked: list[int] = []

    def serves(self, process: int) -> bool:
        return process != 0

    def manifest(self, process: int, save: SaveId, number: int) -> tuple[Manifest, str]:
        self.asked.append(number)
        if process in self.silent:
            raise PeerUnreachableError(f"process {process} does not answer")
        return share(number, save), "tag"

    def reader(self, *_: Any) -> Callable[..., None]:
        return never


class Step:
    """A durable step with the sidecars of these saves."""

    url, round_trips, read, expect = "root/4", False, staticmethod(never), staticmethod(never)
    without_sidecars = ()

    def __init__(self, *saves: SaveId):
        self.saves = saves

    def manifests(self, *, to_read: bool) -> list[Manifest]:
        assert to_read
        return [share(process, save) for process, save in enumerate(self.saves)]


def search(held: Holdings, peers: Peers | None = None, step: Step | None = None) -> SourceSearch:
    client: Any = peers
    shares = (
        None
        if peers is None
        else PeerShares(client=client, process=(0, 4), count=4, holders={p: (p,) for p in range(4)}, alike=lambda _: ())
    )
    opened: Any = lambda: step  # noqa: E731
    candidate = Candidate(save_id=SAVE, durable=step is not None, fast=True)
    return SourceSearch(candidate, held, shares, opened, EventLog())


def tiers(found: Holdings) -> list[str]:
    return [source.tier for source in found.sources]


def test_each_look_covers_more_than_the_one_before() -> None:
    """A restore would wait for a bucket though its own host, or a peer, holds everything."""
    peers = Peers()
    looking = search(own(0), peers, Step(SAVE))
    found = [looking.planned(tiers) for _ in range(4)]
    assert found == [["ram"], ["ram", "peer"], ["ram", "peer"], ["ram", "peer", "durable"]]
    assert peers.asked == [1, 2, 3]
    with pytest.raises(CorruptCheckpointError, match="are missing or damaged"):
        looking.planned(tiers)


def test_damage_sends_the_search_from_peers_to_the_durable_tier() -> None:
    """Every process would be asked for what the durable tier certainly has."""
    peers = Peers()
    looking = search(own(0), peers, Step(SAVE))
    assert looking.planned(tiers, "uncovered") == ["ram"]
    assert looking.planned(tiers, "damaged") == ["ram", "peer"]
    assert looking.planned(tiers, "uncovered") == ["ram", "peer", "durable"]
    assert len(peers.asked) == 1


def test_a_step_of_stock_orbax_has_no_sources() -> None:
    """It would be taken for a step that lost everything."""
    assert search(own(), None, Step()).planned(never) is None


def test_what_did_not_answer_is_not_absent() -> None:
    """The restore would fall back to an older step, though the newest is only out of reach."""
    for silent in ((1, 2, 3), (1,)):
        with pytest.raises(PeerUnreachableError, match="does not answer"):
            search(own(), Peers(silent=silent)).planned(refuse)


def test_the_last_reason_is_raised() -> None:
    """A rejected candidate would not have a reason."""
    with pytest.raises(CorruptCheckpointError, match="not enough in ram, durable"):
        search(own(0), None, Step(SAVE)).planned(refuse)
    with pytest.raises(CorruptCheckpointError, match=r"the slots of save 4@1\.0 are missing or damaged"):
        search(own()).planned(refuse)
    with pytest.raises(CorruptCheckpointError, match=r"root/4 is no longer save 4@1\.0"):
        search(own(0), None, Step(SaveId(2, 4, 0))).planned(refuse)


def refuse(found: Holdings) -> None:
    raise CorruptCheckpointError(f"not enough in {', '.join(tiers(found))}")
