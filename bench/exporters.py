"""`python -m bench exporters`: the step time of a loop with every exporter at work, and of the same loop without one.

Steps are waits, as for a device that computes: what is left of a step is the host's work. Each step is saved to a
ramdisk. Prometheus is scraped once a second over HTTP, and OpenTelemetry's SDK sends to a collector, as in production.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click

RATIO_MAX = 1.01
ROUNDS, STEPS, STEP_MS = 7, 1000, 5.0
_SCRAPE_S = 1.0


@click.command(context_settings={"max_content_width": 120})
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="After one to warm up.")
@click.option("--steps", type=click.IntRange(min=2), default=STEPS, show_default=True, help="Of each loop.")
@click.option("--place", default="/dev/shm", show_default=True, help="Of the ramdisk and the logs.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every round, as JSON.")
def main(rounds: int, steps: int, place: str, json_path: Path | None) -> None:
    """Compares loops of steps of 5 ms with a save each, with all exporters and without, in turns."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from bench.environment import environment

    found: dict[str, Any] = {"benchmark": "exporters", "environment": environment(place, place), "steps": steps}
    home = Path(tempfile.mkdtemp(prefix="ckptkit-exporters-", dir=place))
    try:
        found["step_ms"] = measure(home, rounds, steps)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    found["ratio"] = ratio = ratio_of(found["step_ms"])
    with_ms, without_ms = (statistics.median(found["step_ms"][how]) for how in ("with", "without"))
    print(
        f"a step of {STEP_MS:g} ms with a save: {with_ms:.3f} ms with all exporters, {without_ms:.3f} ms without; "
        f"ratio {ratio:.4f} (bar {RATIO_MAX}): {'met' if ratio <= RATIO_MAX else 'NOT met'}; {rounds} rounds"
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(found, indent=1) + "\n")


def ratio_of(step_ms: dict[str, list[float]]) -> float:
    """The median of the ratios of the rounds, with exporters over without."""
    return statistics.median(a / b for a, b in zip(step_ms["with"], step_ms["without"], strict=True))


def measure(home: Path, rounds: int, steps: int) -> dict[str, list[float]]:
    """The mean milliseconds of a step of each round, with all exporters and without, in an order that alternates."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(rounds + 1):
        for how in ("with", "without") if number % 2 else ("without", "with"):
            with ExitStack() as stack:
                exporters = stack.enter_context(_exporters()) if how == "with" else ()
                step_ms = _loop(home / f"{how}-{number}", exporters, steps)
            if number:  # the first round imports and compiles
                found[how].append(step_ms)
    return found


def _loop(home: Path, exporters: Sequence[Any], steps: int) -> float:
    import time

    import numpy as np
    import orbax.checkpoint as ocp

    import ckptkit
    from bench.measure import now_s, settle

    state = {f"leaf {number}": np.zeros(4096, np.float32) for number in range(8)}
    log = ckptkit.EventLog(home / "attempt-0-process-0.jsonl", exporters=exporters)
    manager = ckptkit.CheckpointManager(
        home / "root",
        options=ocp.CheckpointManagerOptions(save_interval_steps=10**9),
        tiers=[ckptkit.Tier.ram(str(home / "ram"), save=ckptkit.EverySteps(1))],
        events=log,
    )
    with manager:

        def train(step: int) -> None:
            with manager.step(step):
                time.sleep(STEP_MS / 1e3)
            manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]

        train(0)  # the first save makes the slots
        settle()
        began_s = now_s()
        for step in range(1, steps + 1):
            train(step)
        took_s = now_s() - began_s
    log.close()
    return 1e3 * took_s / steps


@contextmanager
def _exporters() -> Iterator[Sequence[Any]]:
    """Both exporters, a collector that takes what OpenTelemetry sends, and a scraper."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from ckptkit.goodput.exporters import OpenTelemetryExporter, PrometheusExporter

    with _collector() as base, ExitStack() as stack:
        sender = OTLPMetricExporter(f"{base}/v1/metrics")
        meters = MeterProvider([PeriodicExportingMetricReader(sender, export_interval_millis=1e3 * _SCRAPE_S)])
        tracers = TracerProvider()
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")))
        stack.callback(meters.shutdown)
        stack.callback(tracers.shutdown)
        prometheus = PrometheusExporter(port=0)
        over = threading.Event()
        scraper = threading.Thread(target=_scrape, args=(prometheus, over), daemon=True)
        scraper.start()
        stack.callback(scraper.join)
        stack.callback(over.set)
        yield (prometheus, OpenTelemetryExporter(meter_provider=meters, tracer_provider=tracers))


def _scrape(prometheus: Any, over: threading.Event) -> None:
    while not over.wait(_SCRAPE_S):
        if prometheus.port:
            with urllib.request.urlopen(f"http://127.0.0.1:{prometheus.port}/metrics", timeout=10) as answer:
                answer.read()


@contextmanager
def _collector() -> Iterator[str]:
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
