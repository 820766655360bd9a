"""The report of a `ckptkit chaos` campaign: each fault, the work that was lost, and whether the end state is right."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ckptkit.cli.outputs import write_whole
from ckptkit.cli.text import count_text, print_line, print_table
from ckptkit.events import Event
from ckptkit.goodput import GoodputReport, Part, goodput_page, goodput_report, headline, load_run, timeline_of
from ckptkit.launch.chaos import ChaosRun
from ckptkit.launch.policy import ExitCode
from ckptkit.util.clock import time_text

_FORMAT = "ckptkit.chaos/1"
_P99_MIN = 100  # of fewer times the 99th percentile is the longest one
_STATE = {
    "equal": "state at the end: equal to that of the undisturbed run, on every process",
    "different": "state at the end: DIFFERENT from that of the undisturbed run",
    "no digest": "state at the end: not compared; call ckptkit.state_digest(state) at the end of the job",
    "not compared": "state at the end: not compared, since a run did not end well",
}


class ChaosReport:
    """A campaign that is over. `events`: the job's event logs; without them its goodput is not known."""

    def __init__(self, run: ChaosRun, seed: int, verdict: str | None, events: Path | None):
        self._run = run
        self._logs, self._goodput, self._no_goodput = _account(events)
        self.found = _found(run, seed, verdict, self._goodput)

    def show(self) -> None:
        """Prints a table of the faults, and what they cost."""
        run, found = self._run, self.found
        print_line()
        _show_faults(run)
        how = "goes on" if run.code is None else "ended well" if run.code == ExitCode.OK else f"ended: {run.code.name}"
        print_line(f"the job {how} after {time_text(run.seconds)}: {count_text(len(run.injected), 'fault')}")
        for line in [*run.unplanned, *_cost_lines(found)]:
            print_line(f"  {line}")
        print_line(f"no goodput: {self._no_goodput}" if self._goodput is None else headline(self._goodput))
        if found["state"] is not None:
            print_line(_STATE[found["state"]])

    def write(self, directory: Path) -> None:
        """Writes `report.json`, `report.txt` (what `show` prints) and, where the goodput is known, `goodput.html`."""
        shown = io.StringIO()
        with redirect_stdout(shown):
            self.show()
        write_whole(directory / "report.json", json.dumps(self.found, indent=2) + "\n")
        write_whole(directory / "report.txt", shown.getvalue().lstrip("\n"))
        if self._goodput is not None:
            page = goodput_page(self._goodput, timeline_of(self._logs), title="Goodput under faults")
            write_whole(directory / "goodput.html", page)


def _account(events: Path | None) -> tuple[list[list[Event]], GoodputReport | None, str]:
    """The logs of the job, their account, and why there is none."""
    if events is None:
        return [], None, "give --report, or --events with the directory of the job's event logs"
    try:
        logs = load_run(events)
        return logs, goodput_report(logs), ""
    except (ValueError, FileNotFoundError) as error:
        return [], None, f"{events}: {error}"


def _found(run: ChaosRun, seed: int, verdict: str | None, account: GoodputReport | None) -> dict[str, Any]:
    back_s = [each.back_s for each in run.injected if each.back_s is not None]
    return {
        "format": _FORMAT,
        "seed": seed,
        "code": None if run.code is None else int(run.code),
        "seconds": run.seconds,
        "faults": [asdict(each) for each in run.injected],
        "unplanned": list(run.unplanned),
        "back_s_samples": len(back_s),
        "back_s_p50": median(back_s) if back_s else None,
        "back_s_p99": quantiles(back_s, n=100, method="inclusive")[98] if len(back_s) >= _P99_MIN else None,
        "back_s_max": max(back_s, default=None),
        "steps_repeated": sum(each.repeated or 0 for each in run.injected),
        "repeated_s": None if account is None else account.parts_s[Part.WASTED],
        "goodput": None if account is None else account.goodput.ml_goodput,
        "state": verdict,
    }


def _show_faults(run: ChaosRun) -> None:
    rows = [
        (
            str(each.fault.number),
            time_text(each.at_s),
            "; ".join(each.did),
            "-" if each.back_s is None else time_text(each.back_s),
            "-" if each.repeated is None else str(each.repeated),
        )
        for each in run.injected
    ]
    if rows:
        titles = ("fault", "at", "what", "next step after", "steps again")
        print_table([(title, title != "what") for title in titles], rows)
        print_line()


def _cost_lines(found: Mapping[str, Any]) -> Sequence[str]:
    samples, p99_s = found["back_s_samples"], found["back_s_p99"]
    if not samples:
        return ["no step came after a fault"] if found["faults"] else []
    p99 = f"p99 needs {_P99_MIN} of them" if p99_s is None else f"p99 {time_text(p99_s)}"
    times = f"p50 {time_text(found['back_s_p50'])}, {p99}, at most {time_text(found['back_s_max'])}"
    lost = count_text(found["steps_repeated"], "step")
    lost_s = "" if found["repeated_s"] is None else f", {time_text(found['repeated_s'])}"
    return [f"next step after: {times}, of {count_text(samples, 'time')}", f"work lost: {lost}{lost_s}"]
