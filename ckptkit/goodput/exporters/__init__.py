"""Live metrics and traces of a run: exporters for `EventLog(..., exporters=[...])`. Each needs its extra."""

from ckptkit.goodput.exporters.metrics import METRICS, Metric, RunMetrics, Sample
from ckptkit.goodput.exporters.opentelemetry import OpenTelemetryExporter
from ckptkit.goodput.exporters.prometheus import PrometheusExporter

__all__ = ["METRICS", "Metric", "OpenTelemetryExporter", "PrometheusExporter", "RunMetrics", "Sample"]
