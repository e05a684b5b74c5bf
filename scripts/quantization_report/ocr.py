"""PP-OCR's networks, INT8 by calibrated ranges."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from passes_report import material
from passes_report.cases import cls_checks, cls_inputs, det_inputs, ocr_model, outputs, rec_checks, rec_inputs

from pipeline.calibration import CalibrationConfig
from pipeline.calibration.ranges import Method, RangeConfig
from pipeline.quantize.config import QuantizeConfig
from pipeline.verify import Feeds
from plugins.errors import KilnError
from quantization_report.bundles import Made, Maker
from quantization_report.findings import Findings, Verdict, at_least
from quantization_report.plain import gain, milliseconds, search_of, size_and_gate, times_of, with_times
from quantization_report.setting import Setting

TEXT = 0.3
"""Probability from which PP-OCR's users count a pixel as text."""
OVERLAP = 0.95
"""Of the pixels that are text to either side, the share that is to both."""
KEPT = (2, 4, 8, 16)
"""Layers that are kept float, one number after the other, until a network reads what it reads in FP32."""
_OPSET = 17
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
    method: Method = "minmax"
    """Of ranges."""


def ocr(setting: Setting) -> list[Findings]:
    """Detection, direction and reading."""
    rows, verdicts, data = [], [], {}
    for reader in READERS:
        if not setting.wants(reader.name):
            continue
        more_rows, more_verdicts, data[reader.name] = _read(reader, setting)
        rows += more_rows
        verdicts += more_verdicts
    columns = ("network", "graph", "layers", "MB", "gate", "ms a call", "times FP32", "found")
    notes = [
        "Rendered text; calibrated on other lines and pages than it is judged on. The files are of opset 11 and 12 and "
        f"were converted to {_OPSET} with onnx.version_converter. Where a network does not read what "
        "it reads in FP32, the layers that add most noise by the gate's ranking are kept float, until it "
        "does; one that never does stays float."
    ]
    return [Findings("pp-ocr", "PP-OCR", columns, rows, verdicts, data, notes)]


def _read(reader: _Reader, setting: Setting) -> tuple[list[tuple[str, ...]], list[Verdict], dict[str, object]]:
    """Rows and verdicts of one network, and its data."""
    folder = setting.folder / reader.name
    folder.mkdir(parents=True)
    calibration = folder / "calibration"
    calibration.mkdir()
    for number, values in enumerate(reader.others()):
        np.savez(calibration / f"{number:02}.npz", x=values)
    inputs = folder / "inputs.npz"
    np.savez(inputs, **reader.inputs()[0])
    maker = setting.maker(reader.name, str(_converted(ocr_model(reader.file)(folder), folder)), inputs)
    ranges = CalibrationConfig(ranges=RangeConfig(reader.method))
    config = QuantizeConfig("w8a8", specs=(str(calibration),), calibration=ranges, search=search_of(setting))
    try:
        made, verdicts = _made(reader, maker, config)
    except KilnError as error:
        row = (reader.name, "w8a8", "", "", "", "", "", f"stays float: {str(error).splitlines()[0]}")
        return [row], [], {"problem": str(error)}
    times = times_of(maker, made, reader.inputs()[0], setting)
    kept = next(iter(made.values())).planned.config.keep
    rows = [
        (reader.name, name, *size_and_gate(maker, made, name), milliseconds(times.get(name)), gain(times, name), text)
        for name, text in (("float", ""), *((name, "; ".join(v.found for v in verdicts)) for name in made))
    ]
    data = {"verdicts": [verdict.found for verdict in verdicts], "kept": kept}
    reads = all(verdict.holds for verdict in verdicts)
    if not reads:
        rows.append(
            (reader.name, "", "", "", "", "", "", "stays float: as w8a8 it does not find what it finds in FP32")
        )
    return rows, verdicts if reads else [], with_times(data, times)


def _made(reader: _Reader, maker: Maker, config: QuantizeConfig) -> tuple[dict[str, Made], list[Verdict]]:
    """W8A8 with as few layers kept float as it takes to read the same, of those that the gate says add most noise."""
    made = maker.make("w8a8", config)
    name, ranking = "w8a8", made.gate.advice.ranking if made.gate and made.gate.advice else ()
    verdicts = reader.judge(maker.parent.engine_path, made.bundle.engine_path)
    for count in KEPT:
        if all(verdict.holds for verdict in verdicts) or count > len(ranking):
            break
        name = f"w8a8, {count} layers kept"
        made = maker.make(name, replace(config, keep=ranking[:count]))
        verdicts = reader.judge(maker.parent.engine_path, made.bundle.engine_path)
    return {name: made}, verdicts


def _converted(source: Path, folder: Path) -> Path:
    """At the opset since which weights are quantised by channel: the files are older."""
    import onnx
    from onnx import version_converter

    target = folder / source.name
    onnx.save(version_converter.convert_version(onnx.load(source), _OPSET), target)
    return target


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
        "mse",
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
