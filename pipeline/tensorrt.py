"""A TensorRT bundle from an ONNX model: rules, profiles, the plan, and a comparison with the model it was made from.

The graph is taken as it is: `kiln optimize --sku` makes it, with its precision. Q and D that TensorRT would not fuse
are refused before anything is built. Decoders are refused: their attention is an operator of its own.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.backends.tensorrt.api import Product
from engines.backends.tensorrt.build import Plan, build_plan, forecast_build_memory, profiles_digest
from engines.backends.tensorrt.child import PLAN
from engines.backends.tensorrt.key import EngineKey
from engines.backends.tensorrt.layers import float_products
from engines.backends.tensorrt.opening import model_from_plan
from engines.backends.tensorrt.options import TensorRtOptions
from engines.backends.tensorrt.profiles import Profile, ServingShapes, derive_profiles
from engines.bundle import EngineBundle, file_records, write_bundle
from engines.manifest import (
    BackendRecord,
    CheckRecord,
    Manifest,
    ModelRecord,
    SkuRecord,
    TensorRecord,
    TensorRtRecord,
)
from engines.sku import Sku, sku_table
from engines.sku_detect import Gpu, NoDriverError, match_gpu, own_gpus
from passes.graph import graph_from_path
from passes.onnx_model import OnnxModel, external_files, load_structure
from passes.quantization.tensorrt_placement import quantised_products, require_fusable
from pipeline.forecast import size
from pipeline.progress import Progress
from plugins.errors import KilnError

PRODUCTS: tuple[str, ...] = get_args(Product)
DISTRIBUTION = "kiln-engine"
MODEL = "model.onnx"
_LIMIT = 5e-2
"""Largest relative error against the ONNX model on a CPU: that of a pass which changes precision."""


@dataclass(frozen=True)
class TensorRtBuild:
    """What to build. `check` compares the engine with the model, on the GPU that it was built for."""

    sku: Sku
    out: Path
    product: Product = "tensorrt"
    options: TensorRtOptions = field(default_factory=TensorRtOptions)
    serving: ServingShapes = field(default_factory=ServingShapes)
    check: bool = True


def build_tensorrt(model: OnnxModel, config: TensorRtBuild, progress: Progress) -> EngineBundle:
    """Build, check and publish. Raises KilnError; nothing is published that was to be checked and failed."""
    if model.decoder is not None:
        raise KilnError(
            f"{model.path} is a decoder's serving graph, whose paged attention TensorRT has no operator for; build it "
            "for ONNX Runtime with build-engine"
        )
    graph = graph_from_path(model.path)
    require_fusable(graph)
    products = [node.name for node in quantised_products(graph)]
    profiles = derive_profiles(model.inputs, None, config.serving)
    gpu = _gpu_for(config)
    for profile in profiles:
        sizes = ", ".join(f"{symbol} {sizes}" for symbol, sizes in profile.symbols.items())
        progress.note(f"profile {profile.name}: {sizes or 'fixed shapes'}")
    progress.note(f"building will take about {size(forecast_build_memory(model))} of host memory")

    def fill(folder: Path) -> Manifest:
        with progress.stage("build the engine"):
            plan = build_plan(
                model,
                profiles,
                config.options,
                folder,
                product=config.product,
                inspect=config.check,
                observe=progress.detail,
            )
        _report(plan, products, progress)
        weights = _weights(model, folder) if config.options.strip_weights else None
        key = _key(model, profiles, plan, config, gpu)
        checks: tuple[CheckRecord, ...] = ()
        if config.check:
            with progress.stage("check"):
                checks = (_checked(model, plan, key, profiles, weights),)
            progress.note(f"{checks[0].name}: {checks[0].sentence()}")
        else:
            progress.note("not checked: compare it with the model on its GPU before it is used")
        record = TensorRtRecord(
            key=key,
            options=config.options.to_dict(),
            profiles=profiles,
            weights=MODEL if weights is not None else None,
            build_memory=plan.peak_memory,
            build_memory_forecast=plan.forecast_memory,
            engine_memory=dict(plan.memory),
            timings_before=plan.timings_before,
            timings_added=plan.timings_added,
            warnings=plan.warnings,
        )
        return _manifest(model, config, plan, record, checks, folder)

    bundle = write_bundle(config.out, fill)
    progress.note(f"wrote {bundle.path}")
    return bundle


def _gpu_for(config: TensorRtBuild) -> Gpu | None:
    """The GPU that the plan is built on and for; None where it is not asked for, because nothing will be run."""
    if not config.check:
        return None
    try:
        gpus = own_gpus()
    except NoDriverError as error:
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


def _weights(model: OnnxModel, folder: Path) -> Path:
    """The model beside a plan without weights."""
    for file in external_files(model.path, load_structure(model.path)):
        target = folder / file.relative_to(model.path.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return Path(shutil.copyfile(model.path, folder / MODEL))


def _key(
    model: OnnxModel, profiles: Sequence[Profile], plan: Plan, config: TensorRtBuild, gpu: Gpu | None
) -> EngineKey:
    return EngineKey(
        product=config.product,
        tensorrt=plan.tensorrt,
        sku=config.sku.name,
        arch=config.sku.arch,
        driver=None if gpu is None else gpu.driver,
        plugin_abi=None,
        model_sha256=model.sha256,
        options=config.options.digest,
        profiles=profiles_digest(profiles),
        hardware=config.options.hardware,
        version_compatible=config.options.version_compatible,
    )


def _checked(
    model: OnnxModel, plan: Plan, key: EngineKey, profiles: Sequence[Profile], weights: Path | None
) -> CheckRecord:
    """Compare with ONNX Runtime on the CPU, on random inputs at the best sizes of each profile."""
    engine = model_from_plan(plan.path, key, model.inputs, profiles, weights)
    reference = OnnxRuntimeModel(model.path, optimized=False)
    worst = 0.0
    for profile in profiles:
        feeds = _random_inputs(model, profile)
        expected, found = reference.infer(feeds), engine.infer(feeds)
        for name, values in expected.items():
            difference = np.abs(found[name].astype(np.float64) - values).max()
            worst = max(worst, float(difference / max(float(np.abs(values).max()), 1e-30)))
    engine.close()
    reference.close()
    if not worst <= _LIMIT:
        raise KilnError(
            f"the engine differs from {model.path} by {worst:.1e} of the largest output; at most {_LIMIT:.0e} is "
            "expected: build with --trt-optimization-level 0, or the graph in FP32, to see which of the two it is"
        )
    return CheckRecord(name="engine against the model on a CPU", value=worst, limit=_LIMIT, origin="random inputs")


def _random_inputs(model: OnnxModel, profile: Profile) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for tensor in model.inputs:
        shape = profile.shapes(tensor)[1]
        kind = np.dtype(tensor.dtype).kind
        values = rng.standard_normal(shape) if kind == "f" else rng.integers(0, 2, shape)
        feeds[tensor.name] = values.astype(tensor.dtype)
    return feeds


def _manifest(
    model: OnnxModel,
    config: TensorRtBuild,
    plan: Plan,
    record: TensorRtRecord,
    checks: tuple[CheckRecord, ...],
    folder: Path,
) -> Manifest:
    tensors = [
        tuple(TensorRecord(name=t.name, dtype=t.dtype, shape=t.shape) for t in group)
        for group in (model.inputs, model.outputs)
    ]
    precision: Literal["fp32"] = "fp32"  # of inputs and outputs; what layers compute in is in layers.json
    return Manifest(
        kiln_version=version(DISTRIBUTION),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        name=model.path.stem,
        model=ModelRecord(
            source=str(model.path), architecture="ONNX", sha256=model.sha256, parameters=model.parameters
        ),
        sku=SkuRecord(name=config.sku.name, arch=config.sku.arch),
        backend=BackendRecord(name=config.product, version=plan.tensorrt, provider="TensorRT"),
        precision=precision,
        engine=PLAN,
        inputs=tensors[0],
        outputs=tensors[1],
        checks=checks,
        tensorrt=record,
        files=file_records(folder),
    )
