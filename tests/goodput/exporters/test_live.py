"""Exporters against the real thing: Prometheus scrapes a training, and a collector receives what the SDK sends."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.goodput.exporters import METRICS, OpenTelemetryExporter, PrometheusExporter

DEPLOY = Path(__file__).parents[3] / "deploy"
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="no prometheus here: make setup-system"
)


def train(events: ckptkit.EventLog, root: Path, steps: int = 4) -> None:
    """A training with two tiers, saved in every step, restored once."""
    tiers = [ckptkit.Tier.ssd(str(root / "ssd"), save=ckptkit.EverySteps(1))]
    with ckptkit.CheckpointManager(root / "durable", tiers=tiers, events=events) as manager:
        state = {"w": jnp.zeros(1000)}
        for step in range(1, steps + 1):
            manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
        manager.restore(None, args=ocp.args.StandardRestore(state))


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return answer.read().decode()


def names_in(expression: str) -> set[str]:
    """The metrics that a PromQL expression names."""
    return set(re.findall(r"\bckptkit_\w+", expression))


def served_names() -> set[str]:
    histograms = {f"{m.name}{end}" for m in METRICS if m.kind == "histogram" for end in ("_bucket", "_sum", "_count")}
    return histograms | {metric.name for metric in METRICS if metric.kind != "histogram"}


def dashboard() -> list[str]:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*expressions, *(each["query"] for each in board["templating"]["list"] if each["type"] == "query")]


def alerts() -> list[str]:
    text = (DEPLOY / "prometheus-rules.yaml").read_text()
    return re.findall(r"^ +expr: \|?(.*?)^ +(?:for|labels):", text, re.M | re.S)


def test_dashboard_and_alerts_query_only_metrics_that_exist() -> None:
    """Breaks when a panel stays empty, or an alert never fires, because a metric has another name."""
    assert len(alerts()) >= 8
    assert len(dashboard()) >= 12
    for expression in [*dashboard(), *alerts()]:
        assert names_in(expression), expression
        assert names_in(expression) <= served_names(), expression


def test_dashboard_counts_the_saves_of_a_job_once() -> None:
    """Breaks when a job of 64 processes that all serve shows each commit 64 times."""
    own = {"ckptkit_commit_bytes_total", "ckptkit_restored_bytes_total"}  # of the process that serves
    summed = [each for each in dashboard() if each.startswith("sum ") and not names_in(each) & own]
    assert len(summed) == 4
    assert all('process="0"' in each for each in summed)


def test_every_alert_has_a_runbook_line() -> None:
    """Breaks when somebody is woken by an alert without advice."""
    text = (DEPLOY / "prometheus-rules.yaml").read_text()
    assert text.count("runbook: ") == text.count("summary: ") == text.count("- alert: ")


@needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    """Breaks when Prometheus refuses to load the alerts."""
    command = ["promtool", "check", "rules", str(DEPLOY / "prometheus-rules.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


LABELS = 'instance="a",job="t",process="0"'
DURABLE = f'{LABELS},tier="durable"'


@needs_prometheus
@pytest.mark.parametrize(
    ("commits", "interval", "minutes", "fires"),
    [
        pytest.param("", "", 30, "", id="young"),
        pytest.param("", "", 90, "CkptkitNeverCommitted", id="never a commit"),
        pytest.param("60x400", "", 90, "", id="one commit, the next is not late"),
        pytest.param("60x400", "", 180, "CkptkitNoDurableCommit", id="one commit, and no other"),
        pytest.param("0+60x400", "60x400", 180, "", id="a commit each minute"),
        pytest.param("0+60x60 3600x340", "60x400", 90, "CkptkitNoDurableCommit", id="no commit any more"),
    ],
)
def test_alert_fires_when_durable_commits_stay_out(
    tmp_path: Path, commits: str, interval: str, minutes: int, fires: str
) -> None:
    """A bucket that refuses after the first commit would wake nobody."""
    series = {f"ckptkit_start_timestamp_seconds{{{LABELS}}}": "0x400"}
    series |= {f"ckptkit_last_commit_timestamp_seconds{{{DURABLE}}}": commits} if commits else {}
    series |= {f"ckptkit_commit_interval_seconds{{{DURABLE}}}": interval} if interval else {}
    assert_fires(tmp_path, series, minutes, fires)


@needs_prometheus
@pytest.mark.parametrize(
    ("attempts", "minutes", "fires"),
    [
        pytest.param("0x100", 90, "", id="one start"),
        pytest.param("0x20 1x40 2x100", 90, "", id="two restarts"),
        pytest.param("0x10 _x5 1x5 _x5 2x5 _x5 3x100", 40, "CkptkitRestarts", id="three, with gaps"),
        pytest.param("0x10 1x5 2x5 3x200", 150, "", id="an hour later"),
    ],
)
def test_alert_fires_when_a_run_restarts_again_and_again(
    tmp_path: Path, attempts: str, minutes: int, fires: str
) -> None:
    """A job that dies before its first commit has no series that is old enough for the other alerts."""
    assert_fires(tmp_path, {f"ckptkit_attempt{{{LABELS}}}": attempts}, minutes, fires)


def assert_fires(tmp_path: Path, series: dict[str, str], minutes: int, fires: str) -> None:
    """The alert `fires`, or none, after some minutes of these series."""
    firing = 'group by (alertname) (ALERTS{alertstate="firing"})'
    found = [{"labels": f'{{alertname="{fires}"}}', "value": 1}] if fires else []
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": f"{minutes}m", "exp_samples": found}],
    }
    rules = str(DEPLOY / "prometheus-rules.yaml")
    (tmp_path / "test.yaml").write_text(
        json.dumps({"rule_files": [rules], "evaluation_interval": "1m", "tests": [case]})  # JSON is YAML
    )
    command = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_endpoint_serves_process_0_alone_unless_each_is_asked_for(tmp_path: Path) -> None:
    """Breaks when a thousand processes want one port, or nobody can look at process 7."""
    pytest.importorskip("prometheus_client")
    quiet = PrometheusExporter(0)
    log = ckptkit.EventLog(process=7, exporters=[quiet])
    log.close()
    assert quiet.port == 0
    exporter = PrometheusExporter(0, address="127.0.0.1", every_process=True, labels={"run": 'a "b"'})
    log = ckptkit.EventLog(process=7, exporters=[exporter])
    train(log, tmp_path, steps=2)
    deadline_s = time.monotonic() + 30
    while not re.search(r"^ckptkit_restores_total\{.*\} 1\.0$", text := scraped(exporter.port), re.M):
        assert time.monotonic() < deadline_s
    log.close()
    assert re.search(r'^ckptkit_commits_total\{process="7",run="a \\"b\\"",tier="durable"\} 2\.0$', text, re.M)
    assert re.search(r'^ckptkit_commit_seconds_bucket\{le="\+Inf",process="7",run=.*tier="ssd"\} 2\.0$', text, re.M)
    assert re.search(r"^ckptkit_tier_used_ratio\{", text, re.M)
    with pytest.raises(OSError, match="refused"):
        scraped(exporter.port)


def asked(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)["data"]


def free_port() -> int:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        return server.server_port


@needs_prometheus
def test_prometheus_scrapes_a_training(tmp_path: Path) -> None:
    """Breaks when Prometheus cannot read what we serve, or an expression of the dashboard or an alert is an error."""
    pytest.importorskip("prometheus_client")
    exporter, port = PrometheusExporter(0, address="127.0.0.1"), free_port()
    log = ckptkit.EventLog(exporters=[exporter])
    config = tmp_path / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: 1s}}\nrule_files: [{DEPLOY}/prometheus-rules.yaml]\nscrape_configs:\n"
        f"  - {{job_name: train, static_configs: [{{targets: ['127.0.0.1:{exporter.port}']}}]}}\n"
    )
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command) as prometheus:
        try:
            train(log, tmp_path)
            wanted = 'ckptkit_commits_total{job="train",tier="durable"}'
            deadline_s, value = time.monotonic() + 90, []
            while not value or value[0]["value"][1] != "4":
                assert time.monotonic() < deadline_s, value
                time.sleep(0.5)
                try:
                    value = asked(port, "query", query=wanted)["result"]
                except OSError:  # not up yet
                    continue
            assert value[0]["metric"]["process"] == "0"
            for expression in [*dashboard(), *alerts()]:
                if not expression.startswith("label_values"):
                    asked(port, "query", query=expression.replace("$job", "train"))  # raises for an error
            assert asked(port, "query", query="count(ckptkit_save_stall_seconds_bucket)")["result"]
            groups = asked(port, "rules")["groups"]
            assert len(groups[0]["rules"]) == len(alerts())
            assert all(rule["health"] != "err" for rule in groups[0]["rules"])
        finally:
            prometheus.terminate()
            log.close()


@pytest.fixture
def collector() -> Iterator[tuple[int, dict[str, list[bytes]]]]:
    """An OTLP collector over HTTP: the port, and the bodies that came, by path."""
    bodies: dict[str, list[bytes]] = {}

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.setdefault(self.path, []).append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, bodies
        server.shutdown()
        thread.join()


def test_collector_receives_metrics_and_traces(tmp_path: Path, collector: tuple[int, dict[str, list[bytes]]]) -> None:
    """Breaks when the user's OpenTelemetry SDK sends nothing of ours, or spans with other times than the events."""
    pytest.importorskip("opentelemetry.sdk", reason="pip install '.[telemetry-test]'")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install '.[telemetry-test]'")
    sdk = "opentelemetry.sdk"
    metrics, spans_of = import_module(f"{sdk}.metrics"), import_module(f"{sdk}.trace")
    readers, processors = import_module(f"{sdk}.metrics.export"), import_module(f"{sdk}.trace.export")
    http = "opentelemetry.exporter.otlp.proto.http"
    metric_http, span_http = import_module(f"{http}.metric_exporter"), import_module(f"{http}.trace_exporter")
    received = "opentelemetry.proto.collector"
    metric_request = import_module(f"{received}.metrics.v1.metrics_service_pb2").ExportMetricsServiceRequest
    span_request = import_module(f"{received}.trace.v1.trace_service_pb2").ExportTraceServiceRequest

    port, bodies = collector
    base = f"http://127.0.0.1:{port}"
    sender = metric_http.OTLPMetricExporter(f"{base}/v1/metrics")
    meters = metrics.MeterProvider([readers.PeriodicExportingMetricReader(sender)])
    tracers = spans_of.TracerProvider()
    tracers.add_span_processor(processors.BatchSpanProcessor(span_http.OTLPSpanExporter(f"{base}/v1/traces")))
    log = ckptkit.EventLog(exporters=[OpenTelemetryExporter(meter_provider=meters, tracer_provider=tracers)])
    seen: list[ckptkit.Event] = []
    log.observe(seen.append)
    train(log, tmp_path)
    log.close()
    meters.shutdown()
    tracers.shutdown()

    values: dict[tuple[str, str], float] = {}
    for body in bodies["/v1/metrics"]:
        for resource in metric_request.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in [*metric.sum.data_points, *metric.gauge.data_points]:
                    labels = {each.key: each.value.string_value for each in point.attributes}
                    values[metric.name, labels.get("tier", "")] = point.as_double or float(point.as_int)
                for point in metric.histogram.data_points:
                    values[metric.name, "count"] = float(point.count)
    assert values["ckptkit_commits_total", "durable"] == values["ckptkit_commits_total", "ssd"] == 4
    assert values["ckptkit_save_stall_seconds", "count"] == 4
    assert values["ckptkit_step", ""] == 4
    spans = [
        span
        for body in bodies["/v1/traces"]
        for resource in span_request.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    names = [span.name for span in spans]
    assert names.count("ckptkit.commit") == 8
    assert names.count("ckptkit.restore") == 1
    restored = next(event for event in seen if event.kind == ckptkit.Kind.RESTORED)
    (span,) = [span for span in spans if span.name == "ckptkit.restore"]
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(
        restored.fields["duration_s"], abs=1e-5
    )
    assert set(values) <= {(metric.name, label) for metric in METRICS for label in (
        "", "count", *(key[1] for key in values)
    )}  # fmt: skip


def test_traces_are_bounded_and_tell_what_was_left_out() -> None:
    """Breaks when a loop with steps of 5 ms spends its time on spans, or nobody learns that some are missing."""
    pytest.importorskip("opentelemetry.sdk", reason="pip install '.[telemetry-test]'")
    sdk = "opentelemetry.sdk.trace"
    export = import_module(f"{sdk}.export")
    memory = import_module(f"{sdk}.export.in_memory_span_exporter").InMemorySpanExporter()
    tracers = import_module(sdk).TracerProvider()
    tracers.add_span_processor(export.SimpleSpanProcessor(memory))
    exporter = OpenTelemetryExporter(tracer_provider=tracers)
    exporter.begin(0)
    for step in range(300):
        exporter.export(ckptkit.Event.span("step", start_s=100 + 0.01 * step, end_s=100.01 + 0.01 * step, step=step))
        exporter.export(ckptkit.Event.span(f"made up {step}", start_s=100.0, end_s=100.0 + 1e-4 * step))
    exporter.export(ckptkit.Event.span("step", start_s=200.0, end_s=201.0, step=300))
    spans = memory.get_finished_spans()
    steps = [span for span in spans if span.name == "ckptkit.step"]
    assert 40 <= len(steps) <= 52  # 20 at once, 10 a second for 3 s, and the last
    assert len(steps) + sum(span.attributes.get("left_out", 0) for span in steps) == 301
    assert steps[-1].attributes["step"] == 300
    assert 100 < len(spans) - len(steps) < 130  # of 300 names
    (counted,) = exporter._metrics.samples_of(next(each for each in METRICS if each.name == "ckptkit_steps_total"))
    assert counted.value == 301
