"""The memory account: of a graph whose tensors can be counted by hand, in the manifest, in bench and in metrics."""

import json
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.bundle import open_bundle
from engines.manifest import TensorRecord
from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from pipeline.bench import BenchConfig, bench
from pipeline.bench_table import table_from_report
from pipeline.ledger.records import entry_from_bench
from pipeline.memory import memory_account, weight_bytes_stored
from pipeline.progress import Progress

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def test_activations_are_the_tensors_that_are_alive_at_once(tmp_path: Path) -> None:
    """x -> a -> b -> y of 1 MiB each: a and b live together while the second runs, b and y while the third does."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node(op, [x], [y], y) for op, x, y in (("Sin", "x", "a"), ("Cos", "a", "b"), ("Tan", "b", "y"))
    ]
    values = [helper.make_tensor_value_info(name, kind, ["batch", 1 << 18]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    path = tmp_path / "g.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    inputs = [TensorRecord(name="x", dtype="float32", shape=("batch", 1 << 18))]
    account = memory_account(path, None, inputs, [])
    assert account is not None
    assert account.weights == weight_bytes_stored(path) == path.stat().st_size
    one, eight = account.phases
    assert one.activations == 2 << 20
    assert eight.activations == 16 << 20
    assert one.peak == account.weights + one.activations + one.workspace
    given = memory_account(path, None, inputs, [], {"x": np.zeros((3, 1 << 18), np.float32)})
    assert given is not None
    assert [phase.name for phase in given.phases] == ["given_inputs"]


def test_a_decoders_account_is_in_its_manifest(llama_bundle: Path) -> None:
    bundle = open_bundle(llama_bundle)
    account, decoder = bundle.manifest.memory, bundle.manifest.decoder
    assert account is not None
    assert decoder is not None
    assert account.kv_pool % decoder.kv.bytes_per_block == 0
    phases = {phase.name: phase for phase in account.phases}
    assert list(phases) == ["decode_batch_1", "decode_batch_16", "prefill_512"]
    assert phases["prefill_512"].cache == 512 * decoder.kv.bytes_per_token
    assert phases["decode_batch_16"].cache == 16 * phases["decode_batch_1"].cache
    assert phases["prefill_512"].activations >= 512 * 128 * 4 * 2  # gate and up of the widest layer
    assert phases["decode_batch_1"].activations < phases["prefill_512"].activations


def test_metrics_tell_the_parts(llama_bundle: Path) -> None:
    with Engine.open(llama_bundle, kv_blocks=8, threads=1) as engine:
        engine.generate([(1, 2, 3)], SamplingParams(max_tokens=2))
        families = {family.name: family for family in text_string_to_metric_families(engine.metrics.text())}
    parts = {sample.labels["part"]: sample.value for sample in families["kiln_memory_bytes"].samples}
    manifest = open_bundle(llama_bundle).manifest
    assert manifest.memory is not None
    assert manifest.decoder is not None
    assert parts["weights"] == manifest.memory.weights
    assert parts["kv_pool"] == 8 * manifest.decoder.kv.bytes_per_block
    assert parts["kv_held"] == 0
    assert 0 < parts["resident"] <= parts["peak"]
    samples = families["kiln_memory_phase_bytes"].samples
    told = {(sample.labels["phase"], sample.labels["part"]): sample.value for sample in samples}
    assert told["prefill_512", "activations"] == manifest.memory.phases[-1].activations


def test_bench_tells_the_peak_of_each_phase(llama_bundle: Path, silent: Progress) -> None:
    config = BenchConfig(threads=1, repetitions=1, prompt_lengths=(32,), decode_batches=(1, 2), decode_tokens=4)
    report = bench(llama_bundle, config, silent)
    assert set(report.peaks) == {"open", "warm_up", "prefill_32", "decode_batch_1", "decode_batch_2"}
    assert report.memory == open_bundle(llama_bundle).manifest.memory
    document = json.loads(report.to_json())
    assert document["memory"]["phases"][0]["name"] == "decode_batch_1"
    assert table_from_report(report) is not None
    entry = entry_from_bench(report, open_bundle(llama_bundle).manifest)
    figure = entry.figure("memory/prefill_32")
    assert figure is not None
    assert figure.values == (report.peaks["prefill_32"],)
