"""The build: source, forecast, load, export, passes, check, publish; one bundle per SKU.

Orchestrates the stages and writes the manifest. What each stage does is in its own module.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from engines.bundle import EngineBundle, file_records, refuse_unusable_target, temporary_sibling, write_bundle
from engines.manifest import (
    DISTRIBUTION,
    BackendRecord,
    CheckRecord,
    Manifest,
    MemoryRecord,
    ModelRecord,
    PassRecord,
    PluginRecord,
    QuantizationRecord,
    SkuRecord,
    TensorRecord,
)
from engines.sku import Sku, resolve_sku
from passes.base import Effect
from passes.manager import link_or_copy
from passes.onnx_model import OnnxModel, external_files, load_structure, onnx_model_from_path
from passes.standard import FLOAT_TABLE, TABLE, WIDE_TABLE
from pipeline.buildable import refuse_unbuildable
from pipeline.check import check_against_torch, check_against_unoptimised
from pipeline.config import BuildConfig, Precision
from pipeline.export import export_model
from pipeline.forecast import (
    Forecast,
    decoder_work_from_description,
    forecast_from_description,
    forecast_from_onnx,
    forecast_plain,
    refuse_what_cannot_fit,
)
from pipeline.gpu_build import (
    PLUGINS,
    UNMEASURED,
    UNVERIFIED_KERNELS,
    gpu_plugin,
    provider_options,
    refuse_gpu_decoder,
    refuse_quantising,
    runnable,
    unmeasured_layers,
    write_expected,
    write_expected_of_graph,
)
from pipeline.load import Description, TorchModel, describe, load
from pipeline.memory import memory_account
from pipeline.optimize import OptimizeConfig, optimize, target_for
from pipeline.pass_report import record_from_report, result_of
from pipeline.progress import Progress
from pipeline.source import ModelSource, resolve_source
from pipeline.verify import Feeds, feeds_from_file
from plugins.abi import abi_hash
from plugins.build import cpu_library
from plugins.errors import KilnError
from plugins.paged_attention.schema import DOMAIN, OP_TYPE
from plugins.quant_matmul.cuda_choice import recorded

ENGINE = "engine.onnx"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Built:
    """One published bundle and what was forecast for it."""

    bundle: EngineBundle
    forecast: Forecast


@dataclass(frozen=True)
class _Inputs:
    """What every SKU's bundle is made from. `torch_model` is None for an .onnx source, `feeds` without --inputs."""

    source: ModelSource
    onnx_model: OnnxModel
    torch_model: TorchModel | None
    feeds: Sequence[Feeds] | None


def build(spec: str, sku_names: Sequence[str], config: BuildConfig, progress: Progress) -> list[Built]:
    """Build one bundle per SKU. Raises KilnError; nothing is published for a SKU whose check failed."""
    skus = [_sku_for(name, config) for name in sku_names]
    with progress.stage("find the model"):
        source = resolve_source(spec)
    progress.detail(f"{source.kind} model at {source.target}")
    targets = _targets(source, skus, config)
    feeds = feeds_from_file(config.inputs) if config.inputs else None
    for path in targets:
        refuse_unusable_target(path)
    torch_model = None
    with progress.stage("read its configuration"):
        description = describe(source)
    if description is None or not description.is_decoder:
        _refuse_cache_options(source, config)
    if source.kind == "module":
        with progress.stage("load weights"):
            torch_model = load(source)  # only the module itself tells its size
    forecasts = [_forecast(source, description, torch_model, sku, config) for sku in skus]
    for line in [line for forecast in forecasts for line in forecast.lines()]:
        progress.note(line)
    for sku, forecast in zip(skus, forecasts, strict=True):
        refuse_what_cannot_fit(forecast)
        is_decoder = forecast.kv_bytes_per_token is not None
        refuse_unbuildable(sku, is_decoder=is_decoder, elsewhere=config.elsewhere)
        if config.quantize is not None and not sku.is_cpu and not is_decoder:
            raise KilnError(f"quantised engines for {sku.name} are language models; {spec} is none: leave it out")
        if description is not None and description.is_decoder and not sku.is_cpu:
            layers = decoder_work_from_description(description, config.for_sku(sku)).layers
            sizes = [layer.head_dim for layer in layers]  # before weights are read; the graph is looked at again
            refuse_gpu_decoder(sizes, config.block_size, sku)
    if description is not None:
        with progress.stage("load weights"):
            torch_model = load(source, description)
    progress.detail(f"the model's sha256 is {source.sha256}")  # not earlier: it reads all weights
    with temporary_sibling(targets[0]) as workspace:
        with progress.stage("export to ONNX"):
            onnx_model = _onnx_model(source, torch_model, workspace / ENGINE, config)
        progress.detail(f"{onnx_model.parameters:,} values in initializers, sha256 {onnx_model.sha256}")
        inputs = _Inputs(source, onnx_model, torch_model, feeds)
        built: list[Built] = []
        for sku, path, forecast in zip(skus, targets, forecasts, strict=True):
            before = zip(skus, built, strict=False)
            twin = next((made.bundle for other, made in before if _same_engine(other, sku, inputs, config)), None)
            if twin is None:
                bundle = _build_for_sku(inputs, sku, path, config, progress)
            else:
                bundle = _share_with_sku(twin, sku, path, progress)
            built.append(Built(bundle, forecast))
        return built


def _onnx_model(source: ModelSource, torch_model: TorchModel | None, target: Path, config: BuildConfig) -> OnnxModel:
    """Export into `target`, or copy an .onnx source there: later stages link what lies in our own folder."""
    if torch_model is not None:
        return export_model(torch_model, target, config)
    assert source.path is not None
    for file in external_files(source.path, load_structure(source.path)):
        copy = target.parent / file.relative_to(source.path.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    shutil.copyfile(source.path, target)
    return onnx_model_from_path(target)


def _forecast(
    source: ModelSource, description: Description | None, torch_model: TorchModel | None, sku: Sku, config: BuildConfig
) -> Forecast:
    if description is not None:
        return forecast_from_description(description, sku, config.for_sku(sku))
    if torch_model is not None:
        return forecast_plain(torch_model.parameters, sku, config.for_sku(sku))
    assert source.path is not None
    return forecast_from_onnx(source.path, sku)


def _sku_for(name: str, config: BuildConfig) -> Sku:
    sku = resolve_sku(name, config.sku_file)
    precision = config.for_sku(sku).precision
    if precision not in sku.precisions:
        raise KilnError(f"SKU {sku.name} offers the precisions {', '.join(sku.precisions)}; found {precision}")
    if config.quantize is not None and not sku.is_cpu:
        refuse_quantising(config.quantize, precision, sku)
    return sku


def _refuse_cache_options(source: ModelSource, config: BuildConfig) -> None:
    """Options of the KV cache take effect at export; for any other model they would be ignored unseen."""
    default = BuildConfig()
    for name in ("kv_dtype", "block_size", "max_context"):
        if getattr(config, name) != getattr(default, name):
            raise KilnError(
                f"--{name.replace('_', '-')} is {getattr(config, name)}, but {source.spec} is not a decoder that Kiln "
                "exports: an .onnx file has its KV cache fixed, other models have none; leave the option out"
            )


def _targets(source: ModelSource, skus: Sequence[Sku], config: BuildConfig) -> list[Path]:
    if config.out is not None and len(skus) == 1:
        return [config.out]
    if config.out is not None:
        return [config.out / sku.name for sku in skus]
    return [Path("bundles") / f"{source.name}-{sku.name}" for sku in skus]


def _build_for_sku(inputs: _Inputs, sku: Sku, path: Path, config: BuildConfig, progress: Progress) -> EngineBundle:
    def fill(folder: Path) -> Manifest:
        plugins: tuple[PluginRecord, ...] = ()
        if inputs.onnx_model.decoder is not None:
            if not sku.is_cpu:
                kv = inputs.onnx_model.decoder.kv
                refuse_gpu_decoder([layer.head_dim for layer in kv.layers], kv.block_size, sku)
            with progress.stage(f"{sku.name}: compile attention"):
                plugins = (_copy_plugin(folder) if sku.is_cpu else gpu_plugin(folder, sku),)
            progress.detail(f"{plugins[0].operator} in {plugins[0].file}, ABI {plugins[0].abi_hash}")
        _save_tokenizer(inputs.torch_model, folder)
        engine = _engine(inputs, sku, folder, [folder / plugin.file for plugin in plugins], config, progress)
        with progress.stage(f"{sku.name}: digests"):
            return _manifest(inputs, engine, sku, config, folder, plugins)

    bundle = write_bundle(path, fill)
    progress.note(f"wrote {bundle.path}")
    if bundle.manifest.unverified:
        found = "; ".join(bundle.manifest.unverified)
        progress.note(f"not verified here: {found}. On a machine with {sku.title} run: kiln tune {bundle.path}")
    return bundle


def _same_engine(first: Sku, second: Sku, inputs: _Inputs, config: BuildConfig) -> bool:
    """Whether two SKUs get the same graph by the same passes, judged by the same checks on this machine."""
    targets = [target_for(inputs.onnx_model, sku, _passes_of(config, sku)) for sku in (first, second)]
    same_code = first.is_cpu or first.plugin_architectures == second.plugin_architectures
    same_speed = config.quantize is None or first.is_cpu or recorded(first.name) == recorded(second.name)
    return targets[0] == targets[1] and first.provider == second.provider and same_code and same_speed


def _share_with_sku(twin: EngineBundle, sku: Sku, path: Path, progress: Progress) -> EngineBundle:
    """Publish another SKU's bundle for this one: its files are linked, not made or stored again."""

    def fill(folder: Path) -> Manifest:
        for name in twin.manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(twin.path / name, folder / name)
        return twin.manifest.model_copy(update={"sku": _sku_record(sku), "created": _now()})

    with progress.stage(f"{sku.name}: shares {twin.manifest.sku.name}'s engine"):
        bundle = write_bundle(path, fill)
    progress.note(f"wrote {bundle.path}")
    return bundle


@dataclass(frozen=True)
class _Engine:
    """The graph that is published, and what was found out about it."""

    model: OnnxModel
    passes: tuple[PassRecord, ...]
    check: CheckRecord
    quantization: QuantizationRecord | None = None
    memory: MemoryRecord | None = None


def _engine(
    inputs: _Inputs, sku: Sku, folder: Path, libraries: list[Path], config: BuildConfig, progress: Progress
) -> _Engine:
    """Write the engine. What is quantised is checked before that, as float, and judged by the gate after it."""
    passes, quantize = _passes_of(config, sku), config.quantize
    target, table, precision = folder / ENGINE, TABLE, passes.precision
    if quantize is not None:
        target, table = folder / "float" / ENGINE, FLOAT_TABLE
        if not sku.is_cpu:  # the cast to 16 bits follows
            table, precision, libraries = WIDE_TABLE, "fp32", [cpu_library()]
    target.parent.mkdir(exist_ok=True)
    with progress.stage(f"{sku.name}: graph passes"):
        model, reports = optimize(inputs.onnx_model, target, sku, passes, inputs.feeds, table=table)
    for report in reports:
        (progress.note if report.rolled_back else progress.detail)(f"{report.name}: {result_of(report)}")
    with progress.stage(f"{sku.name}: check"):
        changed = any(report.changed and report.effect is Effect.MODEL for report in reports)
        check = _check(inputs, model, sku, libraries, precision, changed)
    progress.note(f"{check.name}: {check.sentence()}")
    record = None
    if quantize is not None:
        from pipeline.quantize.building import quantised_engine

        tokenizer = folder / TOKENIZER
        model, more, record = quantised_engine(
            model, folder / ENGINE, sku, passes, quantize, libraries, tokenizer, inputs.feeds, progress
        )
        reports = (*reports, *more)
        shutil.rmtree(target.parent)
    memory = None
    if sku.is_cpu:
        with progress.stage(f"{sku.name}: account for memory"):
            memory = _memory(inputs, model, libraries, progress)
    return _Engine(model, tuple(record_from_report(report) for report in reports), check, record, memory)


def _memory(inputs: _Inputs, model: OnnxModel, libraries: list[Path], progress: Progress) -> MemoryRecord | None:
    """The memory account; a model that random inputs do not suit is published without one."""
    feeds = inputs.feeds[0] if inputs.feeds else None
    try:
        account = memory_account(
            model.path, model.decoder, [TensorRecord.of(tensor) for tensor in model.inputs], libraries, feeds
        )
    except KilnError as error:
        progress.note(f"memory is not accounted for: {error}")
        return None
    if account is not None:
        progress.note(f"memory: {account.sentence()}")
    return account


def _passes_of(config: BuildConfig, sku: Sku) -> OptimizeConfig:
    precision = config.for_sku(sku).precision
    return OptimizeConfig(config.passes, precision, config.io_layout, config.verify_passes, config.measure_passes)


def _copy_plugin(folder: Path) -> PluginRecord:
    library = cpu_library()
    (folder / PLUGINS).mkdir()
    shutil.copyfile(library, folder / PLUGINS / library.name)
    return PluginRecord(file=f"{PLUGINS}/{library.name}", operator=f"{DOMAIN}::{OP_TYPE}", abi_hash=abi_hash())


def _save_tokenizer(model: TorchModel | None, folder: Path) -> None:
    if model is not None and model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder / TOKENIZER)


def _check(
    inputs: _Inputs, model: OnnxModel, sku: Sku, libraries: list[Path], precision: Precision, changed: bool
) -> CheckRecord:
    if not sku.is_cpu:
        with runnable(model) as form:
            return _compare(inputs, form, [cpu_library()] if model.decoder else [], precision, changed)
    return _compare(inputs, model, libraries, precision, changed)


def _compare(
    inputs: _Inputs, model: OnnxModel, libraries: list[Path], precision: Precision, changed: bool
) -> CheckRecord:
    if inputs.torch_model is not None:
        return check_against_torch(inputs.torch_model, model.path, model.decoder, libraries, changed, precision)
    return check_against_unoptimised(inputs.onnx_model, model.path, libraries, inputs.feeds, changed, precision)


def _manifest(
    inputs: _Inputs,
    engine: _Engine,
    sku: Sku,
    config: BuildConfig,
    folder: Path,
    plugins: tuple[PluginRecord, ...],
) -> Manifest:
    import onnxruntime

    torch_model, model = inputs.torch_model, engine.model
    assert sku.provider is not None, "only ONNX Runtime's providers are built for"
    options: dict[str, str] = {}
    unverified: tuple[str, ...] = ()
    expected = None
    if not sku.is_cpu:
        options, unverified = provider_options(sku, model), (UNVERIFIED_KERNELS, UNMEASURED)
        if engine.quantization is not None:
            unverified = (*unverified, *unmeasured_layers(engine.quantization, sku))
            expected = write_expected_of_graph(model, folder)
        elif model.decoder is not None and torch_model is not None:
            expected = write_expected(torch_model, model.decoder, folder)
        elif model.decoder is not None:
            expected = write_expected_of_graph(inputs.onnx_model, folder)
    return Manifest(
        kiln_version=version(DISTRIBUTION),
        created=_now(),
        name=inputs.source.name,
        model=ModelRecord(
            source=inputs.source.spec,
            architecture=torch_model.architecture if torch_model else "ONNX",
            sha256=inputs.source.sha256,
            parameters=torch_model.parameters if torch_model else model.parameters,
        ),
        sku=_sku_record(sku),
        backend=BackendRecord(
            name="onnxruntime", version=onnxruntime.__version__, provider=sku.provider, options=options
        ),
        precision=config.for_sku(sku).precision,
        engine=ENGINE,
        tokenizer=TOKENIZER if (folder / TOKENIZER).is_dir() else None,
        inputs=tuple(map(TensorRecord.of, model.inputs)),
        outputs=tuple(map(TensorRecord.of, model.outputs)),
        decoder=model.decoder,
        plugins=plugins,
        passes=engine.passes,
        checks=(engine.check,),
        quantization=engine.quantization,
        memory=engine.memory,
        unverified=unverified,
        expected=expected,
        files=file_records(folder),
    )


def _sku_record(sku: Sku) -> SkuRecord:
    return SkuRecord(name=sku.name, arch=sku.arch, cpu_features=sku.cpu_features)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
