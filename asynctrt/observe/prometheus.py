"""Expose engines to Prometheus through its own library. The only importer of ``prometheus_client``.

::

    prometheus_client.REGISTRY.register(EngineCollector({"classifier": engine}))
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asynctrt.engine import Engine
from asynctrt.errors import MissingExtraError
from asynctrt.observe.metrics import COUNTER, ENGINE, LOST_DEVICES, READY, Metric, readings_of

try:
    from prometheus_client import (
        GCCollector,
        PlatformCollector,
        ProcessCollector,
        generate_latest,
        metrics_core,
    )
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:
    raise MissingExtraError(
        "metrics need prometheus-client: pip install 'asynctrt[serve]' for a server, or "
        "pip install 'asynctrt[prometheus]' for an application"
    ) from error


class EngineCollector(Collector):
    """Collect the metrics of an application's own engines, for a registry of ``prometheus_client``.

    Names and labels are the same as for a server's metrics. Any thread may scrape. Closed engines are left
    out, and so are metrics that only a server has, such as its clients and its latency histograms.

    :param engines: open engines by the names that label them. The mapping is read at each scrape, so engines
        may be added to it later.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[metrics_core.Metric]:
        """Yield the current metrics.

        :raises UsageError: if a value of the mapping is not an engine.
        """
        readings = readings_of(self._engines)
        index = [
            {
                "name": reading.labels[0],
                "version": reading.labels[1],
                "state": "READY" if reading.done.state == "open" else "UNAVAILABLE",
            }
            for reading in readings
        ]
        for metric in ENGINE:
            yield _family(metric, readings)
        yield _family(READY, index)
        yield _family(LOST_DEVICES, [readings])


def _family(metric: Metric, items: Iterable[Any]) -> metrics_core.Metric:
    """Return a metric with the samples of all items, as the library represents it."""
    name, kind = metric.name, metric.kind
    if kind == COUNTER:  # The library calls a counter by its name without _total, which Triton's lack.
        name, kind = name.removesuffix("_total"), COUNTER if name.endswith("_total") else "unknown"
    family = metrics_core.Metric(name, metric.text, kind)
    for item in items:
        for suffix, values, value in metric.samples(item):
            labels = dict(zip(metric.labels_of(suffix), values, strict=True))
            family.add_sample(metric.name + suffix, labels, value)
    return family


def process_text() -> bytes:
    """Return the library's metrics of this process in Prometheus's text format. Blocks."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return generate_latest(registry)
