"""A save into a slot that dies or fails at any of its system calls: what was committed stays whole."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.errors import StoreError, StoreFullError
from ckptkit.slots import arena as arena_module
from ckptkit.slots.arena import Arena
from tests.slots.arenas import PAGE, commit, die, fill, proven, save_of, write


class Died(BaseException):
    """The process dies here."""


class Dying:
    """Every storage operation of the arena, of which the n-th kills the process before, in or after its effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool):
        self.at, self.after, self.count, self.dead = at, after, 0, False
        for name in ("open", "fsync", "link", "unlink", "replace", "posix_fallocate", "fdopen", "close"):
            monkeypatch.setattr(os, name, self.wrapped(getattr(os, name)))
        monkeypatch.setattr(np, "copyto", self.wrapped(np.copyto))
        monkeypatch.setattr(Path, "unlink", self.wrapped(Path.unlink))

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Died
            self.count += 1
            if self.count != self.at:
                return call(*args, **kwargs)
            self.dead = True
            if self.after:
                call(*args, **kwargs)
            raise Died

        return counted


@pytest.mark.parametrize("synced", [False, True], ids=["ram", "ssd"])
@pytest.mark.parametrize("grows", [False, True], ids=["same size", "grown"])
def test_save_crashed_anywhere_keeps_the_newest_commit(host: Path, tmp_path: Path, synced: bool, grows: bool) -> None:
    """If it failed, a process that dies in mid-save would leave its host with no whole save at all."""
    outcomes: set[frozenset[int]] = set()
    size = 5 * PAGE if grows else 2 * PAGE
    # Enumerated, not sampled: one run per operation and side of it, until a run survives.
    for after in (False, True):
        for at in itertools.count(1):
            here = (tmp_path if synced else host) / f"{after}-{at}"
            arena = Arena.open(here, 0, slots=2, synced=synced)
            write(arena, 1)
            write(arena, 2)
            arena.protect(save_of(2))  # committed by all; 1 may go
            with pytest.MonkeyPatch.context() as monkeypatch:
                dying = Dying(monkeypatch, at, after=after)
                with suppress(Died):
                    slot = arena.acquire(size)
                    assert slot is not None
                    manifest = fill(slot, save_of(3), size)
                    half = size // 2  # the bytes go in two halves, so that one death falls between them
                    whole = slot.memory[:size].copy()
                    slot.memory[:size] = 0
                    np.copyto(slot.memory[:half], whole[:half])
                    np.copyto(slot.memory[half:size], whole[half:])
                    commit(arena, slot, manifest)
            die(arena)
            found = proven(here / "0")
            outcomes.add(frozenset(save.step for save in found))
            assert save_of(2) in found, (at, after)
            again = Arena.open(here, 0, slots=2, synced=synced)
            assert set(again.held()) == found
            write(again, 4, size)  # and the next run goes on
            assert save_of(4) in proven(here / "0")
            again.close()
            if not dying.dead:
                assert at > 5, "the operations that are counted are not those that are made"
                break
    assert outcomes == {frozenset({1, 2}), frozenset({2}), frozenset({2, 3})}


@pytest.mark.parametrize("operation", ["link", "unlink", "fsync of the directory"])
def test_commit_that_fails_after_its_rename_is_reverted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """If it failed, a manifest would stay behind and name a slot that the next save overwrites."""
    arena = Arena.open(tmp_path, 0, slots=2, synced=True)
    write(arena, 1)
    slot = arena.acquire(PAGE)
    assert slot is not None
    manifest = fill(slot, save_of(2), PAGE)
    real_link, real_unlink, real_fsync = os.link, os.unlink, os.fsync

    def link(source: Any, target: Any) -> None:
        real_link(source, target)
        if operation == "link":
            raise OSError(5, "Input/output error")

    def unlink(path: Any, **kwargs: Any) -> None:
        if operation == "unlink" and ".put-" in str(path):
            monkeypatch.setattr(os, "unlink", real_unlink)
            raise OSError(5, "Input/output error")
        real_unlink(path, **kwargs)

    def fsync(fd: int) -> None:
        if operation == "fsync of the directory" and os.path.isdir(f"/proc/self/fd/{fd}"):
            monkeypatch.setattr(os, "fsync", real_fsync)
            raise OSError(5, "Input/output error")
        real_fsync(fd)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="Input/output error"):
        commit(arena, slot, manifest)
    monkeypatch.undo()
    arena.discard(slot)  # as the manager does when a save has failed
    arena.release(slot)
    assert proven(tmp_path / "0") == {save_of(1)}
    write(arena, 3, PAGE)
    assert proven(tmp_path / "0") == {save_of(1), save_of(3)}
    arena.close()


def test_slot_that_cannot_grow_keeps_its_save(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a state that has grown too large would cost the saves that are there, one after the other."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1)
    write(arena, 2)
    arena.protect(save_of(2))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena_module.os, "posix_fallocate", full)
    for _ in range(3):
        with pytest.raises(StoreFullError):
            arena.acquire(100 * PAGE)
    monkeypatch.undo()
    assert save_of(2) in proven(host / "0")
    assert set(arena.held()) == proven(host / "0")
    assert write(arena, 3).memory.nbytes >= 2 * PAGE  # what fits goes on
    assert proven(host / "0") >= {save_of(2), save_of(3)}
    arena.close()
