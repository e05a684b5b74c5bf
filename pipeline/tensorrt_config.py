"""What to build with TensorRT."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from engines.backends.ort_tensorrt import BACKENDS as ORT_BACKENDS
from engines.backends.ort_tensorrt import Backend
from engines.backends.tensorrt.api import Attention, Product
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.profiles import ServingShapes
from engines.sku import Sku
from passes.standard import Precision
from pipeline.quantize.config import QuantizeConfig
from plugins.errors import KilnError

TensorRtBackend = Product | Backend
BACKENDS: tuple[str, ...] = (*get_args(Product), *ORT_BACKENDS)


@dataclass(frozen=True)
class TensorRtBuild:
    """What to build. `passes` rewrites the graph first; without, `precision` must be fp32: the graph has its own.

    `check` compares the engine with the model, on the GPU that it was built for.
    """

    sku: Sku
    out: Path
    precision: Precision = "fp32"
    passes: bool = True
    backend: TensorRtBackend = "tensorrt"
    options: TensorRtOptions = field(default_factory=TensorRtOptions)
    serving: ServingShapes = field(default_factory=ServingShapes)
    check: bool = True
    attention: Attention | None = None
    """Of a decoder; None for the plug-in where it runs."""
    tokenizer: Path | None = None
    """A folder that goes into the bundle."""
    quantize: QuantizeConfig | None = None
    origin: str | None = None
    """What the user called the model, for the manifest; None for the path of its ONNX file."""

    def __post_init__(self) -> None:
        if not self.passes and self.precision != "fp32":
            raise KilnError(
                f"--precision is {self.precision}, which a pass makes, but --no-passes leaves the graph as it is; "
                "leave one of them out"
            )
        if self.quantize is not None and not self.passes:
            raise KilnError("--quant quantises the graph that the passes leave: leave --no-passes out with it")
