"""What only the device can tell of an engine that was built elsewhere: whether it is right, and which steps pay.

1. Logits of the engine's own kernels are compared with those that the bundle holds (`pipeline.expected`): the model's
   in FP32, or where it is quantised the graph's own.
2. Captured decode steps are timed for each batch size; one that is not faster than the next larger is not kept: a batch
   is then padded up further, for nothing.
3. Up to how many rows products take Kiln's own kernels, others cuBLAS or, of quantised weights, W8A8 (`kernel_rows` of
   plugins/dense/schema.py and plugins/quant_matmul/cuda_schema.py): so many as they are faster for, from one on.
   Quantised layers may have been built with a number each, from what was measured of such layers; these stay where all
   with one number are not faster.
4. Which of cuBLASLt's algorithms 16-bit products take for how many rows (`pipeline.tune.algorithms`), before 2 and 3.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engines.backends.base import LaunchingBackend, SamplingInputs, StepInputs
from engines.backends.cuda_decoder import CudaDecoder
from engines.backends.cuda_graphs import ladder_up_to
from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.bundle import EngineBundle
from engines.manifest import CheckRecord
from engines.runtime.opening import check_plugins, decoder_backend
from engines.runtime.scheduler import SchedulerConfig
from engines.runtime.sequence import blocks_for
from passes.onnx_model import onnx_model_from_path
from pipeline.check import verdict
from pipeline.expected import expected_from_file
from pipeline.gpu_build import runnable
from pipeline.progress import Progress
from pipeline.tune.algorithms import measured_algorithms
from pipeline.tune.derive import LOW_BIT, derive_bundle, products_in
from pipeline.verify import errors_between, generated_inputs, run_plain
from plugins.cuda_runtime import PROVIDER as CUDA
from plugins.cuda_runtime import CudaRuntime
from plugins.dense.cuda_search import Product
from plugins.dense.schema import KERNEL_ROWS
from plugins.errors import KilnError

CONTEXT = 512
"""Tokens of every sequence whose step is timed."""
_GAIN = 0.02
"""A smaller batch is to save so much of the next larger one's time: less is noise."""
_REPETITIONS, _STEPS = 5, 12


@dataclass(frozen=True)
class DeviceFindings:
    """Of one engine. `kernel_rows`: None where they stay as they were built, or there are no such products."""

    verified: CheckRecord
    decode_steps: Mapping[int, float]
    """Seconds of the captured steps that pay, by batch size; empty for a model without a KV cache."""
    kernel_rows: int | None = None
    algorithms: Mapping[Product, str] = field(default_factory=dict)
    """Attributes of products that do not take cuBLAS's own choice."""

    @property
    def sentence(self) -> str:
        shown = ", ".join(f"{size}: {1000 * value:.2f}" for size, value in self.decode_steps.items())
        rows = "" if self.kernel_rows is None else f"; products of up to {self.kernel_rows} rows take Kiln's kernels"
        return f"Captured decode steps, ms by batch size: {shown}{rows}."


def measured_on_device(bundle: EngineBundle, most: int, folder: Path, progress: Progress) -> DeviceFindings:
    """Ask this machine's GPU, with batches of up to `most`; a variant lies in `folder` meanwhile.

    Raises KilnError for an engine that is wrong there.
    """
    verified = verify_on_device(bundle)
    progress.note(f"{verified.name}: {verified.sentence()}")
    if bundle.manifest.decoder is None:
        return DeviceFindings(verified, {})
    products = products_in(bundle.engine_path)
    if not products:
        found = DeviceFindings(verified, ladder_from(step_seconds(bundle, most)))
    else:
        cap = max(products.values())
        algorithms = measured_algorithms(bundle, most, progress).texts
        library, kernels = (
            derive_bundle(bundle, folder / f"rows-{rows}" / "bundle", kernel_rows=rows, algorithms=algorithms)
            for rows in (0, cap)
        )
        as_built = bundle
        if algorithms and products.keys() & LOW_BIT:
            as_built = derive_bundle(bundle, folder / "as-built" / "bundle", algorithms=algorithms)
        times = [step_seconds(variant, most) for variant in (library, kernels)]
        built = step_seconds(as_built, most) if products.keys() & LOW_BIT else None
        kernel_rows, seconds = chosen_rows(times[0], times[1], built, cap)
        if kernel_rows:
            verified = verify_on_device(kernels)
        elif kernel_rows == 0 and built is None:  # W8A8 for all rows gives other logits than those that were kept
            verified = verify_on_device(library)
        elif algorithms:
            verified = verify_on_device(as_built)
        found = DeviceFindings(verified, ladder_from(seconds), kernel_rows, algorithms)
    progress.note(found.sentence)
    return found


def is_for_cuda(bundle: EngineBundle) -> bool:
    return bundle.manifest.backend.provider == CUDA and bundle.manifest.tensorrt is None


def device_name() -> str:
    """The GPU's. Raises KilnError where there is none."""
    runtime = CudaRuntime()
    runtime.close()
    return runtime.name


def verify_on_device(bundle: EngineBundle) -> CheckRecord:
    """Compare the engine on this machine's GPU with what it is to give. Raises KilnError beyond the limit."""
    manifest, name = bundle.manifest, device_name()
    if manifest.decoder is None:
        return verdict(f"outputs on {name} against the CPU", _plain_error(bundle), precision=manifest.precision)
    if manifest.expected is None:
        raise KilnError(f"{bundle.path} holds no logits to compare with; build it again with this version of Kiln")
    expected = expected_from_file(bundle.path / manifest.expected)
    backend = _backend(bundle, len(expected.texts), sum(map(len, expected.texts)))
    try:
        error = expected.worst_error(backend, manifest.decoder)
    finally:
        backend.close()
    against = "FP32" if manifest.quantization is None else "its graph on a CPU"
    return verdict(
        f"logits on {name} against {against}", error, manifest.decoder.kv.dtype, precision=manifest.precision
    )


def _plain_error(bundle: EngineBundle) -> float:
    model = onnx_model_from_path(bundle.engine_path)
    with runnable(model) as form:
        samples = generated_inputs(form)
        expected = run_plain(form.path, (), samples)
    backend = OnnxRuntimeModel(bundle.engine_path, provider=CUDA, options=bundle.manifest.backend.options)
    try:
        return errors_between(expected, [backend.infer(feeds) for feeds in samples]).relative
    finally:
        backend.close()


def step_seconds(bundle: EngineBundle, most: int) -> dict[int, float]:
    """Seconds of a captured decode step by batch size, up to `most`: medians, two steps under way where it can."""
    decoder = bundle.manifest.decoder
    assert decoder is not None
    backend = _backend(bundle, most, min(CONTEXT, decoder.max_context) * most)
    try:
        return {size: _step_seconds(backend, size, decoder.max_context) for size in backend.ladder}
    finally:
        backend.close()


def ladder_from(seconds: Mapping[int, float]) -> dict[int, float]:
    """The sizes that pay, ascending: the largest, and each that saves time against the next larger one kept."""
    kept: list[int] = []
    for size in sorted(seconds, reverse=True):
        if not kept or seconds[size] < (1 - _GAIN) * seconds[kept[-1]]:
            kept.append(size)
    return {size: seconds[size] for size in reversed(kept)}


def chosen_rows(
    library: Mapping[int, float], kernels: Mapping[int, float], built: Mapping[int, float] | None, cap: int
) -> tuple[int | None, dict[int, float]]:
    """`kernel_rows`, None for as built, and the seconds of a step that follow, by batch size.

    `library`: those with 0 rows everywhere; `kernels`: with as many as there can be, `cap` at most; `built`: as the
    bundle is, where that may be another choice.
    """
    rows = kernel_rows_from(library, kernels, cap)
    uniform = {size: kernels[size] if size <= rows else library[size] for size in library}
    if built is None or _mean(uniform) < (1 - _GAIN / 2) * _mean(built):
        return rows, uniform
    return None, dict(built)


def _mean(seconds: Mapping[int, float]) -> float:
    return statistics.geometric_mean(seconds.values())


def kernel_rows_from(library: Mapping[int, float], own: Mapping[int, float], cap: int = KERNEL_ROWS) -> int:
    """The largest batch, of `cap` at most, up to which Kiln's own products are faster at every size measured."""
    found = 0
    for size in sorted(library):
        if size > cap or own[size] >= (1 - _GAIN / 2) * library[size]:
            break
        found = size
    return found


def _backend(bundle: EngineBundle, running: int, tokens: int) -> CudaDecoder:
    """The bundle's engine, with a cache for `running` sequences of so many tokens together, all sizes captured."""
    decoder = bundle.manifest.decoder
    assert decoder is not None
    check_plugins(bundle)
    blocks = blocks_for(tokens, decoder.kv.block_size) + running
    config = SchedulerConfig(running, max(running, 1024))
    backend = decoder_backend(bundle, decoder, config, blocks, 0, None, None, ladder=ladder_up_to(running))
    assert isinstance(backend, CudaDecoder)
    return backend


def _step_seconds(backend: CudaDecoder, size: int, max_context: int) -> float:
    inputs = _decode_step(backend, size, min(CONTEXT, max_context) - 1)
    _run_steps(backend, inputs, 2)
    return statistics.median(_run_steps(backend, inputs, _STEPS) for _ in range(_REPETITIONS))


def _run_steps(backend: CudaDecoder, inputs: StepInputs, count: int) -> float:
    """Mean seconds of a step."""
    start = time.perf_counter()
    if isinstance(backend, LaunchingBackend):
        rows = len(inputs.logits_indices)
        sampling, feed = SamplingInputs.greedy(rows), np.full(rows, -1, np.int32)
        for number in range(count):
            backend.launch(inputs, sampling, feed, logits=False)
            if number:
                backend.collect()
        backend.collect()
    else:
        for _ in range(count):
            backend.step(inputs)
    return (time.perf_counter() - start) / count


def _decode_step(backend: CudaDecoder, size: int, past: int) -> StepInputs:
    """One token of each of `size` sequences, which write nothing, over blocks of their own."""
    width = blocks_for(past + 1, backend.kv.block_size)
    rows = np.arange(size, dtype=np.int32)
    return StepInputs(
        input_ids=rows % backend.vocab_size,
        position_ids=np.full(size, past, np.int32),
        logits_indices=rows,
        cumulative_sequence_length=np.arange(size + 1, dtype=np.int32),
        past_seqlens=np.full(size, past, np.int32),
        block_table=(np.arange(size * width, dtype=np.int32) % backend.num_blocks).reshape(size, width),
        slot_mapping=np.full(size, -1, np.int32),
    )
