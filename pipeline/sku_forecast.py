"""One model forecast for many SKUs, before anything is built: `kiln sku forecast`.

A bundle or .onnx file is read as it is; a model without a KV cache is run once on this machine's CPU to see its
shapes. Of other sources only the configuration is read, so a plain one says what it weighs and no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.bundle import MANIFEST, open_bundle
from engines.sku import Precision, Sku
from passes.onnx_model import OnnxModel, onnx_model_from_path
from pipeline.compare.inputs import input_specs_from_graph, sample_of_batch
from pipeline.floors import PlainWork, plain_work
from pipeline.forecast import Forecast, forecast_from_description, forecast_from_onnx, forecast_plain
from pipeline.load import describe, load
from pipeline.progress import Progress
from pipeline.source import resolve_source
from plugins.errors import KilnError, first_line
from plugins.paged_attention.schema import CacheDtype


@dataclass(frozen=True)
class SizeOptions:
    """What decides sizes before there is a graph; a graph has its own precision and cache, and takes none of these."""

    precision: Precision = "fp32"
    kv_dtype: CacheDtype = "float32"
    max_context: int | None = None


def forecast_for_skus(spec: str, skus: Sequence[Sku], options: SizeOptions, progress: Progress) -> list[Forecast]:
    """A forecast for each SKU. Raises KilnError for a model that cannot be found, read or run."""
    graph = _graph(spec)
    if graph is not None:
        if options != SizeOptions():
            raise KilnError(
                f"{spec} is a graph with its own precision, cache and context; leave --precision, --kv-dtype and "
                "--max-context out"
            )
        work = _work(graph, progress) if graph.decoder is None else None
        return [forecast_from_onnx(graph.path, sku, work) for sku in skus]
    source = resolve_source(spec)
    with progress.stage("read its configuration"):
        description = describe(source)
    if description is not None:
        return [forecast_from_description(description, sku, options) for sku in skus]
    with progress.stage("load weights"):
        parameters = load(source).parameters
    return [forecast_plain(parameters, sku, options) for sku in skus]


def _graph(spec: str) -> OnnxModel | None:
    path = Path(spec).expanduser()
    if (path / MANIFEST).is_file():
        return onnx_model_from_path(open_bundle(path).engine_path)
    return onnx_model_from_path(path) if path.suffix == ".onnx" else None


def _work(model: OnnxModel, progress: Progress) -> PlainWork | None:
    """What one sample takes; None, with a note, where the model cannot be run on made-up inputs."""

    feeds = sample_of_batch(input_specs_from_graph(model.path, model.inputs), 1, seed=0)
    batch = next((value.shape[0] for value in feeds.values() if value.shape), 1)
    try:
        with progress.stage("run it once"):
            work = plain_work(model.path, feeds, batch)
    except Exception as error:  # ONNX Runtime raises many types: an operator of another provider, a bad shape
        progress.note(f"rates and the largest batch are unknown: {first_line(error)}")
        return None
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in feeds.items())
    progress.note(f"one sample is {shapes}")
    return work
