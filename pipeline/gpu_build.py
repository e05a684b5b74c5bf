"""What a build for an NVIDIA GPU does otherwise, on a machine that need not have one: plugins, check, what stays open.

The graph is checked in the form that this machine's CPU runs (`pipeline.cpu_form`). Its kernels are compiled here and
run nowhere yet: that, and what only a measurement can choose, is left to `kiln tune` on a machine of the SKU's type,
which has logits in the bundle to compare with. Knows no pass and no backend.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engines.manifest import PluginRecord, QuantizationRecord
from engines.sku import Sku
from passes.manager import link_or_copy
from passes.onnx_model import DecoderSpec, OnnxModel, load_structure
from pipeline.compare.onnx_subject import bound_graph
from pipeline.cpu_form import write_cpu_form
from pipeline.expected import EXPECTED, expected_from_graph, expected_from_torch
from pipeline.load import TorchModel
from pipeline.quantize.config import QuantizeConfig, refuse_schemes
from plugins.abi import abi_hash
from plugins.build import cpu_library
from plugins.cuda_build import cuda_library, find_nvcc
from plugins.errors import KilnError
from plugins.paged_attention.schema import CUDA_BLOCK_GRAIN, CUDA_HEAD_SIZES, DOMAIN, OP_TYPE

PLUGINS = "plugins"
UNVERIFIED_KERNELS = "the GPU's kernels did not run: the check was of the graph, on this machine's CPU"
UNMEASURED = "batch sizes and tokens of a step are defaults, nothing was measured"


def refuse_gpu_decoder(head_sizes: Iterable[int], block_size: int, sku: Sku) -> None:
    """Raise KilnError for a decoder that the CUDA attention does not carry, or without a compiler for it."""
    sizes = sorted(set(head_sizes) - set(CUDA_HEAD_SIZES))
    if sizes:
        raise KilnError(
            f"the model has attention heads of {', '.join(map(str, sizes))}; the attention of {sku.name} is built for "
            f"{', '.join(map(str, CUDA_HEAD_SIZES))}: use --sku cpu"
        )
    if block_size % CUDA_BLOCK_GRAIN:
        raise KilnError(
            f"--block-size is {block_size}; the attention of {sku.name} takes multiples of {CUDA_BLOCK_GRAIN}"
        )
    find_nvcc()


def refuse_quantising(config: QuantizeConfig, precision: str, sku: Sku) -> None:
    """Raise KilnError for a quantised build that Kiln's CUDA operators do not carry, as far as options tell."""
    if (sku.backend, sku.provider) != ("onnxruntime", "CUDAExecutionProvider"):
        raise KilnError(
            f"build-engine quantises for CPUs, and for GPUs with ONNX Runtime; {sku.name} has {sku.backend}"
        )
    if precision == "fp32":
        raise KilnError(f"quantised engines for {sku.name} have activations of 16 bits: use --precision fp16 or bf16")
    if config.attention != "auto":
        raise KilnError(f"--attention is for CPUs; on {sku.name} attention computes in {precision}: leave it out")
    refuse_schemes([config.quant], sku)


def unmeasured_layers(record: QuantizationRecord, sku: Sku) -> tuple[str, ...]:
    """What a manifest says of quantised layers whose speed nobody knows."""
    if not record.unmeasured:
        return ()
    total = sum(count for scheme, count in record.schemes.items() if scheme != "float")
    return (
        f"{record.unmeasured} of {total} quantised layers have shapes that were not measured on {sku.name}: which "
        "kernels multiply them is a default",
    )


def gpu_plugin(folder: Path, sku: Sku) -> PluginRecord:
    """Compile the operator library for the SKU's architectures into a bundle's folder.

    Raises KilnError without nvcc, saying what to install.
    """
    library = cuda_library(sku.plugin_architectures)
    link_or_copy(library, folder / PLUGINS / library.name)
    return PluginRecord(file=f"{PLUGINS}/{library.name}", operator=f"{DOMAIN}::{OP_TYPE}", abi_hash=abi_hash())


def provider_options(sku: Sku, model: OnnxModel) -> dict[str, str]:
    """The SKU's own for its provider, and channels-last kernels for convolutions: docs/benchmarks/gpu.md."""
    options = {name: str(int(value) if isinstance(value, bool) else value) for name, value in sku.options.items()}
    convolves = any(node.op_type == "Conv" for node in load_structure(model.path).graph.node)
    return {**options, "prefer_nhwc": "1"} if convolves else options


@contextmanager
def runnable(model: OnnxModel) -> Iterator[OnnxModel]:
    """The model in the form that this machine's CPU runs, as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="kiln-gpu-check-") as folder:
        yield replace(model, path=write_cpu_form(model.path, Path(folder)))


def write_expected(torch_model: TorchModel, decoder: DecoderSpec, folder: Path) -> str:
    """Write what the model gives in FP32 for some texts into a bundle's folder; returns the file's name."""
    expected_from_torch(torch_model, decoder).save(folder / EXPECTED)
    return EXPECTED


def write_expected_of_graph(source: OnnxModel, folder: Path) -> str:
    """The same by a graph on this machine's CPU: an exported model's in FP32, or in its form a quantised engine's own.

    The latter is what its kernels are to give, however far the weights' bits are from the model's.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-gpu-check-") as work:
        found = expected_from_graph(bound_graph(source.path, Path(work)), source, [cpu_library()])
    found.save(folder / EXPECTED)
    return EXPECTED
