"""A Prometheus endpoint in the training process."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, final

from ckptkit.events import Event
from ckptkit.goodput.exporters.metrics import METRICS, Metric, RunMetrics, Sample


@final
class PrometheusExporter:
    """Serves the metrics of a run (`METRICS`) on `http://HOST:PORT/metrics`, by `prometheus_client`.

    Process 0 alone serves; with `every_process` each one does, on `port` plus its index. With `port` 0 it takes a free
    port, and the attribute `port` has its number. `labels` are added to each series, such as `{"run": "x"}`.
    Cost: nothing for the step loop; a scrape takes half a millisecond in another thread. Raises ImportError without
    `prometheus_client` (`pip install 'ckptkit-jax[prometheus]'`). `EventLog` raises OSError if the port is in use.
    """

    def __init__(
        self,
        port: int = 9432,
        *,
        address: str = "0.0.0.0",
        every_process: bool = False,
        labels: dict[str, str] | None = None,
    ):
        try:
            import prometheus_client
            import prometheus_client.core
        except ImportError as error:
            raise ImportError(
                "PrometheusExporter needs prometheus_client: pip install 'ckptkit-jax[prometheus]'"
            ) from error
        self._client: Any = prometheus_client
        core: Any = prometheus_client.core
        self._families: dict[str, Any] = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        self.port = port
        self._address = address
        self._every_process = every_process
        self._labels = dict(labels or {})
        self._metrics = RunMetrics()
        self._server: Any = None
        self._thread: Any = None

    def begin(self, process: int) -> None:
        """Begins to serve, if this process is to."""
        if process != 0 and not self._every_process:
            return
        self._labels = {**self._labels, "process": str(process)}
        registry = self._client.CollectorRegistry()
        registry.register(self)
        port = self.port + process if self.port and self._every_process else self.port
        self._server, self._thread = self._client.start_http_server(port, self._address, registry)
        self.port = self._server.server_port

    def export(self, event: Event) -> None:
        """Counts an event."""
        self._metrics.add(event)

    def close(self) -> None:
        """Ends the endpoint."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def describe(self) -> Iterable[Any]:
        """The names and types of all metrics, without values, for the registry."""
        return [self._family(metric) for metric in METRICS]

    def collect(self) -> Iterable[Any]:
        """The metrics as they are now, for the registry."""
        families: dict[str, Any] = {}
        for sample in self._metrics.samples():
            family = families.get(sample.metric.name)
            if family is None:
                family = families[sample.metric.name] = self._family(sample.metric)
            values = [*sample.labels, *self._labels.values()]
            if sample.metric.kind == "histogram":
                family.add_metric(values, _buckets(sample), sum_value=sample.value)
            else:
                family.add_metric(values, sample.value)
        return families.values()

    def _family(self, metric: Metric) -> Any:
        return self._families[metric.kind](metric.name, metric.about, labels=[*metric.labels, *self._labels])


def _buckets(sample: Sample) -> list[tuple[str, float]]:
    """Cumulative counts, as Prometheus has them."""
    names = [*map(str, sample.metric.bounds_s), "+Inf"]
    return list(zip(names, accumulate(sample.counts), strict=True))
