"""Metrics: an engine's counters, gauges and latencies, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paged.counters import readings
from paged.errors import ExtraMissing

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from scheduler.engine import Engine

_PREFIX = "paged_"
GAUGES = {  # of Engine.stats(): what each of those is that are no counters
    "num_running": "Requests that have a slot.",
    "num_waiting": "Requests in the queue.",
    "num_pages": "Pages of the pool.",
    "free_pages": "Pages that hold nothing.",
    "live_pages": "Pages of running requests, handles and sessions.",
    "cached_only_pages": "Pages that only the prefix cache holds; they go when room is needed.",
    "usage": "Share of the pages that are live.",
    "num_checkpoints": "Checkpoints of recurrent state.",
    "checkpoint_bytes": "Bytes of the checkpoints.",
}


class EngineCollector:
    """Gives engines' metrics to a registry of prometheus-client: `REGISTRY.register(EngineCollector(engine))`.

    Of several engines give a dictionary: its keys become the label `engine`. Reading waits for the step that runs.
    Nothing is counted for it beside what an engine counts anyway.
    """

    def __init__(self, engines: Engine | Mapping[str, Engine]) -> None:
        self._core = _client().core
        self._labels = ["engine"] if isinstance(engines, Mapping) else []
        self._engines = (
            [([name], e) for name, e in engines.items()] if isinstance(engines, Mapping) else [([], engines)]
        )

    def collect(self) -> Iterator[Metric]:
        """One metric family for each counter, gauge and histogram, as prometheus-client asks for them."""
        families: dict[str, Any] = {}
        for labels, engine in self._engines:
            with engine.lock:
                self._read(families, labels, engine)
        yield from families.values()

    def _read(self, families: dict[str, Any], labels: list[str], engine: Engine) -> None:
        core, stats = self._core, engine.stats()

        def family(kind: Any, name: str, text: str) -> Any:
            if name not in families:
                families[name] = kind(_PREFIX + name, text, labels=self._labels)
            return families[name]

        for name, text in GAUGES.items():
            if name in stats:
                short = name.removeprefix("num_")
                family(core.GaugeMetricFamily, short, text).add_metric(labels, stats[name])
        for group, counters in (("", engine.scheduler.stats), ("prefix_", engine.cache and engine.cache.stats)):
            for item in readings(counters) if counters is not None else ():
                kind = core.CounterMetricFamily if item.grows else core.GaugeMetricFamily
                name = group + item.name.removeprefix("num_")
                family(kind, name, item.text).add_metric(labels, item.value)
        for name, text, histogram in engine.delivery.latencies.items():
            buckets = [("+Inf" if bound == float("inf") else str(bound), n) for bound, n in histogram.cumulative()]
            told = family(core.HistogramMetricFamily, f"{name}_seconds", text)
            told.add_metric(labels, buckets, histogram.sum_s)


def metrics_text(engine: Engine) -> str:
    """See Engine.metrics_text."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(EngineCollector(engine))
    return client.generate_latest(registry).decode()


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ExtraMissing(
            "metrics need the package prometheus-client, which is not installed: pip install 'paged[metrics]'"
        ) from error
    return prometheus_client
