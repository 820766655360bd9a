"""Epochs: an abandoned branch can never win, whoever comes back with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords, Rollback
from ckptkit.errors import CorruptCheckpointError, TransientStoreError
from ckptkit.model.manifest import SaveId, new_id
from ckptkit.restore.plan import rank_candidates
from ckptkit.store import MemoryStore, RetryStore
from ckptkit.store.base import PutMode, Store, WrapperStore


@dataclass
class Model:
    """Runs with rollbacks, by brute force: every save knows the save that it continues from."""

    ancestry: Ancestry = field(default_factory=Ancestry)
    unpruned: list[Rollback] = field(default_factory=list)
    saves: list[SaveId] = field(default_factory=list)
    parent: dict[SaveId, SaveId | None] = field(default_factory=dict)
    abandoned: set[SaveId] = field(default_factory=set)

    def lineage(self, save: SaveId | None) -> set[SaveId]:
        """`save` and all that it grew from."""
        found = set()
        while save is not None:
            found.add(save)
            save = self.parent[save]
        return found

    def run(self, base: SaveId | None, steps: list[int]) -> None:
        """A run that restores `base` and saves `steps`, in any order. Branches that base did not grow from are
        abandoned."""
        epoch = self.ancestry.epoch + 1
        self.ancestry = self.ancestry.begin(epoch, base, new_id())
        if base is not None:
            self.unpruned.append(Rollback(epoch, base.step, base))
            self.abandoned |= set(self.saves) - self.lineage(base)
        last = base
        for step in steps:
            save = SaveId(epoch, step, len(self.saves))
            self.saves.append(save)
            self.parent[save] = last
            last = save


@st.composite
def histories(draw: st.DrawFn) -> Model:
    """A first run and up to six restarts, each from any save that is still good (not always the newest)."""
    model = Model()
    model.run(None, draw(st.lists(st.integers(0, 20), min_size=1, max_size=5)))
    for _ in range(draw(st.integers(0, 6))):
        good = [save for save in model.saves if save not in model.abandoned]
        base = draw(st.sampled_from(good))
        model.run(base, [max(0, base.step + gap) for gap in draw(st.lists(st.integers(-8, 8), max_size=4))])
    return model


@given(model=histories())
@settings(deadline=None, max_examples=400)
def test_superseded_matches_the_model(model: Model) -> None:
    """If it failed, a host that returns with an old ramdisk could overrule the run that replaced it."""
    assert {save for save in model.saves if model.ancestry.superseded(save)} == model.abandoned


@given(model=histories(), data=st.data())
@settings(deadline=None, max_examples=200)
def test_abandoned_branch_is_never_restored(model: Model, data: st.DataObject) -> None:
    """If it failed, training would silently go on from weights that were rolled back."""
    held = data.draw(st.lists(st.sampled_from(model.saves), unique=True))  # whatever survived, in whatever tiers
    ranked = rank_candidates([dict.fromkeys(held)], held, model.ancestry.superseded)
    assert not {candidate.save_id for candidate in ranked} & model.abandoned
    good = [save for save in held if save not in model.abandoned]
    assert [candidate.save_id for candidate in ranked] == sorted(good, reverse=True)


@given(model=histories(), epoch=st.integers(0, 12), step=st.integers(0, 60), number=st.integers(0, 30))
@settings(deadline=None, max_examples=400)
def test_dropping_redundant_rollbacks_changes_no_result(model: Model, epoch: int, step: int, number: int) -> None:
    """If it failed, the record would be short and wrong; without pruning it would grow with every restart."""
    save = SaveId(epoch, step, number)
    assert model.ancestry.superseded(save) == any(rollback.abandons(save) for rollback in model.unpruned)
    bases = [rollback.base for rollback in model.ancestry.rollbacks if rollback.base is not None]
    assert bases == sorted(set(bases))  # what is kept is bounded by the distinct bases, not by the restarts


@given(
    stock=st.sets(st.integers(0, 20), min_size=1, max_size=5),
    restarts=st.lists(st.tuples(st.integers(0, 30), st.sets(st.integers(1, 8), max_size=4)), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=300)
def test_older_stock_orbax_steps_never_outrank_later_saves(
    stock: set[int], restarts: list[tuple[int, set[int]]]
) -> None:
    """If it failed, a job that moved here from Orbax would, after a crash, resume from before it moved."""
    model = Model()
    for choice, gaps in restarts:
        listed = [model.ancestry.of_stock(step) for step in stock]
        good = sorted(save for save in [*listed, *model.saves] if not model.ancestry.superseded(save))
        base = good[choice % len(good)]
        epoch = model.ancestry.epoch + 1
        model.ancestry = model.ancestry.begin(epoch, base, new_id(), stock)
        model.saves += [SaveId(epoch, base.step + gap, len(model.saves)) for gap in gaps]
        for save in model.saves:
            for step in stock:
                if step < save.step and not model.ancestry.superseded(save):
                    theirs = model.ancestry.of_stock(step)
                    assert theirs < save or model.ancestry.superseded(theirs), (step, theirs, save, model.ancestry)


def test_claimed_epoch_without_a_save_keeps_the_newest_step() -> None:
    """If it failed, a crash between an epoch's claim and its first commit would send a job back to Orbax's step."""
    ours = [SaveId(1, 20, 0), SaveId(1, 25, 1)]
    first = Ancestry().begin(1, SaveId(0, 10, -1), new_id(), [10])  # restored Orbax's step 10, then saved 20 and 25
    second = first.begin(2, ours[1], new_id(), [10])  # restored 25, claimed its epoch, and died
    ranked = rank_candidates([{}], [*ours, second.of_stock(10)], second.superseded)
    assert [candidate.save_id.step for candidate in ranked] == [25, 20, 10]


def test_later_stock_orbax_steps_are_newer_than_ours() -> None:
    """If it failed, a job that went back to Orbax for a while would lose what it trained there."""
    ancestry = Ancestry().begin(1, SaveId(0, 10, -1), new_id(), [10])
    assert max(SaveId(1, 25, 7), ancestry.of_stock(30)) == ancestry.of_stock(30)
    later = ancestry.begin(2, ancestry.of_stock(30), new_id(), [10, 30])
    assert max(SaveId(1, 25, 7), later.of_stock(30)) == later.of_stock(30)


def test_a_run_that_restored_nothing_abandons_nothing() -> None:
    """If it failed, a first save into a directory of Orbax's would hide the steps that are there."""
    before = Ancestry(3, (Rollback(2, 10), Rollback(3, 20)))
    ancestry = before.begin(4, None, "a" * 16)
    assert ancestry == Ancestry(4, before.rollbacks, runs=((4, "a" * 16),))
    assert not ancestry.superseded(SaveId(3, 25, 0))


@given(model=histories())
@settings(deadline=None, max_examples=50)
def test_record_round_trips(model: Model) -> None:
    """If it failed, a restart would not know which branches were abandoned."""
    records = EpochRecords(MemoryStore())
    assert records.read() == Ancestry()
    records.write(model.ancestry)
    assert records.read() == model.ancestry


def test_newest_record_wins_in_any_write_order() -> None:
    """If it failed, a slow run of an older epoch could take back what a newer one recorded."""
    store = MemoryStore()
    records = EpochRecords(store)
    records.write(Ancestry(12, (Rollback(12, 5),)))
    records.write(Ancestry(9, (Rollback(9, 90),)))
    store.put("_ckptkit/epochs/notes.txt", b"a user's file")
    assert records.read() == Ancestry(12, (Rollback(12, 5),))


KEYS = ("_ckptkit/epochs/00000003.json", "_ckptkit/epochs/00000003.copy.json")


def recorded() -> tuple[MemoryStore, Ancestry]:
    store, ancestry = (
        MemoryStore("gs://b/run"),
        Ancestry(3, (Rollback(2, 10), Rollback(3, 40)), ((5, 1),), ((3, "a" * 16),), "b" * 16),
    )
    EpochRecords(store).write(ancestry)
    return store, ancestry


@pytest.mark.parametrize("key", KEYS)
def test_flipped_bit_in_a_record_is_found_and_its_copy_read(key: str) -> None:
    """A changed base step would abandon the newest steps, or bring an abandoned branch back."""
    store, ancestry = recorded()
    whole = store.get(key)
    for at in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            store.put(key, bytes(data))
            said: list[str] = []
            records = EpochRecords(store, said.append)
            assert records.read() == ancestry
            assert bool(said) == (key == KEYS[0]), (at, bit)
            found, problems = records.check()
            assert (found, len(problems)) == (ancestry, 1), (at, bit)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("data", [None, b"", b"{}"])
def test_record_and_copy_repair_each_other(key: str, data: bytes | None) -> None:
    """A root that lost one copy would lose the next one too."""
    store, ancestry = recorded()
    whole = store.get(KEYS[0])
    assert store.get(KEYS[1]) == whole
    store.delete(key)
    if data is not None:
        store.put(key, data)
    said: list[str] = []
    records = EpochRecords(store, said.append)
    assert [records.read(), records.read()] == [ancestry, ancestry]
    assert len(said) == (key == KEYS[0]), "once"
    if key == KEYS[0]:
        assert f"epoch record gs://b/run/{key} " in said[0]
    lost = data is not None or key == KEYS[0]  # a copy that was never written is not damage
    assert records.mend() == ([key] if lost else [])
    assert store.get(KEYS[0]) == whole
    assert records.check() == (ancestry, [])
    assert records.mend() == []


def test_both_copies_damaged_are_refused() -> None:
    """Without any record an abandoned branch would come back."""
    store, _ = recorded()
    for key in KEYS:
        store.put(key, b"{")
    for act in (EpochRecords(store).read, EpochRecords(store).check, EpochRecords(store).mend):
        with pytest.raises(CorruptCheckpointError, match=r"epoch record gs://b/run/_ckptkit/epochs/00000003.json"):
            act()


def test_record_without_a_digest_is_read() -> None:
    """A root of an earlier version could not be opened any more."""
    store, ancestry = MemoryStore(), Ancestry(3, (Rollback(3, 40),))
    store.put(KEYS[0], json.dumps({**ancestry.to_json(), "run": "r"}).encode())
    assert EpochRecords(store).check() == (ancestry, [])


def test_epoch_with_a_lost_record_is_not_claimed_again() -> None:
    """Two runs could save under one epoch."""
    store, _ = recorded()
    store.delete(KEYS[0])
    with pytest.raises(FileExistsError, match="copy"):
        EpochRecords(store).write(Ancestry(3))


def test_an_epoch_is_claimed_once() -> None:
    """If it failed, two runs could save under one epoch and neither would be fenced off."""
    records = EpochRecords(MemoryStore())
    records.write(Ancestry(2, ()))
    with pytest.raises(FileExistsError, match=r"_ckptkit/epochs/00000002\.json"):
        records.write(Ancestry(2, (Rollback(2, 5),)))
    assert records.read() == Ancestry(2, ())


class FailsFirstPut(WrapperStore):
    """A store whose first put does not arrive, and during which `meanwhile` happens."""

    def __init__(self, inner: Store, meanwhile: EpochRecords, ancestry: Ancestry):
        super().__init__(inner)
        self._meanwhile: EpochRecords | None = meanwhile
        self._ancestry = ancestry

    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        if self._meanwhile is not None:
            other, self._meanwhile = self._meanwhile, None
            other.write(self._ancestry)
            raise TransientStoreError("503 try again")
        super().put(key, data, mode=mode)


def test_two_runs_cannot_both_claim_an_epoch_through_a_retry() -> None:
    """If it failed, a repeated put that finds the OTHER run's equal record would take it for its own: two owners."""
    bucket = MemoryStore()
    base = SaveId(1, 5, 0)
    one, other = (Ancestry().begin(2, base, new_id()) for _ in range(2))  # two restarts from the same base
    flaky = FailsFirstPut(bucket, meanwhile=EpochRecords(bucket), ancestry=other)
    with pytest.raises(FileExistsError):
        EpochRecords(RetryStore(flaky, first_delay_s=0.0)).write(one)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"epoch":"x","ancestry":[],"stock":[]}',
        b'{"epoch":3,"ancestry":[[1]],"stock":[]}',
        b'{"epoch":3,"ancestry":null,"stock":[]}',
        b'{"epoch":3,"ancestry":[]}',
        b'{"epoch":3,"ancestry":[],"stock":[null]}',
        b"\xff\xfe\x00",
    ],
)
def test_damaged_record_is_refused_by_name(text: bytes) -> None:
    """If it failed, a torn record would count as no record, and an abandoned branch would come back."""
    store = MemoryStore("gs://b/run")
    store.put("_ckptkit/epochs/00000003.json", text)
    with pytest.raises(CorruptCheckpointError) as caught:
        EpochRecords(store).read()
    path = "gs://b/run/_ckptkit/epochs/00000003.json"
    assert str(caught.value).startswith(f"epoch record {path} cannot be read: ")
    assert caught.value.path == path


def test_a_record_under_another_epochs_name_is_refused() -> None:
    """If it failed, a record copied by hand would set the clock of epochs back."""
    store = MemoryStore()
    store.put("_ckptkit/epochs/00000007.json", json.dumps(Ancestry(3).to_json()).encode())
    with pytest.raises(CorruptCheckpointError, match=r"00000007\.json .*epoch 3"):
        EpochRecords(store).read()


def test_looking_for_abandoned_saves_costs_the_same_after_many_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop asks for each save: after 200 restarts with 1,000 steps each call would take 70 ms."""
    ancestry = Ancestry()
    for epoch in range(1, 500):
        ancestry = ancestry.begin(epoch, SaveId(epoch - 1, epoch, epoch), new_id())
    looked: list[Rollback] = []
    abandons = Rollback.abandons
    monkeypatch.setattr(Rollback, "abandons", lambda self, save: looked.append(self) or abandons(self, save))
    for epoch in (0, 1, 250, 499):
        ancestry.superseded(SaveId(epoch, epoch + 1, epoch + 1))
    assert len(looked) <= 4
