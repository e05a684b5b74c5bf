"""Where a step's time goes: ONNX Runtime's own profile of a bundle's engine, by operator; a table, then one JSON line.

Steps are decode at batch 1 and 16 (context 160) and prompts of 512 and 2048 tokens. Profiling itself costs some time.

    python scripts/profile_step.py BUNDLE [--steps N]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from ort_profile import operator_micros

from engines.backends.onnxruntime import OnnxRuntimeDecoder
from engines.bundle import EngineBundle, open_bundle
from engines.runtime.batch import Chunk
from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.sequence import Sequence, blocks_for

WORKLOADS = {
    "decode, batch 1": (1, 1, 160),
    "decode, batch 16": (16, 1, 160),
    "prompt of 512": (1, 512, 0),
    "prompt of 2048": (1, 2048, 0),
}
"""Name to (sequences, new tokens of each, past tokens of each)."""


def profile(bundle: EngineBundle, sequences: int, new: int, past: int, steps: int) -> dict[str, Any]:
    """Median milliseconds of a step, and milliseconds a step by operator."""
    size = bundle.manifest.decoder.kv.block_size
    each = blocks_for(past + new, size)
    batch = []
    for number in range(sequences):
        sequence = Sequence(number, [1] * (past + new), max_tokens=1)
        sequence.blocks.extend(range(number * each, (number + 1) * each))
        batch.append(Chunk(sequence, past, new))
    inputs = step_inputs_from_batch(tuple(batch), size)
    times = []

    def run(backend: OnnxRuntimeDecoder) -> None:
        for _ in range(steps + 1):
            start = time.perf_counter()
            backend.step(inputs)
            times.append(time.perf_counter() - start)

    spent = operator_micros(
        lambda: OnnxRuntimeDecoder(
            bundle.engine_path, bundle.manifest.decoder.kv, sequences * each, plugins=bundle.plugin_paths
        ),
        run,
    )
    operators = {name: micros / len(times) / 1e3 for name, micros in spent.most_common()}
    return {"step_ms": statistics.median(times[1:]) * 1e3, "operators_ms": operators}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    bundle = open_bundle(arguments.bundle)
    results = {}
    for name, (sequences, new, past) in WORKLOADS.items():
        steps = arguments.steps if new == 1 else max(2, arguments.steps // 4)
        results[name] = found = profile(bundle, sequences, new, past, steps)
        total = sum(found["operators_ms"].values())
        print(f"{name}: {found['step_ms']:.1f} ms a step, {total:.1f} ms of it in operators")
        for operator, milliseconds in list(found["operators_ms"].items())[:7]:
            print(f"    {operator:<20} {milliseconds:9.2f} ms  {milliseconds / total:6.1%}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
