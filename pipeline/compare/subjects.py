"""One side of a comparison: what can be asked of a torch model, an ONNX file or a bundle alike.

A subject is opened by one of the constructors in torch_subject.py, onnx_subject.py and bundle_subject.py,
holds its model in memory, and is closed by whoever opened it. Knows nothing of the other side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.inputs import InputSpec
from pipeline.compare.report import Side

Encode = Callable[[str], list[int]]


@runtime_checkable
class PlainSubject(Protocol):
    """A model without a KV cache."""

    side: Side
    inputs: tuple[InputSpec, ...]

    def infer(self, feeds: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Run once; the outputs by name, in the model's order."""
        ...

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        ...


@runtime_checkable
class DecoderSubject(Protocol):
    """A language model. `max_context` in tokens; `encode` is None where no tokenizer comes with the model."""

    side: Side
    vocab_size: int
    max_context: int
    encode: Encode | None

    def logits(self, token_ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
        """Logits after every token of a text that starts an empty context, `chunk` rows [rows, vocabulary] at a time.

        At most one text may be under way; an abandoned iterator frees what it holds when it is closed.
        """
        ...

    def generate_greedy(self, token_ids: Sequence[int], tokens: int) -> list[int]:
        """The `tokens` most likely tokens one after the other, end-of-sequence tokens included and passed over."""
        ...

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        ...


Subject = PlainSubject | DecoderSubject
