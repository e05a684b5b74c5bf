"""Measures the CPU attention kernel against what the machine can do, in one run: a table, then one JSON line.

Decode is compared with read bandwidth, prefill with onnxruntime's own FP32 matrix product and with the peak of what it
multiplies: FP32, or bfloat16, which is twice that where the machine has AVX512-BF16.
Kernel and yardstick alternate, so that a busy machine slows both. Rates are the best of all rounds; a share is best
over best, and in brackets the median of the shares within one round.

    python scripts/bench_attention.py [--threads N] [--rounds N] [--isa auto,avx2,plain]
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from plugins.build import cpu_library
from plugins.measure import fp32_peak, read_bandwidth, usable_cpus
from plugins.paged_attention import schema
from plugins.paged_attention.schema import KvLayer, KvSpec

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16  # SmolLM2-135M
ISAS = {"auto": 0, "plain": 1, "avx2": 2, "avx512": 3, "avx512bf16": 5}
DTYPES = {
    "float32": (np.dtype(np.float32), TensorProto.FLOAT),
    "float16": (np.dtype(np.float16), TensorProto.FLOAT16),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16),
    "int8": (np.dtype(np.int8), TensorProto.INT8),
    "int32": (np.dtype(np.int32), TensorProto.INT32),
}
BANDWIDTH, PEAK, PRODUCT = "read bandwidth", "FP32 peak", "best product"
PEAKS = {"float32": PEAK, "bfloat16": "bfloat16 peak"}
PRODUCTS = ((2048, 2048, 2048), (512, 576, 1536), (512, 1536, 576))


@dataclass(frozen=True)
class Workload:
    name: str
    new: int
    past: int
    sequences: int
    dtype: str
    compute: str = "float32"

    @property
    def cache_bytes(self) -> int:
        """Cache bytes, scales included, that one call must read at least once."""
        kv = KvSpec((KvLayer(KV_HEADS, HEAD_DIM),), BLOCK, self.dtype)  # type: ignore[arg-type]
        return self.sequences * (self.past + self.new) * kv.bytes_per_token

    @property
    def causal_ops(self) -> int:
        """Arithmetic of both products over the positions that a token may see, two per multiply-add."""
        seen = self.new * self.past + self.new * (self.new + 1) // 2
        return 4 * HEAD_DIM * HEADS * seen * self.sequences


DECODE = [
    *(
        Workload(f"decode 16 x 4096 {dtype}", 1, 4095, 16, dtype)
        for dtype in ("float32", "float16", "bfloat16", "int8")
    ),
    *(Workload(f"decode 1 x 4096 {dtype}", 1, 4095, 1, dtype) for dtype in ("float32", "bfloat16", "int8")),
]
PREFILL = [
    *(
        Workload(f"prefill {tokens} {cache}, {compute}", tokens, 0, 1, cache, compute)
        for tokens, cache in (
            (512, "float32"),
            (2048, "float32"),
            (8000, "float32"),
            (2048, "bfloat16"),
            (2048, "int8"),
        )
        for compute in schema.COMPUTE_DTYPES
    ),
    Workload("chunk 256 after 1792", 256, 1792, 1, "float32"),
]


def attention_call(work: Workload, threads: int) -> Callable[[], None]:
    """One call of the operator with cache outputs bound to the input buffers, blocks shuffled."""
    rng = np.random.default_rng(0)
    cache_dtype = DTYPES[work.dtype][0]
    tokens, context = work.new * work.sequences, work.past + work.new
    width = -(-context // BLOCK)
    table = rng.permutation(width * work.sequences).reshape(work.sequences, width).astype(np.int32)
    positions = np.arange(work.past, context)
    shape = (table.size, BLOCK, KV_HEADS, HEAD_DIM)
    spread = np.float32(30 if work.dtype == "int8" else 1)
    arrays = {
        "query": rng.standard_normal((tokens, HEADS * HEAD_DIM), np.float32),
        "key": rng.standard_normal((tokens, KV_HEADS * HEAD_DIM), np.float32),
        "value": rng.standard_normal((tokens, KV_HEADS * HEAD_DIM), np.float32),
        "key_cache": (rng.standard_normal(shape, np.float32) * spread).astype(cache_dtype),
        "value_cache": (rng.standard_normal(shape, np.float32) * spread).astype(cache_dtype),
        "cumulative_sequence_length": np.arange(0, tokens + 1, work.new, dtype=np.int32),
        "past_seqlens": np.full(work.sequences, work.past, np.int32),
        "block_table": table,
        "slot_mapping": (table[:, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32).ravel(),
    }
    arrays["output"] = np.empty_like(arrays["query"])
    outputs = {"output": "output", "key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    if work.dtype == "int8":
        arrays |= {name: np.full(shape[:3], 0.01, np.float32) for name in ("k_scale", "v_scale")}
        outputs |= {"k_scale_out": "k_scale", "v_scale_out": "v_scale"}
    names = [spec.name if spec.name in arrays else "" for spec in schema.INPUTS]
    types = {name: DTYPES[str(array.dtype)][1] for name, array in arrays.items()}
    node = helper.make_node(
        schema.OP_TYPE,
        names,
        list(outputs),
        domain=schema.DOMAIN,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        compute_dtype=schema.COMPUTE_DTYPES.index(work.compute),
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, types[name], None) for name in names if name],
        [helper.make_tensor_value_info(name, types[bound], None) for name, bound in outputs.items()],
    )
    session = session_of(graph, threads)
    binding = session.io_binding()
    values = {n: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, types[n]) for n, array in arrays.items()}
    for name in names:
        if name:
            binding.bind_ortvalue_input(name, values[name])
    for name, bound in outputs.items():
        binding.bind_ortvalue_output(name, values[bound])

    def call() -> None:
        assert arrays  # keeps the buffers alive that the binding points to
        session.run_with_iobinding(binding)

    return call


def product_call(rows: int, depth: int, columns: int, threads: int) -> Callable[[], None]:
    """onnxruntime's MatMul [rows, depth] x constant [depth, columns], which it packs in advance."""
    rng = np.random.default_rng(0)
    left = rng.standard_normal((rows, depth), np.float32)
    right = numpy_helper.from_array(rng.standard_normal((depth, columns), np.float32), "b")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["c"])],
        "product",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, left.shape)],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, (rows, columns))],
        [right],
    )
    session = session_of(graph, threads)
    binding = session.io_binding()
    value = ort.OrtValue.ortvalue_from_numpy(left)
    binding.bind_ortvalue_input("a", value)
    binding.bind_ortvalue_output("c", ort.OrtValue.ortvalue_from_shape_and_type((rows, columns), np.float32))
    return lambda: session.run_with_iobinding(binding)


def session_of(graph: object, threads: int) -> ort.InferenceSession:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(schema.DOMAIN, schema.SINCE_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(cpu_library()))
    # Idle sessions must not spin while another one is measured.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def best_seconds(call: Callable[[], object], at_least: float = 0.15) -> float:
    """Shortest of the calls that fit into `at_least` seconds, and of at least three."""
    best, start, calls = float("inf"), time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - start < at_least:
        before = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - before)
        calls += 1
    return best


def measure(isas: list[str], threads: int, rounds: int) -> list[dict[str, float]]:
    """Per round: rates in bytes/s (decode, bandwidth) and operations/s (the rest)."""
    library = ctypes.CDLL(str(cpu_library()))
    calls = {work: attention_call(work, threads) for work in (*DECODE, *PREFILL)}
    products = {shape: product_call(*shape, threads) for shape in PRODUCTS}
    results = []
    for _ in range(rounds):
        rates = {
            BANDWIDTH: read_bandwidth(threads=threads, repetitions=8),
            PEAK: fp32_peak(threads, 0.2),
        }
        rates[PEAKS["bfloat16"]] = 2 * rates[PEAK]
        for shape, call in products.items():
            rates["matmul " + "x".join(map(str, shape))] = float(2 * np.prod(shape, dtype=float)) / best_seconds(call)
        rates[PRODUCT] = max(rate for name, rate in rates.items() if name.startswith("matmul"))
        for isa in isas:
            if library.kiln_set_isa(ISAS[isa]) < 0:
                continue
            for work, call in calls.items():
                amount = work.cache_bytes if work in DECODE else work.causal_ops
                rates[f"{work.name} {isa}"] = amount / best_seconds(call)
        library.kiln_set_isa(0)
        results.append(rates)
    return results


def report(rounds: list[dict[str, float]], isas: list[str], threads: int) -> None:
    best = {name: max(rates[name] for rates in rounds) for name in rounds[0]}

    def share(name: str, yardstick: str) -> str:
        median = statistics.median(rates[name] / rates[yardstick] for rates in rounds)
        return f"{best[name] / best[yardstick]:>7.0%} ({median:.0%})"

    print(f"{threads} threads; {HEADS} query heads, {KV_HEADS} KV heads of {HEAD_DIM}, blocks of {BLOCK}, shuffled")
    print(f"{BANDWIDTH} {best[BANDWIDTH] / 1e9:.1f} GB/s; {PEAK} {best[PEAK] / 1e9:.0f} Gop/s")
    print("; ".join(f"{name} {rate / 1e9:.0f} Gop/s" for name, rate in best.items() if name.startswith("matmul")))
    print(f"{'workload':<34}{'set':<8}{'rate':>14}  {'of bandwidth':>14}{'of product':>14}{'of peak':>14}")
    for isa in isas:
        for work in (*DECODE, *PREFILL):
            name = f"{work.name} {isa}"
            if name not in best:
                continue
            if work in DECODE:
                print(f"{work.name:<34}{isa:<8}{best[name] / 1e9:>9.1f} GB/s  {share(name, BANDWIDTH):>14}")
            else:
                shares = f"{share(name, PRODUCT):>14}{share(name, PEAKS[work.compute]):>14}"
                print(f"{work.name:<34}{isa:<8}{best[name] / 1e9:>8.1f} Gop/s  {'':>14}{shares}")
    print(json.dumps({"threads": threads, **{name: round(rate / 1e9, 2) for name, rate in best.items()}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", default="auto,avx2,plain", help=f"comma-separated, of {', '.join(ISAS)}")
    arguments = parser.parse_args()
    isas = arguments.isa.split(",")
    if unknown := [isa for isa in isas if isa not in ISAS]:
        parser.error(f"unknown instruction set {unknown[0]!r}: expected some of {', '.join(ISAS)}")
    report(measure(isas, arguments.threads, arguments.rounds), isas, arguments.threads)


if __name__ == "__main__":
    main()
