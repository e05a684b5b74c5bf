"""What an engine counts, in Prometheus' terms. Every engine has a registry of its own; each sample names the model.

Seconds and tokens. The worker observes; gauges are read when somebody asks. `families` can be sent to another process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class EngineMetrics:
    """Counters, histograms and gauges of one engine. Safe to use from any thread."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.queue_seconds = self._histogram("queue_seconds", "From arrival to the first step", _SECONDS)
        self.first_token_seconds = self._histogram("first_token_seconds", "From arrival to the first token", _SECONDS)
        self.inter_token_seconds = self._histogram("inter_token_seconds", "Between two tokens of an answer", _SECONDS)
        self.request_seconds = self._histogram("request_seconds", "From arrival to the outcome", _SECONDS)
        self.step_seconds = self._histogram("step_seconds", "One step or one batch of the model", _SECONDS)
        self.batch_size = self._histogram("batch_size", "Sequences in a step, or items in a batch", _SIZES)
        self.step_tokens = self._histogram("step_tokens", "Tokens that a step computes", _SIZES)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generated_tokens = self._counter("generated_tokens", "Tokens handed out")
        self._finished = Counter("kiln_requests", "Requests by outcome", ["model", "outcome"], registry=self.registry)
        self.drafted_tokens = self._counter("drafted_tokens", "Tokens proposed by speculation")
        self.accepted_tokens = self._counter("accepted_tokens", "Proposed tokens that the model confirmed")

    def finished(self, outcome: str) -> None:
        """Count a request by its finish reason, or `refused`."""
        self._finished.labels(self._model, outcome).inc()

    def handed_out(self, tokens: int, arrival: float, latest: float | None, now: float) -> None:
        """Count tokens of an answer that arrived at one time and got its latest token, if any, at another."""
        if latest is None:
            self.first_token_seconds.observe(now - arrival)
        else:
            for _ in range(tokens):
                self.inter_token_seconds.observe((now - latest) / tokens)
        self.generated_tokens.inc(tokens)

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A value that is read whenever somebody asks; `read` is called from any thread."""
        gauge = Gauge(f"kiln_{name}", help_text, ["model"], registry=self.registry)
        gauge.labels(self._model).set_function(read)

    def gauges(
        self, name: str, help_text: str, labels: Sequence[str], reads: Mapping[tuple[str, ...], Callable[[], float]]
    ) -> None:
        """Values of one name that are told apart by labels, each read like a gauge."""
        gauge = Gauge(f"kiln_{name}", help_text, ["model", *labels], registry=self.registry)
        for values, read in reads.items():
            gauge.labels(self._model, *values).set_function(read)

    def counter(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A count that somebody else keeps, read like a gauge."""
        self.registry.register(_Count(f"kiln_{name}", help_text, self._model, read))

    def families(self) -> list[Metric]:
        """A snapshot of everything."""
        return list(self.registry.collect())

    def text(self) -> str:
        """The snapshot in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"kiln_{name}", help_text, ["model"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"kiln_{name}", help_text, ["model"], registry=self.registry).labels(self._model)


class _Count(Collector):
    def __init__(self, name: str, help_text: str, model: str, read: Callable[[], float]) -> None:
        self._name, self._help, self._model, self._read = name, help_text, model, read

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=["model"])
        family.add_metric([self._model], self._read())
        yield family
