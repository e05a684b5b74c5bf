"""The memory account of an engine: weights, KV pool, activations, workspace, and the peak of each phase.

Sizes come from ONNX Runtime's own arena, which its profiler reports with every kernel, on a session of its own: what
the arena really takes, so tensors are rounded up to its pieces, and the same on every machine with the same library.
Weights, of which some stay mapped from their file, and the cache are counted beside it. Kiln's kernels' own scratch
memory is in neither; `kiln bench` measures the process's peak of each phase.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from numpy.typing import NDArray

from engines.backends.base import StepInputs
from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.manifest import MemoryPhase, MemoryRecord, TensorRecord
from engines.runtime.batch import Chunk
from engines.runtime.opening import default_kv_blocks
from engines.runtime.packing import step_inputs_from_batch
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import Sequence as TokenSequence
from engines.runtime.sequence import blocks_for
from passes.onnx_model import DecoderSpec, external_files, load_structure
from pipeline.compare.inputs import input_specs_from_graph, sample_of_batch
from pipeline.profile.ort_events import Run, runs_from_profile

_PROMPT = 512
_BATCHES = (1, 16)
_CONTEXT = 160
_SAMPLES = (1, 8)
_PEAK = "mem_in_use_peak"


def memory_account(
    engine: Path,
    decoder: DecoderSpec | None,
    inputs: Sequence[TensorRecord],
    plugins: Sequence[Path],
    feeds: Mapping[str, NDArray] | None = None,
) -> MemoryRecord | None:
    """Run each phase once; None where ONNX Runtime's profile has no memory in it.

    A model without a KV cache runs on `feeds`, or random inputs of a few sizes. Raises KilnError where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-memory-") as folder:
        profile = Path(folder) / "profile"
        if decoder is not None:
            return _decoder_account(engine, decoder, plugins, profile)
        return _plain_account(engine, inputs, plugins, profile, feeds)


def weight_bytes_stored(engine: Path) -> int:
    """Bytes of the engine's graph and the files of its weights."""
    return sum(file.stat().st_size for file in [engine, *external_files(engine, load_structure(engine))])


def _decoder_account(engine: Path, decoder: DecoderSpec, plugins: Sequence[Path], profile: Path) -> MemoryRecord | None:
    size, longest = decoder.kv.block_size, decoder.max_context
    context = min(_CONTEXT, longest - 1)
    phases = {f"decode_batch_{batch}": (batch, 1, context) for batch in _BATCHES}
    phases[f"prefill_{min(_PROMPT, longest)}"] = (1, min(_PROMPT, longest), 0)
    phases = dict(sorted(phases.items(), key=lambda item: item[1][0] * item[1][1]))
    blocks = max(sequences * blocks_for(new + past, size) for sequences, new, past in phases.values())
    backend = OnnxRuntimeDecoder(engine, decoder.kv, blocks, plugins=plugins, profile=profile)
    for sequences, new, past in phases.values():
        backend.step(_step(sequences, new, past, size))
    runs = runs_from_profile(backend.end_profile())
    backend.close()
    held = {
        name: sequences * (new + past) * decoder.kv.bytes_per_token for name, (sequences, new, past) in phases.items()
    }
    pool = default_kv_blocks(decoder, SchedulerConfig().max_running) * decoder.kv.bytes_per_block
    return _record(weight_bytes_stored(engine), pool, phases, runs, held)


def _step(sequences: int, new: int, past: int, size: int) -> StepInputs:
    each = blocks_for(new + past, size)
    batch = []
    for place in range(sequences):
        sequence = TokenSequence(place, [0] * (new + past), max_tokens=1)
        sequence.blocks.extend(range(place * each, (place + 1) * each))
        batch.append(Chunk(sequence, past, new))
    return step_inputs_from_batch(tuple(batch), size)


def _plain_account(
    engine: Path,
    inputs: Sequence[TensorRecord],
    plugins: Sequence[Path],
    profile: Path,
    feeds: Mapping[str, NDArray] | None,
) -> MemoryRecord | None:
    specs = input_specs_from_graph(engine, inputs)
    phases: dict[str, Mapping[str, NDArray]] = {} if feeds is None else {"given_inputs": feeds}
    for batch in _SAMPLES if feeds is None else ():
        sample = sample_of_batch(specs, batch, 0)
        found = next((value.shape[0] for value in sample.values() if value.ndim), 1)
        phases[f"batch_{found}"] = sample
    model = OnnxRuntimeModel(engine, plugins=plugins, profile=profile)
    for one in phases.values():
        model.infer(one)
    runs = runs_from_profile(model.end_profile())
    model.close()
    return _record(weight_bytes_stored(engine), 0, phases, runs, {})


def _record(
    weights: int, pool: int, phases: Mapping[str, object], runs: Sequence[Run], held: Mapping[str, int]
) -> MemoryRecord | None:
    if not all(_PEAK in call.arguments for run in runs for call in run.calls):
        return None
    found = []
    inside = 0
    for name, run in zip(phases, runs, strict=True):
        before = _figure(run, 0, "mem_bytes_in_use") - _figure(run, 0, "mem_in_use_delta")
        most = max(_figure(run, place, "mem_bytes_in_use") for place in range(len(run.calls)))
        peak = _figure(run, -1, _PEAK)  # since the session began, so phases are run from small to large
        workspace = max(peak - most, 0) if peak > inside else 0
        inside = max(inside, peak)
        activations, cache = most - before, held.get(name, 0)
        total = weights + cache + activations + workspace
        found.append(MemoryPhase(name=name, activations=activations, workspace=workspace, cache=cache, peak=total))
    return MemoryRecord(weights=weights, kv_pool=pool, phases=tuple(found))


def _figure(run: Run, place: int, name: str) -> int:
    return int(run.calls[place].arguments[name])
