"""What a gate measures on: texts and prompts by length stratum for decoders, feeds by stratum for other models.

Knows how to cut long texts into strata; knows nothing of models but their context limit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from pipeline.compare.greedy import Prompt
from plugins.errors import KilnError

PlainKind = Literal["classifier", "embedding"]
LABELS = "labels"
"""Array of an .npz that holds class numbers [samples], not an input."""


@dataclass(frozen=True)
class TextStratum:
    """Texts of one length class; each starts an empty context."""

    name: str
    texts: tuple[tuple[int, ...], ...]
    prompts: tuple[Prompt, ...] = ()
    """What is continued greedily, of this class's length."""

    def __post_init__(self) -> None:
        for number, text in enumerate(self.texts):
            if len(text) < 2:
                raise KilnError(
                    f"text {number} of stratum '{self.name}' has {len(text)} tokens; scoring needs at least 2"
                )
        if not self.texts:
            raise KilnError(f"stratum '{self.name}' has no text; give at least one")

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def longest(self) -> int:
        return max(map(len, self.texts))


@dataclass(frozen=True)
class DecoderData:
    """Strata from short to long."""

    strata: tuple[TextStratum, ...]
    origin: str

    def __post_init__(self) -> None:
        _require_distinct([stratum.name for stratum in self.strata])

    def check(self, vocab_size: int, max_context: int) -> None:
        """Raise KilnError for tokens that a model does not know, or more of them than it holds."""
        for stratum in self.strata:
            for text in (*stratum.texts, *(prompt.token_ids for prompt in stratum.prompts)):
                if wrong := [token for token in text if not 0 <= token < vocab_size]:
                    raise KilnError(
                        f"stratum '{stratum.name}' has the token {wrong[0]}; the model knows 0 to {vocab_size - 1}: "
                        "encode the texts with its own tokenizer"
                    )
                if len(text) > max_context:
                    raise KilnError(
                        f"a text of stratum '{stratum.name}' has {len(text)} tokens; the model's context holds "
                        f"{max_context}: cut it"
                    )


@dataclass(frozen=True)
class Cut:
    """How a stratum is cut from long texts."""

    name: str
    window: int
    tokens: int
    """At most so many in all."""
    prompt: int
    """Tokens of its longest prompt."""


def default_cuts(max_context: int, new_tokens: int) -> tuple[Cut, ...]:
    """Windows of 512 and 2048 and one of 8000 where the context holds them, else an eighth and half of it, and all.

    Prompts leave room for `new_tokens`.
    """
    short, medium, long = min(512, max_context // 8), min(2048, max_context // 2), min(8000, max_context)
    room = max_context - new_tokens
    if short < 2 or room < 1:
        raise KilnError(f"a context of {max_context} tokens is too short for a gate that generates {new_tokens}")
    return (
        Cut("short", short, 4 * short, min(128, room)),
        Cut("medium", medium, 2 * medium, 0),
        Cut("long", long, long, min(2048, room)),
    )


def decoder_data_from_tokens(
    texts: Sequence[Sequence[int]], cuts: Sequence[Cut], origin: str, prompts: int = 4
) -> DecoderData:
    """Cut texts into strata; the longest ones first, so that a window lies within one text.

    A stratum gets `prompts` prompts of different lengths, its longest last, from other places than each other.
    Raises KilnError where no text is as long as a stratum's window.
    """
    by_length = sorted(texts, key=len, reverse=True)
    strata = []
    for cut in cuts:
        windows = [
            tuple(text[start : start + cut.window])
            for text in by_length
            for start in range(0, len(text) - cut.window + 1, cut.window)
        ]
        if not windows:
            raise KilnError(
                f"stratum '{cut.name}' needs a text of {cut.window} tokens, the longest has "
                f"{len(by_length[0]) if by_length else 0}; give a longer text, or lower its window"
            )
        chosen = _spread(windows, max(1, cut.tokens // cut.window))
        strata.append(TextStratum(cut.name, tuple(chosen), _prompts(by_length, cut, prompts)))
    return DecoderData(tuple(strata), origin)


def _spread(items: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """At most `count` of them, evenly over all."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _prompts(texts: Sequence[Sequence[int]], cut: Cut, count: int) -> tuple[Prompt, ...]:
    """The longest whole, the others shorter by quarters; each from another place of the longest text."""
    source = texts[0]
    made = []
    for index in range(count if cut.prompt else 0):
        length = max(1, cut.prompt * (index + 1) // count) if cut.name == "short" else cut.prompt
        length = min(length, len(source))
        start = index * (len(source) - length) // max(1, count - 1)
        made.append(Prompt(f"text from token {start}", tuple(source[start : start + length])))
    return tuple(made)


@dataclass(frozen=True)
class Sample:
    """One call's inputs by name, and the class of each row where known, [rows] integers."""

    feeds: Mapping[str, NDArray]
    labels: NDArray[np.integer] | None = None


@dataclass(frozen=True)
class PlainStratum:
    """Samples of one length class; `samples` may be gone through several times."""

    name: str
    samples: Iterable[Sample]


@dataclass(frozen=True)
class Task:
    """A downstream task: labelled inputs, whose embeddings a small classifier learns from and is tested on."""

    name: str
    samples: Iterable[Sample]
    train_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.train_share < 1:
            raise KilnError(f"train_share is {self.train_share}; expected between 0 and 1")


@dataclass(frozen=True)
class PlainData:
    """Inputs of a model without a KV cache. `output` names what is judged; None: embeddings, or the first output."""

    kind: PlainKind
    strata: tuple[PlainStratum, ...]
    origin: str
    output: str | None = None
    task: Task | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_distinct([stratum.name for stratum in self.strata])


GateData = DecoderData | PlainData


def _require_distinct(names: Sequence[str]) -> None:
    if not names or len(set(names)) < len(names):
        raise KilnError(f"the strata are called {', '.join(names) or 'nothing'}; expected one or more, all different")


def samples_from_npz(path: Path, batch: int = 8) -> list[Sample]:
    """An .npz of inputs by name, each [samples, ...], and perhaps `labels` [samples], in batches.

    Raises KilnError for another file, and for arrays of different lengths.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file.items())
    except (OSError, EOFError, ValueError, TypeError, BadZipFile) as error:  # TypeError: a single .npy
        raise KilnError(f"{path} is no .npz of arrays ({error}); write one with numpy.savez") from error
    labels = arrays.pop(LABELS, None)
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if labels is not None:
        lengths[LABELS] = len(labels)
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise KilnError(f"{path}: labels are {labels.dtype} {list(labels.shape)}; expected integers [samples]")
    if not arrays or len(set(lengths.values())) != 1 or 0 in lengths.values():
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "it is empty"
        raise KilnError(f"{path}: {found}; expected inputs of one length, at least 1")
    total = next(iter(lengths.values()))
    return [
        Sample(
            {name: array[start : start + batch] for name, array in arrays.items()},
            None if labels is None else labels[start : start + batch].astype(np.int64),
        )
        for start in range(0, total, batch)
    ]
