"""`Metrics`: what Prometheus reads at /metrics. Times are observed as they happen, the engine's state at the scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from helix.engine.engine import Engine

Outcome = Literal["stop", "length", "error", "cancelled", "timeout", "rejected"]

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TTL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """One registry a server, so that two in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "helix_time_to_first_token_seconds",
            "From the arrival of a request to its first token, waiting included.",
            buckets=_TTFT_S,
            registry=self.registry,
        )
        self.token_to_token = Histogram(
            "helix_token_to_token_seconds",
            "TTL: time between two tokens of a request.",
            buckets=_TTL_S,
            registry=self.registry,
        )
        self.requests = Counter("helix_requests", "Generations by how they ended.", ["outcome"], registry=self.registry)
        self.prompt_tokens = Counter("helix_prompt_tokens", "Tokens of prompts taken in.", registry=self.registry)
        self.output_tokens = Counter("helix_output_tokens", "Tokens generated.", registry=self.registry)

    def watch(self, engine: Engine) -> None:
        """From now on a scrape also reads the engine."""
        self.registry.register(_EngineState(engine))

    def count(self, outcome: Outcome, number: int = 1) -> None:
        self.requests.labels(outcome).inc(number)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return bytes(generate_latest(self.registry))


class _EngineState(Collector):
    """Whole numbers that the engine's thread writes; a scrape reads each at once, without a lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        used = engine.num_page_rows - engine.num_free_rows
        yield GaugeMetricFamily("helix_requests_running", "Requests that take part in steps.", engine.num_running)
        yield GaugeMetricFamily("helix_requests_waiting", "Requests that wait to run.", engine.num_waiting)
        yield GaugeMetricFamily("helix_page_rows_used", "Page rows that requests hold.", used)
        yield GaugeMetricFamily("helix_page_rows", "Page rows of the cache.", engine.num_page_rows)
        yield GaugeMetricFamily(
            "helix_page_rows_idle", "Page rows that nobody holds and that may be found again.", engine.num_idle_rows
        )
        yield CounterMetricFamily(
            "helix_prefix_hit_tokens",
            "Tokens found in page rows instead of being computed.",
            engine.num_reused_tokens,
        )
        clock = engine.exchange_clock
        yield CounterMetricFamily("helix_sampled_steps", "Eager steps of rank 0 that were timed.", clock.num_steps)
        yield CounterMetricFamily("helix_sampled_step_seconds", "Time of the timed steps.", clock.step_s)
        yield CounterMetricFamily(
            "helix_sampled_exchange_seconds",
            "Time of all exchanges in the timed steps, waiting for other ranks included.",
            clock.exchange_s,
        )
        yield CounterMetricFamily(
            "helix_preemptions", "Times a request gave its rows back and was computed again.", engine.num_preemptions
        )
