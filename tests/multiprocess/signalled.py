"""Saves, restores, waits and closes that real signals interrupt at random moments: run by `test_signals.py`.

    python -m tests.multiprocess.signalled DIR --seed 7 --moments 12 --kills 2 --processes 1

One process imports everything and starts nothing; a fork of it is one run of a job of one process, or several are those
of a job of more. Runs are killed at random moments, the next one goes on. Within a run, SIGINT, and SIGTERM with a
handler that calls `sys.exit`, interrupt one call of one process. After each, a save has to be committed, and every
slot to be free. Ends with 0, or with the first problem.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANG_S = 60.0  # no call takes as long
TIMEOUT_S = 3.0  # for other processes
SAVES_MAX = 3  # after a disturbance, until one is committed
LEAVES, ROWS = 24, 4000


def main() -> int:
    """Forks run after run; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--moments", type=int, required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import orbax.checkpoint  # noqa: F401

    import ckptkit.manager.checkpoint_manager  # noqa: F401
    from ckptkit.launch import free_port

    chance = random.Random(args.seed)
    for number in range(args.kills + 1):
        kill_s = chance.uniform(0.5, 4.0) if number < args.kills else None
        moments = 10**6 if number < args.kills else args.moments
        job = Job(args.dir, args.processes, free_port(), chance.random(), moments)
        children = [job.fork(process) for process in range(args.processes)]
        if kill_s is not None:
            time.sleep(kill_s)
            for pid in children:
                os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        allowed = {0} if kill_s is None else {0, -signal.SIGKILL}
        if not set(codes) <= allowed:
            print(f"run {number} ended with {codes}", flush=True)
            return 1
    return 0


class Job:
    """One run: its processes make the same calls in the same order, by `seed`."""

    def __init__(self, root: Path, count: int, port: int, seed: float, moments: int):
        self._root, self._count, self._port, self._moments = root, count, port, moments
        self._seed = seed
        self._process = 0
        self._armed = False
        self._step = self._closes = 0
        self._manager: Any = None

    def fork(self, process: int) -> int:
        """The process id of a child that is `process` of the job."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._process = process
            self._run()
            code = 0
        except BaseException as error:  # noqa: BLE001  the top of a process
            import traceback

            traceback.print_exception(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _run(self) -> None:
        faulthandler.enable()
        if self._count > 1:
            import jax

            jax.distributed.initialize(f"localhost:{self._port}", self._count, self._process)
        # After JAX, which has a handler of its own for preemptions.
        signal.signal(signal.SIGINT, lambda *_: self._interrupted(KeyboardInterrupt))
        signal.signal(signal.SIGTERM, lambda *_: self._interrupted(SystemExit))
        chance = random.Random(self._seed)  # the same on every process
        self._manager = self._make()
        self._resume()
        for number in range(self._moments):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            act = chance.choice([self._save, self._save, self._restore, self._wait, self._close])
            sent = chance.choice([signal.SIGINT, signal.SIGTERM])
            self._step += 1  # here, or the loops of two processes would save different steps after an interrupt
            victim, after_s = chance.randrange(self._count), chance.choice([0.002, 0.02, 0.1]) * chance.random()
            self._disturb(act, sent if victim == self._process else None, after_s)
            self._check_saves(f"moment {number}: {sent.name} in {act.__name__} on process {victim}")
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        self._manager.close()
        faulthandler.cancel_dump_traceback_later()

    def _interrupted(self, error: type[BaseException]) -> None:
        if self._armed:
            self._armed = False
            raise error

    def _disturb(self, act: Callable[[], None], sent: signal.Signals | None, after_s: float) -> None:
        """Calls `act`, and sends this process a signal meanwhile."""
        import ckptkit

        timer = threading.Timer(after_s, lambda: os.kill(os.getpid(), sent)) if sent is not None else None
        try:
            try:
                self._armed = True
                if timer is not None:
                    timer.start()
                act()
            finally:
                self._armed = False  # the signal may come before this, too
        except (KeyboardInterrupt, SystemExit, ckptkit.CheckpointError):
            self._armed = False
        if timer is not None:
            timer.join()
        if act == self._close:
            self._quietly(self._manager.close)  # what the signal has left of it
            self._meet()
            self._manager = self._make()

    def _meet(self) -> None:
        """Processes whose managers were closed at different times make the next ones together."""
        if self._count > 1:
            from jax._src import distributed  # its client has no public name

            self._closes += 1
            assert distributed.global_state.client is not None
            distributed.global_state.client.wait_at_barrier(f"signalled/{self._closes}", int(HANG_S * 1000))

    # The calls.

    def _save(self) -> None:
        self._manager.save(self._step, args=self._args(self._step))

    def _restore(self) -> None:
        self._manager.restore(None)

    def _wait(self) -> None:
        self._manager.save(self._step, args=self._args(self._step))
        self._manager.wait_until_finished()

    def _close(self) -> None:
        self._manager.save(self._step, args=self._args(self._step))
        self._manager.close()

    # The conditions that must hold.

    def _check_saves(self, what: str) -> None:
        """A save is committed soon, and nothing is held for one that was interrupted."""
        import ckptkit

        raised = []
        for _ in range(SAVES_MAX):
            self._step += 1
            try:
                self._manager.save(self._step, args=self._args(self._step), force=True)
                self._manager.wait_until_finished()
            except ckptkit.CheckpointError as error:
                raised.append(str(error))
            tiers = [set(record.tiers) for record in self._manager.steps() if record.step == self._step]
            if tiers and tiers[-1] >= {"ram", "durable"}:
                break
        else:
            found = [(record.step, record.state, record.tiers) for record in self._manager.steps()][-6:]
            raise AssertionError(f"{what}: {SAVES_MAX} saves were not committed: {found}, {raised}")
        left = self._manager._pipeline.under_way.left()
        arenas = self._manager._components.storage.arenas
        leased = [
            (name, slot.name, slot.leases) for name, arena in arenas.items() for slot in arena._slots if slot.leases
        ]
        if left or leased:
            raise AssertionError(f"{what}: under way {left}, leased {leased}")
        if self._process == 0:
            (self._root / "committed.new").write_text(str(self._step))
            (self._root / "committed.new").rename(self._root / "committed")

    def _resume(self) -> None:
        """The run goes on from the newest step that an earlier one knew to be committed, or a newer one."""
        path = self._root / "committed"
        known = int(path.read_text()) if path.exists() else None
        if known is None and not self._manager.all_steps():
            return
        import numpy as np

        found = self._manager.restore(None)
        self._step = int(found["step"])
        if known is not None and self._step < known:
            raise AssertionError(f"step {self._step} was restored, and {known} was committed")
        for leaf in found["w"]:
            assert np.all(np.asarray(leaf.addressable_shards[0].data) == self._step)

    def _quietly(self, act: Callable[[], None]) -> None:
        import ckptkit

        try:
            act()
        except ckptkit.CheckpointError:
            return

    def _args(self, step: int) -> Any:
        import jax
        import numpy as np
        import orbax.checkpoint as ocp

        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        value = np.full(ROWS * jax.device_count(), step, np.float32)
        leaves = [
            jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]) for _ in range(LEAVES)
        ]
        return ocp.args.StandardSave({"w": leaves, "step": step})  # pyright: ignore[reportCallIssue]

    def _make(self) -> Any:
        import orbax.checkpoint as ocp

        import ckptkit

        every = ckptkit.EverySteps(1)
        return ckptkit.CheckpointManager(
            self._root / "durable",
            options=ocp.CheckpointManagerOptions(save_interval_steps=3, max_to_keep=3),
            tiers=[
                ckptkit.Tier.ram(str(self._root / "ram"), save=every),
                ckptkit.Tier.ssd(str(self._root / "ssd"), save=every),
            ],
            host_id=f"host-{self._process}",
            saving=ckptkit.SaveOptions(on_failure=ckptkit.FailurePolicy(retries=1, retry_delay_s=0.1)),
            processes=ckptkit.ProcessOptions(timeout_s=TIMEOUT_S),
        )


if __name__ == "__main__":
    sys.exit(main())
