"""Optimisation profiles from how a model is served: which sizes each symbolic dimension takes in each kind of step.

A profile gives sizes to symbols, not to tensors, so that two inputs which share a dimension, such as a token list and
its positions or all KV caches, cannot disagree. A decoder's symbols are those of `plugins.paged_attention.schema`; any
other model has a batch and dimensions whose ranges only its user knows. Knows nothing of TensorRT's objects; whether
the graph computes with these sizes is asked in `engines.backends.tensorrt.profile_check`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from passes.onnx_model import DecoderSpec, Tensor
from plugins.errors import KilnError

Shape = tuple[int, ...]
_SUM = re.compile(r"(.+?)\s*([+-])\s*(\d+)$")
BATCH = ("batch", "batch_size", "n", "N")
"""What exporters call the dimension that the batcher fills."""
SEQUENCE = ("sequence", "sequence_length", "seq_len", "seq", "length")
"""And the one that grows with a text."""
_USUAL = 128
"""Tokens of a text that an encoder's engine is tuned for, where it takes as many."""


@dataclass(frozen=True)
class Sizes:
    """Of one dimension: least, what the engine is tuned for, most."""

    least: int
    best: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.best <= self.most or self.most < 1:
            raise KilnError(
                f"sizes are {self.least}:{self.best}:{self.most}; expected least <= best <= most, the most at least 1"
            )

    def __str__(self) -> str:
        return f"{self.least}:{self.best}:{self.most}"


@dataclass(frozen=True)
class Profile:
    """`symbols` by name. Steps of this kind run with the execution context of this profile."""

    name: str
    symbols: Mapping[str, Sizes]

    def shapes(self, tensor: Tensor) -> tuple[Shape, Shape, Shape]:
        """Of an input: least, best and most. Raises KilnError for a dimension that the profile gives no sizes."""
        sizes = [self.sizes_of(tensor, size) for size in tensor.shape]
        return (
            tuple(size.least for size in sizes),
            tuple(size.best for size in sizes),
            tuple(size.most for size in sizes),
        )

    def sizes_of(self, tensor: Tensor, size: int | str) -> Sizes:
        """Of one dimension: a number, a symbol, or a symbol and a number as in `seqs+1`."""
        if isinstance(size, int):
            return Sizes(size, size, size)
        if size in self.symbols:
            return self.symbols[size]
        match = _SUM.match(size)
        if match is None or match[1] not in self.symbols:
            raise KilnError(
                f"profile {self.name}: input {tensor.name} has the dimension '{size}', whose sizes are not known; the "
                f"profile knows {', '.join(self.symbols) or 'none'}: give --dim '{size}=LEAST:BEST:MOST'"
            )
        base, more = self.symbols[match[1]], int(match[2] + match[3])
        return Sizes(base.least + more, base.best + more, base.most + more)


@dataclass(frozen=True)
class ServingShapes:
    """How the engine will be served; sequences and tokens of one step, blocks of the cache.

    `max_sequence` is the longest text that an encoder takes, in tokens, where it is known. `dims` gives ranges to the
    symbols that none of these explains, and goes before them.
    """

    max_running: int = 32
    tokens_per_step: int = 512
    kv_blocks: int = 1024
    max_batch: int = 32
    max_sequence: int | None = None
    dims: Mapping[str, Sizes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_running", "tokens_per_step", "kv_blocks", "max_batch"):
            if getattr(self, name) < 1:
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.tokens_per_step < self.max_running:
            raise KilnError(
                f"a step holds {self.tokens_per_step} tokens, fewer than the {self.max_running} sequences that run at "
                "once; raise tokens_per_step or lower max_running"
            )


def derive_profiles(
    inputs: Sequence[Tensor], decoder: DecoderSpec | None, serving: ServingShapes
) -> tuple[Profile, ...]:
    """Profiles of one engine, most used first. Raises KilnError for a dimension whose sizes nobody gave."""
    symbols = {size for tensor in inputs for size in tensor.shape if isinstance(size, str)}
    if decoder is None:
        profiles = _plain_profiles(symbols, serving)
    else:
        profiles = _linear_profiles(decoder, serving) if "step" in symbols else _decoder_profiles(decoder, serving)
    for unknown in sorted(set(serving.dims) - symbols):
        raise KilnError(
            f"--dim gives sizes to '{unknown}', which no input has; its inputs have "
            f"{', '.join(sorted(symbols)) or 'fixed shapes only'}"
        )
    for profile in profiles:
        for tensor in inputs:
            profile.shapes(tensor)
    return profiles


def _decoder_profiles(decoder: DecoderSpec, serving: ServingShapes) -> tuple[Profile, ...]:
    """Decode: a token of each sequence. Chunk: full steps. Prompt: one sequence whose prompt goes beyond a step.

    The last is there only where a context is longer than a step's tokens.
    """
    context, running, step = decoder.max_context, serving.max_running, serving.tokens_per_step
    blocks = -(-context // decoder.kv.block_size)
    table = Sizes(1, max(1, blocks // 4), blocks)
    fixed = {
        "blocks": Sizes(serving.kv_blocks, serving.kv_blocks, serving.kv_blocks),
        "block_size": Sizes(*[decoder.kv.block_size] * 3),
        "max_blocks": table,
    }
    decode = Sizes(1, running, running)
    profiles = [
        Profile("decode", {"tokens": decode, "rows": decode, "seqs": decode, **fixed}),
        Profile("chunk", {"tokens": Sizes(1, step, step), "rows": decode, "seqs": Sizes(1, 1, running), **fixed}),
    ]
    if context > step:
        one = Sizes(1, 1, 1)
        profiles.append(Profile("prompt", {"tokens": Sizes(step, context, context), "rows": one, "seqs": one, **fixed}))
    return tuple(Profile(p.name, {**p.symbols, **serving.dims}) for p in profiles)


def _linear_profiles(decoder: DecoderSpec, serving: ServingShapes) -> tuple[Profile, ...]:
    """Of a graph by `linear_graph`: one token of many sequences, a piece of one prompt, or a long one's whole.

    The first two take any step; the last is there where a context is longer than a step.
    """
    context, running, step = decoder.max_context, serving.max_running, min(serving.tokens_per_step, decoder.max_context)
    one, many = Sizes(1, 1, 1), Sizes(1, running, running)
    profiles = [
        Profile("decode", {"seqs": many, "step": one, "rows": many}),
        Profile("chunk", {"seqs": one, "step": Sizes(1, step, step), "rows": Sizes(1, 1, step)}),
    ]
    if context > step:
        profiles.append(Profile("prompt", {"seqs": one, "step": Sizes(step, context, context), "rows": one}))
    return tuple(Profile(p.name, {**p.symbols, **serving.dims}) for p in profiles)


def _plain_profiles(symbols: set[str], serving: ServingShapes) -> tuple[Profile, ...]:
    """One item, whose latency counts, and a batch; only one profile where there is no batch to fill."""
    known, longest = dict(serving.dims), serving.max_sequence
    sequence = next((name for name in SEQUENCE if name in symbols and name not in known), None)
    if sequence is not None and longest is not None:
        known[sequence] = Sizes(1, min(_USUAL, longest), longest)
    batch = next((name for name in BATCH if name in symbols and name not in known), None)
    if batch is None:
        return (Profile("all", known),)
    one = Profile("single", {batch: Sizes(1, 1, 1), **known})
    if serving.max_batch == 1:
        return (one,)
    most = serving.max_batch
    return (one, Profile("batch", {batch: Sizes(2, most, most), **known}))


def sizes_from_text(text: str) -> tuple[str, Sizes]:
    """What `--dim NAME=LEAST:BEST:MOST` gives; one number stands for all three. Raises KilnError."""
    name, equals, numbers = text.partition("=")
    parts = numbers.split(":")
    if not name or not equals or len(parts) not in (1, 3) or not all(part.strip().isdigit() for part in parts):
        raise KilnError(
            f"found --dim {text!r}; expected NAME=LEAST:BEST:MOST, such as sequence=8:128:512, or NAME=SIZE"
        )
    values = [int(part) for part in parts] * (1 if len(parts) == 3 else 3)
    return name, Sizes(*values)


def profile_for(profiles: Sequence[Profile], inputs: Sequence[Tensor], shapes: Mapping[str, Shape]) -> int:
    """Number of the first profile that takes inputs of these shapes. Raises KilnError naming the nearest miss."""
    misses = []
    for number, profile in enumerate(profiles):
        miss = _miss(profile, inputs, shapes)
        if miss is None:
            return number
        misses.append(f"{profile.name}: {miss}")
    raise KilnError(f"no profile of the engine takes these inputs ({'; '.join(misses)}); rebuild it for these sizes")


def _miss(profile: Profile, inputs: Sequence[Tensor], shapes: Mapping[str, Shape]) -> str | None:
    for tensor in inputs:
        shape, (least, _, most) = shapes[tensor.name], profile.shapes(tensor)
        fits = len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        )
        if not fits:
            return f"{tensor.name} is {list(shape)}, expected {list(least)} to {list(most)}"
    return None
