"""Metrics and traces through the user's OpenTelemetry SDK."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from ckptkit.events import Event, Kind
from ckptkit.goodput.exporters.metrics import METRICS, Metric, RunMetrics, labels_of

_SCOPE = "ckptkit"
_SPANS_PER_S, _SPANS_AT_ONCE = 10.0, 20.0  # of one name: the SDK works for 0.1 ms on each, in the training's process
_NAMES_MAX = 100  # later ones share an allowance: a loop may make names up


@final
class OpenTelemetryExporter:
    """Gives the metrics of a run (`ckptkit.goodput.exporters.METRICS`) and its spans to OpenTelemetry.

    It uses `opentelemetry-api` alone. The SDK, its readers and its exporters are the user's; without an SDK nothing is
    exported. Spans are `ckptkit.<name>` for those of the loop and the manager, `ckptkit.commit` from the copy to the
    commit in a tier, and `ckptkit.restore`. `meter_provider` and `tracer_provider` replace the global ones. Raises
    ImportError without `opentelemetry-api` (`pip install 'ckptkit-jax[otel]'`).

    Bounded: of each name 20 spans at once and 10 a second are traced. The attribute `left_out` of the next one is the
    number of those before it that were not. The metrics count all of them. Cost: nothing for the step loop.
    """

    def __init__(self, *, meter_provider: Any = None, tracer_provider: Any = None):
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise ImportError("OpenTelemetryExporter: run pip install 'ckptkit-jax[otel]'") from error
        self._observation: Any = metrics.Observation
        self._meter: Any = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._tracer: Any = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        self._metrics = RunMetrics()
        self._histograms: dict[str, Any] = {}
        self._process: dict[str, int] = {}
        self._allowances: dict[str, _Allowance] = {}

    def begin(self, process: int) -> None:
        """Makes the instruments."""
        self._process = {"process": process}
        for metric in METRICS:
            if metric.kind == "histogram":
                self._histograms[metric.name] = self._meter.create_histogram(
                    metric.name,
                    unit="s",
                    description=metric.about,
                    explicit_bucket_boundaries_advisory=metric.bounds_s,
                )
                continue
            counts = metric.kind == "counter"
            make = self._meter.create_observable_counter if counts else self._meter.create_observable_gauge
            make(metric.name, callbacks=[lambda _, metric=metric: self._observed(metric)], description=metric.about)

    def export(self, event: Event) -> None:
        """Counts an event, and traces one that took time."""
        self._metrics.add(event)
        fields, tier = event.fields, {} if event.tier is None else {"tier": event.tier}
        if event.kind == Kind.STAGED:
            self._histograms["ckptkit_save_stall_seconds"].record(fields["stall_s"], self._process)
        elif event.kind == Kind.COMMITTED:
            self._histograms["ckptkit_commit_seconds"].record(fields["duration_s"], {**self._process, **tier})
            self._trace("commit", event, fields["duration_s"], tier)
        elif event.kind == Kind.RESTORED:
            self._histograms["ckptkit_restore_seconds"].record(fields["duration_s"], self._process)
            self._trace("restore", event, fields["duration_s"], {})
        elif event.kind == Kind.SPAN:
            self._trace(str(fields["span"]), event, max(0.0, fields["duration_s"]), {})

    def close(self) -> None:
        """Does nothing: the SDK is the user's to shut down."""

    def _observed(self, metric: Metric) -> Iterable[Any]:
        for sample in self._metrics.samples_of(metric):
            yield self._observation(sample.value, {**self._process, **labels_of(sample)})

    def _trace(self, name: str, event: Event, duration_s: float, labels: dict[str, str]) -> None:
        allowance = self._allowances.get(name)
        if allowance is None:
            key = name if len(self._allowances) < _NAMES_MAX else ""
            allowance = self._allowances.setdefault(key, _Allowance(event.at_s))
        left_out = allowance.left_out
        if not allowance.take(event.at_s):
            return
        step = {} if event.step is None else {"step": event.step}
        more = {"left_out": left_out} if left_out else {}
        end_ns = int(event.at_s * 1e9)
        span = self._tracer.start_span(
            f"ckptkit.{name}",
            start_time=end_ns - int(duration_s * 1e9),
            attributes={**self._process, **step, **labels, **more},
        )
        span.end(end_time=end_ns)


@final
class _Allowance:
    """The number of spans that may be traced now; it grows with the time of the events."""

    def __init__(self, at_s: float):
        self.left_out = 0  # since the last one that was taken
        self._left, self._at_s = _SPANS_AT_ONCE, at_s

    def take(self, at_s: float) -> bool:
        """Whether the span that ended at `at_s` is traced."""
        self._left = min(_SPANS_AT_ONCE, self._left + _SPANS_PER_S * max(0.0, at_s - self._at_s))
        self._at_s = at_s
        taken = self._left >= 1.0
        self._left -= taken
        self.left_out = 0 if taken else self.left_out + 1
        return taken
