"""Models without a KV cache: torch against ONNX, perturbed weights, NaN, shapes and names that differ."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.compare import CompareConfig, compare
from pipeline.compare.inputs import InputSpec
from pipeline.compare.report import ComparisonReport, Side
from pipeline.progress import Progress
from plugins.errors import KilnError

pytest.importorskip("polygraphy")
torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Function:
    """A subject from a Python function."""

    def __init__(self, name: str, function, inputs: tuple[InputSpec, ...] = (InputSpec("x", "float32", ("n", 3)),)):
        self.side = Side("torch", name, "", "", "fp32", {})
        self.inputs = inputs
        self._function = function

    def infer(self, feeds: Mapping[str, NDArray]) -> dict[str, NDArray]:
        return self._function(feeds)

    def close(self) -> None:
        raise AssertionError("whoever opened a subject closes it")


class Encoder(torch.nn.Module):
    """Token ids and a mask to a sequence and a pooled output, as encoders have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(37, 16)
        self.dense = torch.nn.Linear(16, 8)

    def forward(self, input_ids, attention_mask):
        hidden = torch.tanh(self.dense(self.table(input_ids))) * attention_mask[..., None]
        return {"hidden": hidden, "pooled": hidden.sum(1) / attention_mask.sum(1, keepdim=True)}


@pytest.fixture(scope="module")
def encoder():
    from pipeline.load import TorchModel
    from pipeline.source import ModelSource

    source = ModelSource("m:f", "module", None, "m:f", "encoder", (Path(__file__),))
    ids = torch.randint(0, 37, (2, 5), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": ids, "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    dynamic = {name: {0: "batch", 1: "sequence"} for name in example}
    return TorchModel(source, Encoder().eval(), "Encoder", False, None, example, dynamic)


@pytest.fixture(scope="module")
def encoder_onnx(encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pipeline.config import BuildConfig
    from pipeline.export import export_model

    path = tmp_path_factory.mktemp("onnx") / "encoder.onnx"
    export_model(encoder, path, BuildConfig())
    return path


def functions(a, b, silent: Progress) -> ComparisonReport:
    return compare(Function("a", a), Function("b", b), CompareConfig(), silent)


def test_torch_against_its_own_export_passes_on_several_shapes(encoder, encoder_onnx: Path, silent: Progress) -> None:
    report = compare(encoder, encoder_onnx, CompareConfig(samples=6), silent)
    assert report.passed
    assert report.model_kind == "plain"
    assert {row.name for row in report.outputs} == {"hidden", "pooled"}
    assert all(row.max_abs < 1e-5 and row.elements > 100 for row in report.outputs)
    assert (report.a.kind, report.b.kind) == ("torch", "onnx")
    assert all(check.origin.startswith("default for fp32") for check in report.checks)


def test_an_onnx_file_against_itself_needs_no_torch_and_ranges_come_from_the_graph(
    encoder_onnx: Path, silent: Progress
) -> None:
    report = compare(encoder_onnx, str(encoder_onnx), CompareConfig(), silent)
    assert report.passed
    assert all(row.max_abs == 0.0 for row in report.outputs)


def test_a_perturbed_weight_is_found_and_the_users_limit_decides(
    encoder, encoder_onnx: Path, tmp_path: Path, silent: Progress
) -> None:
    model = onnx.load(encoder_onnx)
    weight = next(t for t in model.graph.initializer if tuple(t.dims) in ((8, 16), (16, 8)))
    values = onnx.numpy_helper.to_array(weight).copy()
    values[3, 4] += 0.02
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "perturbed.onnx")
    report = compare(encoder, tmp_path / "perturbed.onnx", CompareConfig(), silent)
    assert not report.passed
    assert max(row.max_abs for row in report.outputs) > 1e-3
    wide = compare(encoder, tmp_path / "perturbed.onnx", CompareConfig(limits={"atol": 1.0}), silent)
    assert wide.passed
    assert {check.origin for check in wide.checks} == {"command line"}


@pytest.mark.parametrize("both", [True, False])
def test_nan_fails_even_where_both_sides_have_it(both: bool, silent: Progress) -> None:
    def nan(feeds):
        values = feeds["x"].copy()
        values[0, 0] = np.nan
        return {"y": values}

    report = functions(nan if both else lambda feeds: {"y": feeds["x"]}, nan, silent)
    assert not report.passed
    assert "NaN" in report.checks[0].note
    assert '"max_abs": "NaN"' in report.to_json()


def test_equal_infinities_pass_and_different_ones_fail(silent: Progress) -> None:
    def infinite(sign: float):
        return lambda feeds: {"y": np.where(np.arange(3) == 0, sign * np.inf, feeds["x"]).astype(np.float32)}

    assert functions(infinite(1), infinite(1), silent).passed
    assert not functions(infinite(1), infinite(-1), silent).passed


def test_different_shapes_fail_and_are_named(silent: Progress) -> None:
    report = functions(lambda f: {"y": f["x"]}, lambda f: {"y": f["x"][:, :2]}, silent)
    assert not report.passed
    assert "shapes differ: A gave [" in report.outputs[0].note
    assert ", 3], B gave [" in report.checks[0].note


def test_integer_and_boolean_outputs_are_compared_exactly(silent: Progress) -> None:
    def ids(shift: int):
        return lambda f: {"i": np.argmax(f["x"], 1) + 1000 + shift, "b": f["x"] > 0}

    assert functions(ids(0), ids(0), silent).passed
    report = functions(ids(0), ids(5), silent)
    assert [row.passed for row in report.outputs] == [False, True]


def test_outputs_pair_by_name_or_by_place_and_else_are_refused(silent: Progress) -> None:
    swapped = functions(lambda f: {"p": f["x"], "q": f["x"] + 1}, lambda f: {"q": f["x"] + 1, "p": f["x"]}, silent)
    assert swapped.passed
    placed = functions(lambda f: {"p": f["x"], "q": f["x"] + 1}, lambda f: {"1": f["x"], "2": f["x"] + 1}, silent)
    assert placed.passed
    assert placed.outputs[1].note == "B's 2"
    with pytest.raises(KilnError, match="has the outputs p, q, b has p"):
        functions(lambda f: {"p": f["x"], "q": f["x"]}, lambda f: {"p": f["x"]}, silent)


def test_inputs_that_differ_are_refused(silent: Progress) -> None:
    def side(name: str, *specs: InputSpec) -> Function:
        return Function(name, lambda f: f, specs)

    x = InputSpec("x", "float32", ("n", 3))
    for other, message in (
        (InputSpec("z", "float32", ("n", 3)), "A and B take x and z"),
        (InputSpec("x", "int64", ("n", 3)), "is float32 .* in A and int64"),
        (InputSpec("x", "float32", ("n", 4)), r"has shape \['n', 3\] in A and \['n', 4\] in B"),
    ):
        with pytest.raises(KilnError, match=message):
            compare(side("a", x), side("b", other), CompareConfig(), silent)


def test_a_subject_is_left_open_for_its_owner(silent: Progress) -> None:
    assert functions(lambda f: {"y": f["x"]}, lambda f: {"y": f["x"]}, silent).passed  # close() would raise


def test_samples_are_reproducible_and_differ_by_seed(silent: Progress) -> None:
    def report(seed: int) -> float:
        same = CompareConfig(seed=seed)
        pair = [Function(name, lambda f, s=shift: {"y": f["x"] * s}) for name, shift in (("a", 1.0), ("b", 1.1))]
        return compare(*pair, same, silent).outputs[0].mean_abs

    assert report(0) == report(0) != report(1)


def test_configurations_and_tolerances_out_of_range_are_refused() -> None:
    from pipeline.compare.tolerance import tolerances_from_precisions

    for options in ({"tokens": 0}, {"window": 1}, {"samples": 0}, {"chunk": 0}, {"text_tokens": 1}, {"seed": -1}):
        with pytest.raises(KilnError, match="expected at least"):
            CompareConfig(**options)
    for limits in ({"atol": -1.0}, {"kl": float("nan")}, {"unknown": 1.0}):
        with pytest.raises(KilnError, match="tolerance"):
            tolerances_from_precisions("plain", ("fp32", "fp32"), limits)
    with pytest.raises(KilnError, match="no tolerances are known for precision 'float64'"):
        tolerances_from_precisions("plain", ("fp32", "float64"))
    assert tolerances_from_precisions("decoder", ("fp32", "bf16")).atol.value == 1.0
