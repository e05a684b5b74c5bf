"""Calibrating on short texts only: whether a check on short text passes what long text shows to be broken.

On the decoder that was measured, and on one whose ranges grow with position (scripts/growing_decoder.py).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from growing_decoder import VOCABULARY, growing_decoder

from engines.sku import resolve_sku
from passes.onnx_model import OnnxModel
from pipeline.calibration import CalibrationConfig
from pipeline.gate import GateConfig, GateLimits, GateReport, run_gate
from pipeline.gate.generation import GenerationConfig
from pipeline.gate.material import Cut, DecoderData, decoder_data_from_tokens
from pipeline.optimize import OptimizeConfig
from pipeline.quantize.building import rewritten
from pipeline.quantize.config import QuantizeConfig
from pipeline.quantize.material import default_text
from quantization_report.bundles import Made, planned
from quantization_report.decoder import Decoder
from quantization_report.findings import Findings, Verdict
from quantization_report.language import Figures
from quantization_report.setting import Setting

SHORT, BOTH = "short lines", "short and long"
LIMIT = 0.03
"""Change of perplexity that a check of W8A8 with calibrated ranges allows."""
_LINES, _SHORT_LINE = 200, 48
"""Short lines, and tokens of one."""
_CONTEXT, _GROWING_SHORT = 2048, 64


def on_decoder(decoder: Decoder, setting: Setting) -> Findings:
    """The same documentation, cut into short lines or whole."""
    ids = decoder.maker.tokenizer.encode(default_text())[: _LINES * _SHORT_LINE]
    lines = [ids[start : start + _SHORT_LINE] for start in range(0, len(ids), _SHORT_LINE)]
    files = {SHORT: setting.folder / "lines.jsonl", BOTH: setting.folder / "whole.txt"}
    files[SHORT].write_text("\n".join(json.dumps({"token_ids": line}) for line in lines), encoding="utf-8")
    files[BOTH].write_text(default_text(), encoding="utf-8")
    found = {SHORT: _calibrated(decoder, SHORT, files[SHORT], setting)}
    if "w8a8" in decoder.made:  # which is calibrated on that documentation
        found[BOTH] = decoder.made["w8a8"], decoder.figures["w8a8"]
    else:
        found[BOTH] = _calibrated(decoder, BOTH, files[BOTH], setting)
    rows, data, changes = [], {}, {}
    for name, (made, figures) in found.items():
        changes[name] = figures.change
        table = made.planned.table
        assert table is not None
        samples = ", ".join(f"{count} {stratum}" for stratum, count in table.samples.items() if count)
        rows.append((name, samples, *(f"{change:+.2%}" for change in figures.change.values())))
        data[name] = {"samples": dict(table.samples), "change": figures.change, "kl": figures.kl}
    lengths = sorted(decoder.measure.material.windows)
    columns = ("calibrated on", "samples", *(f"perplexity at {length}" for length in lengths))
    title = f"The trap on {decoder.name}: W8A8 with calibrated ranges"
    return Findings("trap", title, columns, rows, [], data, [_in_words(decoder.name, changes, lengths)])


def _calibrated(decoder: Decoder, name: str, file: Path, setting: Setting) -> tuple[Made, Figures]:
    config = QuantizeConfig(
        "w8a8",
        specs=(str(file),),
        calibration=CalibrationConfig(override_coverage=True),
        smooth="search",
        search="all",
        keep=tuple(decoder.sensitive),
    )
    made = replace(decoder.maker, asks_gate=False).make(f"w8a8, {name}", config)
    with setting.progress.stage(f"judge {name}"):
        return made, decoder.measure(made.bundle.path)


def _in_words(name: str, changes: dict[str, dict[int, float]], lengths: Sequence[int]) -> str:
    """Whether the trap is there, with the figures that say so."""
    short, long = lengths[0], lengths[-1]
    found = {way: (abs(change[short]) <= LIMIT, abs(change[long]) <= LIMIT) for way, change in changes.items()}
    figures = f"{changes[SHORT][short]:+.2%} at {short} tokens and {changes[SHORT][long]:+.2%} at {long}"
    if found[SHORT] == (True, False):
        verdict = "shows the trap: it passes a check on short text and fails on long text"
    elif found[SHORT] == (True, True):
        verdict = "does not show the trap: what was calibrated on short lines passes on both"
    else:
        verdict = "does not show the trap as such: what was calibrated on short lines fails on short text already"
    return (
        f"Within {LIMIT:.0%} counts as passed. {name} {verdict} ({figures}; calibrated on both, "
        f"{changes[BOTH][short]:+.2%} and {changes[BOTH][long]:+.2%})."
    )


def on_growing_decoder(setting: Setting) -> Findings:
    """The coverage gate overridden, then the accuracy gate on short and on long texts."""
    folder = setting.folder / "growing"
    folder.mkdir()
    model = growing_decoder(folder / "growing.onnx", _CONTEXT)
    generator = np.random.default_rng(0)
    lengths = {SHORT: [16, 32, 64] * 12, BOTH: [16, 32, 64] * 12 + [300] * 6 + [900] * 4 + [_CONTEXT] * 4}
    tokens = [generator.integers(0, VOCABULARY, 2 * _CONTEXT + 512).tolist()]
    cuts = (Cut("short", _GROWING_SHORT, 32 * _GROWING_SHORT, 32), Cut("long", _CONTEXT, 2 * _CONTEXT, 1024))
    texts = decoder_data_from_tokens(tokens, cuts, "random tokens")
    rows, data, reports = [], {}, {}
    for name, sizes in lengths.items():
        spec = folder / f"{name}.jsonl"
        samples = [generator.integers(0, VOCABULARY, size).tolist() for size in sizes]
        spec.write_text("\n".join(json.dumps({"token_ids": ids}) for ids in samples))
        report = reports[name] = _growing_gate(model, spec, texts, folder / name, setting)
        values = {(check.stratum, check.check.name): check.check.value for check in report.checks}
        failed = {cut.name: sum(c.failed for c in report.checks if c.stratum == cut.name) for cut in cuts}
        data[name] = {"failed": failed, "kl": {s: values[s, "kl_mean"] for s in failed}, "passed": report.passed}
        cells = (f"{values[s, 'kl_mean']:.4f}, {f'{n} checks fail' if n else 'passes'}" for s, n in failed.items())
        rows.append((name, *cells))
    failed_short, failed_both = (data[name]["failed"] for name in (SHORT, BOTH))
    verdicts = [
        Verdict(
            "calibrated on short texts, the gate passes short texts and refuses long ones",
            f"{failed_short['short']} checks fail on short, {failed_short['long']} on long texts",
            failed_short["short"] == 0 and failed_short["long"] > 0,
        ),
        Verdict(
            "calibrated on texts of every length, the gate passes",
            reports[BOTH].sentence(),
            not any(failed_both.values()),
        ),
    ]
    columns = ("calibrated on", f"KL on texts of {_GROWING_SHORT}, gate", f"KL on texts of {_CONTEXT}, gate")
    notes = [
        "A decoder of one layer whose activations grow with position (`scripts/growing_decoder.py`), as W8A8 with "
        "calibrated ranges; the coverage gate was overridden for the first row."
    ]
    return Findings("growing", "The trap on a decoder whose ranges grow", columns, rows, verdicts, data, notes)


def _growing_gate(model: OnnxModel, spec: Path, texts: DecoderData, folder: Path, setting: Setting) -> GateReport:
    config = QuantizeConfig(
        "w8a8", specs=(str(spec),), calibration=CalibrationConfig(override_coverage=True), search="all", smooth="none"
    )
    folder.mkdir()
    found = planned(model, config, folder / "work", None, setting.threads, setting.progress)
    candidate = folder / "engine.onnx"
    rewritten(model, candidate, found, resolve_sku("cpu"), OptimizeConfig(verify=False, threads=setting.threads))
    gate = GateConfig(
        schemes=found.schemes, generation=GenerationConfig(greedy=16, continuation=0), threads=setting.threads
    )
    return run_gate(model.path, candidate, texts, GateLimits(), gate, setting.progress)
