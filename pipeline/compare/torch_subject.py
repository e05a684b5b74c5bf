"""A loaded torch model as one side of a comparison. Runs on the CPU under `torch.inference_mode`."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.inputs import InputSpec
from pipeline.compare.machine import package_versions
from pipeline.compare.report import Side
from pipeline.compare.subjects import Encode, Subject
from plugins.errors import KilnError

if TYPE_CHECKING:
    import torch

    from pipeline.load import TorchModel

_PREFILL = 256
"""Prompt tokens per call: bounds the attention scores and masks in memory."""


def torch_subject_from_model(model: "TorchModel") -> Subject:
    """Wrap what `pipeline.load.load` gave. The subject shares the model's weights and leaves them alone."""
    side = Side(
        kind="torch",
        name=f"torch {model.source.name}",
        path=str(model.source.path or model.source.target),
        sha256=model.source.sha256,
        precision=_precision(model.module),
        versions=package_versions("torch", "transformers"),
    )
    return _TorchDecoder(side, model) if model.is_decoder else _TorchPlain(side, model)


def _precision(module: "torch.nn.Module") -> str:
    """The precision that most of the floating-point weights have; fp32 for a module without any."""
    import torch

    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            name = names.get(parameter.dtype, str(parameter.dtype))
            sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name], default="fp32")


class _TorchPlain:
    def __init__(self, side: Side, model: "TorchModel") -> None:
        if model.example_inputs is None:
            raise KilnError(f"{model.source.spec} has no example inputs, so its outputs cannot be compared")
        dynamic = model.dynamic_shapes or {}
        self.side = side
        self.inputs = tuple(
            _spec_from_example(name, example, dynamic.get(name)) for name, example in model.example_inputs.items()
        )
        self._dtypes = {name: example.dtype for name, example in model.example_inputs.items()}
        self._module: Any = model.module

    def infer(self, feeds: Mapping[str, NDArray]) -> dict[str, NDArray]:
        import torch

        from pipeline.export import named_outputs

        tensors = {name: torch.from_numpy(np.array(feeds[name])).to(dtype) for name, dtype in self._dtypes.items()}
        with torch.inference_mode():
            result = self._module(**tensors)
        return {name: _numpy(value) for name, value in named_outputs(result).items()}

    def close(self) -> None:
        self._module = None


def _spec_from_example(name: str, example: "torch.Tensor", axes: Mapping[int, Any] | None) -> InputSpec:
    sizes = tuple(example.shape)
    symbols = {axis: _symbol(dim, name, axis) for axis, dim in (axes or {}).items()}
    shape = tuple(symbols.get(axis, size) for axis, size in enumerate(sizes))
    low, high = (float(example.min()), float(example.max())) if example.numel() else (0.0, 1.0)
    dtype = str(_numpy(example.reshape(-1)[:0]).dtype)
    return InputSpec(name, dtype, shape, low, high, sizes)


def _symbol(dim: Any, name: str, axis: int) -> str:
    """A dimension's name: dynamic_shapes holds strings, torch.export.Dim objects, or Dim.AUTO hints."""
    return dim if isinstance(dim, str) else getattr(dim, "__name__", f"{name}_{axis}")


class _TorchDecoder:
    def __init__(self, side: Side, model: "TorchModel") -> None:
        module: Any = model.module
        config = module.config.get_text_config()
        self.side = side
        self.vocab_size: int = config.vocab_size
        self.max_context: int = getattr(config, "max_position_embeddings", None) or 2048
        self.encode: Encode | None = None
        if model.tokenizer is not None:
            tokenizer = model.tokenizer
            self.encode = lambda text: list(tokenizer(text, verbose=False)["input_ids"])
        self._module = module
        # transformers renamed the argument; the old name stays until 5.40.
        named = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"

    def logits(self, token_ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
        cache = self._new_cache()
        for start in range(0, len(token_ids), chunk):
            yield self._step(token_ids[start : start + chunk], cache, 0)

    def generate_greedy(self, token_ids: Sequence[int], tokens: int) -> list[int]:
        generated: list[int] = []
        cache = self._new_cache()
        for start in range(0, len(token_ids) - 1, _PREFILL):
            self._step(token_ids[start : min(start + _PREFILL, len(token_ids) - 1)], cache, 1)
        last = token_ids[-1]
        while len(generated) < tokens:
            last = int(self._step([last], cache, 1)[-1].argmax())
            generated.append(last)
        return generated

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._module.config)

    def _step(self, token_ids: Sequence[int], cache: Any, keep: int) -> NDArray[np.float32]:
        """Run tokens after what `cache` holds, and add them to it; logits of the last `keep` of them, of all for 0."""
        import torch

        ids = torch.tensor([list(token_ids)], dtype=torch.int64)
        with torch.inference_mode():
            cached = {self._cache_argument: cache}
            result = self._module(input_ids=ids, use_cache=True, logits_to_keep=keep, **cached)
        return _numpy(result.logits[0]).astype(np.float32, copy=False)

    def close(self) -> None:
        self._module = None


def _numpy(tensor: "torch.Tensor") -> NDArray:
    import torch

    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().cpu().numpy()
