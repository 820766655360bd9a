"""The damaged runs: one of ckptkit with three tiers, and one of stock Orbax, and the reports of each afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import ckptkit
from ckptkit.slots.reader import read_manifests

STEPS = (0, 1, 2)
NEWEST = STEPS[-1]
_HOST = "host"
_SIDE_FILES = ("commit_success.txt",)  # marks that only a bucket needs


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a restore: `step` None if it raised. `noticed`: an error, or a candidate rejected with a reason."""

    step: int | None
    right: bool
    noticed: bool
    error: str = ""


def make_state(step: int) -> dict[str, Any]:
    """Random bits, different for every step: any change of any byte of it shows."""
    chance = np.random.default_rng(step)
    return {
        "w": jnp.asarray(chance.standard_normal((128, 128)), jnp.float32),
        "x": jnp.asarray(chance.standard_normal((64, 128)), jnp.bfloat16),
        "b": jnp.asarray(chance.integers(-100, 100, 64), jnp.int8),
        "count": step,
    }


def _args(step: int) -> Any:
    state = ocp.args.StandardSave(make_state(step))  # pyright: ignore[reportCallIssue]
    return ocp.args.Composite(state=state, data=ocp.args.JsonSave({"step": step}))  # pyright: ignore[reportCallIssue]


def _wanted() -> Any:
    def abstract(leaf: Any) -> Any:
        array = isinstance(leaf, jax.Array)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if array else leaf

    state = ocp.args.StandardRestore(jax.tree.map(abstract, make_state(0)))  # pyright: ignore[reportCallIssue]
    return ocp.args.Composite(state=state, data=ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]


def _is_right(found: Any, step: int) -> bool:
    """Whether these are the bits of one and the same step, and that the one that was asked for."""
    pairs = zip(jax.tree.leaves(found["state"]), jax.tree.leaves(make_state(step)), strict=True)
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    return same and found["data"] == {"step": step}


class Victim:
    """A directory that is damaged and put back, at the same path: a fast tier's job is named by its root's."""

    def __init__(self, home: Path):
        self.home = home
        self._kept = home.with_name(f"{home.name}-kept")

    def keep(self) -> None:
        """The current files are those that `put_back` restores."""
        shutil.copytree(self.home, self._kept)

    def put_back(self) -> None:
        """Undoes everything."""
        shutil.rmtree(self.home)
        shutil.copytree(self._kept, self.home)


@final
class Ours(Victim):
    """Every step in ramdisk, disk and durable tier."""

    TIERS = ("ram", "ssd", "durable")

    def save(self) -> None:
        """Saves all steps in all tiers."""
        with self._manager() as manager:
            for step in STEPS:
                manager.save(step, args=_args(step))
                manager.wait_until_finished()
        self.keep()

    def files(self, tier: str, what: str, step: int) -> list[Path]:
        """The files of one step in one tier: its data, manifests, or Orbax's metadata; `epochs`: of the run."""
        if tier == "durable":
            return durable_files(self.home / "durable", what, step)
        (directory,) = (self.home / tier).glob(f"*/{_HOST}/0")
        found, _ = read_manifests([directory])
        if what == "data":
            return [directory / manifest.slot for _, manifest in found if manifest.save_id.step == step]
        return sorted(directory.glob(f"step-{step:012d}-*.json"))

    def only(self, tier: str) -> None:
        """Takes all other copies away."""
        for other in self.TIERS:
            if other == tier:
                continue
            if other == "durable":
                for step in STEPS:
                    shutil.rmtree(self.home / other / str(step), ignore_errors=True)
            else:
                shutil.rmtree(self.home / other)

    def corrupt(self, tier: str) -> bool:
        """Whether `ckptkit.verify` finds the damage."""
        try:
            return ckptkit.verify(str(self.home / tier)).corrupt
        except ckptkit.CheckpointError:
            return True

    def restore(self) -> Answer:
        """The newest step, as a restart asks for it."""
        events: list[ckptkit.Event] = []
        try:
            with self._manager(events) as manager:
                found = manager.restore(None, args=_wanted())
        except ckptkit.CheckpointError as error:
            return Answer(None, right=True, noticed=True, error=type(error).__name__)
        except Exception as error:  # noqa: BLE001  the error that would end a restart, without a helpful message
            return Answer(None, right=True, noticed=True, error=f"unclear: {type(error).__name__}: {error}")
        noticed = any(event.kind == ckptkit.Kind.REJECTED for event in events)
        step = int(found["data"]["step"])
        return Answer(step, right=_is_right(found, step), noticed=noticed)

    def _manager(self, events: list[ckptkit.Event] | None = None) -> ckptkit.CheckpointManager:
        log = ckptkit.EventLog()
        if events is not None:
            log.observe(events.append)
        tiers = [
            ckptkit.Tier.ram(str(self.home / "ram")),
            ckptkit.Tier.ssd(str(self.home / "ssd"), save=ckptkit.EverySteps(1)),
        ]
        options = ocp.CheckpointManagerOptions(save_interval_steps=1)
        root = self.home / "durable"
        return ckptkit.CheckpointManager(
            root,
            options=options,
            tiers=tiers,
            host_id=_HOST,
            events=log,
            processes=ckptkit.ProcessOptions(timeout_s=30),
        )


@final
class Stock(Victim):
    """The same steps by stock Orbax, with its defaults."""

    def save(self) -> None:
        """Saves all steps."""
        with ocp.CheckpointManager(self.home) as manager:
            for step in STEPS:
                manager.save(step, args=_args(step))
        self.keep()

    def files(self, what: str, step: int) -> list[Path]:
        """The files of one step: data or metadata."""
        return durable_files(self.home, what, step)

    def restore(self) -> Answer:
        """The newest step, as a restart asks for it."""
        try:
            with ocp.CheckpointManager(self.home) as manager:
                step = manager.latest_step()
                if step is None:
                    return Answer(None, right=True, noticed=False)
                found = manager.restore(step, args=_wanted())
            return Answer(step, right=_is_right(found, step), noticed=False)
        except Exception as error:  # noqa: BLE001  whatever it raises, it did notice
            return Answer(None, right=True, noticed=True, error=type(error).__name__)


def durable_files(root: Path, what: str, step: int) -> list[Path]:
    """The files of an Orbax step directory by what they are."""
    if what == "epochs":
        return sorted((root / "_ckptkit/epochs").iterdir())
    files = [path for path in (root / str(step)).rglob("*") if path.is_file() and path.name not in _SIDE_FILES]
    data = [path for path in files if path.parent.name == "d"]
    manifests = [path for path in files if path.parent.name == "_ckptkit"]
    chosen: dict[str, Sequence[Path]] = {
        "data": data,
        "manifest": manifests,
        "metadata": [path for path in files if path not in (*data, *manifests)],
    }
    return sorted(chosen[what])
