"""All passes together on random models: outputs stay, in the table's order and in any other, and so do interfaces.

`--hypothesis-profile=long` draws other and many more models than the fixed ones of a normal run.
"""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from passes.base import Pass
from passes.manager import PassReport, run_passes
from passes.onnx_model import OnnxModel, onnx_model_from_path
from passes.standard import PassSwitches, PassTarget, standard_passes
from plugins.errors import KilnError
from tests.passes.random_graphs import Drawn
from tests.passes.random_images import image_network
from tests.passes.random_soups import soup
from tests.passes.random_tokens import POSITIONS, token_network

FAMILIES = {"images": image_network, "tokens": token_network, "soups": soup}
TOLERANCE, FLOOR = 1e-4, 1e-6
"""Largest error relative to the largest value of an output, and what is allowed where all values are small."""
LONG = settings().max_examples > 100
RANDOM = st.randoms(use_true_random=False) | st.integers(0, 2**32).map(Random)
"""Decisions that hypothesis draws, so that failures shrink, and a generator's own, which are more even."""


def examples(count: int) -> settings:
    """`count` models, always the same ones; for a long run as many as its profile says."""
    return settings(
        max_examples=settings().max_examples if LONG else count,
        derandomize=not LONG,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def passes_of(random: Random) -> list[Pass]:
    """The table for a random backend, with or without the options that switch rules on."""
    options = {"hoist_tables": {"max_positions": POSITIONS}} if random.random() >= 0.5 else {}
    if random.random() >= 0.7:
        options["fold_constants"] = {"size_limit": 64}
    target = PassTarget(random.choice(["cpu", "cuda", "tensorrt"]))
    note(f"{target.backend} {options}")
    return standard_passes(target, PassSwitches(options=options))


@dataclass(frozen=True)
class Rewritten:
    before: onnx.ModelProto
    after: onnx.ModelProto
    reports: tuple[PassReport, ...]


def rewritten(model: onnx.ModelProto, passes: Sequence[Pass]) -> Rewritten:
    """The model after `passes`, none of which may fail."""
    note(onnx.printer.to_text(model))
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        source.write_bytes(model.SerializeToString())
        before = onnx_model_from_path(source)
        after, reports = run_passes(before, target, passes)
        assert [f"{report.name}: {report.rolled_back}" for report in reports if report.rolled_back] == []
        assert_same_interface(before, after)
        return Rewritten(model, onnx.load(target), reports)


def assert_same_interface(before: OnnxModel, after: OnnxModel) -> None:
    assert after.inputs == before.inputs
    assert [(t.name, t.dtype, len(t.shape)) for t in after.outputs] == [
        (t.name, t.dtype, len(t.shape)) for t in before.outputs
    ]


def outputs_of(tools, drawn: Drawn) -> list[list[NDArray]]:
    """Outputs of each run. ONNX Runtime 1.32 loses a tensor that only a dead node of a subgraph reads: not our case."""
    try:
        return [tools.run(drawn.model, feeds) for feeds in drawn.feeds]
    except Exception as error:
        assume("Missing Input" not in str(error))
        raise


def assert_same_outputs(tools, drawn: Drawn, after: onnx.ModelProto, expected: list[list[NDArray]]) -> None:
    note(onnx.printer.to_text(after))
    for feeds, wanted in zip(drawn.feeds, expected, strict=True):
        for before, found in zip(wanted, tools.run(after, feeds), strict=True):
            assert (found.shape, found.dtype) == (before.shape, before.dtype)
            if before.dtype.kind != "f":
                np.testing.assert_array_equal(found, before)
            else:
                limit = FLOOR + TOLERANCE * np.abs(before).max(initial=0)
                np.testing.assert_allclose(found, before, rtol=0, atol=limit)


@pytest.mark.parametrize("family", FAMILIES)
@examples(50)
@given(random=RANDOM)
def test_the_table_keeps_outputs_and_has_nothing_left_to_do(tools, family: str, random: Random) -> None:
    drawn = FAMILIES[family](random)
    passes, expected = passes_of(random), outputs_of(tools, drawn)
    once = rewritten(drawn.model, passes)
    assert_same_outputs(tools, drawn, once.after, expected)
    if all(graph_pass.name != "fuse_swiglu" for graph_pass in passes):  # for TensorRT
        onnx.checker.check_model(once.after)
    twice = rewritten(once.after, passes)
    assert [(report.name, report.rewrites) for report in twice.reports if report.rewrites] == []


def test_the_table_folds_what_transposes_kept_apart(tmp_path):
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n,2,8,8] x) => (float[n,2,8,8] y) <float[1] c = {2}> {
            a = Conv(x, w) b = Transpose<perm = [0, 2, 3, 1]>(a) d = Mul(b, c) y = Transpose<perm = [0, 3, 1, 2]>(d)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    run_passes(onnx_model_from_path(tmp_path / "m.onnx"), tmp_path / "after.onnx", standard_passes(PassTarget()))
    assert [node.op_type for node in onnx.load(tmp_path / "after.onnx").graph.node] == ["Conv"]


@pytest.mark.parametrize("family", FAMILIES)
@examples(50)
@given(random=RANDOM)
def test_any_order_of_any_passes_keeps_outputs(tools, family: str, random: Random) -> None:
    drawn = FAMILIES[family](random)
    passes, expected = passes_of(random), outputs_of(tools, drawn)
    chosen = [random.choice(passes) for _ in range(random.randint(2, len(passes)))]
    note(", ".join(graph_pass.name for graph_pass in chosen))
    assert_same_outputs(tools, drawn, rewritten(drawn.model, chosen).after, expected)


@pytest.mark.parametrize("family", ["images", "tokens"])
@examples(15)
@given(random=RANDOM)
def test_the_same_inside_a_branch(tools, family: str, random: Random) -> None:
    drawn = FAMILIES[family](random)
    feeds = [{**feeds, "flag": np.array(run == 0)} for run, feeds in enumerate(drawn.feeds)]
    inside = replace(drawn, model=tools.in_branch(drawn.model), feeds=tuple(feeds))
    passes, expected = passes_of(random), outputs_of(tools, inside)
    assert_same_outputs(tools, inside, rewritten(inside.model, passes).after, expected)


@pytest.mark.parametrize("family", ["tokens", "soups"])
@examples(60)
@given(data=st.data())
def test_damaged_files_raise_nothing_but_kiln_errors(family: str, data: st.DataObject) -> None:
    drawn = FAMILIES[family](Random(data.draw(st.integers(0, 20))))
    content = bytearray(drawn.model.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder, suppress(KilnError):
        path = Path(folder) / "damaged.onnx"
        path.write_bytes(content)
        model = onnx_model_from_path(path)
        run_passes(model, Path(folder) / "after.onnx", standard_passes(PassTarget("cuda")))
