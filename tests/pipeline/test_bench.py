"""Floors against arithmetic done by hand, and whole measurements of tiny bundles."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from passes.onnx_model import DecoderSpec
from pipeline.bench import BenchConfig, Figure, bench
from pipeline.bench_table import table_from_report
from pipeline.cli_bench import bench_command
from pipeline.floors import AttentionLayer, DecoderWork, decoder_work_from_graph, plain_operations, weight_bytes
from pipeline.limits import peak_memory
from pipeline.progress import Progress
from plugins.errors import KilnError

ROOT = Path(__file__).parents[2]
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def work(window: int | None = None) -> DecoderWork:
    return DecoderWork(1000, 300, 5200, (AttentionLayer(4, 8, window),), kv_bytes_per_token=64)


def test_prefill_counts_every_causal_pair_once() -> None:
    pairs = sum(t + 1 for t in range(20))
    assert work().prefill_operations(20) == 2 * 1000 * 20 + 2 * 300 + 4 * 4 * 8 * pairs


@pytest.mark.parametrize("window", [1, 7, 20, 50])
def test_a_sliding_window_counts_fewer_pairs(window: int) -> None:
    pairs = sum(min(t + 1, window) for t in range(20))
    assert work(window).prefill_operations(20) == 2 * 1000 * 20 + 2 * 300 + 4 * 4 * 8 * pairs


def test_decode_reads_weights_once_and_each_sequences_cache() -> None:
    assert work().decode_bytes(16, 100) == 5200 + 16 * 100 * 64
    assert work(10).decode_bytes(16, 100) == 5200 + 16 * 10 * 64
    assert work().decode_operations(16, 100) == 16 * (2 * 1300 + 4 * 4 * 8 * 100)


def test_a_serving_graph_is_counted_as_its_configuration_says(llama_bundle: Path) -> None:
    from engines.bundle import open_bundle

    bundle = open_bundle(llama_bundle)
    spec = bundle.manifest.decoder
    assert isinstance(spec, DecoderSpec)
    found = decoder_work_from_graph(bundle.engine_path, spec)
    hidden, inner, layers, vocabulary = 64, 128, 2, 512
    attention = hidden * hidden * 2 + hidden * (2 * 16) * 2  # q and o; k and v with 2 heads of 16
    assert found.body_parameters == layers * (attention + 3 * hidden * inner)
    assert found.head_parameters == vocabulary * hidden
    assert found.layers == (AttentionLayer(4, 16, None),) * 2
    assert found.kv_bytes_per_token == 2 * layers * 2 * 16 * 4
    products = 4 * (found.body_parameters + found.head_parameters)
    assert products <= found.weight_bytes <= products + 4 * 1000  # and norms: the tied embedding counts once


@pytest.fixture(scope="module")
def plain_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution, a Gemm and a MatMul: `x` [batch, 4, 5, 6] to `y` [batch, 3]."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    generator = np.random.default_rng(0)

    def weight(name: str, *shape: int):
        return onnx.numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "kernel"], ["c"], group=2, pads=[1, 1, 1, 1]),
            helper.make_node("Flatten", ["c"], ["f"]),
            helper.make_node("Gemm", ["f", "w", "bias"], ["g"], transB=1),
            helper.make_node("MatMul", ["g", "v"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", kind, ["batch", 4, 5, 6])],
        [helper.make_tensor_value_info("y", kind, ["batch", 3])],
        [weight("kernel", 8, 2, 3, 3), weight("w", 10, 240), weight("bias", 10), weight("v", 10, 3)],
    )
    path = tmp_path_factory.mktemp("onnx") / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def test_products_and_convolutions_of_a_plain_model_are_counted(plain_onnx: Path) -> None:
    each = 2 * (8 * 5 * 6 * 2 * 9 + 10 * 240 + 3 * 10)
    for batch in (1, 3):
        assert plain_operations(plain_onnx, {"x": np.zeros((batch, 4, 5, 6), np.float32)}) == batch * each
    assert weight_bytes(plain_onnx) == 4 * (8 * 2 * 9 + 10 * 240 + 10 + 30)


def test_ratios_say_how_much_of_the_floor_is_reached() -> None:
    rate = Figure("f", "f", "tokens/s", 50.0, 40.0, 60.0, 100.0, "reading")
    seconds = Figure("f", "f", "s", 2.0, 2.0, 2.0, 1.0, "products", higher_is_better=False)
    unknown = Figure("f", "f", "s", 2.0, 2.0, 2.0, None, "unknown")
    assert (rate.ratio, seconds.ratio, unknown.ratio) == (0.5, 0.5, None)


def test_a_decoder_is_measured_through_the_runtime(llama_bundle: Path, silent: Progress) -> None:
    report = bench(llama_bundle, BenchConfig(threads=1, repetitions=2), silent)
    figures = {figure.name: figure for figure in report.figures}
    assert list(figures) == ["prefill_511", "decode_batch_1", "decode_batch_16", "first_token", "peak_memory"]
    assert report.limits.read_bandwidth > 1e8
    assert report.limits.product_rate > 1e9
    for figure in figures.values():
        assert figure.lowest <= figure.median <= figure.highest
        assert figure.ratio is not None
        assert figure.ratio > 0  # no upper bound: others may slow the machine down while its limits are measured
    assert figures["first_token"].lowest == pytest.approx(511 / figures["prefill_511"].highest)
    assert figures["decode_batch_16"].median > figures["decode_batch_1"].median
    assert table_from_report(report) is not None


def test_a_model_without_a_kv_cache_has_latency_and_throughput(
    plain_onnx: Path, tmp_path: Path, silent: Progress
) -> None:
    from pipeline.build import build
    from pipeline.config import BuildConfig

    build(str(plain_onnx), ["cpu"], BuildConfig(out=tmp_path / "b"), silent)
    report = bench(tmp_path / "b", BenchConfig(threads=1, repetitions=2), silent)
    names = [figure.name for figure in report.figures]
    assert names == [f"{kind}_batch_{n}" for n in (1, 8) for kind in ("latency", "throughput")] + ["peak_memory"]
    figures = dict(zip(names, report.figures, strict=True))
    assert figures["throughput_batch_8"].highest == pytest.approx(8 / figures["latency_batch_8"].lowest)
    assert figures["throughput_batch_8"].floor == pytest.approx(8 / figures["latency_batch_8"].floor)
    assert all(figure.ratio for figure in report.figures)


def test_decode_rate_is_what_a_known_step_time_gives(llama_bundle: Path) -> None:
    """A backend slowed to a fixed time a step shows that the rate counts whole batches and nothing else."""
    from engines.runtime.engine import Engine
    from engines.runtime.scheduler import SchedulerConfig
    from pipeline.bench import _decode_rate

    with Engine.open(llama_bundle, config=SchedulerConfig(max_running=8), threads=1) as engine:
        backend = engine.backend
        step = backend.step

        def slow(inputs):
            result = step(inputs)
            time.sleep(0.05)
            return result

        backend.step = slow  # type: ignore[method-assign]
        for batch in (1, 8):
            rate = _decode_rate(engine, [(1, 2, 3)] * batch, 20)
            assert 0.3 * batch / 0.05 < rate < batch / 0.05


def test_sequences_that_did_not_decode_together_are_measured_again(
    llama_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the first of two sequences has ended when the second one is submitted."""
    from engines.runtime.engine import Engine
    from engines.runtime.request import Request
    from engines.runtime.stream import Stream
    from pipeline.bench import _decode_rate

    with Engine.open(llama_bundle, threads=1) as engine:
        submit = engine.submit
        submitted: list[Stream] = []

        def late(request: Request) -> Stream:
            if len(submitted) in slow:
                submitted[-1].result()
            submitted.append(submit(request))
            return submitted[-1]

        monkeypatch.setattr(engine, "submit", late)
        slow = {1, 3}
        assert _decode_rate(engine, [(1, 2, 3)] * 2, 200) > 0
        assert len(submitted) >= 6
        submitted.clear()
        slow = set(range(1, 100, 2))
        with pytest.raises(KilnError, match="2 sequences of 4 tokens did not decode together"):
            _decode_rate(engine, [(1, 2, 3)] * 2, 4)


def test_the_command_prints_one_json_line(llama_bundle: Path) -> None:
    result = CliRunner().invoke(bench_command, [str(llama_bundle), "--json", "--threads", "1", "--repetitions", "1"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 1
    document = json.loads(lines[0])
    assert document["threads"] == document["repetitions"] == 1
    assert {"name", "median", "lowest", "highest", "floor", "ratio", "unit"} <= set(document["figures"][0])
    assert "decode, batch 16" in result.stderr


def test_bad_options_and_bundles_are_refused(tmp_path: Path, silent: Progress) -> None:
    for options in ({"repetitions": 0}, {"threads": 0}):
        with pytest.raises(KilnError, match="expected at least 1"):
            BenchConfig(**options)
    with pytest.raises(KilnError, match="expected an engine bundle"):
        bench(tmp_path, BenchConfig(), silent)


def test_peak_memory_can_start_again() -> None:
    program = """
import mmap
from pipeline.limits import peak_memory, reset_peak_memory

def touch(size):
    with mmap.mmap(-1, size) as block:
        for place in range(0, size, 4096):
            block[place] = 1

touch(128 << 20)
high = peak_memory()
reset_peak_memory()
low = peak_memory()
touch(32 << 20)
print(int(high), int(low), int(peak_memory()))
"""
    if peak_memory() is None or not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell VmHWM, or does not let it start again")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    high, low, again = map(int, result.stdout.split())
    assert high - low > 120 << 20
    assert 30 << 20 < again - low < 40 << 20


def test_operations_of_fused_attention(tmp_path):
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    main (float[b,5,16] q, float[b,7,16] k, float[b,7,16] v) => (float[b,5,16] y) {
        y = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "attention.onnx")
    feeds = {name: np.zeros((3, length, 16), np.float32) for name, length in (("q", 5), ("k", 7), ("v", 7))}
    scores = mixed = 2 * 3 * 5 * 7 * 16
    assert plain_operations(tmp_path / "attention.onnx", feeds) == scores + mixed
