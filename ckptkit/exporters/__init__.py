"""Live metrics and traces of a run: exporters for `EventLog(..., exporters=[...])`. Each needs its extra."""

from ckptkit.exporters.metrics import METRICS, Metric, RunMetrics, Sample
from ckptkit.exporters.opentelemetry import OpenTelemetryExporter
from ckptkit.exporters.prometheus import PrometheusExporter

__all__ = ["METRICS", "Metric", "OpenTelemetryExporter", "PrometheusExporter", "RunMetrics", "Sample"]
