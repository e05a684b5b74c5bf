"""The model that is calibrated: a bundle, or an ONNX file, with what turns data into its inputs."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.bundle import open_bundle
from engines.runtime.tokenizer import Tokenizer
from passes.onnx_model import DecoderSpec, OnnxModel, onnx_model_from_path
from pipeline.calibration.samples import TOKENS, Feed, Sample
from pipeline.compare.inputs import InputSpec, input_specs_from_graph
from pipeline.io_layout import Permutations, original_specs, permutations_from_path
from plugins.build import cpu_library
from plugins.errors import KilnError

_MASK, _TYPES = "attention_mask", "token_type_ids"


@dataclass(frozen=True)
class CalibrationModel:
    """`limit`: most tokens of a sample; None for what takes no text, or where nobody says."""

    model: OnnxModel
    plugins: tuple[Path, ...] = ()
    tokenizer: Tokenizer | None = None
    limit: int | None = None

    @property
    def decoder(self) -> DecoderSpec | None:
        return self.model.decoder

    @cached_property
    def permutations(self) -> Permutations:
        return permutations_from_path(self.model.path)

    @cached_property
    def inputs(self) -> tuple[InputSpec, ...]:
        """Of a model without a KV cache, as they were before `--io-layout`; integers with their largest value."""
        return original_specs(input_specs_from_graph(self.model.path, self.model.inputs), self.permutations)

    @property
    def takes_tokens(self) -> bool:
        """Whether token ids alone make a run of it."""
        if self.decoder is not None:
            return True
        names = {spec.name for spec in self.inputs}
        return TOKENS in names and names <= {TOKENS, _MASK, _TYPES}

    @property
    def vocabulary(self) -> int | None:
        if self.decoder is not None:
            return self.decoder.vocab_size
        found = next((spec for spec in self.inputs if spec.name == TOKENS), None)
        return int(found.high) + 1 if found is not None and found.high > 1 else None

    def sample_of_tokens(self, origin: str, token_ids: NDArray[np.int32]) -> Sample:
        """A text's sample. Raises KilnError for no tokens and for ids outside of the vocabulary."""
        if not self.takes_tokens:
            names = ", ".join(spec.name for spec in self.inputs)
            raise KilnError(f"{origin} is text or tokens, but the model takes {names}; give .npz batches or images")
        if not token_ids.size:
            raise KilnError(f"{origin} holds no tokens; leave it out")
        size = self.vocabulary
        outside = token_ids[(token_ids < 0) | (token_ids >= (size or 2**31))]
        if outside.size:
            raise KilnError(
                f"{origin} holds the token id {outside[0]}; the model's vocabulary is 0 to {(size or 0) - 1}"
            )
        return Sample(origin, len(token_ids), lambda: self._feed_of_tokens(token_ids))

    def _feed_of_tokens(self, token_ids: NDArray[np.int32]) -> Feed:
        if self.decoder is not None:
            return {TOKENS: token_ids}
        rows = {TOKENS: token_ids, _MASK: np.ones_like(token_ids), _TYPES: np.zeros_like(token_ids)}
        return {spec.name: rows[spec.name][None].astype(spec.dtype) for spec in self.inputs}

    def check_feed(self, origin: str, feed: Feed) -> None:
        """Raise KilnError unless names, types and shapes are those of the model's inputs, and integers within range."""
        expected = {spec.name: spec for spec in self.inputs}
        if set(feed) != set(expected):
            raise KilnError(
                f"{origin} holds the arrays {', '.join(sorted(feed)) or 'none'}; the model takes {', '.join(expected)}"
            )
        for name, array in feed.items():
            spec = expected[name]
            fits = len(spec.shape) == array.ndim and all(
                isinstance(want, str) or want == have for want, have in zip(spec.shape, array.shape, strict=True)
            )
            if not fits or array.dtype != np.dtype(spec.dtype) or not array.size:
                raise KilnError(
                    f"{origin}: '{name}' is {array.dtype} {list(array.shape)}; the model takes {spec.dtype} "
                    f"[{', '.join(map(str, spec.shape))}]"
                )
            if name == TOKENS and self.vocabulary and (array.min() < 0 or array.max() >= self.vocabulary):
                worst = array.min() if array.min() < 0 else array.max()
                raise KilnError(
                    f"{origin} holds the token id {worst}; the model's vocabulary is 0 to {self.vocabulary - 1}"
                )


def calibration_model_from_path(
    path: Path, tokenizer: Path | None = None, max_context: int | None = None
) -> CalibrationModel:
    """Open a bundle's folder, or an .onnx file with the `tokenizer` folder given. Raises KilnError.

    `max_context` lowers the limit of a decoder's context, or says that of an encoder whose tokenizer does not.
    """
    plugins: tuple[Path, ...] = ()
    if path.is_dir():
        bundle = open_bundle(path)
        model = onnx_model_from_path(bundle.engine_path)
        plugins, tokenizer = tuple(bundle.plugin_paths), tokenizer or bundle.tokenizer_path
    else:
        model = onnx_model_from_path(path)
        plugins = (cpu_library(),) if model.decoder else ()
    loaded = Tokenizer(tokenizer) if tokenizer else None
    limit = model.decoder.max_context if model.decoder else (loaded.max_length if loaded else None)
    if max_context is not None and not 1 <= max_context <= (limit or max_context):
        raise KilnError(f"--max-context is {max_context}; the model takes 1 to {limit} tokens")
    return CalibrationModel(model, plugins, loaded, max_context or limit)
