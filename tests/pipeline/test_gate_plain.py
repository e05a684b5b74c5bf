"""Classifiers and encoders: what is judged, what fails, and what is refused, on tiny models."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.compare.report import Side
from pipeline.gate import GateConfig, GateLimits, require_passed, run_gate
from pipeline.gate.html import html_from_report
from pipeline.gate.material import PlainData, PlainStratum, Sample, Task
from pipeline.gate.plain import measure_samples
from pipeline.progress import Progress
from plugins.errors import KilnError

pytest.importorskip("onnxruntime")

CONFIG = GateConfig(schemes=("w8a8",), threads=1)
LIMITS = GateLimits()
CLASSES, WIDTH, WORDS = 7, 24, 60
Model = Callable[..., Path]


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture
def classifier(tmp_path: Path) -> Model:
    """x [batch, 24] to logits [batch, 7] through two layers; `noise` is added to the weights of `layer`."""

    def make(noise: float = 0.0, layer: str = "head", nan: bool = False) -> Path:
        generator = rng()
        weights = {
            "body": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32),
            "head": generator.normal(size=(WIDTH, CLASSES)).astype(np.float32),
        }
        weights[layer] += (noise * generator.normal(size=weights[layer].shape)).astype(np.float32)
        if nan:
            weights[layer][0, 0] = np.nan
        nodes = [
            helper.make_node("MatMul", ["x", "body_weight"], ["hidden"], name="body"),
            helper.make_node("Tanh", ["hidden"], ["active"], name="tanh"),
            helper.make_node("MatMul", ["active", "head_weight"], ["logits"], name="head"),
        ]
        return saved(tmp_path, nodes, weights, {"x": (TensorProto.FLOAT, ["n", WIDTH])}, ("logits", ["n", CLASSES]))

    return make


@pytest.fixture
def encoder(tmp_path: Path) -> Model:
    """Token ids [batch, tokens] to hidden states [batch, tokens, 24]; `noise` is added to the products' weights."""

    def make(noise: float = 0.0, unlearn: bool = False) -> Path:
        generator = rng()
        table = generator.normal(size=(WORDS, WIDTH)).astype(np.float32)
        weight = generator.normal(size=(WIDTH, WIDTH)).astype(np.float32)
        weight += (noise * generator.normal(size=weight.shape)).astype(np.float32)
        if unlearn:
            weight = np.tile(weight.mean(axis=0), (WIDTH, 1))
        nodes = [
            helper.make_node("Gather", ["table_weight", "input_ids"], ["embedded"], name="embedding"),
            helper.make_node("MatMul", ["embedded", "dense_weight"], ["states"], name="dense"),
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=1),
            helper.make_node("Unsqueeze", ["mask", "axis"], ["column"]),
            helper.make_node("Mul", ["states", "column"], ["last_hidden_state"]),
        ]
        inputs = {name: (TensorProto.INT64, ["n", "t"]) for name in ("input_ids", "attention_mask")}
        weights = {"table": table, "dense": weight}
        output = ("last_hidden_state", ["n", "t", WIDTH])
        return saved(tmp_path, nodes, weights, inputs, output, [numpy_helper.from_array(np.array([2]), "axis")])

    return make


def saved(folder: Path, nodes, weights, inputs, output, others=()) -> Path:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(output[0], TensorProto.FLOAT, output[1])],
        [*(numpy_helper.from_array(value, f"{name}_weight") for name, value in weights.items()), *others],
    )
    path = folder / f"{len(list(folder.iterdir()))}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def images(path: Path, labelled: bool = True, wrong: float = 0.2) -> PlainData:
    """Random inputs, labelled as the model at `path` sees them, but for some."""
    import onnxruntime

    session, generator = onnxruntime.InferenceSession(str(path)), rng()
    samples = []
    for _ in range(10):
        x = generator.normal(size=(8, WIDTH)).astype(np.float32)
        labels = session.run(None, {"x": x})[0].argmax(axis=1)
        labels = np.where(generator.random(8) < wrong, generator.integers(0, CLASSES, 8), labels)
        samples.append(Sample({"x": x}, labels if labelled else None))
    return PlainData("classifier", (PlainStratum("all", samples),), "80 random vectors")


def texts(rows: int, tokens: int, seed: int, labelled: bool = False) -> list[Sample]:
    """Texts of two kinds that differ in their words; a part of each row is padding."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(rows // 4):
        labels = generator.integers(0, 2, 4)
        ids = generator.integers(0, WORDS // 2, (4, tokens))
        ids += np.where(generator.random((4, tokens)) < 0.7, labels[:, None] * (WORDS // 2), 0)
        mask = (np.arange(tokens) < generator.integers(tokens // 2, tokens + 1, 4)[:, None]).astype(np.int64)
        samples.append(Sample({"input_ids": ids, "attention_mask": mask}, labels if labelled else None))
    return samples


def sentences() -> PlainData:
    strata = (PlainStratum("short", texts(16, 6, 1)), PlainStratum("long", texts(16, 50, 2)))
    return PlainData("embedding", strata, "random words", task=Task("two kinds", texts(200, 12, 3, labelled=True)))


def by_name(report, stratum: str) -> dict[str, float]:
    return {check.check.name: check.check.value for check in report.checks if check.stratum == stratum}


def test_a_classifier_is_judged_by_outputs_choices_and_labels(classifier: Model, silent: Progress) -> None:
    float_model = classifier()
    data = images(float_model)
    same = require_passed(run_gate(float_model, classifier(), data, LIMITS, CONFIG, silent))
    values = by_name(same, "all")
    assert values["output_snr_db"] == values["layer_snr_db"] == np.inf
    assert values["top1_agreement"] == values["top5_agreement"] == 1.0
    assert values["accuracy_drop"] == 0.0
    assert 0.7 < same.strata[0].facts["top-1, reference"] < 0.95
    assert "one sample" in next(c.check.origin for c in same.checks if c.check.name == "accuracy_drop")
    slightly = run_gate(float_model, classifier(noise=0.01), data, LIMITS, CONFIG, silent)
    assert slightly.passed, slightly.sentence()
    assert 30 < by_name(slightly, "all")["output_snr_db"] < 50


@pytest.mark.parametrize("layer", ["body", "head"])
def test_a_broken_layer_of_a_classifier_is_named(classifier: Model, silent: Progress, layer: str) -> None:
    float_model = classifier()
    report = run_gate(
        float_model,
        classifier(noise=1.0, layer=layer),
        images(float_model),
        LIMITS,
        CONFIG,
        silent,
        lambda keep: classifier(noise=0.0 if layer in keep else 1.0, layer=layer),
    )
    failed = {check.check.name for check in report.failures}
    assert {"output_cosine", "top1_agreement", "accuracy_drop", "output_snr_db"} <= failed
    assert report.advice is not None
    assert report.advice.keep == (layer,)
    assert report.advice.verified
    assert layer in html_from_report(report)


def test_without_labels_choices_are_still_compared(classifier: Model, silent: Progress) -> None:
    float_model = classifier()
    report = run_gate(float_model, classifier(), images(float_model, labelled=False), LIMITS, CONFIG, silent)
    assert "accuracy_drop" not in by_name(report, "all")
    assert report.passed


def test_embeddings_are_judged_by_length_and_by_their_task(encoder: Model, silent: Progress) -> None:
    report = require_passed(run_gate(encoder(), encoder(noise=0.005), sentences(), LIMITS, CONFIG, silent))
    assert 0.99 < by_name(report, "short")["embedding_cosine_min"] < 1
    assert by_name(report, "long")["embedding_cosine"] > 0.99
    assert abs(by_name(report, "two kinds")["task_drop"]) <= 0.02
    facts = report.strata[-1].facts
    assert facts["task accuracy, reference"] > 0.75
    assert facts["task rows tested"] == 100


def test_an_encoder_that_lost_its_meaning_fails_in_its_task(encoder: Model, silent: Progress) -> None:
    report = run_gate(encoder(), encoder(unlearn=True), sentences(), LIMITS, CONFIG, silent)
    failed = {(check.stratum, check.check.name) for check in report.failures}
    assert {("short", "embedding_cosine"), ("long", "embedding_cosine"), ("two kinds", "task_drop")} <= failed
    assert report.advice is not None
    assert report.advice.keep == ("dense",)


def test_padding_is_no_part_of_an_embedding(encoder: Model, silent: Progress) -> None:
    path = encoder()
    sample = texts(4, 12, 1)[0]
    longer = {name: np.pad(array, ((0, 0), (0, 7))) for name, array in sample.feeds.items()}

    class Padded:
        """The same model, whose texts are padded further."""

        def __init__(self) -> None:
            from pipeline.compare import subject_from

            self.inner = subject_from(path, 1)
            self.side, self.inputs = self.inner.side, self.inner.inputs

        def infer(self, feeds):
            return {name: array[:, :12] for name, array in self.inner.infer(longer).items()}

        def close(self) -> None:
            self.inner.close()

    subject = Padded()
    data = PlainData("embedding", (PlainStratum("short", [sample]),), "one text")
    report = run_gate(path, subject, data, LIMITS, CONFIG, silent)
    assert by_name(report, "short")["embedding_cosine_min"] == pytest.approx(1.0, abs=1e-6)
    subject.close()


def test_a_map_is_judged_as_one_vector() -> None:
    class Map:
        """Gives [rows, 1, 2, 3], as networks that find things in images do."""

        side, inputs = Side("onnx", "map", "map", "", "fp32", {}), ()

        def __init__(self, change: float) -> None:
            self.change = change

        def infer(self, feeds):
            values = np.arange(12, dtype=np.float32).reshape(2, 1, 2, 3) + 1
            values[1, 0, 1, 2] += self.change
            return {"map": values}

        def close(self) -> None: ...

    sample = Sample({"x": np.zeros((2, 3), np.float32)})
    data = PlainData("embedding", (PlainStratum("all", [sample]),), "one")
    values = measure_samples(Map(0), Map(-24), data, [sample]).values
    row = np.arange(7, 13.0)
    other = row - [0, 0, 0, 0, 0, 24]
    cosine = row @ other / np.linalg.norm(row) / np.linalg.norm(other)
    assert values["embedding_cosine_min"] == pytest.approx(cosine)
    assert values["embedding_cosine"] == pytest.approx((1 + cosine) / 2)


def test_what_cannot_be_judged_is_refused(classifier: Model, encoder: Model, silent: Progress) -> None:
    path = classifier()
    data = images(path)

    def labelled(*labels: int) -> PlainData:
        sample = Sample({"x": np.zeros((2, WIDTH), np.float32)}, np.array(labels))
        return PlainData("classifier", (PlainStratum("all", [sample]),), "one")

    with pytest.raises(KilnError, match="sample 0 has the label 7; the model tells classes 0 to 6 apart"):
        run_gate(path, path, labelled(1, 7), LIMITS, CONFIG, silent)
    with pytest.raises(KilnError, match=r"labels int64 \[3\]; expected integers \[2\]"):
        run_gate(path, path, labelled(1, 2, 3), LIMITS, CONFIG, silent)
    with pytest.raises(KilnError, match="layer head of the candidate gives NaN or infinity"):
        run_gate(path, classifier(nan=True), data, LIMITS, CONFIG, silent)
    without = GateConfig(schemes=("w8a8",), threads=1, layers=False)
    with pytest.raises(KilnError, match=r"output 'logits' of .* has NaN or infinity in row 0 of sample 0"):
        run_gate(path, classifier(nan=True), data, LIMITS, without, silent)
    with pytest.raises(KilnError, match="has no samples"):
        run_gate(path, path, PlainData("classifier", (PlainStratum("all", []),), "none"), LIMITS, CONFIG, silent)
    with pytest.raises(KilnError, match="has no output 'probabilities'; it has logits"):
        run_gate(path, path, PlainData("classifier", data.strata, "x", "probabilities"), LIMITS, CONFIG, silent)
    with pytest.raises(KilnError, match="the inputs differ"):
        run_gate(path, encoder(), data, LIMITS, CONFIG, silent)
    with pytest.raises(KilnError, match="no limits for the scheme 'int8-kv'"):
        run_gate(path, path, data, LIMITS, GateConfig(schemes=("int8-kv",)), silent)
    unlabelled = Task("kinds", texts(8, 6, 0))
    strata = (PlainStratum("short", texts(4, 6, 0)),)
    with pytest.raises(KilnError, match="sample 0 of the task 'kinds' has no labels"):
        run_gate(encoder(), encoder(), PlainData("embedding", strata, "x", task=unlabelled), LIMITS, CONFIG, silent)
