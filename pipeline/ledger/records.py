"""Entries from what commands found: builds, comparisons, benchmarks."""

import json
import math
from collections.abc import Mapping

from engines.bundle import EngineBundle
from engines.manifest import Manifest
from pipeline.bench import BenchReport
from pipeline.compare.machine import machine_description, package_versions
from pipeline.compare.report import ComparisonReport, Side
from pipeline.ledger.entry import LIMIT_PREFIX, Entry, FigureValues

_LIBRARIES = ("kiln-engine", "onnxruntime", "onnx", "torch", "transformers", "numpy")


def entry_from_build(bundle: EngineBundle, seconds: Mapping[str, float]) -> Entry:
    """A bundle that was just built here; `seconds` by stage."""
    manifest = bundle.manifest
    checks = [
        FigureValues(f"check/{check.name}", "error", (check.value,), False)
        for check in manifest.checks
        if math.isfinite(check.value)
    ]
    size = sum(record.bytes for record in manifest.files.values())
    return Entry(
        kind="build",
        created=manifest.created,
        name=manifest.name,
        subject=bundle.sha256,
        path=str(bundle.path.resolve()),
        facts={**facts_from_manifest(manifest), **here()},
        figures=(
            *checks,
            FigureValues("bundle_bytes", "bytes", (float(size),), False),
            FigureValues("build_seconds", "s", (sum(seconds.values()),), False),
        ),
        document={"manifest": manifest.model_dump(mode="json"), "seconds": dict(seconds)},
        passes=manifest.passes,
        digests={"bundle": bundle.sha256, "model": manifest.model.sha256, **_files(manifest)},
    )


def entry_from_bench(report: BenchReport, manifest: Manifest) -> Entry:
    """A benchmark of a bundle with this manifest."""
    facts = {
        **facts_from_manifest(manifest),
        **{f"machine.{key}": text for key, text in report.machine.items()},
        **{f"version.{key}": text for key, text in report.versions.items()},
        "bench.threads": str(report.threads),
        "bench.repetitions": str(report.repetitions),
    }
    limits = {"read_bandwidth": "bytes/s", "product_rate": "operations/s"}
    return Entry(
        kind="benchmark",
        created=report.created,
        name=report.name,
        subject=report.sha256,
        path=report.bundle,
        facts=facts,
        figures=(
            *(
                FigureValues(figure.name, figure.unit, figure.values, figure.higher_is_better)
                for figure in report.figures
            ),
            *(FigureValues(f"memory/{phase}", "bytes", (peak,), False) for phase, peak in report.peaks.items()),
            *(
                FigureValues(f"{LIMIT_PREFIX}{name}", unit, (getattr(report.limits, name),), True)
                for name, unit in limits.items()
            ),
        ),
        document=json.loads(report.to_json()),
        digests={"bundle": report.sha256, "model": manifest.model.sha256},
    )


def entry_from_comparison(report: ComparisonReport) -> Entry:
    """A comparison of B with A; its subject is B."""
    facts = {
        **_side("a", report.a),
        **_side("b", report.b),
        **{f"machine.{key}": text for key, text in report.machine.items()},
        **{f"compare.{key}": text for key, text in report.settings.items()},
    }
    figures = {
        check.name: FigureValues(f"compare/{check.name}", "", (check.value,), check.direction == "at least")
        for check in report.checks
        if math.isfinite(check.value)
    }
    return Entry(
        kind="comparison",
        created=report.created,
        name=report.b.name.removeprefix(f"{report.b.kind} "),  # as builds and benchmarks of it are called
        subject=report.b.sha256,
        path=report.b.path,
        facts=facts,
        figures=tuple(figures.values()),
        document=json.loads(report.to_json()),
        digests={"a": report.a.sha256, "b": report.b.sha256},
    )


def facts_from_manifest(manifest: Manifest) -> dict[str, str]:
    """What a bundle was made from and how; not what came out."""
    facts = {
        "model": manifest.model.source,
        "model.sha256": manifest.model.sha256,
        "kiln": manifest.kiln_version,
        "sku": manifest.sku.name,
        "backend": f"{manifest.backend.name} {manifest.backend.version} {manifest.backend.provider}",
        "precision": str(manifest.precision),
        "plugins": ", ".join(plugin.abi_hash[:12] for plugin in manifest.plugins) or "none",
    }
    if manifest.decoder is not None:
        kv = manifest.decoder.kv
        facts |= {
            "kv.dtype": " and ".join(dict.fromkeys(kv.dtypes)),
            "kv.block_size": str(kv.block_size),
            "max_context": str(manifest.decoder.max_context),
        }
    for record in manifest.passes:
        state = "rolled back" if record.rolled_back else "on"
        if facts.get(f"pass.{record.name}") != "on":  # one that runs twice counts as on if it was once
            facts[f"pass.{record.name}"] = state
    if (quantised := manifest.quantization) is not None:
        layers = ", ".join(f"{count} {scheme}" for scheme, count in sorted(quantised.schemes.items()))
        facts |= {"quantization": layers, "quantization.kv": quantised.kv or "none"}
    if manifest.serving is not None:
        facts["serving"] = manifest.serving.sentence()
    return facts


def here() -> dict[str, str]:
    """This machine and the libraries that are installed."""
    return {
        **{f"machine.{key}": text for key, text in machine_description().items()},
        **{f"version.{key}": text for key, text in package_versions(*_LIBRARIES).items()},
    }


def _side(label: str, side: Side) -> dict[str, str]:
    return {
        f"{label}.kind": side.kind,
        f"{label}.sha256": side.sha256,
        f"{label}.precision": " and ".join(side.precisions),
        **{f"{label}.version.{name}": text for name, text in side.versions.items()},
    }


def _files(manifest: Manifest) -> dict[str, str]:
    return {name: record.sha256 for name, record in manifest.files.items()}
