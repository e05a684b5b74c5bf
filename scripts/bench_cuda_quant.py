"""Times products with weights of 8 or 4 bits beside 16-bit ones, for each layer of a decoder and batch, and chooses.

    python scripts/bench_cuda_quant.py [--library PATH] [--batches 1,8,16,32,48,64,96,128] [--table choices.json]

Candidates: 16 bits by Kiln's kernels and by cuBLAS; int8, float8 and int4 weights (int4 in groups of 128) by Kiln's
kernels with 16-bit rows; int8 and float8 by cuBLASLt with quantised rows (W8A8), their quantisation included. Each runs
in a CUDA graph over as many copies of the weight as exceed the L2 cache. --table writes what was measured and chosen,
per layer, format and batch. Prints one table per layer and one JSON line.

Knows nothing of ONNX Runtime.
"""

import argparse
import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plugins.cuda_build import cuda_library
from plugins.dense.cuda_calls import ROWS, CudaLinear
from plugins.elementwise.cuda_calls import CudaElementwise
from plugins.quant_matmul.cuda_calls import CudaQuantLinear, QuantWeight
from plugins.quant_matmul.cuda_choice import Choices, Measured
from plugins.quant_matmul.cuda_schema import KERNEL_ROWS, WeightFormat
from scripts.bench_cuda_step import Shape, milliseconds, random_bits

LAYERS = ("qkv", "o", "gate_up", "down", "head")
Run = Callable[[], object]


class Layer:
    """One layer's weights in every format, in copies that exceed the L2 cache together."""

    def __init__(self, name: str, shape: Shape, library: ctypes.CDLL):
        widths = {"qkv": shape.qkv, "o": shape.hidden, "gate_up": shape.intermediate, "down": shape.hidden}
        depths = {"o": shape.attention, "down": shape.intermediate}
        self.name, self.swiglu = name, name == "gate_up"
        self.width, self.depth = widths.get(name, shape.vocabulary), depths.get(name, shape.hidden)
        self.rows = 2 * self.width if self.swiglu else self.width
        self.copies = max(1, min(16, int(4e8 / (self.rows * self.depth)) + 1))
        self.dense, self.quant, self.elementwise = (
            CudaLinear(library),
            CudaQuantLinear(library),
            CudaElementwise(library),
        )
        sixteen = torch.randn(self.rows, self.depth, device="cuda").mul_(self.depth**-0.5).bfloat16()
        self.sixteen = [sixteen.clone() for _ in range(max(1, self.copies // 2))]
        self.weights: dict[WeightFormat, list[QuantWeight]] = {
            form: [random_bits(form, self.rows, self.depth) for _ in range(self.copies)]
            for form in ("int8", "float8e4m3fn", "int4")
        }

    def candidates(self, batch: int) -> dict[str, Run]:
        x = torch.randn(batch, self.depth, device="cuda").bfloat16()
        y = torch.empty(batch, self.width, device="cuda", dtype=torch.bfloat16)
        packed = torch.empty(batch, self.rows, device="cuda", dtype=torch.bfloat16)

        def kernel(form: WeightFormat) -> Run:
            return lambda: [self.quant.linear(x, one, None, y, self.swiglu) for one in self.weights[form]]

        def w8a8(form: WeightFormat) -> Run:
            return lambda: [self.quant.w8a8(x, one, None, y, self.swiglu) for one in self.weights[form]]

        def cublas() -> None:
            for one in self.sixteen:
                torch.mm(x, one.T, out=packed)
                if self.swiglu:
                    self.elementwise.swiglu(packed, out=y)

        def dense() -> None:
            for one in self.sixteen:
                (self.dense.linear_swiglu if self.swiglu else self.dense.linear)(x, one, None, y)

        found: dict[str, Run] = {"cublas": cublas}
        if batch <= ROWS:
            found["dense"] = dense
        if batch <= 2 * KERNEL_ROWS:
            found |= {"int8": kernel("int8"), "float8e4m3fn": kernel("float8e4m3fn"), "int4": kernel("int4")}
        return found | {"int8 w8a8": w8a8("int8"), "float8e4m3fn w8a8": w8a8("float8e4m3fn")}

    def measure(self, batch: int) -> Measured:
        """Microseconds of one call of each candidate."""
        times = {}
        for name, run in self.candidates(batch).items():
            copies = len(self.sixteen) if name in ("cublas", "dense") else self.copies
            times[name] = milliseconds(run, 9) * 1e3 / copies
        return Measured(self.name, self.width, self.depth, self.swiglu, batch, times)


def print_layer(measured: list[Measured]) -> None:
    names = sorted({name for one in measured for name in one.microseconds})
    first = measured[0]
    print(f"{first.layer} [{first.width}, {first.depth}], us")
    print("batch " + "".join(f"{name:>19}" for name in names) + "   best of 8 bits over 16")
    for one in measured:
        cells = "".join(f"{one.microseconds.get(name, float('nan')):19.1f}" for name in names)
        print(f"{one.batch:5} {cells}   {one.gain(('int8', 'float8e4m3fn')):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", help="the compiled CUDA library; built for this device if left out")
    parser.add_argument("--batches", default="1,8,16,32,48,64,96,128")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--table", type=Path, help="where to write what was measured and chosen")
    options = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    library = ctypes.CDLL(options.library or str(cuda_library([f"sm_{major}{minor}"])))
    measured = []
    for name in options.layers.split(","):
        layer = Layer(name, Shape(), library)
        of_layer = [layer.measure(int(batch)) for batch in options.batches.split(",")]
        print_layer(of_layer)
        measured += of_layer
        del layer
        torch.cuda.empty_cache()
    choices = Choices(torch.cuda.get_device_name(), tuple(measured))
    if options.table:
        options.table.write_text(choices.to_json())
    print(json.dumps({"layers": [vars(one) for one in measured]}))


if __name__ == "__main__":
    main()
