"""An engine of which the test says every figure, for tests of the status page."""

from engines.runtime.info import EngineInfo
from engines.runtime.metrics import EngineMetrics

HOSTILE = "<img src=x onerror=alert(1)>&amp;"


class Scripted:
    """An engine of which the test says everything."""

    def __init__(self, name="scripted", kind="decoder"):
        self.info = EngineInfo(name, kind, source=f"{HOSTILE} source", sku="cpu-avx512")
        self.ready = True
        self.figures = EngineMetrics(name)
        self.values = {
            "running": 3,
            "waiting_interactive": 2,
            "waiting_batch": 5,
            "blocks_free": 50,
            "blocks_cached": 30,
            "blocks_held": 20,
        }
        for gauge in self.values:
            self.figures.gauge(gauge, gauge, lambda gauge=gauge: self.values[gauge])
        totals = {
            "preemptions": 4,
            "engine_restarts": 1,
            "prefix_lookups": 0,
            "prefix_hits": 0,
            "prefix_saved_tokens": 1234,
        }
        self.totals = {name: self.figures._counter(name, name) for name in totals}
        for total, value in totals.items():
            self.totals[total].inc(value)

    async def metrics(self):
        self.figures.batch_size.observe(4)
        self.totals["prefix_lookups"].inc(4)
        self.totals["prefix_hits"].inc(3)
        self.figures.generated_tokens.inc(10)
        self.figures.first_token_seconds.observe(0.2)
        self.figures.queue_seconds.observe(100.0)
        self.figures.finished("stop")
        return self.figures.families()
