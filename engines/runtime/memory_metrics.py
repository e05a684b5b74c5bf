"""The memory account of an open engine, in Prometheus' terms: bytes by part, and by phase as its manifest says."""

import math
from collections.abc import Callable
from functools import partial

from engines.backends.base import DecoderBackend
from engines.backends.memory import process_memory
from engines.bundle import EngineBundle
from engines.runtime.metrics import EngineMetrics


def expose_memory(
    metrics: EngineMetrics,
    bundle: EngineBundle,
    backend: DecoderBackend | None = None,
    held_blocks: Callable[[], int] = lambda: 0,
) -> None:
    """Add `kiln_memory_bytes` and, where the manifest has an account, `kiln_memory_phase_bytes`.

    `resident` and `peak` are those of the whole process that runs the engine; NaN where the system does not say.
    """
    account = bundle.manifest.memory
    weights = sum(record.bytes for record in bundle.manifest.files.values()) if account is None else account.weights
    parts: dict[tuple[str, ...], Callable[[], float]] = {
        ("weights",): lambda: weights,
        ("resident",): lambda: process_memory("VmRSS") or math.nan,
        ("peak",): lambda: process_memory("VmHWM") or math.nan,
    }
    if backend is not None:
        block = backend.kv.bytes_per_block
        pool, swap = backend.num_blocks * block, backend.host_blocks * block
        parts[("kv_pool",)] = lambda: pool
        parts[("kv_held",)] = lambda: held_blocks() * block
        parts[("kv_swap",)] = lambda: swap
    metrics.gauges("memory_bytes", "Where the engine's memory goes", ["part"], parts)
    if account is not None:
        phases: dict[tuple[str, ...], Callable[[], float]] = {
            (phase.name, part): partial(float, getattr(phase, part))
            for phase in account.phases
            for part in ("activations", "workspace", "cache", "peak")
        }
        metrics.gauges("memory_phase_bytes", "The account of one kind of step", ["phase", "part"], phases)
