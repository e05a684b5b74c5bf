"""A TensorRT bundle from an ONNX model: passes, rules, profiles, the plan, and a comparison with the model.

The passes are those for TensorRT, whatever backend the SKU has by default. Q and D that TensorRT would read as other
values are refused before anything is built; those that it would not fuse are named. A decoder's attention takes one of
the forms of `pipeline.tensorrt_decoder`.
"""

import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from engines.backends.base import DecoderBackend
from engines.backends.ort_tensorrt import BACKENDS as ORT_BACKENDS
from engines.backends.ort_tensorrt import PACKAGES as ORT_PACKAGES
from engines.backends.ort_tensorrt import (
    PROVIDERS,
    OrtTensorRtModel,
    fill_engine_cache,
    provider_version,
)
from engines.backends.tensorrt.api import Attention
from engines.backends.tensorrt.build import Plan, build_plan, forecast_build_memory
from engines.backends.tensorrt.child import PLAN
from engines.backends.tensorrt.key import EngineKey
from engines.backends.tensorrt.layers import float_products
from engines.backends.tensorrt.native_graph import OLDEST_NATIVE
from engines.backends.tensorrt.opening import decoder_from_plan, model_from_plan
from engines.backends.tensorrt.plugin_graph import PluginTarget
from engines.backends.tensorrt.profiles import derive_profiles
from engines.bundle import EngineBundle, temporary_sibling, write_bundle
from engines.manifest import (
    BackendRecord,
    CheckRecord,
    Manifest,
    PassRecord,
    TensorRtRecord,
)
from engines.sku import sku_table
from engines.sku_detect import Gpu, NoDriverError, match_gpu, own_gpus
from passes.graph import graph_from_path
from passes.onnx_model import OnnxModel, external_files, load_structure
from passes.quantization.tensorrt_placement import placement_faults, quantised_products, require_readable
from passes.standard import PassSwitches
from pipeline.forecast import size
from pipeline.optimize import OptimizeConfig, optimize
from pipeline.pass_report import record_from_report, result_of
from pipeline.progress import Progress
from pipeline.quantize.building import FOLDER
from pipeline.tensorrt_check import NAME, checked_model
from pipeline.tensorrt_config import TensorRtBuild
from pipeline.tensorrt_decoder import (
    SWITCHES,
    attention_for,
    checked,
    decoder_form,
    linear_check,
    multiprocessors,
)
from pipeline.tensorrt_quantize import Quantised, quantised_for_tensorrt
from pipeline.tensorrt_record import TOKENIZER, Made, manifest_of
from plugins.errors import KilnError
from plugins.paged_attention.tensorrt_plugin import Element

MODEL = "model.onnx"
_NAMED = 5


def build_tensorrt(source: OnnxModel, config: TensorRtBuild, progress: Progress) -> EngineBundle:
    """Rewrite, build, check and publish. Raises KilnError; nothing is published that was to be checked and failed."""
    attention = _attention_of(source, config)
    if attention is None:
        derive_profiles(source.inputs, None, config.serving)  # what it refuses is refused before any work
    gpu = gpu_for(config)
    processors = multiprocessors(config.sku) if attention == "plugin" else 0
    with temporary_sibling(config.out) as workspace:
        model = reference = source
        records: tuple[PassRecord, ...] = ()
        quantised = None
        if config.passes:
            model, records, quantised = _rewritten(source, workspace, config, progress)
        if quantised is not None:
            reference = model
        form = None
        if attention is not None:
            with progress.stage(f"attention: {attention}"):
                form = decoder_form(model, attention, _plugin_target(config, processors), workspace)
            model = form.model
        profiles = derive_profiles(model.inputs, model.decoder, config.serving)
        made = Made(source, reference, model, records, profiles, form, config, gpu, quantised)
        return _build(made, progress)


def _attention_of(source: OnnxModel, config: TensorRtBuild) -> Attention | None:
    """The form of a decoder's attention, None without any. Raises KilnError for one that it cannot take."""
    if source.decoder is None:
        if config.attention is not None:
            raise KilnError(f"{source.path} is no decoder's serving graph: leave --attention {config.attention} out")
        return None
    attention = attention_for(config.sku, config.attention, config.backend)
    if attention == "plugin" and config.options.strip_weights:
        raise KilnError(
            "a plan without weights is refitted by TensorRT's parser, which takes no plug-ins there: leave "
            "--trt-strip-weights out, or build with --attention native"
        )
    return attention


def _plugin_target(config: TensorRtBuild, processors: int) -> PluginTarget:
    element: Element = "bfloat16" if config.precision == "bf16" else "float16"
    return PluginTarget(config.sku.arch, processors, config.serving.max_running, element)


def _rewritten(
    source: OnnxModel, workspace: Path, config: TensorRtBuild, progress: Progress
) -> tuple[OnnxModel, tuple[PassRecord, ...], Quantised | None]:
    """After the passes for TensorRT."""
    target = config.sku.model_copy(update={"backend": "tensorrt", "provider": None, "options": {}})
    switches = SWITCHES if source.decoder is not None else PassSwitches()
    chosen = OptimizeConfig(switches, precision=config.precision)
    quantised = None
    if config.quantize is not None:
        model, reports, quantised = quantised_for_tensorrt(
            source, workspace / MODEL, target, chosen, config.quantize, config.tokenizer, progress
        )
    else:
        with progress.stage("graph passes"):
            model, reports = optimize(source, workspace / MODEL, target, chosen)
    for report in reports:
        (progress.note if report.rolled_back else progress.detail)(f"{report.name}: {result_of(report)}")
    return model, tuple(record_from_report(report) for report in reports), quantised


def _build(made: Made, progress: Progress) -> EngineBundle:
    config, model = made.config, made.model
    graph = graph_from_path(model.path)
    faults = placement_faults(graph)
    require_readable(faults)
    for fault in faults[:_NAMED]:
        progress.note(f"Q and D: {fault.sentence()}")
    if len(faults) > _NAMED:
        progress.note(f"Q and D: {len(faults) - _NAMED} more places cost time")
    products = [node.name for node in quantised_products(graph)]
    for profile in made.profiles:
        sizes = ", ".join(f"{symbol} {sizes}" for symbol, sizes in profile.symbols.items())
        progress.note(f"profile {profile.name}: {sizes or 'fixed shapes'}")
    progress.note(f"building will take about {size(forecast_build_memory(model, len(made.profiles)))} of host memory")

    def fill(folder: Path) -> Manifest:
        if config.tokenizer is not None:
            shutil.copytree(config.tokenizer, folder / TOKENIZER)
        if made.quantised is not None:
            shutil.copytree(made.reference.path.parent / FOLDER, folder / FOLDER)
        if config.backend in ORT_BACKENDS:
            return _with_engine_cache(made, folder, progress)
        return _with_plan(made, products, folder, progress)

    bundle = write_bundle(config.out, fill)
    progress.note(f"wrote {bundle.path}")
    return bundle


def gpu_for(config: TensorRtBuild) -> Gpu | None:
    """The GPU that the plan is built on and for; None where there is none, and nothing will be run."""
    try:
        gpus = own_gpus()
    except NoDriverError as error:
        if not config.check:
            return None
        raise KilnError(
            f"TensorRT builds on the GPU that it builds for, SKU {config.sku.name}; here: {error}"
        ) from error
    if not gpus:
        raise KilnError(f"this machine has no GPU; build for SKU {config.sku.name} on one that has it")
    match = match_gpu(gpus[0], {**sku_table(), config.sku.name: config.sku})
    if match.sku is None or match.sku.name != config.sku.name:
        found = match.sku.name if match.sku is not None else match.reason
        raise KilnError(
            f"TensorRT builds for the GPU at hand, which is {gpus[0].name} ({found}); expected SKU {config.sku.name}: "
            "build it on a machine of that type"
        )
    return gpus[0]


def _with_plan(made: Made, products: Sequence[str], folder: Path, progress: Progress) -> Manifest:
    """TensorRT's own plan."""
    config, product = made.config, made.config.backend
    assert product == "tensorrt" or product == "tensorrt_rtx"
    form = made.form
    checks = _cpu_checks(made, progress)
    with progress.stage("build the engine"):
        plan = build_plan(
            made.model,
            made.profiles,
            config.options,
            folder,
            parsed=None if form is None else form.parsed,
            kernels=None if form is None else form.kernels,
            least=OLDEST_NATIVE if form is not None and form.attention == "native" else (),
            product=product,
            inspect=config.check,
            observe=progress.detail,
        )
    _report(plan, products, progress)
    weights = (
        _copied(made.model, folder, None if form is None else form.parsed) if config.options.strip_weights else None
    )
    key = made.key(product, plan.tensorrt)
    record = TensorRtRecord(
        key=key,
        options=config.options.to_dict(),
        profiles=made.profiles,
        attention=None if form is None else form.attention,
        weights=MODEL if weights is not None else None,
        build_memory=plan.peak_memory,
        build_memory_forecast=plan.forecast_memory,
        engine_memory=dict(plan.memory),
        timings_before=plan.timings_before,
        timings_added=plan.timings_added,
        warnings=plan.warnings,
    )
    checks += _plan_checks(made, plan.path, key, weights, progress)
    backend = BackendRecord(name=product, version=plan.tensorrt, provider="TensorRT")
    return manifest_of(made, backend, PLAN, record, checks, folder)


def _cpu_checks(made: Made, progress: Progress) -> tuple[CheckRecord, ...]:
    """What can be judged before a builder is started, on any machine."""
    if made.form is None:
        return ()
    with progress.stage("check the graph"):
        check = linear_check(made.reference, made.form, made.floats)
    if check is not None:
        progress.note(f"{check.name}: {check.sentence()}")
    return () if check is None else (check,)


def _plan_checks(
    made: Made, plan: Path, key: EngineKey, weights: Path | None, progress: Progress
) -> tuple[CheckRecord, ...]:
    """The engine on the GPU that it was built on, against ONNX Runtime on the CPU."""
    inputs, profiles, form, decoder = made.model.inputs, made.profiles, made.form, made.model.decoder
    if form is None or decoder is None:
        opened = lambda: model_from_plan(plan, key, inputs, profiles, weights)  # noqa: E731
        return _checked(made, lambda: checked_model(made.reference, profiles, opened), progress)

    def opened_decoder() -> DecoderBackend:
        return decoder_from_plan(plan, key, form.attention, inputs, profiles, decoder.kv, weights)

    running = made.config.serving.max_running

    def judged() -> CheckRecord:
        return checked(made.reference, opened_decoder, decoder, NAME, running, made.floats)

    return _checked(made, judged, progress)


def _checked(made: Made, check: Callable[[], CheckRecord], progress: Progress) -> tuple[CheckRecord, ...]:
    if not made.config.check:
        progress.note("not checked: compare it with the model on its GPU before it is used")
        return ()
    with progress.stage("check"):
        found = check()
    progress.note(f"{found.name}: {found.sentence()}")
    return (found,)


def _with_engine_cache(made: Made, folder: Path, progress: Progress) -> Manifest:
    """The model, and the engines that ONNX Runtime's provider keeps of it."""
    config, backend = made.config, made.config.backend
    assert backend == "ort-trt" or backend == "ort-trt-rtx"
    engine = _copied(made.model, folder)
    with progress.stage("build the engine"):
        fill_engine_cache(engine, backend, made.model.inputs, made.profiles, config.options)
    key = made.key("tensorrt" if backend == "ort-trt" else "tensorrt_rtx", provider_version(backend))
    record = TensorRtRecord(
        key=key, options=config.options.to_dict(), profiles=made.profiles, build_memory=0, build_memory_forecast=0
    )
    opened = lambda: OrtTensorRtModel(engine, backend, made.model.inputs, made.profiles, config.options)  # noqa: E731
    checks = _checked(made, lambda: checked_model(made.reference, made.profiles, opened), progress)
    provider = BackendRecord(name="onnxruntime", version=version(ORT_PACKAGES[backend]), provider=PROVIDERS[backend])
    return manifest_of(made, provider, MODEL, record, checks, folder)


def _report(plan: Plan, products: Sequence[str], progress: Progress) -> None:
    progress.note(f"TensorRT {plan.tensorrt}: {len(plan.layers)} layers, peak of the build {size(plan.peak_memory)}")
    if plan.timings_added is not None:
        progress.note(f"timing cache: {plan.timings_before} timings found, {plan.timings_added} added")
    unfused = float_products(plan.layers, products) if plan.layers else []
    if unfused:
        progress.note(
            f"{len(unfused)} of {len(products)} 8-bit products are computed in float: {', '.join(unfused[:5])}"
        )
    for warning in plan.warnings:
        progress.detail(warning)


def _copied(model: OnnxModel, folder: Path, graph: Path | None = None) -> Path:
    """The graph, or another one with the same weights, and its weights, in the bundle."""
    for file in external_files(model.path, load_structure(model.path)):
        target = folder / file.relative_to(model.path.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return Path(shutil.copyfile(graph or model.path, folder / MODEL))
