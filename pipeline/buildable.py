"""What this version of Kiln can build for which SKU, and on which machine: for `build-engine` and `kiln doctor` alike.

Knows backends and the attention plugin, not models: whether one fits is `pipeline.forecast`'s.
"""

from engines.sku import Sku, host_cpu_features
from plugins.cuda_build import ARCHITECTURES
from plugins.errors import KilnError

FINISHED = frozenset(
    {("onnxruntime", "CPUExecutionProvider"), ("onnxruntime", "CUDAExecutionProvider"), ("tensorrt", None)}
)
"""Backends and providers that engines are built and run with; TensorRT's by `kiln tensorrt`."""
_TENSORRT = "kiln tensorrt build MODEL --sku {} --out BUNDLE"
OLDEST_FOR_ATTENTION = next(iter(ARCHITECTURES))


def unfinished_backend(sku: Sku) -> str | None:
    """Why this version builds nothing for the SKU, whatever the machine; None where it does."""
    if (sku.backend, sku.provider) in FINISHED:
        return None
    return f"SKU {sku.name} needs {sku.provider}, for which this version of Kiln builds no engines yet"


def attention_problem(sku: Sku) -> str | None:
    """Why a decoder's attention does not run on the SKU as a plugin, and the form that does; None where it runs."""
    if sku.runs_attention_plugin:
        return None
    return (
        f"SKU {sku.name} is {sku.arch}, but Kiln's paged-attention plugin needs {OLDEST_FOR_ATTENTION} or newer; a "
        "decoder runs there only in the plugin-free form, TensorRT's own attention layers over a linear KV cache "
        f"(TensorRT 11.1 or newer): {_TENSORRT.format(sku.name)} --attention native"
    )


def refuse_unbuildable(sku: Sku, is_decoder: bool, elsewhere: bool = False) -> None:
    """Raise KilnError unless an engine for the SKU can be built, and checked, on this machine.

    `elsewhere`: it will be checked on a machine of that type before it is used.
    """
    if is_decoder and (problem := attention_problem(sku)):
        raise KilnError(problem)
    if sku.backend == "tensorrt":
        raise KilnError(
            f"SKU {sku.name} is built with TensorRT, on a machine of that type: {_TENSORRT.format(sku.name)}"
        )
    if unfinished := unfinished_backend(sku):
        other = "" if is_decoder else f"; with TensorRT: {_TENSORRT.format(sku.name)}"
        raise KilnError(
            f"{unfinished}{other}; kiln doctor --sku {sku.name} shows what this machine has for it, and "
            f"kiln optimize --sku {sku.name} makes its graph; use --sku cpu, cpu-avx2 or cpu-avx512"
        )
    if not elsewhere and (missing := set(sku.cpu_features) - host_cpu_features()):
        raise KilnError(
            f"SKU {sku.name} cannot be checked on this machine, whose CPU lacks {', '.join(sorted(missing))}; "
            "build it on a machine of that type, or use --sku cpu"
        )
