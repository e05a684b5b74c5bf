"""The GPU engine, measured: kernels, steps, first tokens and a trace, each against what this device could do at best.

    python scripts/bench_gpu.py [--bundle BUNDLE] [--precision bf16] [--sku h200]
    python scripts/bench_gpu.py --quant int8 --beside sixteen.json

Builds a bundle of the shape of Llama 3 8B on random weights with Kiln's own build, has the algorithms of its products
measured as `kiln tune` does, unless BUNDLE is there already, and uses it through `Engine` as a service would. Takes
four and a half minutes on an H200. Prints one table and one JSON line, and exits with 1 when a target is missed. Needs
torch with CUDA beside ONNX Runtime's CUDA build.

--quant gives all of the model's products weights of 8 or 4 bits, with the kernels that were measured to be the fastest
for their shapes; --beside FILE, whose last line is the JSON of a run in 16 bits on this machine, adds how the decode
steps compare. The trace is served three times; its figure is the median.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_bench.device_step import decode_inputs, device_step, mixed_inputs, prompt_inputs, run_step
from gpu_bench.figures import GOALS, Figure, table
from gpu_bench.kernels import kernel_table, kernels_of
from gpu_bench.limits import DeviceLimits, attention_figures, measure_device
from gpu_bench.llama8b import Shape, random_bundle
from gpu_bench.quantise import QUANTS
from gpu_bench.serving import (
    MIXED,
    SCHEDULING,
    decode_step,
    first_token,
    first_token_floor,
    serve_trace,
    step_floor,
    trace_floor,
    trace_totals,
)
from gpu_bench.trace_steps import step_table, traced_steps

from engines.backends.base import DecoderBackend, LaunchingBackend
from engines.bundle import EngineBundle, open_bundle
from engines.runtime.allocator import exempt_from_collection
from engines.runtime.engine import Engine
from engines.runtime.scheduler import SchedulerConfig
from pipeline.config import BuildConfig
from pipeline.floors import DecoderWork, decoder_work_from_graph
from pipeline.load_test.trace import Workload
from pipeline.progress import Progress
from pipeline.tune.algorithms import cuda_plugin, measured_algorithms
from pipeline.tune.derive import derive_bundle
from plugins.errors import KilnError

KV_BLOCKS = 24_576
"""For 393,216 tokens, more than any experiment has: 48 GiB."""
MIXED_STEP = (130, 800, 10, 778)
"""What the trace's steps with prompts hold on average: sequences, tokens of each, prompts, tokens of each."""


@dataclass(frozen=True)
class Sizes:
    """Batches of decode steps after prompts of `prompt` tokens, prompts of first tokens, requests of the trace."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128)
    prompt: int = 512
    prompts: tuple[int, ...] = (512, 4096)
    requests: int = 256


def engine_figures(
    engine: Engine, work: DecoderWork, limits: DeviceLimits, sizes: Sizes, mixed: Workload, seed: int
) -> Iterator[Figure]:
    """Everything that goes through the engine, which must be idle."""
    serve_trace(engine, mixed.draw(min(16, sizes.requests), seed + 1))  # warms up
    for batch in sizes.batches:
        taken, least = decode_step(engine, batch, sizes.prompt), step_floor(work, limits, batch, sizes.prompt)
        yield Figure(f"decode step, batch {batch}", taken * 1e3, "ms", least * 1e3)
    if isinstance(engine.backend, LaunchingBackend):
        device = device_step(engine.backend, batch, sizes.prompt)
        yield Figure(f"device alone, batch {batch}", device * 1e3, "ms", least * 1e3)
        yield Figure(f"host, batch {batch}", max(0.0, taken - device) * 1e3, "ms")
    for prompt in sizes.prompts:
        taken, least = first_token(engine, prompt), first_token_floor(work, limits, prompt)
        yield Figure(f"first token, prompt of {prompt}", taken * 1e3, "ms", least * 1e3)
    trace = mixed.draw(sizes.requests, seed)
    prompts, outputs = trace_totals(trace)
    taken = statistics.median(serve_trace(engine, trace) for _ in range(3))
    least = trace_floor(work, limits, trace)
    yield Figure(f"{sizes.requests} requests", outputs / taken, "tokens/s", outputs / least, is_rate=True)
    yield Figure(f"{sizes.requests} requests, with prompts", (prompts + outputs) / taken, "tokens/s", is_rate=True)


def bundle_for(arguments: argparse.Namespace, folder: Path, progress: Progress) -> EngineBundle:
    path = arguments.bundle or folder / "llama-8b-shape"
    if path.exists():
        return open_bundle(path)
    built = path.with_name(f"{path.name}-built")
    config = BuildConfig(out=built, precision=arguments.precision, verify_passes=False)
    bundle = random_bundle(Shape(), arguments.sku, config, progress, QUANTS.get(arguments.quant))
    algorithms = measured_algorithms(bundle, SCHEDULING.max_running, progress).texts
    return derive_bundle(bundle, path, algorithms=algorithms)


def measure(
    bundle: EngineBundle, config: SchedulerConfig, seed: int, kernels: bool, progress: Progress
) -> Iterator[Figure]:
    """Every figure as it is found; afterwards with `kernels`, prints where the time of some steps goes."""
    decoder = bundle.manifest.decoder
    if decoder is None:
        raise SystemExit(f"{bundle.path} is no decoder; expected a bundle of a language model")
    try:
        library = cuda_plugin(bundle)
    except KilnError as error:
        raise SystemExit(str(error)) from error
    with progress.stage("the device's limits"):
        limits = measure_device()
    yield Figure("copy", limits.bandwidth / 1e12, "TB/s")
    yield Figure("product", limits.product_rate / 1e12, "TFLOP/s")
    with progress.stage("attention kernels"):
        attention = attention_figures(library, limits, decoder.kv.block_size)
    yield from attention
    work = decoder_work_from_graph(bundle.engine_path, decoder)
    with progress.stage("open the engine"):
        engine = Engine.open(bundle.path, kv_blocks=KV_BLOCKS, config=config)
    exempt_from_collection()  # as the processes of kiln serve do
    with engine:
        yield from engine_figures(engine, work, limits, Sizes(), MIXED, seed)
        if kernels:
            print_kernels(engine.backend, Sizes())
            print_trace(engine, Sizes(), seed)


def beside(figures: list[Figure], other: dict[str, Any]) -> list[Figure]:
    """Decode steps over those of another run's document, in shares of its time."""
    return [
        Figure(f"{figure.name}, over 16 bits", figure.value / other[figure.name]["value"], "x")
        for figure in figures
        if figure.name.startswith("decode step") and figure.name in other
    ]


def document_of(path: Path) -> dict[str, Any]:
    """The last line of a file that a run was written to."""
    try:
        found = json.loads(path.read_text().splitlines()[-1])
        if found["quant"] is None:
            return dict(found)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} does not end with this script's JSON line ({error}); give a run's output") from error
    raise SystemExit(f"{path} is of a run with --quant {found['quant']}; expected one in 16 bits")


def print_kernels(backend: DecoderBackend, sizes: Sizes) -> None:
    for batch in (sizes.batches[0], sizes.batches[-1]):
        step = decode_inputs(backend, batch, sizes.prompt)
        print(kernel_table(f"decode step, batch {batch}", *kernels_of(lambda step=step: run_step(backend, step), 10)))
    for prompt in sizes.prompts:
        whole = prompt_inputs(backend, prompt)
        print(kernel_table(f"prompt of {prompt}", *kernels_of(lambda whole=whole: run_step(backend, whole), 3)))
    mixed = mixed_inputs(backend, *MIXED_STEP)
    sequences, context, prompts, tokens = MIXED_STEP
    title = f"{sequences} sequences of {context} and {prompts} prompts of {tokens}"
    print(kernel_table(title, *kernels_of(lambda: run_step(backend, mixed), 12)))


def print_trace(engine: Engine, sizes: Sizes, seed: int) -> None:
    if isinstance(engine.backend, LaunchingBackend):
        with traced_steps(engine.backend) as steps:
            serve_trace(engine, MIXED.draw(sizes.requests, seed))
        print(step_table(steps))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="built there if nothing is; by default built and thrown away")
    parser.add_argument("--precision", default="bf16", help="of the bundle that is built")
    parser.add_argument("--sku", default="h200", help="that it is built for")
    parser.add_argument("--quant", choices=sorted(QUANTS), help="weights of the bundle that is built; else 16 bits")
    parser.add_argument("--beside", type=Path, help="output of a run in 16 bits to compare decode steps with")
    parser.add_argument("--kernels", action="store_true", help="also print what the time of steps goes to")
    parser.add_argument("--tokens-per-step", type=int, default=SCHEDULING.tokens_per_step, help="in the trace, at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = replace(SCHEDULING, tokens_per_step=arguments.tokens_per_step)
    sixteen = {} if arguments.beside is None else document_of(arguments.beside)
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder:
        bundle = bundle_for(arguments, Path(folder), progress)
        figures = []
        for figure in measure(bundle, config, arguments.seed, arguments.kernels, progress):
            progress.note(figure.sentence())
            figures.append(figure)
    figures += beside(figures, sixteen)
    print(table(figures))
    measured = {figure.name: figure.to_json() for figure in figures}
    missed = [*(figure.name for figure in figures if figure.missed), *(name for name in GOALS if name not in measured)]
    print(f"missed: {', '.join(missed)}" if missed else "all targets are met")
    about = {"sku": arguments.sku, "precision": bundle.manifest.precision, "quant": arguments.quant}
    print(json.dumps({**about, "missed": missed, **measured}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
