"""Export: a `TorchModel` to an ONNX file with stable, documented names.

Decoders become serving graphs (`pipeline.serving_graph`); other models are exported as they are, with
their own input and output names. Weights go to one external data file beside the graph, each once,
whatever its size; traces of the exporting machine are removed.
"""

import ast
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passes.onnx_model import DECODER_METADATA, DecoderSpec, OnnxModel, onnx_model_from_path
from passes.quantization.layers import LAYER_KINDS, unique_name
from pipeline.config import BuildConfig
from pipeline.load import TorchModel
from pipeline.serving_graph import kv_layers, runs, serving_module
from plugins.errors import KilnError
from plugins.paged_attention.schema import LOGITS, STEP_INPUTS, KvSpec, cache_names, cache_output_names

if TYPE_CHECKING:
    import onnx_ir
    import torch

OPSET = 21
_CACHE_DIMS = ("blocks", "block_size")
_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch notes the modules around a node, outermost first."""


@dataclass(frozen=True)
class _Traced:
    """What torch.onnx.export is given, and the names that its flat inputs and outputs get."""

    module: "torch.nn.Module"
    args: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    input_names: list[str]
    output_names: list[str]
    metadata: dict[str, str]


def export_model(model: TorchModel, path: Path, config: BuildConfig) -> OnnxModel:
    """Write `path` and `path` + `.data`. Raises KilnError for a model that torch cannot export."""
    import torch

    traced = _trace_decoder(model, config) if model.is_decoder else _trace_plain(model)
    try:
        with torch.no_grad(), _silent():
            program = torch.onnx.export(
                traced.module,
                traced.args,
                dynamo=True,
                dynamic_shapes=traced.dynamic_shapes,
                input_names=traced.input_names,
                output_names=traced.output_names,
                opset_version=OPSET,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        cause = error.__cause__ or error
        raise KilnError(
            f"{model.source.spec}: torch could not export {model.architecture}: {_reason(cause)}; if a dimension is "
            "fixed by the model, pass dynamic_shapes from a module:callable"
        ) from error
    assert program is not None
    _name_layers(program.model)
    _remove_traces(program.model)
    _name_dimensions(program.model)
    program.model.metadata_props.update(traced.metadata)
    program.save(path, external_data=True)
    return onnx_model_from_path(path)


@contextmanager
def _silent() -> Iterator[None]:
    """torch's exporter warns of absent optional packages, and prints whole graphs when it fails."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _reason(error: BaseException) -> str:
    """The first lines of torch's message, which may go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:600] or type(error).__name__


def decoder_spec(model: TorchModel, config: BuildConfig) -> DecoderSpec:
    """What the runtime must know of a decoder, from the model itself."""
    text = model.pretrained.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    max_context = config.max_context or limit or 2048
    _refuse_rotation_by_length(model, text, max_context)
    return DecoderSpec(
        kv=KvSpec(layers=kv_layers(model.pretrained), block_size=config.block_size, dtype=config.kv_dtype or "float32"),
        vocab_size=text.vocab_size,
        max_context=max_context,
        eos_token_ids=_eos_token_ids(model),
    )


def _refuse_rotation_by_length(model: TorchModel, text: Any, max_context: int) -> None:
    """Frequencies that change with the longest sequence of a step would make packed sequences depend on each other."""
    parameters = getattr(text, "rope_parameters", None) or {}
    what = f"{model.source.spec}: the rotation of {model.architecture} depends on the sequence's length"
    for rope in (parameters, *parameters.values()):  # some models have one set per type of layer
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "dynamic":
            raise KilnError(f"{what} (rope_type dynamic), which Kiln cannot build; use a model with another rope_type")
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or text.original_max_position_embeddings
            if max_context > original:
                raise KilnError(
                    f"{what} beyond {original} tokens (rope_type longrope), which Kiln cannot build; "
                    f"choose --max-context {original} or less"
                )


def _trace_decoder(model: TorchModel, config: BuildConfig) -> _Traced:
    import torch

    spec = decoder_spec(model, config)
    layers = range(len(spec.kv.layers))
    # Sizes are above 1 and distinct per symbol, so that torch specialises none of them.
    sizes = {"tokens": 7, "rows": 5, "seqs": 3, "seqs+1": 4, "max_blocks": 6, "blocks": 8}
    dims = {name: torch.export.Dim(name.replace("+1", "_plus_1")) for name in [*sizes, "block_size"]}
    step = [torch.zeros([sizes[d] for d in shape], dtype=torch.int32) for shape in STEP_INPUTS.values()]
    dtype = getattr(torch, spec.kv.dtype)
    caches = [[torch.zeros(spec.kv.cache_shape(i, sizes["blocks"]), dtype=dtype) for i in layers] for _ in range(2)]
    cache_dims = [{axis: dims[name] for axis, name in enumerate(_CACHE_DIMS)} for _ in layers]
    step_dims = [{axis: dims[name] for axis, name in enumerate(shape)} for shape in STEP_INPUTS.values()]
    names = [cache_names(i) for i in layers]
    output_names = [cache_output_names(i) for i in layers]
    return _Traced(
        module=serving_module(model.pretrained),
        args=(*step, *caches),
        dynamic_shapes=(*step_dims, cache_dims, cache_dims),
        input_names=[*STEP_INPUTS, *(key for key, _ in names), *(value for _, value in names)],
        output_names=[LOGITS, *(key for key, _ in output_names), *(value for _, value in output_names)],
        metadata={DECODER_METADATA: spec.to_json()},
    )


def _keyword_module(module: "torch.nn.Module", inputs: list[str]) -> "torch.nn.Module":
    """Calls a model by keyword and returns its tensor outputs as a tuple: the form that torch.export takes."""
    import torch

    class KeywordModule(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.eval()

        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(named_outputs(self.module(**dict(zip(inputs, args, strict=True)))).values())

    return KeywordModule()


def named_outputs(result: Any) -> "dict[str, torch.Tensor]":
    """A model's tensor outputs by name: a mapping's keys, or `output`, or `output_0`, `output_1`, ..."""
    import torch

    if isinstance(result, torch.Tensor):
        return {"output": result}
    if hasattr(result, "items"):
        return {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    if isinstance(result, (tuple, list)):
        return {f"output_{i}": value for i, value in enumerate(result) if isinstance(value, torch.Tensor)}
    raise KilnError(f"the model returned {type(result).__name__}; expected a tensor, a tuple or a mapping of tensors")


def _trace_plain(model: TorchModel) -> _Traced:
    import torch

    assert model.example_inputs is not None
    names = list(model.example_inputs)
    with torch.no_grad(), runs(model.module):
        outputs = named_outputs(model.module(**model.example_inputs))
    if not outputs:
        raise KilnError(f"{model.source.spec}: {model.architecture} returned no tensor; nothing to export")
    dynamic = model.dynamic_shapes or {}
    args = tuple(_at_least_two(value, dynamic.get(name)) for name, value in model.example_inputs.items())
    symbols: dict[str, Any] = {}

    def dims(axes: Any) -> Any:
        return {
            axis: symbols.setdefault(d, torch.export.Dim(d)) if isinstance(d, str) else d for axis, d in axes.items()
        }

    shapes = tuple(dims(dynamic[name]) if dynamic.get(name) else None for name in names)
    return _Traced(_keyword_module(model.module, names), args, (shapes,), names, list(outputs), {})


def _at_least_two(value: "torch.Tensor", axes: Any) -> "torch.Tensor":
    """torch specialises dimensions of size 1, so a dynamic one is repeated."""
    for axis in axes or {}:
        if value.shape[axis] == 1:
            value = value.repeat_interleave(2, dim=axis)
    return value


def _eos_token_ids(model: TorchModel) -> tuple[int, ...]:
    """Every token that ends a generation: the generation config's and the tokenizer's."""
    found: set[int] = set()
    for holder in (getattr(model.module, "generation_config", None), model.module.config, model.tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return tuple(sorted(found))


def _name_layers(model: "onnx_ir.Model") -> None:
    """Name every product after the module that it comes from, such as `model.layers.0.mlp.gate_proj`.

    Those that no module of the user's own made keep their names. Several of one module are numbered from the second on.
    """
    taken: set[str] = set()
    for graph in model.graphs():
        for node in graph:
            module = _module_of(node) if node.op_type in LAYER_KINDS and node.domain == "" else ""
            if module:
                node.name = unique_name(module, taken)


def _module_of(node: "onnx_ir.Node") -> str:
    """Path of the module that owns a node's weight, else of the innermost one around it, from the user's model on.

    The weight goes first: a convolution fused with its norm lies in the norm's module.
    """
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    path = str(weight.name).rpartition(".")[0] if weight is not None and weight.is_initializer() else ""
    if not path:
        path = next(iter(ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))[-2:-1]), "")  # the last is the node's
    return path.partition(".")[2]  # without the wrapper's own attribute


def _remove_traces(model: "onnx_ir.Model") -> None:
    """Drop stack traces and module paths: they name the exporting machine's folders and change every digest."""
    for graph in model.graphs():
        for node in graph:
            node.metadata_props.clear()
            for output in node.outputs:
                output.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


def _name_dimensions(model: "onnx_ir.Model") -> None:
    """Give `seqs+1` its contract name: torch's symbols must be identifiers."""
    import onnx_ir

    for value in model.graph.inputs:
        if value.name == "cumulative_sequence_length":
            value.shape = onnx_ir.Shape(["seqs+1"])
