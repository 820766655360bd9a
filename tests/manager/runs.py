"""A job's directories, and managers over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import ckptkit
from tests.states import abstract, assert_same, make_state, restore_args, save_args


class Run:
    """A job's directories, and managers over them; events are kept."""

    def __init__(self, root: Path):
        self.durable = root / "durable"
        self.ram = root / "ram"
        self.ssd = root / "ssd"
        self.events: list[ckptkit.Event] = []

    def manager(self, *, save_every: int = 4, tiers: bool = True, host_id: str = "host-a", **options: Any) -> Any:
        log = ckptkit.EventLog()
        log.observe(self.events.append)
        fast = [
            ckptkit.Tier.ram(str(self.ram), save=ckptkit.EverySteps(1)),
            ckptkit.Tier.ssd(str(self.ssd), save=ckptkit.EverySteps(2)),
        ]
        return ckptkit.CheckpointManager(
            self.durable,
            options=ocp.CheckpointManagerOptions(save_interval_steps=save_every, **options),
            tiers=fast if tiers else (),
            host_id=host_id,
            events=log,
            processes=ckptkit.ProcessOptions(timeout_s=30),
        )

    def save_steps(self, steps: range, **kwargs: Any) -> None:
        with self.manager(**kwargs) as manager:
            for step in steps:
                assert manager.save(step, args=save_args(make_state(step), step))
                manager.wait_until_finished()

    def of_kind(self, kind: ckptkit.Kind) -> list[ckptkit.Event]:
        return [event for event in self.events if event.kind == kind]

    def sources(self) -> set[str]:
        return set(self.of_kind(ckptkit.Kind.RESTORED)[-1].fields["sources"])


def restored_step(run: Run, **kwargs: Any) -> int:
    """Restores the newest step, checks every bit of it, and returns its number."""
    with run.manager(**kwargs) as manager:
        restored = manager.restore(None, args=restore_args(abstract(make_state())))
    assert_same(restored["state"], make_state(restored["data"]["step"]))
    return restored["data"]["step"]
