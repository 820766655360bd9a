"""`python -m bench exporters`: the step time of a loop with every exporter at work, and of the same loop without one.

Steps are waits, as for a device that computes: what is left of a step is the host's work. Each step is saved to a
ramdisk. Prometheus is scraped once a second over HTTP, and OpenTelemetry's SDK sends to a collector, both in another
process, as in production.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from bench.environment import environment, store_result

RATIO_MAX = 1.01
ROUNDS, STEPS, STEP_MS = 7, 1000, 5.0
_EXPORT_MS = 1e3  # OpenTelemetry's own interval is a minute


@click.command(context_settings={"max_content_width": 120})
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="After one to warm up.")
@click.option("--steps", type=click.IntRange(min=2), default=STEPS, show_default=True, help="Of each loop.")
@click.option("--place", default="/dev/shm", show_default=True, help="Of the ramdisk and the logs.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every round, as JSON.")
def main(rounds: int, steps: int, place: str, json_path: Path | None) -> None:
    """Compares loops of steps of 5 ms with a save each, with all exporters and without, in turns."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    found: dict[str, Any] = {"benchmark": "exporters", "environment": environment(place, place), "steps": steps}
    home = Path(tempfile.mkdtemp(prefix="ckptkit-exporters-", dir=place))
    try:
        found |= measure(home, rounds, steps)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    found["ratio"] = ratio = ratio_of(found["step_ms"])
    with_ms, without_ms = (statistics.median(found["step_ms"][how]) for how in ("with", "without"))
    print(
        f"a step of {STEP_MS:g} ms with a save: {with_ms:.3f} ms with all exporters, {without_ms:.3f} ms without; "
        f"ratio {ratio:.4f} (bar {RATIO_MAX}): {'met' if ratio <= RATIO_MAX else 'NOT met'}; {rounds} rounds"
    )
    with_ms, without_ms = (statistics.median(found["cpu_ms"][how]) for how in ("with", "without"))
    print(f"processor time of the whole process for a step: {with_ms:.3f} ms with, {without_ms:.3f} ms without")
    store_result(found, json_path)


def ratio_of(step_ms: dict[str, list[float]]) -> float:
    """The median of the ratios of the rounds, with exporters over without."""
    return statistics.median(a / b for a, b in zip(step_ms["with"], step_ms["without"], strict=True))


def measure(home: Path, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """The mean milliseconds of a step of each round, with all exporters and without, in an order that alternates.

    `step_ms` is by the clock. `cpu_ms` is processor time, of which other threads have a part.
    """
    found: dict[str, dict[str, list[float]]] = {kind: {"with": [], "without": []} for kind in ("step_ms", "cpu_ms")}
    for number in range(rounds + 1):
        for how in ("with", "without") if number % 2 else ("without", "with"):
            with ExitStack() as stack:
                exporters = stack.enter_context(_exporters()) if how == "with" else ()
                took = _loop(home / f"{how}-{number}", exporters, steps)
            if number:  # the first round imports and compiles
                for kind, milliseconds in zip(found, took, strict=True):
                    found[kind][how].append(milliseconds)
    return found


def _loop(home: Path, exporters: Sequence[Any], steps: int) -> tuple[float, float]:
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
        began_s, cpu_s = now_s(), time.process_time()
        for step in range(1, steps + 1):
            train(step)
        took_s, cpu_s = now_s() - began_s, time.process_time() - cpu_s
    log.close()
    return 1e3 * took_s / steps, 1e3 * cpu_s / steps


@contextmanager
def _exporters() -> Iterator[Sequence[Any]]:
    """Both exporters, and what listens to them."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from ckptkit.goodput.exporters import OpenTelemetryExporter, PrometheusExporter

    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        base = stack.enter_context(_listening(port))
        sender = OTLPMetricExporter(f"{base}/v1/metrics")
        meters = MeterProvider([PeriodicExportingMetricReader(sender, export_interval_millis=_EXPORT_MS)])
        tracers = TracerProvider()
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")))
        stack.callback(meters.shutdown)
        stack.callback(tracers.shutdown)
        exporter = OpenTelemetryExporter(meter_provider=meters, tracer_provider=tracers)
        yield (PrometheusExporter(port, address="127.0.0.1"), exporter)


@contextmanager
def _listening(port: int) -> Iterator[str]:
    """A collector and a scraper in a process of their own, as in production; the collector's address."""
    command = [sys.executable, "-m", "bench.listening", str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[1]) as listener:
        assert listener.stdin is not None
        assert listener.stdout is not None
        try:
            yield listener.stdout.readline().strip()
        finally:
            listener.stdin.close()
