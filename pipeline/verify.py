"""How far two models are apart, and how long each takes: what the pass manager's gate and clock are made of.

Both run on the backend at hand, ONNX Runtime on CPU. The gate switches ONNX Runtime's own rewrites off, so that a
graph is judged as it is; the clock leaves them on, as the engine will run. Inputs are drawn from a seed, short ones
and a long one: errors that grow with length show only there.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from engines.backends.onnxruntime import ALTERNATING, OnnxRuntimeDecoder, OnnxRuntimeModel
from passes.manager import CannotJudge, Errors, Timing
from passes.onnx_model import DecoderSpec, OnnxModel, decoder_from_structure, load_structure
from pipeline.compare.inputs import InputSpec, input_specs_from_graph, sample_of_sizes, samples_from_inputs
from pipeline.compare.onnx_subject import bound_graph
from pipeline.io_layout import from_model, original_specs, permutations_from_path, to_model
from pipeline.packed import decoder_feeds, packed_logits, step_inputs_of_prompt
from pipeline.paired import take_turns
from pipeline.ranges import measure_ranges
from plugins.errors import KilnError

LONG = 1024
"""Tokens of a decoder's long input by default, where its context allows it."""
TIMED_TOKENS = 512
_LONG_SIZES = {"i": (2048, 1024, 512, 256), "f": (640, 320, 160)}
"""Sizes tried for the dynamic dimensions of the long input, by kind of the input's type: tokens, or pixels."""
_ROWS = 32
_NO_KERNEL = "Could not find an implementation"
"""How ONNX Runtime says that a provider lacks an operator for a type."""
_SAMPLES = 2

Feeds = Mapping[str, NDArray]
Outputs = dict[str, NDArray]


class NumericGate:
    """A `passes.manager.Gate`. The outputs of the last two models are kept: one of them is the next one's reference."""

    def __init__(
        self,
        model: OnnxModel,
        plugins: Sequence[Path] = (),
        inputs: Sequence[Feeds] | None = None,
        for_this_machine: bool = True,
        long_tokens: int = LONG,
    ) -> None:
        """`inputs` replaces the generated ones, for a model that does not take random values.

        With `for_this_machine` False a model for which this CPU has no kernels is not judged, instead of refused.
        """
        self.for_this_machine, self.long_tokens = for_this_machine, long_tokens
        self.decoder, self.plugins = model.decoder, tuple(plugins)
        self.inputs = tuple(inputs or (() if model.decoder else generated_inputs(model, plugins)))
        self._kept: dict[Path, list[Outputs]] = {}

    def __call__(self, before: Path, after: Path) -> Errors:
        try:
            self._kept = {path: self._outputs(path) for path in (before, after)}
        except KilnError as error:
            if not self.for_this_machine and _NO_KERNEL in str(error):
                raise CannotJudge("this machine's CPU has no kernels for this graph") from error
            raise
        return errors_between(self._kept[before], self._kept[after])

    def backend_errors(self, path: Path) -> Errors:
        """What ONNX Runtime's own rewrites of a model change in its outputs."""
        return errors_between(self._outputs(path), self._run(path, optimized=True))

    def noise(self, path: Path) -> float:
        """Relative error that ONNX Runtime's own rewrites of a model cause: what another order of sums may do to it."""
        return self.backend_errors(path).relative

    def ranges(self, path: Path) -> dict[str, float]:
        """Largest magnitude of every FP32 tensor of a model's main graph on the gate's inputs."""
        permutations = permutations_from_path(path)
        feeds = self.inputs if self.decoder is None else decoder_feeds(self.decoder)
        return measure_ranges(path, [to_model(feed, permutations) for feed in feeds], self.plugins)

    def _outputs(self, path: Path) -> list[Outputs]:
        return self._kept[path] if path in self._kept else self._run(path)

    def _run(self, path: Path, optimized: bool = False) -> list[Outputs]:
        if self.decoder is None:
            return run_plain(path, self.plugins, self.inputs, optimized=optimized)
        decoder = with_cache_of(path, self.decoder)
        with tempfile.TemporaryDirectory(prefix="kiln-gate-") as folder:
            bound = bound_graph(path, Path(folder))
            return _decoder_outputs(bound, decoder, self.plugins, self.long_tokens, optimized)


class StepClock:
    """A `passes.manager.Clock`: a prompt of TIMED_TOKENS for a decoder, else one call on the first input."""

    def __init__(
        self,
        model: OnnxModel,
        plugins: Sequence[Path] = (),
        inputs: Sequence[Feeds] | None = None,
        threads: int | None = None,
        seconds: float = 3.0,
    ) -> None:
        self.decoder, self.plugins, self.threads, self.seconds = model.decoder, tuple(plugins), threads, seconds
        self.feeds = None if model.decoder else next(iter(inputs or generated_inputs(model, plugins)))

    def __call__(self, before: Path, after: Path) -> Timing:
        """Alternating calls for `seconds`, after one of each to warm up."""
        with tempfile.TemporaryDirectory(prefix="kiln-clock-") as folder:
            calls = [self._call(path, Path(folder) / str(number)) for number, path in enumerate((before, after))]
        before_pass, ratio = take_turns(calls[0], calls[1], self.seconds)
        return Timing(before_pass, before_pass * ratio.median, ratio.noise)

    def _call(self, path: Path, folder: Path) -> Callable[[], object]:
        if self.decoder is None:
            model = OnnxRuntimeModel(path, plugins=self.plugins, threads=self.threads, config=ALTERNATING)
            assert self.feeds is not None
            feeds = to_model(self.feeds, permutations_from_path(path))
            return lambda: model.infer(feeds)
        folder.mkdir()
        tokens = min(TIMED_TOKENS, self.decoder.max_context)
        inputs = step_inputs_of_prompt(tokens, self.decoder)
        decoder = OnnxRuntimeDecoder(
            bound_graph(path, folder),
            with_cache_of(path, self.decoder).kv,
            inputs.block_table.size,
            plugins=self.plugins,
            threads=self.threads,
            config=ALTERNATING,
        )
        return lambda: decoder.step(inputs)


def with_cache_of(path: Path, decoder: DecoderSpec) -> DecoderSpec:
    """`decoder` with the cache that the graph at `path` has: a pass may change its types."""
    own = decoder_from_structure(path, load_structure(path))
    return decoder if own is None else replace(decoder, kv=own.kv)


def errors_between(before: Sequence[Outputs], after: Sequence[Outputs]) -> Errors:
    """The worst over all inputs and outputs. Raises KilnError for an output of another shape or name."""
    worst = Errors(0.0, 0.0, 1.0, "")
    for reference, found in zip(before, after, strict=True):
        if list(reference) != list(found):
            raise KilnError(f"the outputs are {', '.join(found)}; expected {', '.join(reference)}")
        for name, expected in reference.items():
            if found[name].shape != expected.shape:
                raise KilnError(f"output '{name}' has shape {found[name].shape}; expected {expected.shape}")
            errors = _errors_of(name, found[name], expected)
            worst = Errors(
                absolute=float(np.maximum(worst.absolute, errors.absolute)),  # np.maximum keeps a NaN
                relative=float(np.maximum(worst.relative, errors.relative)),
                cosine=float(np.minimum(worst.cosine, errors.cosine)),
                output=worst.output if worst.output and worst.relative >= errors.relative else name,
            )
    return worst


def _errors_of(name: str, found: NDArray, expected: NDArray) -> Errors:
    if expected.dtype.kind not in "fc":
        same = np.array_equal(found, expected)
        return Errors(0.0, 0.0, 1.0, name) if same else Errors(float("nan"), float("nan"), float("nan"), name)
    found, expected = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    finite = np.isfinite(expected)
    if not (np.array_equal(finite, np.isfinite(found)) and np.array_equal(found[~finite], expected[~finite], True)):
        return Errors(float("nan"), float("nan"), float("nan"), name)
    found, expected = found[finite], expected[finite]
    if not expected.size:
        return Errors(0.0, 0.0, 1.0, name)
    absolute, largest = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    norms = float(np.linalg.norm(found) * np.linalg.norm(expected))
    cosine = float(found @ expected) / norms if norms else float(not absolute)
    return Errors(absolute, absolute / max(largest, float(np.finfo(np.float32).tiny)), cosine, name)


def run_plain(
    path: Path, plugins: Sequence[Path], inputs: Sequence[Feeds], *, optimized: bool = False
) -> list[Outputs]:
    """Outputs of a model without a KV cache, for each set of inputs; as its graph stands unless `optimized`.

    Inputs and outputs have the layout that they had before `--io-layout` changed it.
    """
    permutations = permutations_from_path(path)
    backend = OnnxRuntimeModel(path, plugins=plugins, optimized=optimized)
    try:
        return [from_model(backend.infer(to_model(feeds, permutations)), permutations) for feeds in inputs]
    finally:
        backend.close()


def _decoder_outputs(
    path: Path, decoder: DecoderSpec, plugins: Sequence[Path], long_tokens: int, optimized: bool
) -> list[Outputs]:
    """A long prompt in one step, beside a short one; then a step of single tokens."""
    generator = np.random.default_rng(3)
    lengths = [min(long_tokens, decoder.max_context), min(37, decoder.max_context)]
    texts = [generator.integers(0, decoder.vocab_size, length) for length in lengths]
    steps = [[max(length - 1, 1) for length in lengths], [1, 1]]
    rows = packed_logits(path, decoder, plugins, texts, steps, optimized=optimized, last_rows=_ROWS)
    return [{"logits": np.concatenate(rows)}]


def feeds_from_file(path: Path) -> list[Feeds]:
    """One set of inputs from an .npz, by input name. Raises KilnError for any other file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return [dict(arrays.items())]
    except (OSError, EOFError, ValueError, TypeError, BadZipFile) as error:  # TypeError: a single .npy
        raise KilnError(f"inputs {path} are no .npz of arrays ({error}); write one with numpy.savez") from error


def generated_inputs(model: OnnxModel, plugins: Sequence[Path] = ()) -> tuple[Feeds, ...]:
    """Random inputs that the model accepts, the last one as long as it takes. Raises KilnError where none are found."""
    found = input_specs_from_graph(model.path, model.inputs)
    specs = original_specs(found, permutations_from_path(model.path))
    samples = samples_from_inputs(specs, _SAMPLES, seed=1)
    try:
        run_plain(model.path, plugins, samples)
    except KilnError as error:
        raise KilnError(f"{error}. Random inputs do not suit this model; give some with --inputs FILE.npz") from error
    long = _longest(model.path, plugins, specs)
    return (*samples, long) if long is not None else tuple(samples)


def _longest(path: Path, plugins: Sequence[Path], specs: Sequence[InputSpec]) -> Feeds | None:
    """The longest sample among some sizes that the model runs on; None where no dimension but the batch varies."""
    varies = any(isinstance(size, str) for spec in specs for size in spec.shape[1:])
    kind = "i" if specs and all(np.dtype(spec.dtype).kind in "iub" for spec in specs) else "f"
    for size in _LONG_SIZES[kind] if varies else ():
        feeds = sample_of_sizes(specs, batch=1, size=size, seed=2)
        with suppress(KilnError):
            run_plain(path, plugins, [feeds])
            return feeds
    return None
