"""What the parts on models without a KV cache share: running bundles, timing them in turn, table cells."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from passes_report.timing import Spread, interleaved

from engines.runtime.engine import Engine
from pipeline.verify import Feeds
from quantization_report.bundles import Made, Maker, weight_bytes
from quantization_report.findings import gate_in_words
from quantization_report.setting import Setting


def search_of(setting: Setting) -> str:
    """Layers that are faster, as users get them; all of them where no times are wanted."""
    return "latency" if setting.times else "all"


def bundles(maker: Maker, made: Mapping[str, Made]) -> dict[str, Path]:
    return {"float": maker.parent.path, **{name: item.bundle.path for name, item in made.items()}}


def infer(bundle: Path, feeds: Feeds) -> NDArray:
    """The first output."""
    with Engine.open(bundle) as engine:
        return next(iter(engine.infer(feeds).values()))


def times_of(maker: Maker, made: Mapping[str, Made], feeds: Feeds, setting: Setting) -> dict[str, Spread]:
    """Seconds of a call, bundles in turn; nothing without times."""
    if not setting.times:
        return {}
    engines = {name: Engine.open(path, threads=setting.threads) for name, path in bundles(maker, made).items()}
    try:
        calls = {name: (lambda engine=engine: engine.infer(feeds)) for name, engine in engines.items()}
        with setting.progress.stage("times"):
            return interleaved(calls, setting.seconds)
    finally:
        for engine in engines.values():
            engine.close()


def cosines_of(a: NDArray, b: NDArray) -> NDArray[np.float64]:
    """Row by row."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def size_and_gate(maker: Maker, made: Mapping[str, Made], name: str) -> Sequence[str]:
    """Layers by scheme, MB, and the gate's verdict."""
    if name == "float":
        return ("float", f"{weight_bytes(maker.parent) / 1e6:.1f}", "")
    return (made[name].schemes, f"{weight_bytes(made[name].bundle) / 1e6:.1f}", gate_in_words(made[name].gate))


def milliseconds(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median * 1e3:.2f} ({spread.low * 1e3:.2f} to {spread.high * 1e3:.2f})"


def gain(times: Mapping[str, Spread], name: str) -> str:
    """How many times as fast as FP32, for a table's cell; empty without times."""
    return f"{times['float'].median / times[name].median:.2f}" if name in times else ""


def with_times(figures: Mapping[str, object], times: Mapping[str, Spread]) -> dict[str, object]:
    return {**figures, "seconds": {name: spread.median for name, spread in times.items()}}
