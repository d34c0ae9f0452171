"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from allmlp.serve.batching import Batcher

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one application, in a separate registry."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher, self.registry = batcher, (registry := CollectorRegistry())
        self.requests = Counter("http_requests", "HTTP requests.", ["path", "status"], registry=registry)
        self.duration = Histogram(
            "http_request_duration_seconds", "HTTP latency.", ["path"], registry=registry, buckets=SECONDS
        )
        self.batch_size = Histogram("allmlp_batch_size", "Batch size.", registry=registry, buckets=BATCH_SIZES)
        self.batch_duration = Histogram(
            "allmlp_batch_duration_seconds", "Model time of a batch.", registry=registry, buckets=SECONDS
        )
        registry.register(self)
        ProcessCollector(registry=registry)  # no metrics where there is no /proc

    def collect(self) -> Iterator[Metric]:
        batcher = self.batcher
        yield CounterMetricFamily("allmlp_requests_accepted", "Accepted requests.", batcher.accepted)
        yield GaugeMetricFamily("allmlp_requests_in_flight", "Accepted, unfinished requests.", batcher.in_flight)
        yield GaugeMetricFamily("allmlp_max_concurrency", "Limit of requests in flight.", batcher.max_concurrency)

    def on_response(self, path: str, status: int, seconds: float) -> None:
        """`path` must be a route of the server: label values chosen by clients would grow without bound."""
        self.requests.labels(path, status).inc()
        self.duration.labels(path).observe(seconds)

    def on_batch(self, size: int, seconds: float) -> None:
        self.batch_size.observe(size)
        self.batch_duration.observe(seconds)
