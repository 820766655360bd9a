"""A run as one self-contained page: no script, no network; every colour has a second sign (hatch, shape or word)."""

from __future__ import annotations

import datetime
import html
import math
from collections.abc import Iterable, Sequence

from ckptkit.goodput.parts import Part
from ckptkit.goodput.prices import Bill
from ckptkit.goodput.report import DEFINITIONS, GoodputReport
from ckptkit.goodput.text import NO_STEPS, caveats, headline
from ckptkit.goodput.timeline import SaveMark, Stretch, Timeline
from ckptkit.model.tiers import DURABLE, PEER, RAM, SSD
from ckptkit.util.clock import time_text
from ckptkit.util.words import count_text

_WIDTH = 1120.0  # of the drawings, in their own units; the page scales them
_LEFT, _RIGHT = 96.0, 24.0  # for the names of lanes, and half of the last label
_LANE, _GAP = 22.0, 8.0
_STRETCHES_MAX = 4000  # more cannot be distinguished on a screen, and a browser takes seconds for them
_MARKS_MAX = 2000
_BINS = 24
_LINES_MAX = 200  # losses whose log lines are shown

# Okabe and Ito's palette: distinct with all common kinds of colour blindness. The hatch distinguishes twins in print.
_LOOK: dict[Part, tuple[str, str]] = {
    Part.PRODUCTIVE: ("#009E73", ""),
    Part.CHECKPOINT_SAVE: ("#E69F00", "rising"),
    Part.CHECKPOINT_RESTORE: ("#56B4E9", "rising"),
    Part.WASTED: ("#D55E00", "dots"),
    Part.WASTED_BY_SPIKE: ("#D55E00", "rising"),
    Part.RECOVERY: ("#CC79A7", "falling"),
    Part.INITIALIZATION: ("#0072B2", ""),
    Part.TRAINING_PREP: ("#0072B2", "rising"),
    Part.COMPILE: ("#0072B2", "dots"),
    Part.DATA_LOADING: ("#F0E442", "falling"),
    Part.STOPPED: ("#DDDDDD", ""),
    Part.CUSTOM: ("#F0E442", "dots"),
    Part.OTHER: ("#999999", ""),
}
_NAMES = {Part.WASTED: "steps done twice", Part.WASTED_BY_SPIKE: "steps undone by a guard", Part.RECOVERY: "recovery"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f23; --quiet: #5b6570; --rule: #d9dee3; --paper: #fff; }
@media (prefers-color-scheme: dark) {
:root { --ink: #e6e9ec; --quiet: #a2abb4; --rule: #3a4149; --paper: #14171a; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0 .8rem; color: var(--quiet); }
.figures { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.figure { border: 1px solid var(--rule); border-radius: 6px; padding: .6rem .9rem; min-width: 7.5rem; }
.figure b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; color: var(--ink); }
.wide { overflow-x: auto; } .wide > svg { min-width: 46rem; } .wide > table { min-width: 34rem; }
.line { font: 12px/1.5 ui-monospace, monospace; white-space: pre; color: var(--ink); margin: .2rem 0 1rem; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; } section:target h3 { text-decoration: underline; }
a { color: inherit; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td.n, th.n { text-align: right; } td:first-child { white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .5rem 0; font-size: 13px; }
.legend svg { display: inline-block; width: 22px; height: 13px; vertical-align: -2px; margin-right: .35rem; }
"""
_PATTERNS = """
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="rising" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line x1="0" y1="0" x2="0" y2="6" stroke="#fff" stroke-width="2"/></pattern>
<pattern id="falling" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<line x1="0" y1="0" x2="0" y2="6" stroke="#fff" stroke-width="2"/></pattern>
<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse">
<circle cx="3" cy="3" r="1.4" fill="#fff"/></pattern>
</defs></svg>
"""


def goodput_page(
    report: GoodputReport, run: Timeline, *, title: str, bill: Bill | None = None, arithmetic: Sequence[str] = ()
) -> str:
    """The page, with costs where there is a `bill`; `arithmetic` is the text above them, line by line. At most 4,000
    stretches and 2,000 marks a lane are drawn: more are merged."""
    began = datetime.datetime.fromtimestamp(run.origin_s, datetime.UTC)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>{_PATTERNS}",
            f"<h1>{_text(title)}</h1>",
            f"<p>Began {began:%Y-%m-%d %H:%M:%S} UTC, {time_text(report.wall_s)} in all.</p>",
            *(f"<p>{_text(caveat)}</p>" for caveat in caveats(report)),
            _figures(report),
            _definitions(report),
            "<h2>What happened when</h2>",
            f'<div class="wide">{_timeline(run)}</div>',
            _legend(),
            "<h2>Where the time went</h2>",
            f'<div class="wide">{_bars(report)}</div>',
            *([] if bill is None else ["<h2>What it cost</h2>", _costs(bill, arithmetic)]),
            "<h2>What each loss cost</h2>",
            _losses(report, run),
            _injected(report),
            "<h2>How long saves held the step loop</h2>",
            f'<div class="wide">{_histogram(run.stalls_ms)}</div>',
            _lines(run),
            "</body></html>",
        ]
    )


def _figures(report: GoodputReport) -> str:
    goodput, saves = report.goodput, report.saves
    resume = report.mean_time_to_resume_s.get("total")
    stall = "-" if saves.stall_ms_p50 is None else f"{saves.stall_ms_p50:.1f} / {saves.stall_ms_p99:.1f} ms"
    shown = [
        (f"goodput ({DEFINITIONS[0][1]})", NO_STEPS if goodput.ml_goodput is None else f"{goodput.ml_goodput:.1%}"),
        ("steps kept", f"{goodput.distinct_steps:,}"),
        ("losses", f"{len(report.disruptions):,}"),
        ("steps lost", f"{sum(loss.lost_steps for loss in report.disruptions):,}"),
        ("mean time to resume", "-" if resume is None else time_text(resume)),
        ("stall per save, p50 / p99", stall),
    ]
    return '<div class="figures">' + "".join(f'<div class="figure"><b>{v}</b>{n}</div>' for n, v in shown) + "</div>"


def _definitions(report: GoodputReport) -> str:
    """The definitions of the leading number and of the others, folded up."""
    if report.goodput.ml_goodput is None:
        return ""
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td class=n>{getattr(report.goodput, field):.2%}</td><td>{_text(formula)}</td></tr>"
        for field, name, formula in DEFINITIONS
    )
    head = "<tr><th>definition</th><th class=n>goodput</th><th>formula</th></tr>"
    return f"<details><summary>{_text(headline(report))}</summary><table>{head}{rows}</table></details>"


def _timeline(run: Timeline) -> str:
    lanes = sorted({mark.tier for mark in run.saves}, key=lambda t: (RAM, SSD, PEER, DURABLE, t).index(t))
    height = 44 + (_LANE + _GAP) * (1 + len(lanes)) + 22
    drawn = [f'<svg id="timeline" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="timeline of the run">']
    top = 40.0
    drawn.append(_lane_name("steps", top))
    drawn += [_stretch(each, run, top) for each in _bounded(run.stretches, run.wall_s)]
    for row, tier in enumerate(lanes, start=1):
        at = top + row * (_LANE + _GAP)
        drawn.append(_lane_name(f"{tier} saves", at))
        marks = [mark for mark in run.saves if mark.tier == tier]
        drawn += [_save(mark, run, at) for mark in _thinned(marks)]
    bottom = top + (1 + len(lanes)) * (_LANE + _GAP)
    for mark in run.losses:
        x, loss = _x(mark.at_s, run), mark.loss
        who = "?" if loss.process is None else loss.process
        lost = count_text(loss.lost_steps, "step")
        said = f"loss of process {who} ({loss.cause}), {lost} lost, at {time_text(mark.at_s)}"
        line = (
            f'<line x1="{x:.1f}" y1="18" x2="{x:.1f}" y2="{bottom:.1f}" stroke="currentColor" stroke-dasharray="3 2"/>'
        )
        cross = f'<path d="M {x - 6:.1f} 6 l 12 12 m 0 -12 l -12 12" stroke="currentColor" stroke-width="2.5"/>'
        drawn.append(_group("loss", said, line + cross))
    for each in run.injected[:_MARKS_MAX]:
        x = _x(each.at_s, run)
        said = f"fault {each.fault}: {each.did}, at {time_text(each.at_s)}"
        shape = f'<path d="M {x:.1f} 22 l 6 7 l -6 7 l -6 -7 Z" fill="#F0E442" stroke="currentColor"/>'
        drawn.append(_group("injected", said, shape))
    for mark in run.restores:
        x = _x(mark.at_s, run)
        said = f"restored step {mark.step} from {', '.join(mark.tiers) or 'nothing'}, at {time_text(mark.at_s)}"
        shape = f'<path d="M {x - 6:.1f} 34 l 12 0 l -6 -10 Z" fill="#56B4E9" stroke="currentColor"/>'
        drawn.append(_group("restore", said, shape))
    drawn += _axis(run.wall_s, bottom)
    return "".join([*drawn, "</svg>"])


def _stretch(each: Stretch, run: Timeline, top: float) -> str:
    x, width = _x(each.start_s, run), max(0.3, _x(each.end_s, run) - _x(each.start_s, run))
    said = f"{_name(each.part)}: {time_text(each.end_s - each.start_s)}, from {time_text(each.start_s)}"
    return _group("stretch", said, _box(each.part, x, top, width, _LANE))


def _save(mark: SaveMark, run: Timeline, top: float) -> str:
    x, width = _x(mark.start_s, run), max(1.5, _x(mark.end_s, run) - _x(mark.start_s, run))
    middle = top + _LANE / 2
    if mark.problem is not None:
        said = f"step {mark.step} not taken: {mark.problem}"
        shape = f'<path d="M {x - 4:.1f} {middle - 4:.1f} l 8 8 m 0 -8 l -8 8" stroke="#D55E00" stroke-width="2"/>'
        return _group("refused", said, shape)
    said = f"step {mark.step}: committed after {time_text(mark.end_s - mark.start_s)}, at {time_text(mark.end_s)}"
    shape = f'<rect {_place(x, top + 4, width, _LANE - 8)} fill="#E69F00" stroke="currentColor" stroke-width=".4"/>'
    return _group("save", said, shape)


def _bars(report: GoodputReport) -> str:
    rows = [(part, seconds) for part, seconds in report.parts_s.items() if seconds > 0]
    rows.sort(key=lambda row: (row[0] != Part.PRODUCTIVE, -row[1]))
    longest = max((seconds for _, seconds in rows), default=1.0)
    left, room = 190.0, _WIDTH - 190.0 - 170.0
    drawn = [f'<svg viewBox="0 0 {_WIDTH:g} {len(rows) * 26 + 6}" role="img" aria-label="time by kind">']
    for row, (part, seconds) in enumerate(rows):
        y = 4 + row * 26.0
        width = max(0.5, room * seconds / longest)
        share = seconds / report.wall_s if report.wall_s else 0.0
        drawn.append(f'<text x="{left - 8:g}" y="{y + 15:g}" text-anchor="end">{_name(part)}</text>')
        drawn.append(_box(part, left, y, width, 20.0))
        drawn.append(f'<text x="{left + width + 8:.1f}" y="{y + 15:g}">{time_text(seconds)} ({share:.2%})</text>')
    return "".join([*drawn, "</svg>"])


def _costs(bill: Bill, arithmetic: Sequence[str]) -> str:
    text = bill.price.host_h.text
    parts = sorted(bill.parts.items(), key=lambda item: (item[0] != Part.PRODUCTIVE, -item[1]))
    rows = [("all", bill.total), *((_name(part), cost) for part, cost in parts if cost > 0)]
    cells = "".join(f"<tr><td>{_text(name)}</td><td class=n>{_text(text(cost))}</td></tr>" for name, cost in rows)
    head = "<tr><th>kind of time</th><th class=n>cost</th></tr>"
    told = "".join(f"<p>{_text(line.strip())}</p>" for line in arithmetic or [bill.price.rate_text])
    return f"{told}<table>{head}{cells}</table>"


def _losses(report: GoodputReport, run: Timeline) -> str:
    if not report.disruptions:
        return "<p>Nothing was lost.</p>"
    rows = []
    for number, mark in enumerate(run.losses[:_MARKS_MAX]):
        loss = mark.loss
        phases = sorted(loss.resume_parts_s.items(), key=lambda item: -item[1])
        told = ", ".join(f"{_name(part)} {time_text(seconds)}" for part, seconds in phases if seconds >= 0.005)
        cells = [
            f"process {'?' if loss.process is None else loss.process}: {loss.cause}",
            ", ".join(loss.wiped) or "-",
            f"{loss.lost_steps:,}",
            "never" if loss.resume_s is None else time_text(loss.resume_s),
            told or "-",
        ]
        at = time_text(mark.at_s)
        when = f'<a href="#loss-{number}">{at}</a>' if mark.lines and number < _LINES_MAX else at
        rows.append(f"<tr><td>{when}</td>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    titles = ("at", "lost", "tiers wiped", "steps lost", "first step again after", "of which")
    more = f"<p>and {len(run.losses) - _MARKS_MAX:,} more</p>" if len(run.losses) > _MARKS_MAX else ""
    head = "".join(f"<th>{title}</th>" for title in titles)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide">{table}</div>{more}'


def _injected(report: GoodputReport) -> str:
    """The faults of `ckptkit chaos`; nothing where there were none."""
    if not report.injected:
        return ""
    cells = [(time_text(each.at_s), str(each.fault), each.did) for each in report.injected[:_MARKS_MAX]]
    rows = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    head = "<tr><th>at</th><th>fault</th><th>what it did</th></tr>"
    return f'<h2>Injected faults</h2><div class="wide"><table>{head}{rows}</table></div>'


def _lines(run: Timeline) -> str:
    """The log lines that lead to each loss: the table of losses links here."""
    told = []
    for number, mark in enumerate(run.losses[:_LINES_MAX]):
        if mark.lines:
            text = "\n".join(f"{_text(name)}: {_text(line)}" for name, line in mark.lines)
            head = f"<h3>Before the loss at {time_text(mark.at_s)}</h3>"
            told.append(f'<section id="loss-{number}">{head}<div class="line wide">{text}</div></section>')
    return "".join(["<h2>Log lines</h2>", *told]) if told else ""


def _histogram(stalls_ms: Sequence[float]) -> str:
    """Bins of equal ratio: stalls spread over decades."""
    if not stalls_ms:
        return "<p>Nothing was saved.</p>"
    low = max(min(stalls_ms), 0.01)
    high = max(max(stalls_ms), low * 1.01)
    counts = [0] * _BINS
    for stall in stalls_ms:
        place = math.log(max(stall, low) / low) / math.log(high / low)
        counts[min(_BINS - 1, int(place * _BINS))] += 1
    each, room = (_WIDTH - 50 - _RIGHT) / _BINS, 140.0
    drawn = [f'<svg viewBox="0 0 {_WIDTH:g} 200" role="img" aria-label="histogram of stalls">']
    for number, count in enumerate(counts):
        x, tall = 50 + number * each, room * count / max(counts)
        begin, end = (low * (high / low) ** (k / _BINS) for k in (number, number + 1))
        said = f"{count_text(count, 'save')} from {begin:.3g} to {end:.3g} ms"
        drawn.append(_group("stalls", said, f'<rect {_place(x, 160 - tall, each - 1, tall)} fill="#0072B2"/>'))
        if count:
            drawn.append(f'<text x="{x + each / 2:.1f}" y="{154 - tall:.1f}" text-anchor="middle">{count}</text>')
        if number % 4 == 0:
            drawn.append(f'<text x="{x:.1f}" y="176" text-anchor="middle">{_short(begin)}</text>')
    drawn.append(f'<text x="{50 + _BINS * each:.1f}" y="176" text-anchor="middle">{_short(high)}</text>')
    drawn.append(f'<text x="{_WIDTH / 2:g}" y="196" text-anchor="middle">ms per save and process, log scale</text>')
    return "".join([*drawn, "</svg>"])


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _legend() -> str:
    entries = [f'<span><svg viewBox="0 0 22 13">{_box(part, 0, 0, 22, 13)}</svg>{_name(part)}</span>' for part in Part]
    signs = (
        "&#10005; with a line: a loss",
        "&#9670; an injected fault",
        "&#9650; a restore",
        "red &#10005; in a lane: a save that was not taken",
    )
    entries += [f"<span>{sign}</span>" for sign in signs]
    return f'<div class="legend">{"".join(entries)}</div>'


def _axis(wall_s: float, y: float) -> Iterable[str]:
    tick = _nice(wall_s / 10)
    for number in range(int(wall_s / tick) + 1):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * (number * tick / wall_s if wall_s else 0.0)
        yield f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle">{time_text(number * tick)}</text>'


def _nice(length_s: float) -> float:
    choices = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400]
    return next((float(each) for each in choices if each >= length_s), math.ceil(length_s / 86400) * 86400.0)


def _bounded(stretches: Sequence[Stretch], wall_s: float) -> list[Stretch]:
    """The stretches that a screen can show: with too many, one per column, named by its longest part."""
    if len(stretches) <= _STRETCHES_MAX:
        return list(stretches)
    columns = int(_WIDTH)
    width_s = wall_s / columns
    taken: list[dict[Part, float]] = [{} for _ in range(columns)]
    for each in stretches:
        first, last = int(each.start_s / width_s), min(columns - 1, int(each.end_s / width_s))
        for column in range(first, last + 1):
            inside = min(each.end_s, (column + 1) * width_s) - max(each.start_s, column * width_s)
            taken[column][each.part] = taken[column].get(each.part, 0.0) + inside
    bounded: list[Stretch] = []
    for column, parts in enumerate(taken):
        if parts:
            most = max(parts, key=lambda part: parts[part])
            start_s = column * width_s
            if bounded and bounded[-1].part == most:
                start_s = bounded.pop().start_s
            bounded.append(Stretch(start_s=start_s, end_s=(column + 1) * width_s, part=most))
    return bounded


def _thinned(marks: Sequence[SaveMark]) -> Sequence[SaveMark]:
    """Every refusal, and as many evenly chosen saves as can be seen."""
    if len(marks) <= _MARKS_MAX:
        return marks
    every = math.ceil(len(marks) / _MARKS_MAX)
    return [mark for number, mark in enumerate(marks) if number % every == 0 or mark.problem][: 2 * _MARKS_MAX]


def _box(part: Part, x: float, y: float, width: float, height: float) -> str:
    colour, hatch = _LOOK[part]
    place = _place(x, y, width, height)
    over = f'<rect {place} fill="url(#{hatch})" fill-opacity=".75"/>' if hatch else ""
    return f'<rect {place} fill="{colour}"/>{over}'


def _place(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'


def _group(kind: str, said: str, shape: str) -> str:
    """A shape with the words that a pointer over it shows."""
    return f'<g class="{kind}"><title>{_text(said)}</title>{shape}</g>'


def _lane_name(name: str, top: float) -> str:
    return f'<text x="{_LEFT - 8:g}" y="{top + 15:g}" text-anchor="end">{_text(name)}</text>'


def _x(at_s: float, run: Timeline) -> float:
    share = at_s / run.wall_s if run.wall_s else 0.0
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(max(share, 0.0), 1.0)  # another host's clock may be off


def _name(part: Part) -> str:
    return _NAMES.get(part, str(part).replace("_", " "))


def _text(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else "?" for c in text))
