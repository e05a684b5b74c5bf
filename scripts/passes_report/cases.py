"""Real models for judging graph passes: where each comes from, and what has to be the same before and after.

Checks run both graphs without ONNX Runtime's own rewrites, as the gate of the pass manager does.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.backends.onnxruntime import OnnxRuntimeModel
from passes.onnx_model import load_structure
from passes_report import material
from passes_report.material import package_folder
from pipeline.config import BuildConfig
from pipeline.export import export_model
from pipeline.load import load
from pipeline.source import resolve_source
from pipeline.verify import Feeds, run_plain
from pipeline.zoo import efficientnet_lite0
from plugins.build import cpu_library

CHUNKS = 20
"""Steps through which Silero VAD carries its state."""
TEXT = 0.3
"""Probability from which PP-OCR's detection counts a pixel as text: the threshold that its users take."""

DIFFER = 3
"""Pixels on the border of text, of some 360,000, whose probability may cross TEXT."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold after the passes."""

    name: str
    before: str
    after: str
    passed: bool


class Record(Protocol):
    """What a check reads of a pass: a `PassReport`, or a record of a bundle's manifest."""

    @property
    def name(self) -> str: ...
    @property
    def rewrites(self) -> int: ...
    @property
    def nodes_before(self) -> Mapping[str, int]: ...
    @property
    def nodes_after(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Case:
    """`make` gives the model before all passes, written into a folder where it is not a file of a package."""

    name: str
    origin: str
    make: Callable[[Path], Path]
    checks: Callable[[Path, Path, Sequence[Record]], list[Check]]
    inputs: Callable[[], list[Feeds]] | None = None
    """For the gate; None where generated ones suit the model."""


def kiln_export(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        return export_model(load(resolve_source(name)), folder / "model.onnx", BuildConfig()).path

    return make


def export_with_batch_norms(folder: Path) -> Path:
    """EfficientNet-Lite0 as torch traced it: torch's exporter would fold its batch norms itself."""
    import torch

    path = folder / "model.onnx"
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            module, inputs = efficientnet_lite0()
            torch.onnx.export(
                module,
                (inputs["inputs"],),
                path,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=["inputs"],
                output_names=["output"],
                dynamic_shapes={"inputs": {0: torch.export.Dim("batch")}},
            )
    finally:
        logging.disable(logging.NOTSET)
    return path


def efficientnet_checks(before: Path, after: Path, records: Sequence[Record]) -> list[Check]:
    images, labels = material.photographs()
    scores = [outputs(path, [{"inputs": images}])[0] for path in (before, after)]
    ranked = [np.argsort(-found, axis=1) for found in scores]
    first = [int((order[:, 0] == labels).sum()) for order in ranked]
    five = [int((order[:, :5] == labels[:, None]).any(axis=1).sum()) for order in ranked]
    return [
        Check("label first, of 20 photographs", str(first[0]), str(first[1]), first == [17, 17]),
        Check("label among five, of 20", str(five[0]), str(five[1]), five == [20, 20]),
        Check("same class for each photograph", "", "yes", bool((ranked[0][:, 0] == ranked[1][:, 0]).all())),
    ]


def unfolded_checks(before: Path, after: Path, records: Sequence[Record]) -> list[Check]:
    norms = [count(records[0].nodes_before, "BatchNormalization"), count(records[-1].nodes_after, "BatchNormalization")]
    folded = Check("BatchNormalization nodes", str(norms[0]), str(norms[1]), norms == [49, 0])
    return [folded, *efficientnet_checks(before, after, records)]


def count(nodes: Mapping[str, int], *operators: str) -> int:
    return sum(nodes.get(operator, 0) for operator in operators)


def ocr_model(name: str) -> Callable[[Path], Path]:
    return lambda folder: package_folder("rapidocr_onnxruntime") / "models" / f"{name}.onnx"


def det_inputs() -> list[Feeds]:
    return [{"x": material.text_page(*size)} for size in ((640, 320), (320, 480))]


def rec_inputs() -> list[Feeds]:
    return [{"x": material.text_line(text, width)} for width, text in material.LINES.items()]


def cls_inputs() -> list[Feeds]:
    return [{"x": material.text_line("Kiln read it", 192, upside_down)} for upside_down in (False, True)]


def outputs(path: Path, feeds: Sequence[Feeds]) -> list[NDArray]:
    """The first output for each set of inputs."""
    return [next(iter(found.values())) for found in run_plain(path, [cpu_library()], feeds)]


def det_checks(before: Path, after: Path, records: Sequence[Record]) -> list[Check]:
    found = [np.concatenate([each.ravel() for each in outputs(path, det_inputs())]) > TEXT for path in (before, after)]
    differ = int((found[0] != found[1]).sum())
    name = f"pixels that are text (p > {TEXT}); {differ} of {found[0].size:,} differ"
    return [Check(name, *(f"{mask.mean():.2%}" for mask in found), bool(found[0].any()) and differ <= DIFFER)]


def rec_checks(before: Path, after: Path, records: Sequence[Record]) -> list[Check]:
    """Greedy CTC: the likeliest symbol of each step, repeats merged, blanks (0) left out."""
    entries = {entry.key: entry.value for entry in load_structure(before).metadata_props}
    symbols = ["", *entries["character"].splitlines(), " "]
    checks = []
    pairs = zip(outputs(before, rec_inputs()), outputs(after, rec_inputs()), strict=True)
    for width, pair in zip(material.LINES, pairs, strict=True):
        best = [each[0].argmax(axis=1) for each in pair]
        texts = [
            "".join(symbols[s] for s, last in zip(ids, [0, *ids[:-1]], strict=True) if s and s != last) for ids in best
        ]
        checks.append(Check(f"text read, {width} pixels wide", *texts, bool(texts[0]) and np.array_equal(*best)))
    return checks


def cls_checks(before: Path, after: Path, records: Sequence[Record]) -> list[Check]:
    found = [[int(each.argmax()) for each in outputs(path, cls_inputs())] for path in (before, after)]
    words = [", ".join(("0", "180")[index] + " degrees" for index in each) for each in found]
    return [Check("direction of a line, upright and turned", *words, found == [[0, 1], [0, 1]])]


def embeddings(path: Path) -> NDArray:
    """Unit vectors: the mean over each text's tokens."""
    vectors = []
    for feeds in material.sentences():
        mask = feeds["attention_mask"][..., None]
        vectors.append((outputs(path, [feeds])[0] * mask).sum(axis=1) / mask.sum(axis=1))
    found = np.concatenate(vectors).astype(np.float64)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def minilm_checks(before: Path, after: Path, records: Sequence[Record]) -> list[Check]:
    first, second = embeddings(before), embeddings(after)
    cosines = (first * second).sum(axis=1)
    near, far = first[0] @ first[1], first[0] @ first[2]
    return [
        Check(
            f"least cosine of {len(cosines)} embeddings", "1", f"{cosines.min():.9f}", bool(cosines.min() > 0.999999)
        ),
        Check(
            "cosine of two sentences alike, and of two that are not",
            f"{near:.4f}, {far:.4f}",
            f"{second[0] @ second[1]:.4f}, {second[0] @ second[2]:.4f}",
            bool(second[0] @ second[1] > 0.5 > 0.3 > second[0] @ second[2]),
        ),
    ]


def vad_inputs() -> list[Feeds]:
    """A chunk amid the signal at either rate, with a state as there may be."""
    state = np.random.default_rng(1).uniform(-0.5, 0.5, (2, 1, 128)).astype(np.float32)
    return [
        {"input": material.windows(rate, CHUNKS)[CHUNKS // 2], "state": state, "sr": np.array(rate, np.int64)}
        for rate in material.WINDOWS
    ]


def vad_stream(path: Path, rate: int) -> tuple[NDArray, NDArray]:
    """Probabilities of speech for CHUNKS chunks, each with the state that the one before it left; the last state."""
    model = OnnxRuntimeModel(path, plugins=[cpu_library()], optimized=False)
    state, found = np.zeros((2, 1, 128), np.float32), []
    for window in material.windows(rate, CHUNKS):
        result = model.infer({"input": window, "state": state, "sr": np.array(rate, np.int64)})
        state = result["stateN"]
        found.append(result["output"][0, 0])
    return np.array(found), state


def vad_checks(before: Path, after: Path, records: Sequence[Record]) -> list[Check]:
    checks = []
    for rate in material.WINDOWS:
        runs = [vad_stream(path, rate) for path in (before, after)]
        error = max(float(np.abs(a - b).max()) for a, b in zip(*runs, strict=True))
        spread = [f"{found.min():.3f} to {found.max():.3f}" for found, _ in runs]
        name = f"p(speech) in {CHUNKS} chunks at {rate // 1000} kHz, equal to 1e-5 with the last state ({error:.0e})"
        checks.append(Check(name, *spread, error <= 1e-5))
    return checks


SMOLLM2_LAYERS = 30
_NORM = ("Pow", "ReduceMean", "Sqrt", "Reciprocal")
_ROTATION = ("Neg", "Cos", "Sin", "Slice", "Concat")


def smollm2_checks(before: Path | None, after: Path | None, records: Sequence[Record]) -> list[Check]:
    """Structure, from the records alone: every norm, gate, rotation and projection, and nothing left over."""
    layers, last = SMOLLM2_LAYERS, records[-1].nodes_after
    passes = {record.name: record for record in records if record.rewrites}

    def rewrites(name: str) -> int:
        return passes[name].rewrites if name in passes else 0

    rope = passes.get("fuse_rope")
    rotated = [count(rope.nodes_before, "Neg"), count(rope.nodes_after, "Neg")] if rope else [0, 0]
    packed = passes.get("pack_matmuls")
    products = [count(packed.nodes_before, "MatMul"), count(packed.nodes_after, "MatMul")] if packed else [0, 0]
    rows: Iterable[tuple[str, object, object, bool]] = (
        ("RMSNorm: rewrites", 2 * layers + 1, rewrites("fuse_rms_norm"), rewrites("fuse_rms_norm") == 2 * layers + 1),
        ("SwiGLU: rewrites", layers, rewrites("fuse_swiglu"), rewrites("fuse_swiglu") == layers),
        (
            "rotary embedding: rewrites, of a query and a key each",
            layers,
            rewrites("fuse_rope"),
            rewrites("fuse_rope") == layers,
        ),
        ("rotations written as arithmetic", *rotated, rotated == [2 * layers, 0]),
        ("query, key and value packed: groups", layers, rewrites("pack_matmuls"), rewrites("pack_matmuls") == layers),
        ("products of matrices", *products, products == [7 * layers + 1, 5 * layers + 1]),
        ("operators of norms left", "", count(last, *_NORM), not count(last, *_NORM)),
        ("operators of rotations left", "", count(last, *_ROTATION), not count(last, *_ROTATION)),
        ("Sigmoid left", "", count(last, "Sigmoid"), not count(last, "Sigmoid")),
    )
    return [Check(name, str(expected), str(found), passed) for name, expected, found, passed in rows]


CASES = (
    Case(
        "efficientnet-lite0",
        "EfficientNet-Lite0, Kiln's export: torch's exporter has folded its batch norms already",
        kiln_export("efficientnet-lite0"),
        efficientnet_checks,
    ),
    Case(
        "efficientnet-lite0-unfolded",
        "the same, exported with torch's optimisations off, so that its batch norms are still there",
        export_with_batch_norms,
        unfolded_checks,
    ),
    Case(
        "pp-ocr-det",
        "PP-OCRv4 text detection, the file that rapidocr-onnxruntime 1.4.4 ships; pages of rendered text",
        ocr_model("ch_PP-OCRv4_det_infer"),
        det_checks,
        det_inputs,
    ),
    Case(
        "pp-ocr-rec",
        "PP-OCRv4 text recognition, from the same package; lines of rendered text",
        ocr_model("ch_PP-OCRv4_rec_infer"),
        rec_checks,
        rec_inputs,
    ),
    Case(
        "pp-ocr-cls",
        "PP-OCR text direction, from the same package; a line of rendered text, upright and turned",
        ocr_model("ch_ppocr_mobile_v2.0_cls_infer"),
        cls_checks,
        cls_inputs,
    ),
    Case(
        "minilm", "all-MiniLM-L6-v2, Kiln's export; sentences", kiln_export("minilm"), minilm_checks, material.sentences
    ),
    Case(
        "silero-vad",
        "Silero VAD, the file that silero-vad 6.2.3 ships, most of it in branches of If; a synthetic voice",
        lambda folder: package_folder("silero_vad") / "data" / "silero_vad.onnx",
        vad_checks,
        vad_inputs,
    ),
    Case(
        "smollm2",
        "SmolLM2-135M-Instruct, Kiln's export as a serving graph; prompts of 2,048 and 37 tokens, then single tokens",
        kiln_export("smollm2"),
        smollm2_checks,
    ),
)
