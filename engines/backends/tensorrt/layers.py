"""What the builder made of a network: layers with their tactics and types, read from its log.

With detailed verbosity TensorRT prints the layers of a finished engine in its verbose log, also where no GPU could load
that engine to inspect it. What was fused is seen from the ONNX nodes that one layer stands for.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

_LAYER = re.compile(r"^(?:\[verbose\] )?Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), (?P<rest>.*)$")
_TENSOR = re.compile(r"\{ Name: (?P<name>[^,]+), .*?Datatype: (?P<dtype>\w+)")
_SECTION = re.compile(
    r"(Inputs|Constants|Outputs): \[(.*?)\](?=, (?:Inputs|Constants|Outputs|TacticName|TacticValue)|$)"
)
_TACTIC = re.compile(r"Tactic(?:Name|Value)?: (?P<tactic>[^,]*)")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_MEMORY = {
    "activations": re.compile(r"Total Activation Memory: (\d+) bytes"),
    "weights": re.compile(r"Total Weights Memory: (\d+) bytes"),
    "scratch": re.compile(r"Max Scratch Memory: (\d+) bytes"),
}
_ALLOCATORS = re.compile(r"Peak memory usage of TRT CPU/GPU memory allocators: CPU (\d+) MiB, GPU (\d+) MiB")


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine. `nodes` are the ONNX nodes that it computes; types are TensorRT's, such as `Int8`."""

    name: str
    kind: str
    tactic: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    input_types: tuple[str, ...]
    output_types: tuple[str, ...]
    constant_types: tuple[str, ...]

    @property
    def multiplies_in_8_bits(self) -> bool:
        """Whether the first input and the other operand, an input or a constant, are 8-bit tensors."""
        others = (*self.input_types[1:2], *self.constant_types[:1])
        return self.input_types[:1] in (("Int8",), ("FP8",)) and self.input_types[0] in others


def layers_from_log(lines: Iterable[str]) -> tuple[EngineLayer, ...]:
    """All layers that a verbose log lists, in the order in which they run; empty where it lists none."""
    return tuple(_layer(match) for line in lines if (match := _LAYER.match(line)))


def memory_from_log(lines: Iterable[str]) -> dict[str, int]:
    """Bytes of `activations`, `weights` and `scratch` of the engine, and `gpu_peak` of the build, where it says so."""
    found: dict[str, int] = {}
    for line in lines:
        for name, pattern in _MEMORY.items():
            if match := pattern.search(line):
                found[name] = int(match[1])
        if match := _ALLOCATORS.search(line):
            found["gpu_peak"] = int(match[2]) * 2**20
    return found


def layers_to_file(path: Path, layers: Iterable[EngineLayer]) -> None:
    path.write_text(json.dumps([asdict(layer) for layer in layers], indent=1) + "\n", encoding="utf-8")


def layers_from_file(path: Path) -> tuple[EngineLayer, ...]:
    return TypeAdapter(tuple[EngineLayer, ...]).validate_json(path.read_bytes())


def float_products(layers: Iterable[EngineLayer], products: Iterable[str]) -> list[str]:
    """Those of the ONNX products, by name, that no layer multiplies in 8 bits, although their Q and D ask for it."""
    fused = {name for layer in layers if layer.multiplies_in_8_bits for name in layer.nodes}
    return [name for name in products if name not in fused]


def _layer(match: "re.Match[str]") -> EngineLayer:
    rest = match["rest"]
    tensors = {section: _TENSOR.findall(body) for section, body in _SECTION.findall(rest)}
    tactic = _TACTIC.search(rest)
    inputs = tensors.get("Inputs", [])
    return EngineLayer(
        match["name"],
        match["type"],
        tactic["tactic"].strip() if tactic else "",
        tuple(_NODE.findall(rest)),
        tuple(name for name, _ in inputs),
        tuple(dtype for _, dtype in inputs),
        tuple(dtype for _, dtype in tensors.get("Outputs", [])),
        tuple(dtype for _, dtype in tensors.get("Constants", [])),
    )
