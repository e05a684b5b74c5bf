"""How an encoder turns one text's tokens into one vector: what to feed it, which output to read, how to pool it.

Pure NumPy over an `EngineInfo`; knows nothing of HTTP, tokenizers or batching. Pooling follows sentence-transformers
(https://sbert.net): the mean over the tokens, then length 1, unless the graph pools by itself or `EmbeddingConfig` says
otherwise. A `pooler_output` is left alone: it was trained for next-sentence prediction, not for similarity.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from engines.runtime.info import EngineInfo, TensorInfo
from plugins.errors import KilnError

Pooling = Literal["mean", "cls", "last", "model"]

_TOKENS, _MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"
_POOLED = ("sentence_embedding", "text_embeds", "embeddings")
"""Names that exporters give to a vector per text."""
_LEAST_LENGTH = 1e-12
"""A vector of zeros stays one, as in torch.nn.functional.normalize."""

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class EmbeddingConfig:
    """What a model's author knows and its graph does not tell. Raises KilnError for values out of range."""

    pooling: Pooling | None = None
    """`mean` of the tokens' hidden states, that of the first (`cls`) or `last` token, or what the `model` pools itself;
    None: `model` where the graph has such an output, else `mean`."""
    normalize: bool = True
    """Whether vectors are scaled to length 1."""
    dimensions: tuple[int, ...] = ()
    """Shorter lengths that the model was trained to be cut to (Matryoshka representation learning, 2205.13147)."""
    max_tokens: int | None = None
    """Longest input; None: what the tokenizer says that the model takes."""
    max_inputs: int = 2048
    """Texts in one request; OpenAI's limit."""

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise KilnError(f"pooling is {self.pooling!r}; expected one of {', '.join(get_args(Pooling))}")
        for name, values in (
            ("dimensions", self.dimensions),
            ("max_tokens", () if self.max_tokens is None else (self.max_tokens,)),
            ("max_inputs", (self.max_inputs,)),
        ):
            if any(value < 1 for value in values):
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least 1")


class Encoder:
    """One model's facts. Raises KilnError when the model does not turn tokens into vectors."""

    def __init__(self, info: EngineInfo, config: EmbeddingConfig) -> None:
        self._config = config
        self._name = info.name
        self._inputs = {tensor.name: tensor for tensor in info.inputs}
        unknown = set(self._inputs) - {_TOKENS, _MASK, _TYPES}
        if _TOKENS not in self._inputs or unknown:
            raise KilnError(
                f"{info.name} takes {', '.join(self._inputs) or 'no tensors'}; an encoder of text takes {_TOKENS} and "
                f"perhaps {_MASK} and {_TYPES}: use another model, or /v2/models/{info.name}/infer"
            )
        self._output, self._pooling = _output_and_pooling(info, config.pooling)
        width = self._output.shape[-1]
        self.width = width if isinstance(width, int) else None
        """Numbers in a vector; None where only running the model tells."""

    @property
    def fixed_tokens(self) -> int | None:
        """The only length that the graph takes, to which inputs are padded; None where any will do."""
        length = self._inputs[_TOKENS].shape[-1]
        return length if isinstance(length, int) else None

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise KilnError for a length to which vectors of this model must not be cut."""
        if dimensions is None or dimensions == self.width or dimensions in self._config.dimensions:
            return
        known = ", ".join(map(str, sorted({*self._config.dimensions, *([self.width] if self.width else [])})))
        raise KilnError(
            f"dimensions is {dimensions}; {self._name} gives vectors of {known or 'one length'}, and cutting them to "
            "a length that it was not trained for would take their meaning: leave dimensions out"
        )

    def feeds(self, token_ids: list[int]) -> dict[str, NDArray]:
        """The graph's inputs for one text, each [1, tokens], padded where the graph's length is fixed."""
        length = self.fixed_tokens or len(token_ids)
        if length != len(token_ids) and _MASK not in self._inputs:
            raise KilnError(f"{self._name} takes exactly {length} tokens and no {_MASK}; found {len(token_ids)} tokens")
        columns = {_TOKENS: token_ids, _MASK: [1] * len(token_ids), _TYPES: [0] * len(token_ids)}
        arrays = {}
        for name, tensor in self._inputs.items():
            arrays[name] = np.zeros((1, length), tensor.dtype)
            arrays[name][0, : len(token_ids)] = columns[name]
        return arrays

    def vector(self, outputs: dict[str, NDArray], tokens: int, dimensions: int | None) -> Vector:
        """The text's vector from the graph's outputs; `tokens` is how many of them are not padding.

        Raises KilnError when it is not finite.
        """
        values = outputs[self._output.name][0]
        match self._pooling:
            case "mean":
                pooled = values[:tokens].mean(axis=0, dtype=np.float32)
            case "cls":
                pooled = values[0]
            case "last":
                pooled = values[tokens - 1]
            case "model":
                pooled = values
        vector = pooled.astype(np.float32)[:dimensions]
        if not np.isfinite(vector).all():
            raise KilnError(
                f"{self._name} gave a vector with NaN or infinite values; compare its bundle with the model"
            )
        if self._config.normalize:
            vector /= max(float(np.linalg.norm(vector)), _LEAST_LENGTH)
        return vector


def _output_and_pooling(info: EngineInfo, wanted: Pooling | None) -> tuple[TensorInfo, Pooling]:
    floats = [tensor for tensor in info.outputs if tensor.dtype.startswith("float")]
    pooled = [tensor for tensor in floats if len(tensor.shape) == 2 and tensor.name in _POOLED]
    hidden = [tensor for tensor in floats if len(tensor.shape) == 3]
    hidden.sort(key=lambda tensor: tensor.name != "last_hidden_state")
    if pooled and wanted in (None, "model"):
        return pooled[0], "model"
    if hidden and wanted != "model":
        return hidden[0], wanted or "mean"
    raise KilnError(
        f"{info.name} gives {', '.join(tensor.name for tensor in info.outputs) or 'nothing'}; expected "
        + (
            f"a vector per text named {' or '.join(_POOLED)}"
            if wanted == "model"
            else "hidden states [batch, tokens, width], such as last_hidden_state"
        )
        + ": use another pooling or another model"
    )
