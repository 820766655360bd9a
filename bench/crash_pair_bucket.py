"""The crash points of the job of two processes (`crash_pair`) in a bucket: every state between two requests."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import final

from bench.crash_bucket import BUCKET, History, Replayed, State
from bench.crash_pair import NOTES, OTHER_RECORD, RIGHT
from bench.crash_pair_judge import Restarts, any_record_believed
from bench.crashpoints import few

HOME = "pair"
CONTROLS = ("sidecar-late", "sidecars-deleted")  # a bucket has nothing to sync
SHORT_POINTS = 5  # of each scene
_LIMIT_S = 240.0


def record_pair_in_bucket() -> History:
    """Every scene of the job: both processes send their requests to the bucket of this process's environment."""
    history = History()
    with history.watch():
        words = [sys.executable, "-m", "bench.crash_pair", f"gs://{BUCKET}/{HOME}"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    return history


def requests_of(history: History, scene: str) -> list[int]:
    """The requests of a scene that changed the bucket, and those that put its promises."""
    found = []
    for number, (request, state) in enumerate(history.states):
        name = request.split(" ", 1)[1]
        if name.startswith(f"{HOME}/{NOTES}/") and name in state:
            of = json.loads(state[name])["scene"]
        else:
            of = name.split("/")[1]
        if of == scene:
            found.append(number)
    return found


def checked_in_bucket(
    history: History, *, full: bool, chance: random.Random
) -> Iterator[tuple[str, str, list[str], int]]:
    """Each request after which the root has to hold: its row, its name, the violations, and how many restarts were
    asked. Without `full` a few of each scene."""
    for scene, row in ((RIGHT, "pair bucket"), (OTHER_RECORD, "pair bucket other record")):
        judge, labels = PairBucketJudge(history, scene), dict.fromkeys(requests_of(history, scene), row)
        for number in labels if full else few(labels, SHORT_POINTS, chance):
            before = judge.restarts
            wrong = judge.check(number)
            yield row, f"request {number}: {history.states[number][0]}", wrong, judge.restarts - before


def controls_found_in_bucket(history: History) -> dict[str, str]:
    """The violation that shows each broken rule, or nothing."""
    found = {scene: _violation(history, scene) for scene in CONTROLS}
    with any_record_believed():
        found[f"{OTHER_RECORD}-believed"] = _violation(history, OTHER_RECORD)
    return {f"{name} in a bucket": wrong for name, wrong in found.items()}


def _violation(history: History, scene: str) -> str:
    judge = PairBucketJudge(history, scene)
    return next((wrong for number in reversed(requests_of(history, scene)) for wrong in judge.check(number)), "")


@final
class PairBucketJudge:
    """Puts states of a scene back into the bucket, and asks restarts."""

    def __init__(self, history: History, scene: str):
        self._history, self._scene = history, scene
        self._replayed = Replayed()
        self._restarts = Restarts(f"gs://{BUCKET}/{HOME}/{scene}")

    @property
    def restarts(self) -> int:
        """How many were asked."""
        return self._restarts.count

    def check(self, number: int) -> list[str]:
        """The violations of the state after a request."""
        whole = self._history.states[number][1]
        said = [json.loads(data) for name, data in whole.items() if name.startswith(f"{HOME}/{NOTES}/")]
        state = _below(whole, f"{HOME}/{self._scene}/")
        return self._restarts.check(
            _digest(state),
            {note["committed"] for note in said if note["scene"] == self._scene},
            lambda: self._replayed.set_to(state),
            lambda step: _digest(_below(state, f"{HOME}/{self._scene}/{step}/")),
        )


def _below(state: State, prefix: str) -> State:
    return {name: data for name, data in state.items() if name.startswith(prefix)}


def _digest(state: State) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, data in sorted(state.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
