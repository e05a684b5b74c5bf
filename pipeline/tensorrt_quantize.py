"""INT8 for TensorRT: the float passes, then plan, calibration and gate of `pipeline.quantize`, Q and D where TensorRT
fuses them.

Every layer that TensorRT has in 8 bits is chosen, but the first and the last, and those that the accuracy limits do not
allow: what saves time there cannot be measured on this machine. A decoder is judged as it will run, with attention and
cache in 16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.manifest import QuantizationRecord
from engines.sku import Sku
from passes.bind_attention import BindAttention
from passes.cast_attention import CastAttention
from passes.manager import PassReport
from passes.onnx_model import OnnxModel
from passes.standard import FLOAT_TABLE
from pipeline.optimize import OptimizeConfig, optimize
from pipeline.progress import Progress
from pipeline.quantize.building import quantised_engine
from pipeline.quantize.config import QuantizeConfig
from plugins.build import cpu_library

SCHEME = "w8a8"
"""Weights and activations in INT8 with fixed ranges: the only one of `--quant int8` that TensorRT multiplies in."""


@dataclass(frozen=True)
class Quantised:
    """`floats` is what was quantised; plan, table and the gate's report lie beside the model, as `record` says."""

    floats: OnnxModel
    record: QuantizationRecord


def quantised_for_tensorrt(
    source: OnnxModel,
    target: Path,
    sku: Sku,
    passes: OptimizeConfig,
    config: QuantizeConfig,
    tokenizer: Path | None,
    progress: Progress,
) -> tuple[OnnxModel, Sequence[PassReport], Quantised]:
    """Write the quantised graph, and what it rests on beside it. A decoder's runs on this machine, too.

    Raises KilnError for data that does not suit the model and where nothing is left to quantise, and GateFailedError
    for what is beyond its limits.
    """
    libraries: list[Path] = []
    if source.decoder is not None:
        bound = (*passes.switches.enable, BindAttention.name, CastAttention.name)
        passes, libraries = replace(passes, switches=replace(passes.switches, enable=bound)), [cpu_library()]
    floats_path = target.parent / "float" / target.name
    floats_path.parent.mkdir()
    with progress.stage("graph passes"):
        wide = replace(passes, precision="fp32")  # the rest is cast once Q and D are there
        floats, reports = optimize(source, floats_path, sku, wide, table=FLOAT_TABLE)
    # One value that is rounded the other way moves all that depend on it: the gate judges what comes of all passes.
    passes = replace(passes, verify=False)
    made, more, record = quantised_engine(floats, target, sku, passes, config, libraries, tokenizer, None, progress)
    return made, (*reports, *more), Quantised(floats, record)
