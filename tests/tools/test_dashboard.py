"""The picture of the dashboard: each panel of deploy/grafana.json shows something."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ckptkit.goodput import goodput_report
from tools.dashboard import BEGAN_S, BOARD, Curve, dashboard_page, invented_run, page

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="no prometheus here: make setup-system"
)


def test_invented_run_is_a_run() -> None:
    """The picture would show what no run's log can hold."""
    report = goodput_report(invented_run())
    assert (report.steps_from, len(report.disruptions)) == ("spans", 2)
    assert report.goodput.ml_goodput is not None
    assert 0.8 < report.goodput.ml_goodput < 1.0
    assert set(report.saves.commit_s_p50) == {"ram", "peer", "ssd", "durable"}


@needs_prometheus
@pytest.mark.long
def test_every_panel_shows_something(tmp_path: Path) -> None:
    """A panel would stay empty in Grafana, although its query is valid: a label that nothing has, a rate of a gauge."""
    text = dashboard_page(tmp_path)
    panels = re.findall(r"<section>.*?</section>", text, re.S)
    titles = [panel["title"] for panel in json.loads(BOARD.read_text())["panels"]]
    assert [re.search("<h2>(.*?)</h2>", panel)[1] for panel in panels] == titles  # pyright: ignore[reportOptionalSubscript]
    for panel, title in zip(panels, titles, strict=True):
        assert 'class="curve"' in panel, title
        assert "<i" in panel, title
        assert "nan" not in panel, title


def test_line_is_broken_where_nothing_was_measured() -> None:
    """The picture would show a training that goes on while it was lost."""
    panel = {"title": "a <panel>", "fieldConfig": {"defaults": {"unit": "s"}}}
    points = [(BEGAN_S + 60.0 * minute, 1.0) for minute in (1, 2, 3, 30, 31)]
    text = page("x", [(panel, [Curve(name="a <name>", points=points)])])
    (path,) = re.findall(r'class="curve" d="([^"]+)"', text)
    assert re.sub(r"[^ML]", "", path) == "MLLML"
    assert "a &lt;name&gt;" in text
    assert "a &lt;panel&gt;" in text
    assert not re.search(r"<script|https?:", text)
