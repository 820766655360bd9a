"""`ckptkit goodput`: one account, however it is asked for; a page that a real browser opens."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ckptkit.cli import main
from ckptkit.events import EventLog, Kind
from ckptkit.goodput import goodput_page, goodput_report, load_run, steps_done, timeline_of
from ckptkit.goodput.exporters import METRICS
from ckptkit.util import clock
from tests.browser import in_browser, needs_browser, overflow_in_browser, pictured


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two attempts: a process lost after step 5 and resumed at step 3, one save refused; told by events."""
    now = {"s": 1.75e9}
    monkeypatch.setattr(clock, "wall_s", lambda: now["s"])
    directory = tmp_path / "my <run>"
    launcher = EventLog(directory / "launcher.jsonl", process=-1)
    for attempt, steps in enumerate((range(6), range(3, 9))):
        log = EventLog(directory / f"attempt-{attempt}-process-0.jsonl")
        log.emit(Kind.STARTED, attempt=attempt, pid=1)
        now["s"] += 2.0
        log.emit(Kind.SPAN, span="compile", duration_s=2.0)
        if attempt:
            log.emit(Kind.RESTORED, step=3, sources={"ram": 1000, "peer": 3000}, duration_s=0.5)
        for step in steps:
            now["s"] += 1.0
            log.emit(Kind.SPAN, step=step, span="step", duration_s=1.0)
            log.emit(Kind.STAGED, step=step, strategy="slot_copy", reason="-", bytes=1, stall_s=0.005 * (step + 1))
            log.emit(Kind.COMMITTED, step=step, tier="ram", bytes=1, duration_s=0.2)
        log.emit(Kind.SKIPPED, step=99, reason='too early: "</title><script>alert(1)</script>', policy="skip")
        if attempt == 0:
            now["s"] += 0.5
            launcher.emit(Kind.DISRUPTED, attempt=0, lost=0, cause="SIGKILL", wiped=["ram"])
            now["s"] += 3.0
        else:
            log.emit(Kind.FINISHED)
        log.close()
    launcher.emit(Kind.FINISHED, code=0)
    launcher.close()
    return directory


def test_table_shows_goodput_and_the_cost_of_each_loss(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    """The first lines that a person reads must be there: three definitions, the parts, the loss, the source of the
    restore."""
    assert main(["goodput", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1] == "goodput 46.15% (Google's ML goodput; steps from the loop's `step` spans)"
    assert re.search(r"^effective training time +\d+\.\d+%  the total less", out, re.M)
    assert re.search(r"^new steps over elapsed +46\.15%  distinct", out, re.M)
    assert re.search(r"^wasted_progress_from_disruption +3 s +\d+\.\d+%", out, re.M)
    assert re.search(r"^ +0 +0 +3 +6 s +9 s +ram +SIGKILL", out, re.M)
    assert "peer 75%, ram 25%" in out


def test_damaged_log_is_reported_by_name(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    """A person would report a block that a power failure took as an error of ours."""
    path = run_dir / "attempt-0-process-0.jsonl"
    path.write_text(path.read_text().replace('"compile"', "\0\0\0\0", 1))
    assert main(["goodput", str(run_dir)]) == 11
    err = capsys.readouterr().err
    assert f"corrupt: {path}:2: " in err
    assert "report it" not in err


def test_events_of_a_newer_version_are_skipped_with_a_note(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    """One event of a new kind, in the log of one process, would make the whole account impossible."""
    assert main(["goodput", str(run_dir), "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["notes"] == []
    path, done = run_dir / "attempt-0-process-0.jsonl", steps_done(run_dir)
    line = '{"kind":"warp_begun","at_s":1.0,"process":0,"reason":[1]}\n'
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], line, *lines[2:], 2 * line]))
    note = (
        "3 lines of attempt-0-process-0.jsonl could not be read: this ckptkit does not know the kinds of event "
        "warp_begun. Read the logs with the version that wrote them."
    )
    assert main(["goodput", str(run_dir)]) == 0
    assert note in capsys.readouterr().out.splitlines()
    assert main(["goodput", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**before, "notes": [note]}
    assert steps_done(run_dir) == done
    path.write_text(path.read_text().replace(line, '{"kind":"warp_begun","process":0}\n'))  # not an event of any kind
    assert main(["goodput", str(run_dir)]) == 11
    assert f"corrupt: {path}:3: not an event" in capsys.readouterr().err


def test_json_parts_add_up(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    """Programs take the same numbers as people."""
    assert main(["goodput", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert math.fsum(found["parts_s"].values()) == pytest.approx(found["wall_s"])
    assert found["disruptions"][0]["lost_steps"] == 3


def test_prometheus_text_is_valid(run_dir: Path, tmp_path: Path):
    """One wrong line and the node exporter drops the whole file: types before samples, labels escaped, no repeats."""
    path = tmp_path / "run.prom"
    assert main(["goodput", str(run_dir), "--prometheus", str(path)]) == 0
    lines = path.read_text().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    shape = re.compile(r'^[a-z_]+\{run="my <run>"(,[a-z]+="[^"\\]*")*\} -?[0-9.e+-]+$')
    assert all(shape.match(line) for line in samples), samples
    assert len({line.rsplit(" ", 1)[0] for line in samples}) == len(samples)
    seconds = [float(line.rsplit(" ", 1)[1]) for line in samples if line.startswith("ckptkit_run_seconds")]
    assert math.fsum(seconds) == pytest.approx(goodput_report(load_run(run_dir)).wall_s)
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert {metric.name for metric in METRICS}.isdisjoint(names)  # of the same run, with another type


def test_tensorboard_scalars_are_written(run_dir: Path, tmp_path: Path):
    """The scalars must be readable as TensorBoard reads them: records with their checksums."""
    assert main(["goodput", str(run_dir), "--tensorboard", str(tmp_path / "tb")]) == 0
    (events,) = (tmp_path / "tb").iterdir()
    assert b"ckptkit/goodput_ratio/ml_goodput" in events.read_bytes()


def test_follow_returns_when_the_run_ends(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    """--follow must show a run that is not there yet, and return when it is finished."""
    hidden = run_dir.with_name("later")
    run_dir.rename(hidden)
    run_dir.mkdir()

    def appear() -> None:
        time.sleep(0.5)
        for log in sorted(hidden.iterdir(), key=lambda path: path.name == "launcher.jsonl"):
            log.rename(run_dir / log.name)

    thread = threading.Thread(target=appear)
    thread.start()
    try:
        assert main(["goodput", str(run_dir), "--follow"]) == 0
    finally:
        thread.join()
    assert "9 steps kept, 1 loss;" in capsys.readouterr().out


def test_follow_ignores_the_end_of_an_earlier_launch(run_dir: Path):
    """A job that was preempted and launched again would be shown as over."""
    launcher = EventLog(run_dir / "launcher.jsonl", process=-1)
    launcher.emit(Kind.STARTED, attempt=2, pid=1)
    ended = threading.Event()

    def end() -> None:
        time.sleep(1.0)
        ended.set()
        launcher.emit(Kind.FINISHED, code=0)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        assert main(["goodput", str(run_dir), "--follow"]) == 0
        assert ended.is_set()
    finally:
        thread.join()
        launcher.close()


@pytest.mark.parametrize("command", ["goodput", "tune"])
def test_missing_output_directory_is_refused_before_the_work(
    command: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The result of an hour of measuring would be thrown away, for a directory that is not there."""
    target = str(tmp_path / "none" / "out")
    words = {
        "goodput": ["goodput", str(run_dir), "--html", target],
        "tune": ["tune", str(tmp_path / "root"), "--output", target],
    }
    assert main(words[command]) == 2
    said = capsys.readouterr()
    assert (said.out, f"{tmp_path / 'none'} is not a directory; make it first" in said.err) == ("", True)
    assert not (tmp_path / "root").exists()


def test_interrupt_ends_the_following_and_not_what_comes_after_it(run_dir: Path, tmp_path: Path):
    """The page of a long run would not be written, because the one Ctrl-C was sent again and again."""
    page = tmp_path / "page.html"
    script = f"""
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background has it ignored
from ckptkit.cli import goodput, main
make = goodput.goodput_page
goodput.goodput_page = lambda *given, **named: (time.sleep(1.0), make(*given, **named))[1]
report = goodput.goodput_report
def once(logs):
    threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    goodput.goodput_report = report
    return report(logs)
goodput.goodput_report = once
sys.exit(main(["goodput", {str(run_dir)!r}, "--follow", "--html", {str(page)!r}]))
"""
    for path in run_dir.glob("launcher.jsonl"):
        lines = [line for line in path.read_text().splitlines() if '"finished"' not in line]
        path.write_text("".join(f"{line}\n" for line in lines))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, page.exists()) == (0, True), done.stderr


def test_failed_output_is_reported_under_the_given_name(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The message would speak of a file that nobody knows, and leave it behind."""
    (tmp_path / "taken").mkdir()
    longest = tmp_path / "taken" / ("x" * 255)
    assert main(["goodput", str(run_dir), "--prometheus", str(longest)]) == 0
    longest.unlink()
    path = tmp_path / "taken" / ("x" * 256)
    assert main(["goodput", str(run_dir), "--prometheus", str(path)]) == 1
    assert f"ckptkit: {path}: File name too long" in capsys.readouterr().err
    assert list((tmp_path / "taken").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(["nowhere"], 10, "no event logs in"), ([".", "--follow", "--json"], 2, "leave --json out")],
)
def test_wrong_directory_or_flag_gives_one_sentence(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
):
    """Never a traceback for a slip of the finger."""
    assert main(["goodput", *words]) == code
    assert message in capsys.readouterr().err


def test_html_page_fetches_nothing_and_escapes_log_text(run_dir: Path):
    """A page that loads from the network, or runs what an event's text contains, is not a report but a hole."""
    logs = load_run(run_dir)
    page = goodput_page(goodput_report(logs), timeline_of(logs), title="my <run>")
    assert "<script" not in page
    assert "my &lt;run&gt;" in page
    assert not re.search(r"src\s*=|href\s*=(?!\"#)|url\((?!#)|@import|https?:", page)


@needs_browser
def test_browser_draws_every_loss_without_errors(run_dir: Path, tmp_path: Path):
    """The page in a real browser: no console message, and as many marks as the run had losses, saves and restores."""
    page = tmp_path / "report.html"
    assert main(["goodput", str(run_dir), "--html", str(page)]) == 0
    dom, said = in_browser(page, tmp_path / "profile")
    run = timeline_of(load_run(run_dir))
    assert dom.count('class="loss"') == len(run.losses) == 1
    assert dom.count('class="restore"') == len(run.restores) == 1
    assert dom.count('class="save"') + dom.count('class="refused"') == len(run.saves)
    assert dom.count('class="stretch"') == len(run.stretches)
    assert "CONSOLE" not in said


@needs_browser
@pytest.mark.long
def test_page_is_dark_where_the_reader_wants_that(run_dir: Path, tmp_path: Path) -> None:
    """A white page would blind the person who is called at night."""
    image = pytest.importorskip("matplotlib.image")
    page = tmp_path / "report.html"
    assert main(["goodput", str(run_dir), "--html", str(page)]) == 0
    light = image.imread(pictured(page, tmp_path / "profile"))[..., :3]
    dark = image.imread(pictured(page, tmp_path / "profile", dark=True))[..., :3]
    assert np.median(light) > 0.9
    assert np.median(dark) < 0.2


@needs_browser
@pytest.mark.long
def test_page_fits_a_phone(run_dir: Path, tmp_path: Path) -> None:
    """The person who is called at night would scroll sideways for each line."""
    page = tmp_path / "report.html"
    assert main(["goodput", str(run_dir), "--html", str(page), "--price", "2.5/h"]) == 0
    assert overflow_in_browser(page, tmp_path / "profile", width=390) == 0
    page.write_text(page.read_text().replace('class="wide"', ""))
    assert overflow_in_browser(page, tmp_path / "profile", width=390) > 0  # as it would be: tables keep their width


def test_each_loss_links_to_its_log_lines(run_dir: Path, tmp_path: Path) -> None:
    """The reader of the page would search the logs of a thousand hosts for the moment of the loss."""
    page = tmp_path / "report.html"
    assert main(["goodput", str(run_dir), "--html", str(page)]) == 0
    text = page.read_text()
    assert '<a href="#loss-0">' in text
    lines = html.unescape(text.split('<section id="loss-0">')[1].split("</section>")[0])
    assert 'launcher.jsonl: {"kind":"disrupted"' in lines
    assert lines.count("attempt-0-process-0.jsonl: ") == 3


def test_costs_are_the_times_at_the_price(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The person who pays would get a sum that nobody can check."""
    assert main(["goodput", str(run_dir), "--price", "$36/h", "--hosts", "100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    cost = told["cost"]
    assert cost["total"] == pytest.approx(told["wall_s"])  # a second of the job costs 1
    assert cost["parts"] == pytest.approx(told["parts_s"])
    assert cost["badput"] == pytest.approx(told["wall_s"] - told["parts_s"]["productive"])
    assert cost["losses"] == pytest.approx([told["disruptions"][0]["caught_up_s"]])
    assert main(["goodput", str(run_dir), "--price", "$36000/h"]) == 0
    out = capsys.readouterr().out
    assert f"at 1 x $36,000.00 = $36,000.00 an hour; ${10 * cost['badput']:,.2f} of it was not productive" in out


def test_better_interval_is_named_with_its_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader would know the cost of the run, and not which setting to change."""
    now = {"s": 1.75e9}
    monkeypatch.setattr(clock, "wall_s", lambda: now["s"])
    launcher = EventLog(tmp_path / "launcher.jsonl", process=-1)
    for attempt in range(4):
        log = EventLog(tmp_path / f"attempt-{attempt}-process-0.jsonl")
        log.emit(Kind.STARTED, attempt=attempt, pid=1)
        for step in range(100 * attempt, 100 * attempt + 100):
            now["s"] += 10.0
            log.emit(Kind.SPAN, step=step, span="step", duration_s=10.0)
            log.emit(Kind.STAGED, step=step, strategy="slot_copy", reason="-", bytes=1, stall_s=1.0)
            log.emit(Kind.COMMITTED, step=step, tier="ram", bytes=1, duration_s=0.2)
        log.close()
        if attempt < 3:
            launcher.emit(Kind.DISRUPTED, attempt=attempt, lost=0, cause="SIGKILL", wiped=[])
    launcher.close()
    assert main(["goodput", str(tmp_path), "--price", "36", "--hosts", "100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    better = told["cost"]["better_interval"]
    assert (better["tier"], better["every_s"], better["stall_s"]) == ("ram", 10.0, 1.0)
    assert better["mtbf_s"] == pytest.approx(4000 / 3)
    waste = {every: 1 / every + every / 2 / better["mtbf_s"] for every in (10.0, better["best_s"])}
    assert better["gain"] == pytest.approx(waste[10.0] - waste[better["best_s"]])
    assert better["saved"] == pytest.approx(better["gain"] * told["cost"]["total"])
    assert main(["goodput", str(tmp_path), "--price", "36"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ram every 5\d(\.\d)? s instead of every 10 s would have saved", out), out
    assert "1 s/10 s + 10 s/(2 x 22.2 min) = 10.38% now" in out
    assert main(["goodput", str(tmp_path), "--price", "36", "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "would have saved" in text
    assert "1 s/10 s + 10 s/(2 x 22.2 min) = 10.38% now" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--price", "cheap"], "'cheap' is not a price; write 2.5/h or $2.5/h"),
        (["--price", "0.02/GB-month"], "'0.02/GB-month' is not a price; write 2.5/h"),
        (["--hosts", "3"], "--hosts is for --price: give both, or neither"),
    ],
)
def test_wrong_price_is_refused(run_dir: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A sum in the wrong unit would be believed."""
    assert main(["goodput", str(run_dir), *words]) == 2
    assert said in capsys.readouterr().err


def test_page_has_the_name_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    """Every page would be called "Goodput of events", and none could be told from another."""
    events = run_dir / "events"
    events.mkdir()
    for log in list(run_dir.glob("*.jsonl")):
        log.rename(events / log.name)
    assert main(["goodput", str(events), "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "<h1>Goodput of my &lt;run&gt;</h1>" in text
    assert "log scale" in text
