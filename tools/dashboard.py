"""The picture of the Grafana dashboard in docs/DASHBOARDS.md: `make campaign NAME=picture-dashboard`.

Grafana is not needed. The events of an invented run go through the exporter's metrics into Prometheus, which answers
each query of `deploy/grafana.json`; a page of ours draws the panels, and a browser takes the picture. Needs Debian's
`prometheus` and `chromium` (`make setup-system`).
"""

from __future__ import annotations

import html
import http.server
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckptkit.events import Event, Kind
from ckptkit.goodput.exporters.metrics import METRICS, RunMetrics, Sample, labels_of
from ckptkit.model.tiers import DURABLE, PEER, RAM, SSD
from ckptkit.util.clock import time_text
from ckptkit.util.words import size_text

ROOT = Path(__file__).parents[1]
BOARD = ROOT / "deploy" / "grafana.json"
PICTURE = ROOT / "docs" / "dashboard.png"
BEGAN_S, HOURS, SCRAPED_EVERY_S = 1.79e9, 6.0, 60.0
_STEP_S = 6.0
_SHARE_BYTES = 16 << 30
# Of each tier: every how many steps it is saved to, and how long a commit takes.
_TIERS = {RAM: (5, 2.5), PEER: (5, 6.0), SSD: (50, 14.0), DURABLE: (200, 95.0)}
_WINDOW = 1240, 2000  # pixels; higher than the page
_MARGIN = 14
# Okabe and Ito's palette: people with any common kind of colour blindness can distinguish the colours.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_TIMES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0)
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 580.0, 190.0, 72.0, 8.0, 20.0
_STYLE = """
body { font: 13px/1.4 system-ui, sans-serif; color: #1b1f23; background: #f4f5f6; margin: 16px; }
h1 { font-size: 18px; margin: 0 0 12px; }
main { display: grid; grid-template-columns: 1fr 1fr; gap: 10px; }
section { background: #fff; border: 1px solid #d9dee3; border-radius: 4px; padding: 8px 10px; }
h2 { font-size: 13px; margin: 0 0 4px; font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, sans-serif; fill: #5b6570; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; color: #5b6570; min-height: 18px; }
.legend i { display: inline-block; width: 18px; vertical-align: 4px; margin-right: 5px; border-top: 3px solid; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a panel: its name in the legend, and its values by wall-clock second."""

    name: str
    points: Sequence[tuple[float, float]]


class _Start(NamedTuple):
    """A start of the invented run: from and until when (hours), its first step, and the tiers that it restores from."""

    from_h: float
    to_h: float
    first: int
    sources: Mapping[str, int]


# A process is lost after 1.7 hours, and a host after 3.9 hours.
_STARTS = (
    _Start(0.0, 1.7, 0, {}),
    _Start(1.76, 3.9, 970, {RAM: _SHARE_BYTES}),
    _Start(4.05, HOURS, 2200, {RAM: 15 * _SHARE_BYTES // 16, PEER: _SHARE_BYTES // 16}),
)


def invented_run() -> list[list[Event]]:
    """The events of process 0 in each start: two losses, an SSD without space, and a bucket that is slow for a time."""
    drawn = random.Random(0)
    return [sorted(_start(number, start, drawn), key=lambda event: event.at_s) for number, start in enumerate(_STARTS)]


def _start(number: int, start: _Start, drawn: random.Random) -> Iterator[Event]:
    now_s, end_s = BEGAN_S + 3600 * start.from_h, BEGAN_S + 3600 * start.to_h
    yield _event(Kind.STARTED, now_s, attempt=number)
    yield _event(Kind.OPENED, now_s + 15, tiers=[RAM, PEER, SSD])
    now_s += 40 + 30 * drawn.random()
    if start.sources:
        took_s = 9.0 if PEER in start.sources else 4.0
        now_s += took_s
        yield Event.span("checkpoint_restore", start_s=now_s - took_s, end_s=now_s, step=start.first)
        yield _event(Kind.RESTORED, now_s, start.first, sources=start.sources, duration_s=took_s)
    yield Event.span("compile", start_s=now_s, end_s=now_s + 35, step=start.first)
    now_s += 35
    step = start.first
    while now_s < end_s:
        step += 1
        took_s = _STEP_S * (1 + 0.05 * drawn.random())
        yield Event.span("data_loading", start_s=now_s, end_s=now_s + 0.1)
        yield Event.span("step", start_s=now_s + 0.1, end_s=now_s + took_s, step=step)
        now_s += took_s
        due = [tier for tier, (every, _) in _TIERS.items() if step % every == 0]
        if due:
            stall_s = drawn.lognormvariate(math.log(0.13), 0.25)
            yield Event.span("checkpoint_save", start_s=now_s, end_s=now_s + stall_s, step=step)
            now_s += stall_s
            yield _event(Kind.STAGED, now_s, step, stall_s=stall_s)
            yield from (event for tier in due for event in _saved(tier, step, now_s, drawn) if event.at_s < end_s)


def _saved(tier: str, step: int, staged_s: float, drawn: random.Random) -> Iterator[Event]:
    """The result of a save in one tier. The SSD is full for half an hour, the bucket answers slowly for an hour."""
    hour = (staged_s - BEGAN_S) / 3600
    took_s = _TIERS[tier][1] * (1 + 0.3 * drawn.random())
    if tier == SSD and 2.3 < hour < 2.8:
        yield _event(Kind.DEGRADED, staged_s + 1, step, tier, reason="no space")
        yield _event(Kind.FAILED, staged_s + 1, step, tier, reason="no space")
        return
    if tier == DURABLE and 4.8 < hour < 5.6:
        took_s *= 2.2
        for again in range(drawn.randrange(1, 4)):
            yield _event(Kind.RETRIED, staged_s + 20 * (again + 1), step, tier, reason="503", delay_s=2.0)
    elif tier == PEER and drawn.random() < 0.01:
        yield _event(Kind.SKIPPED, staged_s + 1, step, tier, policy="skip", reason="too early")
        return
    yield _event(Kind.COMMITTED, staged_s + took_s, step, tier, bytes=_SHARE_BYTES, duration_s=took_s)


def _event(kind: Kind, at_s: float, step: int | None = None, tier: str | None = None, **fields: Any) -> Event:
    return Event(kind=kind, at_s=at_s, process=0, step=step, tier=tier, fields=fields)


def open_metrics(starts: Sequence[Sequence[Event]]) -> str:
    """The metrics of a run as Prometheus would have scraped them, in OpenMetrics' text format."""
    lines: dict[str, list[str]] = {metric.name: [] for metric in METRICS}
    for events in starts:
        metrics, waiting = RunMetrics(), list(reversed(events))
        at_s = events[0].at_s
        while waiting:
            at_s += SCRAPED_EVERY_S
            while waiting and waiting[-1].at_s <= at_s:
                metrics.add(waiting.pop())
            for sample in [*metrics.samples(at_s), *_used(at_s)]:
                lines[sample.metric.name] += _lines(sample, at_s)
    text = [f"# TYPE {m.name.removesuffix('_total')} {m.kind}\n" + "".join(lines[m.name]) for m in METRICS]
    return "".join(text) + "# EOF\n"


def _used(at_s: float) -> Iterator[Sample]:
    """The space in use, invented: these tiers are not mounted."""
    metric = next(metric for metric in METRICS if metric.name == "ckptkit_tier_used_ratio")
    hour = (at_s - BEGAN_S) / 3600
    yield Sample(metric, (RAM,), 0.61)
    yield Sample(metric, (SSD,), min(1.0, 0.55 + 0.2 * hour) if hour < 2.8 else 0.42 + 0.02 * hour)


def _lines(sample: Sample, at_s: float) -> Iterator[str]:
    labels = ",".join(f'{key}="{value}"' for key, value in {"job": "train", "process": 0, **labels_of(sample)}.items())
    name = sample.metric.name
    if sample.metric.kind != "histogram":
        yield f"{name}{{{labels}}} {sample.value!r} {at_s:.0f}\n"
        return
    bounds = [*map(repr, sample.metric.bounds_s), "+Inf"]
    for bound, count in zip(bounds, accumulate(sample.counts), strict=True):
        yield f'{name}_bucket{{{labels},le="{bound}"}} {count} {at_s:.0f}\n'
    yield f"{name}_sum{{{labels}}} {sample.value!r} {at_s:.0f}\n"
    yield f"{name}_count{{{labels}}} {sum(sample.counts)} {at_s:.0f}\n"


@contextmanager
def prometheus_over(text: str, home: Path) -> Iterator[str]:
    """A Prometheus that holds these metrics; the address of its API."""
    source, blocks = home / "metrics.txt", home / "blocks"
    source.write_text(text)
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(source), str(blocks)]
    subprocess.run(command, check=True, capture_output=True)
    (home / "prometheus.yml").write_text("{}\n")
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        address = f"127.0.0.1:{server.server_port}"
    command = ["prometheus", f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={blocks}"]
    command += ["--storage.tsdb.retention.time=100y", f"--web.listen-address={address}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            _wait_until_ready(f"http://{address}/-/ready", process)
            yield f"http://{address}/api/v1"
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"{url}: Prometheus was not ready within {timeout_s:g} s")


def curves_of(panel: Mapping[str, Any], api: str) -> list[Curve]:
    """The answers to the queries of a panel, over the whole run."""
    found: list[Curve] = []
    for target in panel["targets"]:
        query = target["expr"].replace("$job", ".*")
        span = {"start": BEGAN_S, "end": BEGAN_S + 3600 * HOURS, "step": SCRAPED_EVERY_S}
        with urllib.request.urlopen(f"{api}/query_range?{urllib.parse.urlencode({'query': query, **span})}") as answer:
            series = json.load(answer)["data"]["result"]
        for each in series:
            labels = each["metric"]
            name = re.sub(
                r"\{\{(\w+)\}\}", lambda match, labels=labels: labels.get(match[1], ""), target["legendFormat"]
            )
            points = [(float(at_s), float(value)) for at_s, value in each["values"]]
            found.append(Curve(name=name.strip(), points=[point for point in points if math.isfinite(point[1])]))
    return [curve for curve in found if curve.points]


def _name(template: str, labels: Mapping[str, str]) -> str:
    """`{{tier}} degraded` with the label in its place, as Grafana writes it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template).strip()


def page(title: str, panels: Iterable[tuple[Mapping[str, Any], Sequence[Curve]]]) -> str:
    """The panels as a page without network or script, two in a row."""
    drawn = "\n".join(_panel(panel, curves) for panel, curves in panels)
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"{head}<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><main>{drawn}</main></body></html>"


def _panel(panel: Mapping[str, Any], curves: Sequence[Curve]) -> str:
    unit, largest = (panel["fieldConfig"]["defaults"].get(key) for key in ("unit", "max"))
    values = [value for curve in curves for _, value in curve.points]
    ticks = _ticks(largest or max(values, default=1.0), unit, whole=all(value == int(value) for value in values))
    scale = _HEIGHT - _TOP - _BOTTOM
    drawn = [f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{html.escape(panel["title"])}">']
    for tick in ticks:
        y = _TOP + scale * (1 - tick / ticks[-1])
        drawn.append(f'<line x1="{_LEFT:g}" y1="{y:.1f}" x2="{_WIDTH:g}" y2="{y:.1f}" stroke="#e6e9ec"/>')
        drawn.append(f'<text x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{_value(tick, unit)}</text>')
    for hour in range(int(HOURS) + 1):
        x = min(_x(BEGAN_S + 3600 * hour), _WIDTH - 8)
        drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - 4:g}" text-anchor="middle">{hour} h</text>')
    for number, curve in enumerate(curves):
        points = [point for point in curve.points if point[1] <= ticks[-1]]
        path = _path([(_x(at_s), _TOP + scale * (1 - value / ticks[-1])) for at_s, value in points])
        dash = ' stroke-dasharray="5 3"' * (number % 2)
        drawn.append(
            f'<path class="curve" d="{path}" fill="none" stroke="{_colour(number)}" stroke-width="1.6"{dash}/>'
        )
    names = "".join(
        f'<span><i style="border-color:{_colour(number)};border-top-style:{"dashed" if number % 2 else "solid"}"></i>'
        f"{html.escape(curve.name)}</span>"
        for number, curve in enumerate(curves)
    )
    title = f"<h2>{html.escape(panel['title'])}</h2>"
    return f'<section>{title}{"".join(drawn)}</svg><div class="legend">{names}</div></section>'


def _x(at_s: float) -> float:
    return _LEFT + (_WIDTH - _LEFT) * (at_s - BEGAN_S) / (3600 * HOURS)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A line that is broken where values are missing."""
    apart = 2.5 * (_x(SCRAPED_EVERY_S) - _x(0.0))
    starts = [True, *(after[0] - before[0] > apart for before, after in pairwise(points))]
    return " ".join(f"{'M' if begins else 'L'}{x:.1f},{y:.1f}" for begins, (x, y) in zip(starts, points, strict=True))


def _ticks(largest: float, unit: str, *, whole: bool) -> list[float]:
    """Round values from 0 on, the last one not below `largest`."""
    if unit == "s":
        steps = [*(0.001 * each for each in _decades(3)), *_TIMES_S]
    elif unit in ("Bps", "bytes"):
        steps = [2.0**power for power in range(60)]
    else:
        steps = [1e-3 * each for each in _decades(12) if not whole or each >= 1e3]
    each = next(step for step in steps if 4.0001 * step >= largest)
    return [each * number for number in range(max(1, math.ceil(largest / each - 1e-3)) + 1)]


def _decades(count: int) -> list[float]:
    return [digit * 10.0**power for power in range(count) for digit in (1, 2, 5)]


def _value(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:g} %"
    if unit == "s":
        return time_text(value)
    if unit in ("Bps", "bytes"):
        return size_text(int(value)).replace(".0 ", " ") + ("/s" if unit == "Bps" else "")
    return f"{value:g}"


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def pictured(text: str, home: Path) -> Path:
    """The picture that a browser takes of a page."""
    from matplotlib import image

    source, picture = home / "dashboard.html", home / "dashboard.png"
    source.write_text(text)
    words = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
    command = ["chromium", *words.split(), f"--window-size={_WINDOW[0]},{_WINDOW[1]}", f"--screenshot={picture}"]
    command += [f"--user-data-dir={home / 'profile'}", source.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = image.imread(picture)
    drawn = np.flatnonzero((pixels != pixels[-1, 0]).any(axis=(1, 2)))
    image.imsave(picture, pixels[: drawn[-1] + _MARGIN])
    return picture


def dashboard_page(home: Path) -> str:
    """The page of every panel of the dashboard, over the invented run."""
    board = json.loads(BOARD.read_text())
    with prometheus_over(open_metrics(invented_run()), home) as api:
        panels = [(panel, curves_of(panel, api)) for panel in board["panels"]]
    return page(board["title"], panels)


def main() -> None:
    """Writes the picture."""
    missing = [name for name in ("prometheus", "promtool", "chromium") if shutil.which(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} not found: make setup-system")
    with tempfile.TemporaryDirectory(prefix="ckptkit-dashboard-") as home:
        shutil.copyfile(pictured(dashboard_page(Path(home)), Path(home)), PICTURE)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
