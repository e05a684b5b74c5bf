"""Loads a `ModelSource` as a torch model on the CPU in FP32, ready to be exported or compared with.

`describe` reads only the configuration, in seconds, and refuses what Kiln cannot build; `load` reads weights.
"""

import importlib
import io
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pipeline.source import ModelSource
from plugins.errors import KilnError, first_line

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_MOST_LAYERS = 1000
"""Building the skeleton of a configuration with more, surely a damaged one, would take minutes."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


@dataclass(frozen=True)
class Description:
    """What a model's configuration says. `parameters` counts tied weights once."""

    architecture: str
    is_decoder: bool
    config: "PretrainedConfig"
    model_class: "type[PreTrainedModel]"
    parameters: int


@dataclass(frozen=True)
class TorchModel:
    """A loaded model. `example_inputs` and `dynamic_shapes` are for models without a KV cache only."""

    source: ModelSource
    module: "torch.nn.Module"
    architecture: str
    is_decoder: bool
    tokenizer: "PreTrainedTokenizerBase | None"
    example_inputs: "dict[str, torch.Tensor] | None" = None
    dynamic_shapes: dict[str, Any] | None = None

    @property
    def pretrained(self) -> "PreTrainedModel":
        """The module of a Hugging Face or GGUF source."""
        return cast("PreTrainedModel", self.module)

    @property
    def parameters(self) -> int:
        """How many parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def describe(source: ModelSource) -> Description | None:
    """Read a Hugging Face or GGUF model's configuration; None for other kinds. Raises KilnError."""
    if source.kind not in ("huggingface", "gguf"):
        return None
    import torch
    import transformers

    with _quiet(), _readable(source):
        config = transformers.AutoConfig.from_pretrained(**_location(source))
    architecture = str((config.architectures or [""])[0])
    if not architecture and source.kind == "gguf":
        mapping: Any = transformers.AutoModelForCausalLM._model_mapping
        architecture = mapping[type(config)].__name__ if type(config) in mapping else ""
    model_class = getattr(transformers, architecture, None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise KilnError(
            f"{source.target}: the architecture '{architecture or 'not named in config.json'}' is unknown to "
            f"transformers {transformers.__version__}; wrap the model in a module:callable, or upgrade transformers"
        )
    is_decoder = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if is_decoder and not getattr(model_class, "_supports_attention_backend", False):
        raise KilnError(
            f"{source.target}: {architecture} does not take an attention function (transformers' AttentionInterface), "
            "which Kiln's paged attention needs; use an architecture that does (Llama, Qwen, Mistral, Gemma and most "
            "others), or export it yourself and pass the .onnx file"
        )
    if model_class._can_set_experts_implementation():
        raise KilnError(
            f"{source.target}: {architecture} routes tokens to experts, which torch cannot export with packed tokens "
            "and Kiln does not rewrite yet; use a dense model"
        )
    text = config.get_text_config()
    for field, most in (("num_hidden_layers", _MOST_LAYERS), ("max_position_embeddings", 2**31 - 1)):
        value = getattr(text, field, 1)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise KilnError(f"{source.target}: {field} is {value!r}; expected 1 to {most}")
    with torch.device("meta"), _quiet(), _readable(source):
        skeleton = model_class(config)
    skeleton.tie_weights()
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    return Description(architecture, is_decoder, config, model_class, parameters)


def load(source: ModelSource, description: Description | None = None) -> TorchModel:
    """Load the weights. Raises KilnError for what cannot be read, and for models in training mode."""
    if source.kind == "onnx":
        raise KilnError(f"{source.target} is an ONNX model; there is no torch model to load from it")
    description = description or describe(source)
    model = _load_pretrained(source, description) if description is not None else _load_callable(source)
    _refuse_training(model.module)
    return model


def _load_pretrained(source: ModelSource, description: Description) -> TorchModel:
    import torch

    with _quiet(), _readable(source):
        loaded: Any = description.model_class.from_pretrained(
            **_location(source), config=description.config, dtype=torch.float32, output_loading_info=True
        )
    module, info = loaded
    if missing := sorted(info["missing_keys"]):  # transformers gives them random values
        raise KilnError(
            f"{source.target} lacks {len(missing)} weights of {description.architecture}, {missing[0]} for one; "
            "copy the whole model again, or correct 'architectures' in its config.json"
        )
    module = module.eval().requires_grad_(False)
    tokenizer = _tokenizer(source)
    example, dynamic = (None, None) if description.is_decoder else _example_inputs(module, tokenizer)
    return TorchModel(source, module, description.architecture, description.is_decoder, tokenizer, example, dynamic)


def _tokenizer(source: ModelSource) -> "PreTrainedTokenizerBase | None":
    """The model's tokenizer; None for a folder that has none of a tokenizer's files."""
    import transformers

    if source.kind == "huggingface" and not any(file.name in _TOKENIZER_FILES for file in source.files):
        return None
    with _quiet():
        try:
            return transformers.AutoTokenizer.from_pretrained(**_location(source))
        except Exception as error:  # the tokenizers library raises Exception itself
            raise KilnError(
                f"{source.target}: its tokenizer could not be read: {first_line(error)}; copy the model again, or "
                "remove the tokenizer's files to build without one"
            ) from error


def _load_callable(source: ModelSource) -> TorchModel:
    import torch

    name, _, attribute = source.target.partition(":")
    with redirect_stdout(sys.stderr), _users_code(source):  # standard output is for our own results
        function = getattr(importlib.import_module(name), attribute, None)
        if not callable(function):
            raise KilnError(f"{source.target}: the module '{name}' has no callable '{attribute}'")
        result = function()
    expected = "(torch.nn.Module, example inputs as a dict or tuple of tensors[, dynamic_shapes by input name])"
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], torch.nn.Module):
        raise KilnError(f"{source.target} returned {type(result).__name__}; expected {expected}")
    module, example = result[0], result[1]
    if isinstance(example, torch.Tensor):
        example = (example,)
    if isinstance(example, (tuple, list)):
        names = _forward_names(module)
        if len(example) > len(names):
            raise KilnError(
                f"{source.target} returned {len(example)} example inputs, but the module takes {len(names)}: "
                f"{', '.join(names) or 'none'}; expected {expected}"
            )
        example = dict(zip(names, example, strict=False))
    if not isinstance(example, Mapping) or not example or not _are_named_tensors(example):
        raise KilnError(f"{source.target} returned example inputs that are not tensors; expected {expected}")
    dynamic = result[2] if len(result) == 3 else {key: {0: "batch"} for key, value in example.items() if value.dim()}
    if not isinstance(dynamic, Mapping) or not set(dynamic) <= set(example):
        raise KilnError(
            f"{source.target} returned dynamic_shapes {dynamic!r}; expected a dict by input name "
            f"({', '.join(example)}) of axis to dimension name, as {{'{next(iter(example))}': {{0: 'batch'}}}}"
        )
    if foreign := {str(p.dtype) for p in module.parameters() if p.is_floating_point()} - {"torch.float32"}:
        raise KilnError(f"{source.target} returned weights in {', '.join(sorted(foreign))}; call .float() on the model")
    return TorchModel(source, module, type(module).__name__, False, None, dict(example), dict(dynamic))


def _example_inputs(
    module: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None"
) -> "tuple[dict[str, torch.Tensor], dict[str, Any]]":
    """Two rows of plausible inputs for a Hugging Face encoder or vision model, and which axes vary."""
    import torch

    config, generator = module.config, torch.Generator().manual_seed(0)
    accepted = _forward_names(module)
    if "pixel_values" in accepted and "input_ids" not in accepted:
        edge = getattr(config, "image_size", 224)
        size = edge if isinstance(edge, (list, tuple)) else (edge, edge)
        pixels = torch.randn(2, config.num_channels, *size, generator=generator)
        return {"pixel_values": pixels}, {"pixel_values": {0: "batch"}}
    if "input_ids" not in accepted:
        raise KilnError(
            f"{type(module).__name__} takes neither input_ids nor pixel_values; wrap it in a module:callable "
            "that returns the module and example inputs"
        )
    shape = (2, 7)
    candidates = {
        "input_ids": torch.randint(0, config.vocab_size, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
        "token_type_ids": torch.zeros(shape, dtype=torch.int64),
    }
    wanted = set(tokenizer.model_input_names) if tokenizer is not None else {"input_ids", "attention_mask"}
    example = {name: value for name, value in candidates.items() if name in wanted and name in accepted}
    return example, {name: {0: "batch", 1: "sequence"} for name in example}


def _are_named_tensors(example: Mapping[Any, Any]) -> bool:
    import torch

    return all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in example.items())


def _forward_names(module: "torch.nn.Module") -> list[str]:
    import inspect

    return list(inspect.signature(module.forward).parameters)


def _refuse_training(module: "torch.nn.Module") -> None:
    import torch

    if module.training:
        raise KilnError(f"the model {type(module).__name__} is in training mode; call .eval() on it before export")
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm) and (child.training or child.running_mean is None):
            raise KilnError(
                f"BatchNorm '{name}' uses batch statistics (training mode, or no running mean), so its output would "
                "depend on the batch; call .eval() and train it with track_running_stats=True"
            )
        if child.training and isinstance(child, torch.nn.modules.dropout._DropoutNd):
            raise KilnError(f"Dropout '{name}' is in training mode; call .eval() on the whole model before export")


def _location(source: ModelSource) -> dict[str, Any]:
    assert source.path is not None
    options = {"trust_remote_code": False, "local_files_only": True}  # without the first, transformers asks the user
    if source.kind == "gguf":
        return {**options, "pretrained_model_name_or_path": str(source.path.parent), "gguf_file": source.path.name}
    return {**options, "pretrained_model_name_or_path": str(source.path)}


@contextmanager
def _users_code(source: ModelSource) -> Iterator[None]:
    """Code of the user's may raise anything, and end the program; say where it did."""
    try:
        yield
    except KilnError:
        raise
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise KilnError(
            f"{source.target} failed with {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}); "
            "call it from Python to see the whole trace"
        ) from error


@contextmanager
def _readable(source: ModelSource) -> Iterator[None]:
    """Readers of model files raise anything on damaged ones; say which file it was."""
    try:
        yield
    except KilnError:
        raise
    except Exception as error:
        what = "a GGUF file" if source.kind == "gguf" else "a Hugging Face model folder"
        raise KilnError(
            f"{source.target} could not be read as {what}: {first_line(error)}; "
            "it may be truncated or of an unsupported kind"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws progress bars and warns about missing optional parts; our own progress says enough."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
