"""The output of the demo: a live line while it trains, and at the end a table with the cost of the losses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ckptkit.goodput import DEFINITIONS, Disruption, GoodputReport
from tools.proof import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoss:
    """Process `process` is killed once `step` steps are done, and its host's directories in `wiped` are removed."""

    step: int
    process: int
    wiped: tuple[str, ...]

    def __str__(self) -> str:
        what = "host lost" if "ssd" in self.wiped else "process killed"
        return f"{what}: process {self.process} at step {self.step}, {' and '.join(self.wiped)} wiped"


def account(report: GoodputReport, losses: Sequence[PlannedLoss]) -> Table:
    """The table of what the losses cost, what the tiers did, and where the time went."""
    table = Table("what", "measured", title="The run with losses", title_justify="left")
    for planned, loss in zip(losses, report.disruptions, strict=False):
        table.add_row(str(planned), _words_of_loss(loss))
    table.add_section()
    for restore in report.restores:
        served = ", ".join(f"{tier} {size / 1e6:.2f} MB" for tier, size in restore.source_bytes.items())
        waited = "" if restore.waited_s is None else f"; the loop waited {restore.waited_s:.2f} s"
        took = f"{served} in {restore.restore_s:.2f} s{waited}"
        table.add_row(f"restore of step {restore.step} (attempt {restore.attempt})", took)
    table.add_section()
    saves = report.saves
    if saves.stall_ms_p50 is not None and saves.stall_ms_p99 is not None:
        stall = f"p50 {saves.stall_ms_p50:.1f} ms, p99 {saves.stall_ms_p99:.1f} ms"
        table.add_row(f"stall per save ({saves.saves} saves)", stall)
    for tier, commit_s in saves.commit_s_p50.items():
        table.add_row(f"commit to {tier}", f"p50 {1e3 * commit_s:.0f} ms")
    table.add_section()
    goodput = report.goodput
    for field, name, _ in DEFINITIONS:
        share = getattr(goodput, field)
        table.add_row(f"goodput: {name}", "-" if share is None else f"{share:.1%}")
    for part, seconds in sorted(report.parts_s.items(), key=lambda item: -item[1]):
        table.add_row(f"  {part}", f"{seconds:6.2f} s  {seconds / report.wall_s:6.1%}")
    table.add_row("  total", f"{report.wall_s:6.2f} s")
    return table


def _words_of_loss(loss: Disruption) -> str:
    if loss.resume_s is None:
        return f"{loss.lost_steps} steps lost; never resumed"
    parts = sorted(loss.resume_parts_s.items(), key=lambda item: -item[1])
    phases = "\n".join(f"  {seconds:.2f} s {part}" for part, seconds in parts if seconds >= 0.005)
    caught_up = "" if loss.caught_up_s is None else f"; caught up after {loss.caught_up_s:.1f} s"
    return f"{loss.lost_steps} steps lost; first step again after {loss.resume_s:.1f} s{caught_up}\n{phases}"


class Screen:
    """The output: a live line on a terminal, a line now and then elsewhere, tables at the end."""

    EVERY_STEPS = 20  # without a terminal
    DIFFERENCES_SHOWN = 50

    def __init__(self, job: str):
        self._job = job
        is_terminal = sys.stdout.isatty()
        self._console = Console(width=None if is_terminal else 110, highlight=False)
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps  loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(
            TextColumn("{task.description:>9}"), *columns, console=self._console, disable=not is_terminal
        )
        self._task: TaskID | None = None
        self._name = ""

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def begin(self, name: str, steps: int) -> None:
        """A run begins; its progress is shown from now."""
        self._name = name
        self._task = self._progress.add_task(name, total=steps, loss="-")
        if self._progress.disable:
            self.say(f"{name}: {steps} steps {self._job}")

    def advance(self, step: int, loss: str) -> None:
        """`step` steps are done; after a resume that is fewer than before."""
        if self._task is not None and not self._progress.disable:
            self._progress.update(self._task, completed=step, loss=loss)
        elif step % self.EVERY_STEPS == 0:
            self.say(f"{self._name}: step {step} loss {loss}")

    def show(self, table: Table) -> None:
        """Shows a table below the progress, which ends."""
        self._progress.stop()
        self._console.print(table)

    def show_verdict(self, verdict: Verdict, failures: Sequence[str], elapsed_s: float) -> None:
        """The last lines: that the resume is bit-identical, or the failures."""
        for failure in failures[: self.DIFFERENCES_SHOWN]:
            self.say(failure)
        if len(failures) > self.DIFFERENCES_SHOWN:
            self.say(f"... and {len(failures) - self.DIFFERENCES_SHOWN} more")
        compared = (
            f"{verdict.leaves} leaves in {verdict.boxes} boxes, records and loss of {verdict.steps} steps "
            f"({verdict.repeated_steps} of them taken again)"
        )
        said = f"FAILED: {len(failures)} differences in" if failures else "VERIFIED: bit-identical to the reference:"
        self.say(f"{said} {compared}; {elapsed_s:.0f} s in all")
