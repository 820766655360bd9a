"""One process of a job in which small things go wrong; writes down what became of the saves after each.

    python -m tests.multiprocess.disturbed_worker --process 0 --coordinator HOST:PORT DIR

Writes DIR/found-{process}.json. Process 1 is the one that is disturbed.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.multiprocess.save_worker import make_state, save_args

PROCESSES = 2
LIMIT_S = 100.0
AWAY_S = 4.0


def main() -> None:
    """Runs every act, in the same order on every process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    import jax
    from jax._src import distributed  # its client has no public name

    jax.distributed.initialize(args.coordinator, PROCESSES, args.process)
    make_state(0)  # the backend wants the client itself
    service = Service(distributed.global_state.client)
    distributed.global_state.client = service  # pyright: ignore[reportAttributeAccessIssue]
    worker = Worker(args.dir, args.process, service)
    for act in (worker.service_away, worker.raises_early, worker.missed_verdict, worker.only_saves):
        worker.found[act.__name__] = act()
        (args.dir / f"found-{args.process}.json").write_text(json.dumps(worker.found))
    distributed.global_state.client = service.client
    atexit.register(jax.distributed.shutdown)
    worker.left_open()


class Service:
    """JAX's coordination service, away when it is told to be."""

    def __init__(self, client: Any):
        self.client = client
        self.away_until_s = 0.0
        self.loses: Callable[[str], bool] = lambda _: False  # which keys are never there for this process

    def __getattr__(self, name: str) -> Any:
        import jax

        def call(*args: Any, **words: Any) -> Any:
            if time.monotonic() < self.away_until_s:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")
            if name == "blocking_key_value_get" and self.loses(args[0]):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: lost")
            return getattr(self.client, name)(*args, **words)

        return call


class Worker:
    """The acts; each has a manager of its own."""

    def __init__(self, root: Path, process: int, service: Service):
        self.found: dict[str, Any] = {}
        self._root, self._process, self._service = root, process, service

    @property
    def _disturbed(self) -> bool:
        return self._process == 1

    @contextmanager
    def _manager(self, name: str, **words: Any) -> Iterator[Any]:
        import ckptkit

        manager = self._make(name, **words)
        yield manager
        with suppress(ckptkit.CheckpointError):
            manager.close()

    def _make(self, name: str, *, timeout_s: float = 3.0, every: int = 10**6, **failure: Any) -> Any:
        import orbax.checkpoint as ocp

        import ckptkit

        return ckptkit.CheckpointManager(
            self._root / name / "durable",
            options=ocp.CheckpointManagerOptions(save_interval_steps=every),
            tiers=[ckptkit.Tier.ram(str(self._root / name / "ram"))],
            host_id=f"host-{self._process}",
            saving=ckptkit.SaveOptions(on_failure=ckptkit.FailurePolicy(retries=0, **failure)),
            processes=ckptkit.ProcessOptions(timeout_s=timeout_s, peers=None),
        )

    def _save(self, manager: Any, step: int) -> str:
        """The error of a save, or of the wait for it."""
        import ckptkit

        try:
            manager.save(step, args=save_args(step))
            manager.wait_until_finished()
        except ckptkit.CheckpointError as error:
            return str(error)
        return ""

    def service_away(self) -> Any:
        """The service cannot be reached from process 1 for 4 s, in which 4 saves are made."""
        import ckptkit

        with self._manager("away") as manager:
            self._save(manager, 0)
            if self._disturbed:
                self._service.away_until_s = time.monotonic() + AWAY_S
            for step in range(1, 5):
                with suppress(ckptkit.SaveFailedError):  # of the one before
                    manager.save(step, args=save_args(step))
                time.sleep(1.0)
            with suppress(Exception):
                manager.wait_until_finished()
            raised = [self._save(manager, step) for step in (5, 6)]
            leases = sum(slot.leases for slot in manager._pipeline._targets.staging._slots)
            return {"raised": raised, "held": _held(manager, 5), "leases": leases}

    def raises_early(self) -> Any:
        """Process 1 raises in three saves before anything is staged; the others' next saves wait for nothing."""

        import orbax.checkpoint as ocp

        with self._manager("early", timeout_s=60.0, every=1) as manager:
            self._save(manager, 0)
            took_s = []
            for step in (1, 2, 3):
                began_s = time.monotonic()
                bad: Any = ocp.args.JsonSave(object())  # pyright: ignore[reportArgumentType, reportCallIssue]
                with suppress(ValueError):  # Orbax has no handler for it
                    manager.save(step, args=bad if self._disturbed else save_args(step))
                manager._pipeline.threads.wait()
                took_s.append(time.monotonic() - began_s)
            with suppress(Exception):
                manager.check_for_errors()
            raised = self._save(manager, 4)
            return {"raised": raised, "held": _held(manager, 0), "longest_s": max(took_s)}

    def missed_verdict(self) -> Any:
        """Process 1 never reads that step 2 is committed; then both restore, and go on."""
        from ckptkit.job import meeting

        with self._manager("missed") as manager:
            self._save(manager, 1)
            coordinator = manager._pipeline._coordinator
            if self._disturbed:
                self._service.loses = lambda key: ".2.0/0/out" in key and "/commit/" in key
                coordinator.timeout_s, meeting._VERDICT_SPARE_S = 0.1, 0.2  # for how long it looks
            missed = self._save(manager, 2)
            coordinator.timeout_s, meeting._VERDICT_SPARE_S = 3.0, 5.0
            restored = manager.restore(None)["b"].addressable_shards[0].data.tolist()[0]
            self._service.loses = lambda _: False
            after = manager.all_steps()
            raised = self._save(manager, 3)
            return {
                "missed": missed,
                "restored": restored,
                "after": after,
                "raised": raised,
                "held": _held(manager, 0),
            }

    def only_saves(self) -> Any:
        """Every save fails on process 1, in a loop that calls `save` and nothing else."""
        import ckptkit

        with self._manager("told", skipped_max=4) as manager:
            self._save(manager, 0)
            arena = manager._pipeline._targets.staging
            if self._disturbed:
                arena.commit = _refused
            for step in range(1, 20):
                try:
                    manager.save(step, args=save_args(step))
                    manager._pipeline.threads.writer.drain()
                except ckptkit.SaveFailedError as error:
                    return {"step": step, "said": str(error)}
        return {"step": 20, "said": ""}

    def left_open(self) -> None:
        """The process ends while a durable save is under way; its manager is never closed."""
        manager = self._make("open", timeout_s=30.0, every=1)
        save = manager._durable.save

        def slow(*args: Any, **words: Any) -> Any:
            time.sleep(0.5)
            return save(*args, **words)

        manager._durable.save = slow
        manager.save(1, args=save_args(1))


def _refused(*_: Any, **__: Any) -> None:
    raise OSError(5, "Input/output error")


def _held(manager: Any, first: int) -> list[Any]:
    """The steps of the ramdisk from `first` on, each with its epoch."""
    records = [record for record in manager.steps() if "ram" in record.tiers and record.step >= first]
    return [[record.step, record.save_id.epoch, record.save_id.number] for record in records]


if __name__ == "__main__":
    main()
