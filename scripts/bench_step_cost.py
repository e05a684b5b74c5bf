"""Shows that a decode step costs the same whatever the size of the block pool.

    python scripts/bench_step_cost.py [BUNDLE] [--blocks 400] [--factor 10]

Runs the same steps on two pools, alternating, with the sequences' blocks spread over each pool. Without a bundle
it makes a graph of 30 attention layers with SmolLM2's geometry and nothing else, where a copied cache would
show most. Reports per step: time, page faults, and how much resident memory grew over all steps (a copy of a
cache would touch fresh pages). Prints a table and one JSON line; exits with 1 when the large pool is dearer.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.backends.base import StepInputs
from engines.backends.onnxruntime import OnnxRuntimeDecoder
from engines.bundle import open_bundle
from plugins.paged_attention.schema import (
    DOMAIN,
    LOGITS,
    OP_TYPE,
    STEP_INPUTS,
    KvLayer,
    KvSpec,
    cache_names,
    cache_output_names,
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, VOCABULARY = 30, 9, 3, 64, 16, 64
SEQUENCES, CONTEXT = 16, 256
ROUNDS, STEPS = 15, 10
TIME_LIMIT = 1.05
"""Largest ratio of step times that still counts as equal."""


@dataclass
class Measurement:
    """What one pool's steps cost."""

    blocks: int
    pool_bytes: int
    step_ms: float = 0.0
    faults_per_step: float = 0.0
    rss_growth_bytes: int = 0


def attention_graph(path: Path) -> KvSpec:
    """Write a serving graph of attention layers only; query, key and value are slices of the embedding."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    hidden, width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    rng = np.random.default_rng(0)
    weights = {
        "embedding": rng.normal(size=(VOCABULARY, hidden + 2 * width)).astype(np.float32),
        "head": rng.normal(size=(hidden, VOCABULARY)).astype(np.float32),
        "widths": np.array([hidden, width, width], np.int64),
    }
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT32, s) for n, s in STEP_INPUTS.items()]
    outputs = [helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["rows", VOCABULARY])]
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["embedded"]),
        helper.make_node("Split", ["embedded", "widths"], ["q0", "k", "v"], axis=1),
    ]
    for layer in range(LAYERS):
        caches, aliases = cache_names(layer), cache_output_names(layer)
        shape = ["blocks", BLOCK_SIZE, KV_HEADS, HEAD_DIM]
        inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in caches]
        outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in aliases]
        step = ["cumulative_sequence_length", "past_seqlens", "block_table", "", "", "slot_mapping"]
        operands = [f"q{layer}", "k", "v", *caches, *step]
        heads = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
        nodes.append(helper.make_node(OP_TYPE, operands, [f"q{layer + 1}", *aliases], domain=DOMAIN, **heads))
    nodes += [
        helper.make_node("Gather", [f"q{LAYERS}", "logits_indices"], ["last"]),
        helper.make_node("MatMul", ["last", "head"], [LOGITS]),
    ]
    initializers = [numpy_helper.from_array(weight, name) for name, weight in weights.items()]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return KvSpec((KvLayer(KV_HEADS, HEAD_DIM),) * LAYERS, BLOCK_SIZE, "float32")


def decode_step(num_blocks: int, block_size: int) -> StepInputs:
    """One token for each of SEQUENCES sequences of CONTEXT tokens; their blocks are spread over the whole pool."""
    per_sequence = CONTEXT // block_size + 1
    spread = np.linspace(0, num_blocks - 1, SEQUENCES * per_sequence).astype(np.int32)
    table = np.random.default_rng(1).permutation(spread).reshape(SEQUENCES, per_sequence)
    past = np.full(SEQUENCES, CONTEXT, np.int32)
    return StepInputs(
        input_ids=np.arange(1, SEQUENCES + 1, dtype=np.int32),
        position_ids=past,
        logits_indices=np.arange(SEQUENCES, dtype=np.int32),
        cumulative_sequence_length=np.arange(SEQUENCES + 1, dtype=np.int32),
        past_seqlens=past,
        block_table=np.ascontiguousarray(table),
        slot_mapping=table[:, CONTEXT // block_size] * block_size + CONTEXT % block_size,
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(backends: list[OnnxRuntimeDecoder]) -> list[Measurement]:
    """Alternate rounds of steps over the pools, so that a busy machine disturbs both alike."""
    steps = [decode_step(backend.num_blocks, backend.kv.block_size) for backend in backends]
    results = [Measurement(b.num_blocks, b.num_blocks * b.kv.bytes_per_block) for b in backends]
    times: list[list[float]] = [[] for _ in backends]
    addresses = [backend.cache_addresses for backend in backends]
    for backend, inputs in zip(backends, steps, strict=True):
        for _ in range(STEPS):
            backend.step(inputs)
    for _ in range(ROUNDS):
        for backend, inputs, result, elapsed in zip(backends, steps, results, times, strict=True):
            resident, faults = resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(STEPS):
                start = time.perf_counter()
                backend.step(inputs)
                elapsed.append(time.perf_counter() - start)
            result.faults_per_step += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            result.rss_growth_bytes += resident_bytes() - resident
    assert addresses == [backend.cache_addresses for backend in backends]
    for result, elapsed in zip(results, times, strict=True):
        result.step_ms = statistics.median(elapsed) * 1e3
        result.faults_per_step /= ROUNDS * STEPS
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path, help="a bundle; without one, attention layers only")
    parser.add_argument("--blocks", type=int, default=400, help="blocks of the small pool (default 400)")
    parser.add_argument("--factor", type=int, default=10, help="the large pool has so many times more (default 10)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.bundle:
            bundle = open_bundle(arguments.bundle)
            assert bundle.manifest.decoder is not None
            engine, kv, plugins = bundle.engine_path, bundle.manifest.decoder.kv, bundle.plugin_paths
        else:
            from plugins.build import cpu_library

            engine, plugins = Path(folder) / "attention.onnx", [cpu_library()]
            kv = attention_graph(engine)
        pools = (arguments.blocks, arguments.blocks * arguments.factor)
        small, large = measure([OnnxRuntimeDecoder(engine, kv, blocks, plugins=plugins) for blocks in pools])
    print(f"{SEQUENCES} sequences of {CONTEXT} tokens, {ROUNDS * STEPS} steps on each pool, alternating")
    print(f"{'blocks':>8} {'pool MiB':>9} {'step ms':>9} {'faults/step':>12} {'RSS growth KiB':>15}")
    for row in (small, large):
        pool, growth = row.pool_bytes / 2**20, row.rss_growth_bytes / 2**10
        print(f"{row.blocks:>8} {pool:>9.0f} {row.step_ms:>9.3f} {row.faults_per_step:>12.1f} {growth:>15.0f}")
    ratio = large.step_ms / small.step_ms
    # One layer's keys would already be 1/60 of the pool: a hundredth of it in all steps together is no copy.
    ok = ratio <= TIME_LIMIT and large.rss_growth_bytes < large.pool_bytes / 100
    print(f"step time ratio {ratio:.3f} (at most {TIME_LIMIT}): {'equal' if ok else 'NOT equal'}")
    print(json.dumps({"ratio": ratio, "limit": TIME_LIMIT, "ok": ok, "pools": [vars(small), vars(large)]}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
