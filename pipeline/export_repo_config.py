"""A Triton model configuration: what a bundle's manifest says, in Triton's terms and protobuf's text format.

Fields are those of `model_config.proto` (package inference); the tests parse every text with that definition. Knows
manifests; does not know files, and whether a model keeps what its names promise.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from engines.backends.onnxruntime import CPU
from engines.backends.tensorrt.profiles import Sizes
from engines.manifest import Manifest, TensorRecord, TensorRtRecord
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.info import TensorInfo
from engines.runtime.shape_buckets import layout_from_tensors
from plugins.errors import KilnError

_BATCHING = BatchingConfig()
_DATA_TYPES: Mapping[str, str] = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
    "str": "TYPE_STRING",
}


@dataclass(frozen=True)
class TritonOptions:
    """What an operator may set beside what the bundle says; None takes the bundle's, else Kiln's own default.

    max_batch     rows of one call
    queue_delay   microseconds that a request may wait for company
    instances     copies of the model: in all on CPUs, on each GPU
    threads       of one call on CPUs; 0 takes all
    server_path   where the server sees the repository: Triton wants operator libraries by their whole path
    """

    max_batch: int | None = None
    queue_delay: int = round(_BATCHING.max_wait * 1e6)
    instances: int = 1
    threads: int | None = None
    server_path: str = "/models"

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("queue_delay", 0), ("instances", 1), ("threads", 0)):
            found = getattr(self, name)
            if found is not None and found < least:
                raise KilnError(f"{name.replace('_', '-')} is {found}; expected at least {least}")


def require_served_by_triton(manifest: Manifest) -> None:
    """Raise KilnError, with what to use instead, for a bundle that no Triton backend can run as Kiln does."""
    if manifest.decoder is not None:
        raise KilnError(
            f"{manifest.name} is a decoder. Its keys and values stay in the engine between steps, and continuous "
            "batching decides at every step which sequences share it; Triton's ONNX Runtime and TensorRT backends keep "
            "nothing between requests. Serve it with kiln serve: OpenAI's API, health and metrics "
            "(docs/server.md; in a cluster docs/deploy.md)"
        )
    record = manifest.tensorrt
    if record is None:
        return
    if manifest.backend.name == "onnxruntime":
        raise KilnError(
            f"{manifest.name} is a model with the engine cache of {manifest.backend.provider}, whose options Triton "
            "sets in its own way; build a plan: kiln tensorrt build --backend tensorrt, or serve it with kiln serve"
        )
    if manifest.backend.name != "tensorrt":
        raise KilnError(
            f"{manifest.name} has a plan of {manifest.backend.name}; Triton's backend loads plans of tensorrt: build "
            "it with kiln tensorrt build --backend tensorrt, or serve it with kiln serve"
        )
    if record.weights is not None:
        raise KilnError(
            f"{manifest.name} has a plan without weights, which is refitted when it is opened; Triton does not refit: "
            "build it without --trt-strip-weights, or serve it with kiln serve"
        )


def can_batch(manifest: Manifest) -> bool:
    """Whether the names of the dimensions promise that requests may share a call."""
    groups = ([TensorInfo(t.name, t.dtype, t.shape) for t in group] for group in (manifest.inputs, manifest.outputs))
    return layout_from_tensors(*groups).batch is not None


def text_from_manifest(
    manifest: Manifest, identity: str, name: str, version: int, options: TritonOptions, batches: bool
) -> str:
    """`config.pbtxt` of a model. `batches` False serves one request a call, whatever the bundle says.

    Raises KilnError for a type that Triton has no name for, and a batch that a TensorRT plan does not take.
    """
    import jinja2

    max_batch = _max_batch(manifest, options) if batches else 0
    source = files("pipeline").joinpath("data/config.pbtxt.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["quoted"] = _quoted
    plan = manifest.tensorrt is not None
    backend = manifest.backend
    return environment.from_string(source).render(
        bundle=identity,
        origin=f"{manifest.sku.name}, checked with {backend.name} {backend.version}, {backend.provider}",
        name=name,
        backend="tensorrt" if plan else "onnxruntime",
        model_file=model_file(manifest),
        max_batch=max_batch,
        interface=interface_text(manifest, batched=max_batch > 0),
        preferred=_preferred(manifest, max_batch) if max_batch else (),
        queue_delay=options.queue_delay,
        max_waiting=_BATCHING.max_waiting,
        kind="KIND_CPU" if backend.provider == CPU else "KIND_GPU",
        instances=options.instances,
        profiles=range(len(manifest.tensorrt.profiles)) if manifest.tensorrt else (),
        libraries=[f"{options.server_path.rstrip('/')}/{name}/{version}/{p.file}" for p in manifest.plugins],
        parameters={**({} if plan else _session(manifest, options)), "kiln.bundle": identity},
    )


def model_file(manifest: Manifest) -> str:
    """The name that Triton expects in a version's folder."""
    return "model.onnx" if manifest.tensorrt is None else "model.plan"


def interface_text(manifest: Manifest, batched: bool) -> str:
    """The inputs and outputs; equal texts are equal interfaces."""
    return "\n".join(
        "\n".join([f"{side} [", ",\n".join(_tensor_text(tensor, batched) for tensor in tensors), "]"])
        for side, tensors in (("input", manifest.inputs), ("output", manifest.outputs))
    )


def _tensor_text(tensor: TensorRecord, batched: bool) -> str:
    """Of a batch, Triton wants the shape of one row. It has no tensors without dimensions: those are given a 1."""
    if tensor.dtype not in _DATA_TYPES:
        raise KilnError(
            f"tensor {tensor.name} has type {tensor.dtype}, which Triton has no name for; it has "
            f"{', '.join(_DATA_TYPES)}: convert it inside the model"
        )
    dims = [size if isinstance(size, int) else -1 for size in (tensor.shape[1:] if batched else tensor.shape)]
    lines = [
        f"name: {_quoted(tensor.name)}",
        f"data_type: {_DATA_TYPES[tensor.dtype]}",
        f"dims: [ {', '.join(map(str, dims)) or '1'} ]",
        *([] if dims else ["reshape { shape: [ ] }"]),
    ]
    return "  {\n" + "".join(f"    {line}\n" for line in lines) + "  }"


def _max_batch(manifest: Manifest, options: TritonOptions) -> int:
    serving = manifest.serving
    own = serving.max_batch if serving is not None else None
    if manifest.tensorrt is None:
        return options.max_batch or own or _BATCHING.max_batch
    most = max(sizes.most for sizes in _plan_batches(manifest, manifest.tensorrt))
    if options.max_batch is not None and options.max_batch > most:
        raise KilnError(
            f"--max-batch is {options.max_batch}, but the plan of {manifest.name} was built for batches of up to "
            f"{most}; build it with kiln tensorrt build --max-batch {options.max_batch}"
        )
    return min(options.max_batch or own or most, most)


def _preferred(manifest: Manifest, max_batch: int) -> Sequence[int]:
    """Sizes that pay beyond others: those that a plan was tuned for, or the one beyond which efficiency falls.

    Triton fills batches up to the largest in any case, so that one is not named.
    """
    found: set[int] = set()
    if manifest.tensorrt is not None:
        found = {sizes.best for sizes in _plan_batches(manifest, manifest.tensorrt)}
    elif manifest.serving is not None and manifest.serving.falls:
        found = {manifest.serving.knee}
    return sorted(size for size in found if 1 < size < max_batch)


def _plan_batches(manifest: Manifest, record: TensorRtRecord) -> list[Sizes]:
    """Of each profile; asked only where all inputs begin with the same symbol."""
    batch = str(manifest.inputs[0].shape[0])
    return [profile.symbols[batch] for profile in record.profiles]


def _session(manifest: Manifest, options: TritonOptions) -> dict[str, str]:
    """ONNX Runtime's settings as Kiln's own backend has them (engines/backends/onnxruntime.py)."""
    tuned = manifest.serving.threads if manifest.serving is not None else 0
    threads = tuned if options.threads is None else options.threads
    return {"intra_op_thread_count": str(threads), "execution_mode": "0", "enable_mem_pattern": "0"}


def _quoted(text: str) -> str:
    """JSON's escapes are protobuf's."""
    return json.dumps(text, ensure_ascii=False)
