"""Times a decode step of a Llama-8B shape, made of Kiln's CUDA kernels alone, in one CUDA graph on random weights.

    python scripts/bench_cuda_step.py [--library PATH] [--batches 1,8,32,64,128] [--context 512]
        [--weights int8,float8e4m3fn,int4]

Beside Kiln's products, used up to as many rows as they take and cuBLAS's beyond, stands the same step with cuBLAS's
products at all batches; both also without attention. --weights adds the step with weights of these formats: by Kiln's
kernels up to 32 rows, with quantised rows (W8A8) by cuBLASLt beyond; int4, in groups of 128, always by kernels. The
floor is the time to read all weights, with attention the
cache too, at the bandwidth that reading a large tensor reaches here. Prints one table, one of the token-wise operators,
and one JSON line.

Knows nothing of ONNX Runtime: what a backend adds to these times is measured by scripts/bench_gpu.py.
"""

import argparse
import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.device_limits import device_seconds
from plugins.cuda_build import cuda_library
from plugins.dense.cuda_calls import ROWS, CudaLinear
from plugins.elementwise.cuda_calls import CudaElementwise
from plugins.paged_attention.cuda_calls import CudaAttention, Operands
from plugins.paged_attention.reference import Attributes
from plugins.quant_matmul.cuda_calls import CudaQuantLinear, QuantWeight
from plugins.quant_matmul.cuda_schema import FORMATS, WeightFormat

BLOCK = 16
"""Tokens of a block of the cache."""


@dataclass(frozen=True)
class Shape:
    """Of a decoder; Llama 3.1 8B's by default."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    vocabulary: int = 128256

    @property
    def attention(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """What a step reads; it needs single rows of the embedding."""
        layer = self.hidden * (self.qkv + self.attention + 3 * self.intermediate)
        return 2 * (self.layers * layer + self.hidden * self.vocabulary)

    def cache_bytes(self, tokens: int) -> int:
        return 4 * self.layers * tokens * self.kv_heads * self.head_dim


def random(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()


def weight(width: int, depth: int) -> torch.Tensor:
    return random(width, depth).mul_(depth**-0.5)


def random_bits(form: WeightFormat, width: int, depth: int) -> QuantWeight:
    """Bits at random, which cost what real ones do; of float8 without its two NaNs."""
    group = 128 if form == "int4" else 0
    packed = torch.randint(0, 255, (width, depth // 2 if group else depth), dtype=torch.uint8, device="cuda")
    if form == "float8e4m3fn":
        packed[packed % 128 == 127] = 0
    largest = {"int8": 127, "int4": 8, "float8e4m3fn": 448}[form]
    scale = torch.full((depth // group if group else 1, width), depth**-0.5 / largest, device="cuda")
    return QuantWeight(packed, scale, form, group)


Weight = TypeVar("Weight")


class Weights(Generic[Weight]):
    """Those of all layers, and the head's."""

    def __init__(self, shape: Shape, make: Callable[[int, int], Weight]):
        hidden, inner = shape.hidden, shape.intermediate
        sizes = {
            "qkv": (shape.qkv, hidden),
            "o": (hidden, shape.attention),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        self.layers = [{name: make(*size) for name, size in sizes.items()} for _ in range(shape.layers)]
        self.head = make(shape.vocabulary, hidden)


class Model:
    """Random weights on the device, and the kernels of a library."""

    def __init__(self, shape: Shape, library: ctypes.CDLL):
        self.shape = shape
        self.products, self.elementwise = CudaLinear(library), CudaElementwise(library)
        self.attention, self.quantised = CudaAttention(library), CudaQuantLinear(library)
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device="cuda")

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.products.linear(x, weight) if len(x) <= ROWS else torch.nn.functional.linear(x, weight)

    def linear_swiglu(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.products.linear_swiglu(x, weight) if len(x) <= ROWS else self.library_swiglu(x, weight)

    def quant_linear(self, x: torch.Tensor, weight: QuantWeight, swiglu: bool = False) -> torch.Tensor:
        by_kernels = len(x) <= ROWS or weight.form == "int4"
        return (self.quantised.linear if by_kernels else self.quantised.w8a8)(x, weight, swiglu=swiglu)

    def quant_linear_swiglu(self, x: torch.Tensor, weight: QuantWeight) -> torch.Tensor:
        return self.quant_linear(x, weight, swiglu=True)

    def library_swiglu(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.elementwise.swiglu(torch.nn.functional.linear(x, weight))


class Cache:
    """Shuffled blocks of `context` tokens for each of `batch` sequences, the last of which the step writes."""

    def __init__(self, shape: Shape, batch: int, context: int):
        width = -(-context // BLOCK)
        size = (batch * width, BLOCK, shape.kv_heads, shape.head_dim)
        self.layers = [(random(*size), random(*size)) for _ in range(shape.layers)]
        self.table = torch.randperm(batch * width, device="cuda", dtype=torch.int32).view(batch, width)
        self.past = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
        self.cumulative = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        last = context - 1
        self.slots = (self.table[:, last // BLOCK] * BLOCK + last % BLOCK).contiguous()
        angles = torch.rand(context, shape.head_dim // 2, device="cuda")
        self.cos, self.sin = angles.cos(), angles.sin()
        self.attributes = Attributes(shape.heads, shape.kv_heads, do_rotary=1)

    def attend(self, attention: CudaAttention, layer: int, qkv: torch.Tensor, width: int) -> torch.Tensor:
        out = qkv.new_empty(len(qkv), width)
        caches = self.layers[layer]
        operands = Operands(
            *(qkv, None, None, *caches, self.cumulative, self.past, self.table, self.slots, self.cos, self.sin)
        )
        attention(operands, self.attributes, out)
        return out


Product = Callable[[torch.Tensor, Any], torch.Tensor]


def step(
    model: Model, weights: Weights[Any], cache: Cache | None, x: torch.Tensor, product: Product, gated: Product
) -> torch.Tensor:
    """Logits of one decode step of the rows x; without a cache, attention gives its queries."""
    shape, residual = model.shape, torch.zeros_like(x)

    def normalized(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = model.elementwise.add_rms_norm(x, residual, model.norm)
        return out, x if total is None else total

    for number, layer in enumerate(weights.layers):
        hidden, residual = normalized(x, residual)
        qkv = product(hidden, layer["qkv"])
        if cache is None:
            attended = qkv[:, : shape.attention].contiguous()
        else:
            attended = cache.attend(model.attention, number, qkv, shape.attention)
        hidden, residual = normalized(product(attended, layer["o"]), residual)
        x = product(gated(hidden, layer["gate_up"]), layer["down"])
    return product(normalized(x, residual)[0], weights.head)


def milliseconds(run: Callable[[], Any], repetitions: int = 15) -> float:
    """Median time of a CUDA graph of `run`."""
    return device_seconds(run, 1, repetitions, warm_ups=3) * 1e3


def read_bandwidth() -> float:
    """Bytes a second of reading 2 GiB once."""
    data = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    return data.numel() * 4 / (milliseconds(lambda: torch.sum(data)) * 1e-3)


def measure_step(
    model: Model, weights: Weights[torch.Tensor], batch: int, context: int, bandwidth: float
) -> dict[str, float]:
    x, cache = random(batch, model.shape.hidden), Cache(model.shape, batch, context)
    kiln: tuple[Product, Product] = (model.linear, model.linear_swiglu)
    cublas: tuple[Product, Product] = (torch.nn.functional.linear, model.library_swiglu)
    bytes_read = model.shape.weight_bytes
    return {
        "batch": batch,
        "kiln_ms": milliseconds(lambda: step(model, weights, cache, x, *kiln)),
        "cublas_ms": milliseconds(lambda: step(model, weights, cache, x, *cublas)),
        "floor_ms": (bytes_read + model.shape.cache_bytes(batch * context)) / bandwidth * 1e3,
        "kiln_without_attention_ms": milliseconds(lambda: step(model, weights, None, x, *kiln)),
        "cublas_without_attention_ms": milliseconds(lambda: step(model, weights, None, x, *cublas)),
        "floor_without_attention_ms": bytes_read / bandwidth * 1e3,
    }


def measure_quantised(
    model: Model, form: WeightFormat, batches: list[int], context: int, bandwidth: float
) -> dict[int, tuple[float, float]]:
    """Milliseconds of a step and of its floor, by batch."""
    weights = Weights(model.shape, lambda width, depth: random_bits(form, width, depth))
    bytes_read = model.shape.weight_bytes * (9 / 32 if form == "int4" else 1 / 2)  # int4's with its groups' scales
    found = {}
    for batch in batches:
        x, cache = random(batch, model.shape.hidden), Cache(model.shape, batch, context)
        taken = milliseconds(
            lambda x=x, cache=cache: step(  # type: ignore[misc]
                model, weights, cache, x, model.quant_linear, model.quant_linear_swiglu
            )
        )
        found[batch] = taken, (bytes_read + model.shape.cache_bytes(batch * context)) / bandwidth * 1e3
    return found


def measure_elementwise(model: Model, batch: int, launches: int = 50) -> dict[str, float]:
    """Microseconds of one call, of many in a row in a graph."""
    shape, elementwise = model.shape, model.elementwise
    x, skip, packed = random(batch, shape.hidden), random(batch, shape.hidden), random(batch, 2 * shape.intermediate)

    def microseconds(run: Callable[[], Any]) -> float:
        return milliseconds(lambda: [run() for _ in range(launches)]) / launches * 1e3

    def torch_norm() -> torch.Tensor:
        return torch.nn.functional.rms_norm(x + skip, (shape.hidden,), model.norm, 1e-5)

    def torch_swiglu() -> torch.Tensor:
        gate, up = packed.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    return {
        "batch": batch,
        "add_rms_norm_us": microseconds(lambda: elementwise.add_rms_norm(x, skip, model.norm)),
        "torch_add_rms_norm_us": microseconds(torch_norm),
        "swiglu_us": microseconds(lambda: elementwise.swiglu(packed)),
        "torch_swiglu_us": microseconds(torch_swiglu),
    }


def print_steps(steps: list[dict[str, float]]) -> None:
    columns = ("kiln", "cublas", "kiln_without_attention", "cublas_without_attention")
    print("batch   " + "   ".join(f"{name.replace('_', ' '):>24}" for name in columns))
    for row in steps:
        cells = []
        for name in columns:
            floor = row["floor_without_attention_ms" if "without" in name else "floor_ms"]
            cells.append(f"{row[f'{name}_ms']:17.3f} ({row[f'{name}_ms'] / floor:4.2f})")
        print(f"{row['batch']:5}   {'   '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", help="the compiled CUDA library; built for this device if left out")
    parser.add_argument("--batches", default="1,8,32,64,128")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--weights", default="", help="formats besides 16 bits: int8, float8e4m3fn, int4")
    options = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    model = Model(Shape(), ctypes.CDLL(options.library or str(cuda_library([f"sm_{major}{minor}"]))))
    batches, bandwidth = [int(batch) for batch in options.batches.split(",")], read_bandwidth()
    weights = Weights(model.shape, weight)
    steps = [measure_step(model, weights, batch, options.context, bandwidth) for batch in batches]
    elementwise = [measure_elementwise(model, batch) for batch in batches]
    print(
        f"ms a step at context {options.context}, in brackets over the floor of reading at {bandwidth / 1e12:.2f} TB/s"
    )
    print_steps(steps)
    forms = [form for form in FORMATS if form in options.weights.split(",")]
    quantised = {form: measure_quantised(model, form, batches, options.context, bandwidth) for form in forms}
    for form, rows in quantised.items():
        for row in steps:
            taken, floor = rows[int(row["batch"])]
            of_sixteen = taken / min(row["kiln_ms"], row["cublas_ms"])
            print(f"{form:13} batch {row['batch']:4}  {taken:.3f} ({taken / floor:.2f}), {of_sixteen:.2f} of 16 bits")
    for row in elementwise:
        print("us a call  " + "   ".join(f"{name.removesuffix('_us')} {value:.4g}" for name, value in row.items()))
    results = {"context": options.context, "steps": steps, "quantised": quantised, "elementwise": elementwise}
    print(json.dumps({"bandwidth": bandwidth, **results}))


if __name__ == "__main__":
    main()
