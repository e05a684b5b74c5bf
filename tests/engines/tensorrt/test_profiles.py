"""Profiles from serving shapes: derived for decoders and plain models, checked against the graph, refused by name."""

from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from engines.backends.tensorrt.profile_check import check_profiles
from engines.backends.tensorrt.profiles import (
    Profile,
    ServingShapes,
    Sizes,
    derive_profiles,
    profile_for,
    sizes_from_text,
)
from passes.onnx_model import DecoderSpec, Tensor, onnx_model_from_path
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec

IMAGE = (Tensor("x", "float32", ("batch", 3, 224, 224)),)
TEXT = (Tensor("ids", "int64", ("batch", "sequence")), Tensor("mask", "int64", ("batch", "sequence")))
STEP = (
    Tensor("input_ids", "int32", ("tokens",)),
    Tensor("logits_indices", "int32", ("rows",)),
    Tensor("cumulative_sequence_length", "int32", ("seqs+1",)),
    Tensor("block_table", "int32", ("seqs", "max_blocks")),
    Tensor("key_cache.0", "float32", ("blocks", "block_size", 3, 64)),
)
DECODER = DecoderSpec(KvSpec((KvLayer(3, 64),), 16, "float32"), 100, 2048, ())


def test_an_image_model_has_one_profile_for_latency_and_one_for_batches() -> None:
    single, batch = derive_profiles(IMAGE, None, ServingShapes(max_batch=16))
    assert single.shapes(IMAGE[0]) == ((1, 3, 224, 224),) * 3
    assert batch.shapes(IMAGE[0]) == ((2, 3, 224, 224), (16, 3, 224, 224), (16, 3, 224, 224))
    assert len(derive_profiles(IMAGE, None, ServingShapes(max_batch=1))) == 1


def test_a_text_model_takes_its_longest_text() -> None:
    profiles = derive_profiles(TEXT, None, ServingShapes(max_batch=4, max_sequence=512))
    assert profiles[1].shapes(TEXT[1]) == ((2, 1), (4, 128), (4, 512))
    with pytest.raises(KilnError, match=r"input ids has the dimension 'sequence'.*--dim 'sequence=LEAST:BEST:MOST'"):
        derive_profiles(TEXT, None, ServingShapes())


def test_a_decoder_has_profiles_for_decode_chunks_and_long_prompts() -> None:
    serving = ServingShapes(max_running=8, tokens_per_step=256, kv_blocks=64)
    decode, chunk, prompt = derive_profiles(STEP, DECODER, serving)
    assert [p.name for p in (decode, chunk, prompt)] == ["decode", "chunk", "prompt"]
    assert decode.shapes(STEP[0]) == ((1,), (8,), (8,))
    assert decode.shapes(STEP[2]) == ((2,), (9,), (9,))
    assert chunk.shapes(STEP[0])[2] == (256,)
    assert prompt.shapes(STEP[0]) == ((256,), (2048,), (2048,))
    assert prompt.shapes(STEP[3])[2] == (1, 128)
    assert {p.shapes(STEP[4]) for p in (decode, chunk, prompt)} == {((64, 16, 3, 64),) * 3}
    short = ServingShapes(max_running=8, tokens_per_step=2048)
    assert len(derive_profiles(STEP, DECODER, short)) == 2


@given(running=st.integers(1, 64), more=st.integers(0, 4096), blocks=st.integers(1, 4096))
def test_every_step_of_a_scheduler_has_a_profile(running: int, more: int, blocks: int) -> None:
    serving = ServingShapes(max_running=running, tokens_per_step=running + more, kv_blocks=blocks)
    profiles = derive_profiles(STEP, DECODER, serving)
    for tokens, seqs in ((1, 1), (running, running), (serving.tokens_per_step, running), (serving.tokens_per_step, 1)):
        shapes = {
            "input_ids": (tokens,),
            "logits_indices": (seqs,),
            "cumulative_sequence_length": (seqs + 1,),
            "block_table": (seqs, 1),
            "key_cache.0": (blocks, 16, 3, 64),
        }
        assert 0 <= profile_for(profiles, STEP, shapes) < len(profiles)


def test_shapes_that_no_profile_takes_are_told() -> None:
    profiles = derive_profiles(IMAGE, None, ServingShapes(max_batch=4))
    assert profile_for(profiles, IMAGE, {"x": (3, 3, 224, 224)}) == 1
    with pytest.raises(
        KilnError, match=r"single: x is \[5, 3, 224, 224\], expected \[1, 3, 224, 224\] to .*; batch: x"
    ):
        profile_for(profiles, IMAGE, {"x": (5, 3, 224, 224)})


@pytest.mark.parametrize("text", ["sequence", "=1:2:3", "n=1:2", "n=a:b:c", "n=", "n=1:2:3:4"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(KilnError, match="NAME=LEAST:BEST:MOST"):
        sizes_from_text(text)


def test_sizes() -> None:
    assert sizes_from_text("h=32:640:1280") == ("h", Sizes(32, 640, 1280))
    assert sizes_from_text("h=32") == ("h", Sizes(32, 32, 32))
    for wrong in ((2, 1, 3), (1, 4, 3), (0, 0, 0), (-1, 1, 1)):
        with pytest.raises(KilnError, match="least <= best <= most"):
            Sizes(*wrong)
    with pytest.raises(KilnError, match="'width', which no input has; its inputs have batch"):
        derive_profiles(IMAGE, None, ServingShapes(dims={"width": Sizes(1, 1, 1)}))
    with pytest.raises(KilnError, match="fewer than the 32 sequences"):
        ServingShapes(tokens_per_step=8)


def saved(folder: Path, *nodes: onnx.NodeProto, inputs: dict, **constants) -> Path:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("kiln", 1)]
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=10), path)
    return path


def test_a_profile_that_the_graph_does_not_compute_with_names_the_node(tmp_path: Path) -> None:
    """The trap of KV inputs: two tensors grow together, and a profile that lets them differ."""
    add = helper.make_node("Add", ["past", "new"], ["y"], "join_cache")
    inputs = {"past": (TensorProto.FLOAT, ["past", 4]), "new": (TensorProto.FLOAT, ["new", 4])}
    path = saved(tmp_path, add, inputs=inputs)
    tensors = onnx_model_from_path(path).inputs
    good = Profile("decode", {"past": Sizes(2, 3, 4), "new": Sizes(2, 3, 4)})
    check_profiles(path, tensors, [good])
    bad = Profile("chunk", {"past": Sizes(2, 3, 4), "new": Sizes(2, 2, 4)})
    with pytest.raises(KilnError) as error:
        check_profiles(path, tensors, [good, bad])
    message = str(error.value)
    for part in ("profile chunk", "best sizes", "join_cache (Add)", "past [3, 4]", "new [2, 4]", "new 2:2:4"):
        assert part in message
    with pytest.raises(KilnError, match="no profile"):
        check_profiles(path, tensors, [])


def test_an_input_whose_values_are_sizes_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["size"], ["long"], "cast", to=TensorProto.INT64),
        helper.make_node("Expand", ["x", "long"], ["y"], "grow"),
    ]
    path = saved(tmp_path, *nodes, inputs={"x": (TensorProto.FLOAT, [1, 4]), "size": (TensorProto.INT32, [2])})
    with pytest.raises(KilnError, match=r"values of input size decide the shape that node grow \(Expand\) gives"):
        check_profiles(path, onnx_model_from_path(path).inputs, [Profile("all", {})])


def test_operators_that_onnx_does_not_know_are_passed_over(tmp_path: Path) -> None:
    node = helper.make_node("PagedAttention", ["x"], ["y"], "attention", domain="kiln")
    path = saved(tmp_path, node, inputs={"x": (TensorProto.FLOAT, ["n", 4])})
    check_profiles(path, onnx_model_from_path(path).inputs, [Profile("all", {"n": Sizes(1, 2, 3)})])
