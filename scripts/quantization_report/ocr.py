"""PP-OCR's networks, INT8 by calibrated ranges."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from passes_report import material
from passes_report.cases import cls_checks, cls_inputs, det_inputs, ocr_model, outputs, rec_checks, rec_inputs

from pipeline.quantize.config import QuantizeConfig
from pipeline.verify import Feeds
from plugins.errors import KilnError
from quantization_report.findings import Findings, Verdict, at_least
from quantization_report.plain import gain, maker_for, milliseconds, search_of, size_and_gate, times_of, with_times
from quantization_report.setting import Setting

TEXT = 0.3
"""Probability from which PP-OCR's users count a pixel as text."""
OVERLAP = 0.95
"""Of the pixels that are text to either side, the share that is to both."""
_PHRASES = (
    "a quick test",
    "invoice 4711",
    "Sum: 128.50 EUR",
    "Do not disturb",
    "platform 9 is closed",
    "READ ME",
)


@dataclass(frozen=True)
class _Reader:
    """One of PP-OCR's networks. `judge` compares graphs float and quantised."""

    name: str
    file: str
    inputs: Callable[[], list[Feeds]]
    others: Callable[[], list[NDArray]]
    """What it is calibrated on, which is not among `inputs`."""
    judge: Callable[[Path, Path], list[Verdict]]


def ocr(setting: Setting) -> list[Findings]:
    """Detection, direction and reading."""
    rows, verdicts, data = [], [], {}
    for reader in READERS:
        if not setting.wants(reader.name):
            continue
        found, data[reader.name] = _read(reader, setting)
        rows += found[0]
        verdicts += found[1]
    columns = ("network", "graph", "layers", "MB", "gate", "ms a call", "times FP32", "found")
    notes = [
        "Rendered text; calibrated on other lines and pages than it is judged on. Networks that lose what they read "
        "stay float: `--quant none`, or find the layers to keep with `kiln bisect`."
    ]
    return [Findings("pp-ocr", "PP-OCR", columns, rows, verdicts, data, notes)]


def _read(reader: _Reader, setting: Setting) -> tuple[tuple[list[tuple[str, ...]], list[Verdict]], dict[str, object]]:
    """Rows and verdicts of one network, and its data."""
    folder = setting.folder / reader.name
    folder.mkdir(parents=True)
    calibration = folder / "calibration"
    calibration.mkdir()
    for number, values in enumerate(reader.others()):
        np.savez(calibration / f"{number:02}.npz", x=values)
    inputs = folder / "inputs.npz"
    np.savez(inputs, **reader.inputs()[0])
    maker = maker_for(reader.name, str(ocr_model(reader.file)(folder)), setting, inputs)
    try:
        made = {
            "w8a8": maker.make("w8a8", QuantizeConfig("w8a8", specs=(str(calibration),), search=search_of(setting)))
        }
    except KilnError as error:
        row = (reader.name, "w8a8", "", "", "", "", "", f"stays float: {str(error).splitlines()[0]}")
        return ([row], []), {"problem": str(error)}
    times = times_of(maker, made, reader.inputs()[0], setting)
    verdicts = reader.judge(maker.parent.engine_path, made["w8a8"].bundle.engine_path)
    rows = [
        (reader.name, name, *size_and_gate(maker, made, name), milliseconds(times.get(name)), gain(times, name), text)
        for name, text in (("float", ""), ("w8a8", "; ".join(verdict.found for verdict in verdicts)))
    ]
    return (rows, verdicts), with_times({"verdicts": [verdict.found for verdict in verdicts]}, times)


def _det_judge(before: Path, after: Path) -> list[Verdict]:
    masks = [np.concatenate([each.ravel() for each in outputs(path, det_inputs())]) > TEXT for path in (before, after)]
    both, either = (masks[0] & masks[1]).sum(), (masks[0] | masks[1]).sum()
    return [at_least("pp-ocr-det: overlap of the pixels that are text", both / max(either, 1), OVERLAP)]


def _rec_judge(before: Path, after: Path) -> list[Verdict]:
    checks = rec_checks(before, after, ())
    same = [check.before == check.after and bool(check.before) for check in checks]
    read = ", ".join(f"'{check.after}'" for check in checks)
    return [Verdict("pp-ocr-rec: the same text read as in FP32", f"{sum(same)} of {len(same)}: {read}", all(same))]


def _cls_judge(before: Path, after: Path) -> list[Verdict]:
    (check,) = cls_checks(before, after, ())
    return [Verdict("pp-ocr-cls: direction of a line, upright and turned", check.after, check.passed)]


READERS = (
    _Reader(
        "pp-ocr-det",
        "ch_PP-OCRv4_det_infer",
        det_inputs,
        lambda: [material.text_page(w, h) for w, h in ((320, 320), (480, 320), (640, 640), (320, 640), (512, 384))],
        _det_judge,
    ),
    _Reader(
        "pp-ocr-rec",
        "ch_PP-OCRv4_rec_infer",
        rec_inputs,
        lambda: [material.text_line(text, width) for text in _PHRASES for width in (240, 400)],
        _rec_judge,
    ),
    _Reader(
        "pp-ocr-cls",
        "ch_ppocr_mobile_v2.0_cls_infer",
        cls_inputs,
        lambda: [material.text_line(text, 192, turned) for text in _PHRASES for turned in (False, True)],
        _cls_judge,
    ),
)
