"""Measures Kiln's quantised products on the CPU against their floors and against ONNX Runtime's, in one run: a table,
then one JSON line.

Every variant of a shape starts from float activations, so that those with integers quantise them in the time shown. A
session has as many copies of the product, each with weights of its own, as exceed the cache: a decoder's step reads all
its weights from memory. The variants alternate, so that a busy machine slows all of them; times are the best of all
rounds, per product. The floor is the longer of the arithmetic at the machine's peak and of reading the weights once.

    python scripts/bench_products.py [--threads 2] [--rounds N] [--shapes 576x1536,...] [--rows 512,16,1] [--isa avx2]
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from plugins.build import cpu_library
from plugins.measure import fp32_peak, read_bandwidth, usable_cpus
from plugins.quant_matmul.packing import pack, pack_scales
from plugins.quant_matmul.schema import INT8_MATMUL, QUANTIZE_ROWS, WEIGHT_MATMUL
from plugins.spec import DOMAIN

CONTRIB = "com.microsoft"
SHAPES = ((576, 960), (576, 576), (576, 1536), (1536, 576), (576, 49152))  # SmolLM2-135M
HEAD = 49152
ROWS = (512, 2048, 16, 1)
MANY_ROWS = 64  # the head makes logits for a few rows only
GROUP = 64
BEYOND_CACHE = 96 << 20  # bytes of weights per session
ISAS = {"auto": 0, "plain": 1, "avx2": 2, "avx512": 3, "avx512vnni": 4}


@dataclass(frozen=True)
class Part:
    """One copy of a product: nodes that make `y` of `x`, and their constants."""

    nodes: list[NodeProto]
    constants: dict[str, NDArray]


@dataclass(frozen=True)
class Variant:
    """How a product is computed."""

    make: Callable[[str, NDArray[np.int8]], Part]
    """Of a suffix for names and weights [k, n] in -7..7."""
    bits: int
    integers: bool


def ours(suffix: str, weights: NDArray[np.int8], bits: int, integers: bool) -> Part:
    k, n = weights.shape
    group = GROUP if bits == 4 else 0
    scales = np.full((n, k // group if group else 1), 0.01, np.float32)
    constants = {f"w{suffix}": pack(weights, bits), f"s{suffix}": pack_scales(scales)}
    attributes = {"n": n, "bits": bits, "group_size": group}
    if not integers:
        node = helper.make_node(
            WEIGHT_MATMUL.op_type, [f"x{suffix}", *constants], [f"y{suffix}"], domain=DOMAIN, **attributes
        )
        return Part([node], constants)
    rows = [f"q{suffix}", f"a{suffix}"]
    nodes = [
        helper.make_node(QUANTIZE_ROWS.op_type, [f"x{suffix}"], rows, domain=DOMAIN),
        helper.make_node(INT8_MATMUL.op_type, [*rows, *constants], [f"y{suffix}"], domain=DOMAIN, **attributes),
    ]
    return Part(nodes, constants)


def matmul_integer(suffix: str, weights: NDArray[np.int8]) -> Part:
    """ONNX Runtime makes one operator of these nodes."""
    zero, scale = np.zeros(1, np.int8), np.full(1, 0.01, np.float32)
    constants = {f"w{suffix}": weights, f"z{suffix}": zero[0], f"s{suffix}": scale}
    q, a, p, i, f, t = (name + suffix for name in ("q", "a", "p", "i", "f", "t"))
    nodes = [
        helper.make_node("DynamicQuantizeLinear", [f"x{suffix}"], [q, a, p]),
        helper.make_node("MatMulInteger", [q, f"w{suffix}", p, f"z{suffix}"], [i]),
        helper.make_node("Cast", [i], [f], to=TensorProto.FLOAT),
        helper.make_node("Mul", [a, f"s{suffix}"], [t]),
        helper.make_node("Mul", [f, t], [f"y{suffix}"]),
    ]
    return Part(nodes, constants)


def matmul_nbits(suffix: str, weights: NDArray[np.int8]) -> Part:
    k, n = weights.shape
    stored = (weights.T + 8).astype(np.uint8).reshape(n, k // GROUP, GROUP)
    constants = {
        f"w{suffix}": stored[..., 0::2] | stored[..., 1::2] << 4,
        f"s{suffix}": np.full(n * (k // GROUP), 0.01, np.float32),
    }
    node = helper.make_node(
        "MatMulNBits", [f"x{suffix}", *constants], [f"y{suffix}"], domain=CONTRIB, K=k, N=n, bits=4, block_size=GROUP,
        accuracy_level=4,
    )  # fmt: skip
    return Part([node], constants)


def matmul(suffix: str, weights: NDArray[np.int8]) -> Part:
    return Part(
        [helper.make_node("MatMul", [f"x{suffix}", f"w{suffix}"], [f"y{suffix}"])], {f"w{suffix}": weights * 0.01}
    )


VARIANTS = {
    "W8A8": Variant(lambda suffix, weights: ours(suffix, weights, 8, True), 8, True),
    "W4A8": Variant(lambda suffix, weights: ours(suffix, weights, 4, True), 4, True),
    "W8A32": Variant(lambda suffix, weights: ours(suffix, weights, 8, False), 8, False),
    "W4A32": Variant(lambda suffix, weights: ours(suffix, weights, 4, False), 4, False),
    "MatMulInteger": Variant(matmul_integer, 8, True),
    "MatMulNBits": Variant(matmul_nbits, 4, True),
    "MatMul": Variant(matmul, 32, False),
}
OURS = ("W8A8", "W4A8", "W8A32", "W4A32")


def session_call(variant: Variant, rows: int, k: int, n: int, threads: int) -> tuple[Callable[[], None], int]:
    """Runs all copies once; and their number."""
    rng = np.random.default_rng(0)
    copies = -(-BEYOND_CACHE // (k * n * variant.bits // 8))
    kind = np.float32 if variant.bits == 32 else np.int8
    # Weights and inputs of their own, or ONNX Runtime finds that the copies are one.
    parts = [variant.make(str(number), rng.integers(-7, 8, (k, n)).astype(kind)) for number in range(copies)]
    inputs, names = ([f"{letter}{number}" for number in range(copies)] for letter in "xy")
    graph = helper.make_graph(
        [node for part in parts for node in part.nodes],
        "copies",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, k)) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, n)) for name in names],
        [numpy_helper.from_array(array, name) for part in parts for name, array in part.constants.items()],
    )
    opsets = [helper.make_opsetid(*item) for item in (("", 20), (CONTRIB, 1), (DOMAIN, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(str(cpu_library()))
    options.add_session_config_entry("session.force_spinning_stop", "1")  # idle sessions must not spin
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    x = ort.OrtValue.ortvalue_from_numpy(rng.standard_normal((rows, k), np.float32))
    for name in inputs:
        binding.bind_ortvalue_input(name, x)
    output = ort.OrtValue.ortvalue_from_shape_and_type((rows, n), np.float32)
    for name in names:  # the copies run one by one, and nobody reads what they write
        binding.bind_ortvalue_output(name, output)
    return lambda: session.run_with_iobinding(binding), copies


def best_seconds(call: Callable[[], None], at_least: float) -> float:
    """Shortest of the calls that fit into `at_least` seconds, and of at least two."""
    best, start, calls = float("inf"), time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - start < at_least:
        before = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - before)
        calls += 1
    return best


def measure(rows: int, k: int, n: int, threads: int, rounds: int, names: list[str]) -> dict[str, float]:
    """Microseconds of one product, by variant."""
    calls = {name: session_call(VARIANTS[name], rows, k, n, threads) for name in names}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, (call, copies) in calls.items():
            best[name] = min(best[name], best_seconds(call, 0.1) / copies * 1e6)
    return best


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=numbers, default=ROWS)
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES))
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--isa", choices=ISAS, default="auto")
    arguments = parser.parse_args()
    if ctypes.CDLL(str(cpu_library())).kiln_set_isa(ISAS[arguments.isa]) < 0:
        parser.error(f"this machine lacks {arguments.isa}")
    names = arguments.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown variant {unknown[0]!r}: expected some of {', '.join(VARIANTS)}")
    bandwidth, peak = read_bandwidth(threads=arguments.threads), fp32_peak(arguments.threads)
    print(
        f"{arguments.threads} threads; {bandwidth / 1e9:.1f} GB/s, FP32 {peak / 1e9:.0f} Gop/s, INT8 taken as four "
        "times that. Microseconds a product (share of the floor)"
    )
    record: dict[str, dict[str, dict[str, float]]] = {}
    for k, n in (tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")):
        for rows in arguments.rows:
            if n == HEAD and rows > MANY_ROWS:
                continue
            row = record[f"{rows}x{k}x{n}"] = {}
            for name, microseconds in measure(rows, k, n, arguments.threads, arguments.rounds, names).items():
                variant, products = VARIANTS[name], rows * k * n
                arithmetic = 2 * products / (peak * (4 if variant.integers else 1))
                floor = max(arithmetic, k * n * variant.bits / 8 / bandwidth) * 1e6
                row[name] = {
                    "us": round(microseconds, 1),
                    "of_floor": round(floor / microseconds, 3),
                    "gops": round(2e-3 * products / microseconds, 1),
                }
            cells = (f"{name} {cell['us']:.1f} ({cell['of_floor']:.0%})" for name, cell in row.items())
            print(f"{rows:5}x{k}x{n}: " + "  ".join(cells), flush=True)
    print(json.dumps({"threads": arguments.threads, "bandwidth": bandwidth, "fp32_peak": peak, "products": record}))


if __name__ == "__main__":
    main()
