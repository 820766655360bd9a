"""The part of a stranger's script that is not the stranger's: its arguments, its tiers, its end, and its result."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ckptkit
from ckptkit.events import Event, Kind
from ckptkit.patch import patch_orbax
from tests.goodput.by_hand import Notebook


@dataclass(kw_only=True)
class Run:
    """One start of a stranger: it trains below `root`, and SIGKILL ends it once `kill_after` is committed.

    `step_s`: what a step takes on the device at least. The account of a start over ours is in `root`/account, the
    one made by hand in `root`/by_hand.
    """

    root: Path
    kill_after: int | None
    stock: bool  # over Orbax itself
    step_s: float
    events: Any = field(default_factory=ckptkit.EventLog)
    notebook: Any = field(init=False)
    committed: set[tuple[str, int]] = field(default_factory=set)
    sources: list[str] = field(default_factory=list)  # the tiers that the restore read

    @classmethod
    def from_arguments(cls) -> Run:
        """The run that the command line asks for; Orbax's classes are replaced by ours."""
        parser = argparse.ArgumentParser()
        parser.add_argument("root", type=Path)
        parser.add_argument("--kill-after", type=int)
        parser.add_argument("--stock", action="store_true")
        parser.add_argument("--step-s", type=float, default=0.0)
        run = cls(**vars(parser.parse_args()))
        run.notebook = Notebook(run.root / "by_hand", run.step_s)
        if not run.stock:
            run.events = ckptkit.EventLog.for_run(run.root / "account")
            run.notebook.watch(ckptkit.CheckpointManager)
        run.events.observe(run._note)
        if not run.stock:  # with a ramdisk that holds every save of the trainer
            patch_orbax([ckptkit.Tier.ram(str(run.root / "ram"))], events=run.events)
        return run

    def reached(self, step: int) -> None:
        """Ends the process as the kernel would, if this is the step; all its saves are committed."""
        if step == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def kill_once_committed(self) -> None:
        """Ends the process once both tiers have the step: for a trainer that calls nothing of ours between steps."""
        wanted = {("ram", self.kill_after), ("durable", self.kill_after)}
        self.events.observe(lambda _: self.reached(self.kill_after or 0) if wanted <= self.committed else None)

    def report(self, first: int, leaves: Iterable[Any]) -> None:
        """Prints the step after the restore, its tiers, the tiers of all saves, and a digest of the end's bits."""
        digest = hashlib.sha256()
        for leaf in leaves:
            is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            digest.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
        tiers = sorted({tier for tier, _ in self.committed})
        print(json.dumps({"first": first, "sources": self.sources, "tiers": tiers, "bits": digest.hexdigest()}))

    def _note(self, event: Event) -> None:
        if event.kind == Kind.COMMITTED:
            self.committed.add((str(event.tier), event.step or 0))
        elif event.kind == Kind.RESTORED:
            self.sources = sorted(event.fields.get("sources", {}))
