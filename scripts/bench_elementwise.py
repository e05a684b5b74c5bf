"""Measures Kiln's token-wise operators against the ones of ONNX Runtime that they replace, in one run: a table, then
one JSON line.

All variants of a shape alternate, so that a busy machine slows all of them. Times are the best of all rounds, per
operator, from a session that chains many copies of it, as a decoder does. The floor is the time to move each operand
once at the machine's read bandwidth; operands that stay in a cache from one copy to the next beat it.

    python scripts/bench_elementwise.py [--threads 1,2] [--rounds N] [--isa auto,avx2,plain]
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
from onnx import TensorProto, helper, numpy_helper

from plugins.build import cpu_library
from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU
from plugins.measure import read_bandwidth, usable_cpus
from plugins.spec import DOMAIN

ISAS = {"auto": 0, "plain": 1, "avx2": 2, "avx512": 3}
CONTRIB = "com.microsoft"
ROWS = (1, 16, 512)
NORM, GATE = "residual sum and RMS norm", "gate of SwiGLU"
WIDTHS = {NORM: 576, GATE: 1536}  # SmolLM2-135M
OPERANDS = {NORM: 4, GATE: 3}  # tensors that must be moved at least once


@dataclass(frozen=True)
class Step:
    """One node: operands `x`, `k`, `g` are given, others are results of the steps before.

    In a chain, results `s` and `n` are the next copy's x and k, `y` is its k.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    domain: str = ""


VARIANTS: dict[str, dict[str, tuple[Step, ...]]] = {
    NORM: {
        "Add, Norm": (Step("Add", ("x", "k"), ("s",)), Step("SimplifiedLayerNormalization", ("s", "g"), ("n",))),
        "SkipNorm": (Step("SkipSimplifiedLayerNormalization", ("x", "k", "g"), ("n", "", "", "s"), CONTRIB),),
        "AddRmsNorm": (Step(ADD_RMS_NORM.op_type, ("x", "k", "g"), ("n", "s"), DOMAIN),),
    },
    GATE: {
        "Sigmoid, Mul, Mul": (
            Step("Sigmoid", ("x",), ("s",)),
            Step("Mul", ("x", "s"), ("t",)),
            Step("Mul", ("t", "k"), ("y",)),
        ),
        "QuickGelu, Mul": (Step("QuickGelu", ("x",), ("t",), CONTRIB), Step("Mul", ("t", "k"), ("y",))),
        "SwiGlu": (Step(SWIGLU.op_type, ("x", "k"), ("y",), DOMAIN),),
    },
}
OURS = {NORM: "AddRmsNorm", GATE: "SwiGlu"}


def copies_of(rows: int) -> int:
    """Enough that starting a session run does not count."""
    return 8 if rows > 64 else 64


def session_call(steps: tuple[Step, ...], rows: int, width: int, threads: int) -> Callable[[], None]:
    """Runs a chain of `copies_of(rows)` copies of the steps."""
    nodes, next_ones = [], {"x": "x", "k": "k", "g": "g"}
    for number in range(copies_of(rows)):
        names = dict(next_ones)
        for step in steps:
            names |= {name: f"{name}{number}" for name in step.outputs if name}
            inputs, outputs = ([names.get(name, "") for name in side] for side in (step.inputs, step.outputs))
            attributes = {"alpha": 1.0} if step.op == "QuickGelu" else {}
            nodes.append(helper.make_node(step.op, inputs, outputs, domain=step.domain, **attributes))
        next_ones |= {"k": names["y"]} if "y" in names else {"x": names["s"], "k": names["n"]}
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        nodes,
        "copies",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, width)) for name in ("x", "k")],
        [helper.make_tensor_value_info(next_ones["k"], TensorProto.FLOAT, (rows, width))],
        [numpy_helper.from_array(np.ones(width, np.float32), "g")],
        value_info=[
            helper.make_tensor_value_info(name, TensorProto.FLOAT, (rows, width))
            for node in nodes
            for name in node.output
            if name not in ("", next_ones["k"])
        ],
    )
    opsets = [helper.make_opsetid(*item) for item in (("", 20), (CONTRIB, 1), (DOMAIN, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # or it merges or fuses copies
    options.register_custom_ops_library(str(cpu_library()))
    # Idle sessions must not spin while another one is measured.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name in ("x", "k"):
        values = rng.uniform(1.2, 1.35, (rows, width)).astype(np.float32)  # silu(x) is near 1: no chain ends in 0
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(values))
    output = ort.OrtValue.ortvalue_from_shape_and_type((rows, width), np.float32)
    binding.bind_ortvalue_output(next_ones["k"], output)
    return lambda: session.run_with_iobinding(binding)


def best_seconds(call: Callable[[], None], at_least: float) -> float:
    """Shortest of the calls that fit into `at_least` seconds, and of at least three."""
    best, start, calls = float("inf"), time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - start < at_least:
        before = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - before)
        calls += 1
    return best


def measure(what: str, rows: int, threads: int, rounds: int, isas: list[str]) -> dict[str, float]:
    """Microseconds of one operator, by variant; ours with each instruction set."""
    library = ctypes.CDLL(str(cpu_library()))
    calls = {name: session_call(steps, rows, WIDTHS[what], threads) for name, steps in VARIANTS[what].items()}
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            for isa in isas if name == OURS[what] else ["auto"]:
                if library.kiln_set_isa(ISAS[isa]) < 0:
                    continue
                label = name if isa == "auto" else f"{name} {isa}"
                seconds = best_seconds(call, 0.04) / copies_of(rows)
                best[label] = min(best.get(label, float("inf")), seconds * 1e6)
    library.kiln_set_isa(0)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, usable_cpus()}))))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--isa", default="auto,avx2,plain", help=f"comma-separated, of {', '.join(ISAS)}")
    arguments = parser.parse_args()
    isas = arguments.isa.split(",")
    if unknown := [isa for isa in isas if isa not in ISAS]:
        parser.error(f"unknown instruction set {unknown[0]!r}: expected some of {', '.join(ISAS)}")
    record: dict[str, dict[str, float]] = {}
    for threads in map(int, arguments.threads.split(",")):
        bandwidth = read_bandwidth(threads=threads, repetitions=8)
        print(f"{threads} threads, microseconds; read bandwidth {bandwidth / 1e9:.1f} GB/s")
        for what, width in WIDTHS.items():
            for rows in ROWS:
                floor = OPERANDS[what] * rows * width * 4 / bandwidth * 1e6
                found = measure(what, rows, threads, arguments.rounds, isas) | {"floor": floor}
                found = {name: round(microseconds, 2) for name, microseconds in found.items()}
                cells = "   ".join(f"{name} {microseconds:.2f}" for name, microseconds in found.items())
                print(f"  {what} [{rows}, {width}]: {cells}", flush=True)
                record[f"{threads} threads {what} {rows}x{width}"] = found
    print(json.dumps(record))


if __name__ == "__main__":
    main()
