"""The GPU benchmark's parts that need no GPU: repeated layers, trace, floors and verdicts, and measuring an engine."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from bench_gpu import Sizes, beside, document_of, engine_figures
from gpu_bench.deepen import deepen
from gpu_bench.device_step import decode_inputs, greedy
from gpu_bench.figures import Figure, table
from gpu_bench.limits import DeviceLimits
from gpu_bench.llama8b import Shape, random_bundle, save_model
from gpu_bench.quantise import QUANTS, quantise
from gpu_bench.serving import MIXED, first_token_floor, step_floor, trace_floor, trace_totals
from gpu_bench.trace_steps import TracedStep, step_table, traced_steps
from gpu_bench.widen import random_values, widen

from engines.bundle import EngineBundle, open_bundle
from engines.runtime.engine import Engine
from engines.runtime.scheduler import SchedulerConfig
from passes.onnx_model import DecoderSpec, load_structure
from pipeline.config import BuildConfig
from pipeline.floors import DecoderWork, decoder_work_from_graph
from pipeline.load_test.trace import Lengths, TraceRequest, Workload
from pipeline.packed import packed_logits
from pipeline.progress import Progress
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec
from plugins.quant_matmul.cuda_choice import Choices, Measured
from plugins.quant_matmul.cuda_packing import restored, unpack
from plugins.quant_matmul.cuda_schema import FORMATS
from tests.engines.launching_fake import LaunchingFake

torch = pytest.importorskip("torch")

SHAPE = Shape(hidden=64, layers=6, heads=4, kv_heads=2, intermediate=96, vocabulary=200, context=256)
LIMITS = DeviceLimits(bandwidth=4e12, product_rate=8e14)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> EngineBundle:
    path = tmp_path_factory.mktemp("bench") / "bundle"
    return random_bundle(SHAPE, "cpu", BuildConfig(out=path, verify_passes=False), Progress())


@pytest.fixture(scope="module")
def work(bundle: EngineBundle) -> DecoderWork:
    return decoder_work_from_graph(bundle.engine_path, bundle.manifest.decoder)


def _initializers(bundle: EngineBundle) -> list[onnx.TensorProto]:
    return list(load_structure(bundle.engine_path).graph.initializer)


def vocabulary_weights(bundle: EngineBundle) -> tuple[np.ndarray, np.ndarray]:
    """Embedding [tokens, hidden] and head [hidden, tokens]."""
    tensors = [tensor for tensor in _initializers(bundle) if SHAPE.vocabulary in tensor.dims]
    arrays = [onnx.numpy_helper.to_array(tensor, str(bundle.path)) for tensor in tensors]
    (embedding,) = [array for array in arrays if array.shape == (SHAPE.vocabulary, SHAPE.hidden)]
    (head,) = [array for array in arrays if array.shape == (SHAPE.hidden, SHAPE.vocabulary)]
    return embedding, head


def test_repeated_layers_compute_what_torch_does_with_the_same_weights(bundle, tmp_path):
    """Up to its attention a repeated layer is the last one; behind it, the one before the last.

    Tokens are those that the bundle was widened to, with torch's embeddings and head from there.
    """
    import transformers

    save_model(SHAPE, tmp_path)
    shallow = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    sizes = {"num_hidden_layers": SHAPE.layers, "vocab_size": SHAPE.vocabulary, "dtype": "float32"}
    deep = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(tmp_path, **sizes)).eval()
    known, weights = shallow.state_dict(), deep.state_dict()
    ahead = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    for name in weights:
        path = name.split(".", 3)  # model.layers.NUMBER.rest
        if path[:2] == ["model", "layers"]:
            sources = (0, 1, 2, 2, 2, 2) if path[3].startswith(ahead) else (0, 1, 1, 1, 1, 2)
            path[2] = str(sources[int(path[2])])
        weights[name] = known[".".join(path)]
    embedding, head = vocabulary_weights(bundle)
    weights |= {"model.embed_tokens.weight": torch.tensor(embedding), "lm_head.weight": torch.tensor(head.T)}
    deep.load_state_dict(weights)
    decoder = open_bundle(bundle.path).manifest.decoder
    assert decoder is not None
    assert len(decoder.kv.layers) == SHAPE.layers
    text = np.random.default_rng(0).integers(0, SHAPE.vocabulary, 40)
    found = packed_logits(bundle.engine_path, decoder, bundle.plugin_paths, [text], [[30], [1], [9]])[0]
    with torch.inference_mode():
        expected = deep(torch.from_numpy(text)[None]).logits[0].numpy()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_every_repeated_layer_has_weights_of_its_own_to_read(bundle, work):
    hidden, inner = SHAPE.hidden, SHAPE.intermediate
    assert work.body_parameters == SHAPE.layers * hidden * (3 * hidden + 3 * inner)
    assert work.head_parameters == SHAPE.vocabulary * hidden
    read = 4 * (work.body_parameters + work.head_parameters)
    assert read <= work.weight_bytes <= 1.01 * read
    stored = [{entry.key: entry.value for entry in t.external_data} for t in _initializers(bundle) if t.external_data]
    assert len({(at["location"], at["offset"]) for at in stored}) < len(stored)


def test_random_values_are_spread_and_no_two_rows_are_alike():
    values = np.concatenate(list(random_values(3 * 2**22, np.float32, np.random.default_rng(0)))).reshape(-1, 4096)
    assert values.std() == pytest.approx(0.02, rel=1e-2)
    assert len(np.unique(values, axis=0)) == len(values)
    whole = next(random_values(10_000, np.int8, np.random.default_rng(0)))
    assert {-128, 127} <= set(whole.tolist())


def test_a_graph_that_counts_its_tokens_is_not_widened(bundle, tmp_path):
    graph = load_structure(bundle.engine_path)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, SHAPE.vocabulary]), "shape"))
    with pytest.raises(KilnError, match="the constant shape holds 200, the number of tokens"):
        widen(graph, bundle.manifest.decoder, 256, tmp_path)


def test_a_graph_whose_layers_differ_is_refused(bundle):
    graph = load_structure(bundle.engine_path)
    attention = [node for node in graph.graph.node if node.op_type == "PagedAttention"][-1]
    next(attribute for attribute in attention.attribute if attribute.name == "num_heads").i = 2
    with pytest.raises(KilnError, match=r"last layers of the graph differ: .*PagedAttention"):
        deepen(graph, bundle.manifest.decoder, 8)


def test_fewer_layers_than_there_are_is_refused(bundle):
    with pytest.raises(KilnError, match="has 6 layers with 6 attentions and is to have 5; expected"):
        deepen(load_structure(bundle.engine_path), bundle.manifest.decoder, 5)


def test_the_trace_is_the_one_that_vllm_answered_within_three_percent():
    trace = MIXED.draw(256, 0)
    prompts, outputs = trace_totals(trace)
    assert prompts == pytest.approx(213_522, rel=0.03)
    assert outputs == pytest.approx(50_787, rel=0.03)
    assert min(asked.prompt_tokens for asked in trace) == 200
    assert max(asked.output_tokens for asked in trace) == 512


def test_floors_are_the_slower_of_products_and_reading(work):
    one = replace(LIMITS, product_rate=1e30)
    assert step_floor(work, one, 8, 100) == work.decode_bytes(8, 100) / 4e12
    assert step_floor(work, replace(LIMITS, bandwidth=1e30), 8, 100) == work.decode_operations(8, 100) / 8e14
    assert first_token_floor(work, one, 100) == work.weight_bytes / 4e12


def test_a_trace_costs_what_its_prompts_and_steps_cost_together(work):
    """One request: its prompt, and a step for each further token, with contexts that grow by one."""
    trace = (TraceRequest(prompt_tokens=100, output_tokens=4),)
    products = work.prefill_operations(100) + sum(work.decode_operations(1, 100 + i) for i in (1, 2, 3))
    assert trace_floor(work, replace(LIMITS, bandwidth=1e30), trace) == pytest.approx(products / 8e14, rel=1e-3)
    reading = 4 * work.weight_bytes + sum(work.decode_bytes(1, 100 + i) - work.weight_bytes for i in (1, 2, 3))
    assert trace_floor(work, replace(LIMITS, product_rate=1e30), trace) == pytest.approx(reading / 4e12, rel=1e-2)


def test_an_engine_is_measured_and_idle_afterwards(bundle, work):
    mixed = Workload(Lengths(20, 0.5, 5, 60), Lengths(5, 0.5, 2, 10))
    config = SchedulerConfig(max_running=8, tokens_per_step=64, step_stretch=None, share_prefixes=False)
    with Engine.open(bundle.path, config=config) as engine:
        figures = {
            figure.name: figure
            for figure in engine_figures(engine, work, LIMITS, Sizes((1, 3), 20, (10,), 12), mixed, 0)
        }
        assert engine.free_blocks == engine.info.num_blocks
    assert list(figures) == [
        *("decode step, batch 1", "decode step, batch 3", "first token, prompt of 10"),
        *("12 requests", "12 requests, with prompts"),
    ]
    assert all(figure.value > 0 for figure in figures.values())
    assert all(figure.over(figure.best) > 1 for figure in figures.values() if figure.best)


def test_what_misses_its_target_is_said():
    slow, fast = Figure("decode step, batch 8", 5.0, "ms", 4.0), Figure("decode step, batch 8", 4.8, "ms", 4.0)
    assert slow.missed
    assert not fast.missed
    assert slow.to_json() == {
        **{"value": 5.0, "unit": "ms", "best": 4.0, "over_best": 1.25, "target": 4.9, "missed": True},
        **{"vllm": 5.05, "over_vllm": 5.0 / 5.05},
    }
    rate = Figure("256 requests", 5000, "tokens/s", 10_000, is_rate=True)
    assert rate.missed
    assert rate.over(rate.best) == 2
    assert not Figure("copy", 4.1, "TB/s").missed
    lines = table([slow, rate, Figure("copy", 4.1, "TB/s")]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["decode", "step,", "batch", "8", "5", "ms", "4", "1.25", "4.9", "missed", "5.05", "0.99"],
        ["256", "requests", "5,000", "tokens/s", "10,000", "2.00", "5,300", "missed", "5,264", "1.05"],
        ["copy", "4.1", "TB/s"],
    ]


def test_products_of_a_graph_for_a_gpu_are_counted(tmp_path):
    """Weights [24, 16] in 16 bits, [48, 24] in int4 for gate and up, and [40, 24] in int8 for the head."""
    node, value, data = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto
    weights = {
        "a": onnx.helper.make_tensor("a", data.BFLOAT16, [24, 16], bytes(768), raw=True),
        "b": onnx.numpy_helper.from_array(np.zeros((48, 12), np.uint8), "b"),
        "c": onnx.numpy_helper.from_array(np.zeros((40, 24), np.uint8), "c"),
    }
    scales = [onnx.numpy_helper.from_array(np.ones((1, width), np.float32), f"s{width}") for width in (48, 40)]
    nodes = [
        node("Linear", ["x", "a"], ["h"], domain="kiln", kernel_rows=32),
        node("QuantLinearSwiGlu", ["h", "b", "s48"], ["g"], domain="kiln", format=2),
        node("QuantLinear", ["g", "c", "s40"], ["l"], domain="kiln", format=0),
        node("Cast", ["l"], ["logits"], to=data.FLOAT),
    ]
    given, made = value("x", data.BFLOAT16, ["tokens", 16]), value("logits", data.FLOAT, ["tokens", 40])
    graph = onnx.helper.make_graph(nodes, "gpu", [given], [made], [*weights.values(), *scales])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "gpu.onnx")
    kv = KvSpec((KvLayer(1, 64),), 16, "bfloat16")
    found = decoder_work_from_graph(tmp_path / "gpu.onnx", DecoderSpec(kv, 40, 64, (0,)))
    assert found.body_parameters == 24 * 16 + 48 * 24
    assert found.head_parameters == 40 * 24
    assert found.weight_bytes == 2 * 24 * 16 + 48 * 12 + 40 * 24 + 4 * (48 + 40)


@pytest.mark.parametrize("quant", sorted(QUANTS))
def test_a_graphs_products_get_packed_weights(quant, tmp_path):
    """Two layers that share their weights on disk, and a gated one, of which the first kind was measured."""
    form, data = QUANTS[quant], onnx.TensorProto
    dims = {"a": [256, 512], "b": [256, 512], "c": [1024, 256]}
    weights = [data(name=name, dims=size, data_type=data.BFLOAT16) for name, size in dims.items()]
    for tensor, offset in zip(weights, ("0", "0", "400000"), strict=True):
        tensor.data_location = data.EXTERNAL
        for key, value in (("location", "w.data"), ("offset", offset)):
            tensor.external_data.add(key=key, value=value)
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    nodes = [
        node("Linear", ["x", "a"], ["h"], domain="kiln", kernel_rows=32),
        node("Linear", ["x", "b"], ["k"], domain="kiln", kernel_rows=32),
        node("LinearSwiGlu", ["k", "c"], ["y"], domain="kiln", kernel_rows=32),
    ]
    given, made = value("x", data.BFLOAT16, ["tokens", 512]), value("y", data.BFLOAT16, ["tokens", 512])
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "gpu", [given], [made], weights))
    measured = Measured("o", 256, 512, False, 16, {"cublas": 2.0, form: 1.0})
    assert quantise(model, form, Choices("a device", (measured,)), tmp_path) == 3
    assert [node.op_type for node in model.graph.node] == ["QuantLinear", "QuantLinear", "QuantLinearSwiGlu"]
    assert set(dims).isdisjoint(tensor.name for tensor in model.graph.initializer)
    attributes = [{attribute.name: attribute.i for attribute in node.attribute} for node in model.graph.node]
    assert {one["format"] for one in attributes} == {FORMATS.index(form)}
    assert [one["kernel_rows"] for one in attributes] == [16, 16, 32]
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert stored["a/packed"].external_data == stored["b/packed"].external_data
    assert list(stored["c/packed"].dims) == [1024, 256 if form != "int4" else 128]
    packed, scales = (onnx.numpy_helper.to_array(stored[f"c/{name}"], str(tmp_path)) for name in ("packed", "scale"))
    values = restored(unpack(packed, form), scales, 128 if form == "int4" else 0)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.02, rel=0.05)


def test_low_bit_steps_are_held_against_those_of_another_run(tmp_path):
    sixteen = {"quant": None, "decode step, batch 1": Figure("decode step, batch 1", 4.0, "ms").to_json()}
    (tmp_path / "16.txt").write_text(f"table\n{json.dumps(sixteen)}\n")
    steps = [
        Figure("decode step, batch 1", 2.5, "ms"),
        Figure("decode step, batch 8", 3.0, "ms"),
        Figure("copy", 4, "TB/s"),
    ]
    (over,) = beside(steps, document_of(tmp_path / "16.txt"))
    assert (over.name, over.value, over.missed) == ("decode step, batch 1, over 16 bits", 0.625, False)
    assert replace(over, value=0.66).missed
    for text, says in (("", "does not end with"), ('{"quant": "int8"}', "is of a run with --quant int8")):
        (tmp_path / "16.txt").write_text(text)
        with pytest.raises(SystemExit, match=says):
            document_of(tmp_path / "16.txt")


def test_steps_of_a_trace_are_told_apart_by_what_is_in_them():
    """Each lasts from the end of the step before; the first has none."""
    sizes = ((512, 2, 0), (512, 2, 0), (3, 3, 30), (40, 40, 400))
    steps = [
        TracedStep(*size, launch=(n, n + 0.25), collect=(n + 0.25, n + 0.75)) for n, size in enumerate(sizes, start=1)
    ]
    table = {tuple(line[:20].split()): line[20:].split() for line in step_table(steps).splitlines()[1:]}
    each = ["1.000", "1000.00", "250.00", "500.00"]
    assert table == {
        ("prompts",): ["1", "512", "0", *each],
        ("decode,", "up", "to", "32"): ["1", "3", "10", *each],
        ("decode,", "up", "to", "64"): ["1", "40", "10", *each],
    }


def test_launched_steps_are_recorded_as_they_are_collected():
    backend = LaunchingFake()
    backend.cache[:] = 1  # as if all had been written
    with traced_steps(backend) as steps:
        for context in (5, 6):
            step = decode_inputs(backend, 2, context)
            backend.launch(step, greedy(2), np.full(2, -1, np.int32), logits=False)
        backend.collect()
        assert [(step.tokens, step.sequences, step.context) for step in steps] == [(2, 2, 10)]
        backend.collect()
    assert [step.context for step in steps] == [10, 12]
    assert all(step.launch[0] <= step.launch[1] <= step.collect[0] <= step.collect[1] for step in steps)
