"""A process of the book's jobs: forked, joined to its job by JAX, and then given one run after the other."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from tests.book.book import DURABLE, PEER, RAM
from tests.book.world import set_writable

KILLED = 9
TIMEOUT_S = 20.0
CELLS = 12  # elements of the sharded leaf: each count of processes divides them
_SLOW_S = 0.02
_real_time = time.time


def serve(process: int, count: int, port: int, orders: Any, answers: Callable[[dict[str, Any]], None]) -> None:
    """Does the runs that come as lines of JSON, and never returns."""
    lines: list[tuple[int, str]] = []
    _listen(lines)
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, process)
    for line in orders:
        order = json.loads(line)
        run = _Run(process, count, order, answers, lines)
        try:
            run.work()
        except Exception as error:  # noqa: BLE001  a finding, or a fault of the history's own
            answers({"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]})
    os._exit(0)


def _listen(lines: list[tuple[int, str]]) -> None:
    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    log = logging.getLogger("ckptkit")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(Listener())
    logging.getLogger("absl").setLevel(logging.CRITICAL)


class _Run:
    """One run of one process."""

    def __init__(self, process: int, count: int, order: dict[str, Any], answers: Any, lines: list[tuple[int, str]]):
        self._process, self._count, self._order, self._lines = process, count, order, lines
        self._answer = answers
        self._kill_after: int | None = None
        self._barriers = 0
        self._deleted: int | None = None
        lines.clear()

    def work(self) -> None:
        """Opens a manager, does the acts, and closes it; tells what came of each."""
        order = self._order
        acts = [tuple(act) for act in order["acts"]]
        while acts and acts[0][0] in ("clock", "kill"):  # before the manager is made
            self._act(None, acts.pop(0))
        with CLOCK.of_a_run():
            manager = self._open()
            self._answer({"opened": self._view(manager), "lines": self._lines[:]})
            for act in acts:
                self._answer({"begins": act[:1]})
                self._answer({"ends": act[:1], "result": self._act(manager, act)})
            if order["end"] == "killed at the end" or self._kill_after is not None:
                os._exit(KILLED)
            failure = None
            try:
                manager.close()
            except ckptkit.CheckpointError as error:
                failure = str(error)
            self._answer({"closed": True, "failure": failure, "outside": self._outside()})

    def _open(self) -> Any:
        order = self._order
        every, keep, fast = order["every"], order["keep"], order["fast"]

        def tier(name: str) -> Any:
            if name == PEER:
                return ckptkit.Tier.peer()
            make = ckptkit.Tier.ram if name == RAM else ckptkit.Tier.ssd
            return make(fast[name], save=ckptkit.EverySteps(every[name]), keep=ckptkit.KeepNewest(keep[name]))

        log = ckptkit.EventLog()
        log.observe(self._heard)
        return ckptkit.CheckpointManager(
            order["root"],
            options=ocp.CheckpointManagerOptions(
                save_interval_steps=every[DURABLE], max_to_keep=keep[DURABLE], create=True
            ),
            tiers=[tier(name) for name in order["tiers"]],
            host_id=f"host-{order['host']}",
            events=log,
            processes=ckptkit.ProcessOptions(timeout_s=TIMEOUT_S, progress=False),
            saving=ckptkit.SaveOptions(on_failure=ckptkit.FailurePolicy(retries=0)),
        )

    def _heard(self, event: Any) -> None:
        del event
        if self._kill_after is not None:
            self._kill_after -= 1
            if self._kill_after <= 0:
                os._exit(KILLED)

    # Acts.

    def _act(self, manager: Any, act: tuple[Any, ...]) -> Any:
        kind, *rest = act
        return getattr(self, "_" + kind.replace(" ", "_"))(manager, *rest)

    def _restore(self, manager: Any, which: int | None) -> Any:
        steps = manager.all_steps()
        if manager.latest_step() is None or (which is not None and not steps):
            return {"nothing": True}
        step = None if which is None else steps[which % len(steps)]
        target = _state(0, self._count, sharded=self._order["sharded"])
        target = {name: _abstract(leaf) for name, leaf in target.items()}
        restored = manager.restore(step, args=ocp.args.StandardRestore(target))
        return {"step": step, "values": sorted(_values(restored)), "latest": manager.latest_step()}

    def _save(self, manager: Any, which: str, force: bool, value: int) -> Any:
        latest, steps = manager.latest_step(), manager.all_steps()
        if which == "next" or latest is None or not steps:
            step = 1 + (latest or 0)
        elif which == "lower":
            free = [step for step in range(max(0, latest - 3), latest) if step not in steps]
            step = free[value % len(free)] if free else latest + 1
        elif which == "deleted" and self._deleted is not None:
            step = self._deleted
        else:
            step = steps[value % len(steps)]
        self._answer({"saving": step, "value": value})
        state = _state(value, self._count, sharded=self._order["sharded"])
        taken, error = None, None
        try:
            taken = bool(manager.save(step, args=ocp.args.StandardSave(state), force=force))
        except (ckptkit.CheckpointError, ckptkit.StepAlreadyExistsError, ValueError) as caught:
            taken, error = False, f"{type(caught).__name__}: {caught}"
        return {"step": step, "taken": taken, "error": error, "latest": latest, "existed": step in steps}

    def _settle(self, manager: Any) -> Any:
        error = None
        try:
            manager.wait_until_finished()
        except ckptkit.CheckpointError as caught:
            error = f"{type(caught).__name__}: {caught}"
        with suppress(ckptkit.CheckpointError):
            manager.check_for_errors()
        found = {
            record.step: sorted(record.tiers) for record in manager.steps() if not getattr(record, "rejected", None)
        }
        return {"found": found, "error": error, **self._view(manager)}

    def _delete(self, manager: Any, which: int) -> Any:
        steps = manager.all_steps()
        if not steps:
            return None
        self._deleted = step = steps[which % len(steps)]
        self._answer({"deleting": step})
        try:
            manager.delete(step)
        except ckptkit.CheckpointError as error:
            return {"error": str(error)}
        return {"step": step, **self._view(manager)}

    def _kill(self, _: Any, process: int, after: int) -> None:
        if process == self._process:
            self._kill_after = after

    def _clock(self, _: Any, seconds: float) -> None:
        CLOCK.offset_s = seconds

    def _slow(self, _: Any) -> None:
        """Renames, by which the storage commits, take long."""
        CLOCK.slow = True

    def _read_only(self, _: Any) -> bool:
        return self._alone(
            lambda: self._order["disk"] is not None and set_writable(self._order["disk"], writable=False)
        )

    def _writable(self, _: Any) -> bool:
        return self._alone(lambda: self._order["disk"] is not None and set_writable(self._order["disk"], writable=True))

    def _back_up(self, _: Any) -> bool:
        def copy() -> bool:
            shutil.copytree(
                self._order["root"], os.path.join(self._order["backups"], str(self._order["backup"])), symlinks=True
            )
            self._order["backup"] += 1
            return True

        return self._alone(copy)

    def _alone(self, act: Callable[[], bool]) -> bool:
        """Process 0 acts while the others wait."""
        self._meet()
        done = act() if self._process == 0 else True
        self._meet()
        return done

    def _meet(self) -> None:
        if self._count > 1:
            from jax._src import distributed

            self._barriers += 1
            name = f"book/{self._order['number']}/{self._barriers}"
            client: Any = distributed.global_state.client
            client.wait_at_barrier(name, 60_000)

    def _view(self, manager: Any) -> dict[str, Any]:
        return {"latest": manager.latest_step(), "all": list(manager.all_steps())}

    def _outside(self) -> Any:
        """The root as other programs see it."""
        if self._process != 0:
            return None
        return ckptkit.latest_step(self._order["root"])


def _state(value: int, count: int, *, sharded: bool) -> dict[str, Any]:
    mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = np.arange(CELLS, dtype=np.float32) + 100 * value
    spec = PartitionSpec("x") if sharded else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    parts = [
        jax.device_put(whole[index], device)
        for device, index in sharding.addressable_devices_indices_map(whole.shape).items()
    ]
    leaf = jax.make_array_from_single_device_arrays(whole.shape, sharding, parts)
    return {"w": leaf, "value": np.asarray([value])}


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if hasattr(leaf, "sharding") else leaf


def _values(state: dict[str, Any]) -> set[float]:
    """The values of which this process has a part: one, if no two saves were mixed."""
    found = {float(np.asarray(state["value"])[0])}
    for shard in state["w"].addressable_shards:
        found |= set(((np.asarray(shard.data) - np.arange(CELLS, dtype=np.float32)[shard.index]) / 100).tolist())
    return found


class _Clock:
    """The clock of a run's host, and the speed of its storage."""

    def __init__(self) -> None:
        self.offset_s, self.slow = 0.0, False

    @contextmanager
    def of_a_run(self) -> Iterator[None]:
        """Ends with the run what its acts have changed."""
        try:
            yield
        finally:
            self.offset_s, self.slow = 0.0, False

    def install(self) -> None:
        """Replaces the functions of this process."""
        time.time = lambda: _real_time() + self.offset_s
        real_ns = time.time_ns
        time.time_ns = lambda: real_ns() + int(self.offset_s * 1e9)
        for name in ("rename", "replace"):
            setattr(os, name, self._slowed(getattr(os, name)))

    def _slowed(self, real: Any) -> Any:
        def call(source: Any, target: Any, **words: Any) -> Any:
            if self.slow and "/disk/" in os.fspath(source):
                time.sleep(_SLOW_S)
            return real(source, target, **words)

        return call


CLOCK = _Clock()
