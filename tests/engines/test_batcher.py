"""Requests of many threads to models without a KV cache: tiny real graphs behind a gate that holds calls back."""

import asyncio
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import numpy as np
import onnx.parser
import pytest

from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo
from engines.runtime.scheduler import QueueFullError
from engines.runtime.shape_buckets import BatchLayout
from plugins.errors import KilnError

PATIENCE = 30
"""Seconds after which a test gives up."""

ENCODER = """(int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
    => (float[batch, sequence] hidden, float[batch] pooled) {
    axes = Constant<value_ints = [1]> ()
    ids = Cast<to = 1>(input_ids)
    mask = Cast<to = 1>(attention_mask)
    kept = Mul(ids, mask)
    total = ReduceSum<keepdims = 1>(kept, axes)
    number = ReduceSum<keepdims = 1>(mask, axes)
    mean = Div(total, number)
    hidden = Mul(ids, mean)
    pooled = Squeeze(mean, axes)
}"""
"""`pooled` is the mean of the ids that the mask keeps, `hidden` every id times that."""

IGNORES_MASK = ENCODER.replace("kept = Mul(ids, mask)", "kept = Identity(ids)").replace(
    "number = ReduceSum<keepdims = 1>(mask, axes)",
    "ones = Cast<to = 1>(attention_mask) one = Div(ids, ids) number = ReduceSum<keepdims = 1>(one, axes)",
)

MIXES_ROWS = """(float[n, 2] x) => (float[n, 2] y) {
    axes = Constant<value_ints = [0]> ()
    mean = ReduceMean<keepdims = 1>(x, axes)
    y = Sub(x, mean)
}"""

LOOKUP = """(int64[n, words] ids) => (float[n, words] found)
    <float[4] table = {0.5, 1.5, 2.5, 3.5}> { found = Gather(table, ids) }"""
"""Fails as a whole when one id is above 3."""

FIXED = "(float[1, 2] x) => (float[1, 2] y) { y = Add(x, x) }"


class Gated:
    """A backend that notes the rows of each call, and waits in each while the gate is closed."""

    def __init__(self, model: OnnxRuntimeModel) -> None:
        self.model = model
        self.inputs, self.outputs = model.inputs, model.outputs
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.rows: list[int] = []
        self.seen: list[np.ndarray] = []
        self.closed = False

    def check(self, inputs) -> None:
        self.model.check(inputs)

    def infer(self, inputs):
        first = next(iter(inputs.values()))
        self.rows.append(len(first))
        self.seen.append(first)
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        return self.model.infer(inputs)

    def close(self) -> None:
        self.closed = True
        self.model.close()


class Served:
    """An engine over a gated model, and a way to have requests wait while another one runs."""

    def __init__(self, backend: Gated, config: BatchingConfig) -> None:
        self.backend = backend
        self.engine = Engine.from_model(backend, EngineInfo("tiny", "model"), config)

    def hold(self, inputs, **options) -> Future:
        """A request that runs, and does not end before the gate is opened."""
        self.backend.gate.clear()
        self.backend.entered.clear()
        future = self.engine.submit_infer(inputs, **options)
        assert self.backend.entered.wait(PATIENCE)
        return future

    def together(self, *requests) -> list:
        """Results of requests that wait while another one runs; the rows of their calls are all that is noted after."""
        first = self.hold(requests[0])
        futures = [self.engine.submit_infer(inputs) for inputs in requests]
        self.backend.rows.clear()
        self.backend.gate.set()
        first.result(PATIENCE)
        return [future.result(PATIENCE) for future in futures]

    def sample(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(f"kiln_{name}", {"model": "tiny", **labels}) or 0.0


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., Served]]:
    """Opens an engine over a graph in ONNX's textual syntax."""
    opened = []

    def make(graph: str, **config) -> Served:
        path = tmp_path / f"{len(opened)}.onnx"
        onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> tiny {graph}'), path)
        served = Served(Gated(OnnxRuntimeModel(path, threads=1)), BatchingConfig(**config))
        opened.append(served)
        return served

    yield make
    for served in opened:
        served.backend.gate.set()
        served.engine.close()
        assert served.backend.closed


def text(*rows) -> dict:
    ids = np.array(rows, np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def x(*rows) -> dict:
    return {"x": np.array(rows, np.float32)}


def ids(*rows) -> dict:
    return {"ids": np.array(rows, np.int64)}


def assert_encoded(result, request) -> None:
    mean = request["input_ids"].mean(axis=1)
    np.testing.assert_allclose(result["pooled"], mean, rtol=1e-6)
    np.testing.assert_allclose(result["hidden"], request["input_ids"] * mean[:, None], rtol=1e-6)


def test_requests_that_wait_share_a_call_once_that_has_proved_right(serve):
    served = serve(ENCODER)
    requests = [text([1, 2, 3]), text([4, 5, 9], [7, 8, 8]), text([5, 5, 6])]
    for calls in ([4, 1, 2, 1], [4], [4]):  # the first batch is computed both ways
        for result, request in zip(served.together(*requests), requests, strict=True):
            assert_encoded(result, request)
        assert served.backend.rows == calls


def test_shorter_texts_of_a_bucket_are_padded(serve):
    served = serve(ENCODER, buckets=(4, 8))
    requests = [text([1, 2, 3]), text([4]), text([7, 8], [9, 9]), text([1, 2, 3, 4, 5]), text([6] * 9)]
    for calls in ([4, 1, 1, 2, 1, 1], [4, 1, 1]):
        for result, request in zip(served.together(*requests), requests, strict=True):
            assert_encoded(result, request)
        assert served.backend.rows == calls
    assert [array.shape for array in served.backend.seen[-3:]] == [(4, 3), (1, 5), (1, 9)]


def test_a_batch_has_at_most_so_many_rows_and_tokens(serve):
    served = serve(ENCODER, max_batch=3, tokens_per_batch=8, buckets=(2, 4, 16))
    short, long, large = text([1, 2]), text([1, 2, 3]), text(*[[1, 2, 9]] * 5)
    served.together(short, text([3, 4]), long, text([2, 3, 5]))
    served.together(*[short] * 7)
    assert served.backend.rows == [3, 3, 1]
    served.together(*[long] * 3)
    assert served.backend.rows == [2, 1]
    served.together(short, large, short)
    assert served.backend.rows == [2, 5]


def test_one_row_a_batch_turns_batching_off(serve):
    served = serve(ENCODER, max_batch=1)
    served.together(*[text([1, 2])] * 3)
    assert served.backend.rows == [1, 1, 1]


def test_a_model_with_a_fixed_batch_runs_requests_one_by_one(serve):
    served = serve(FIXED)
    results = served.together(x([1, 2]), x([3, 4]))
    assert [result["y"].tolist() for result in results] == [[[2, 4]], [[6, 8]]]
    assert served.backend.rows == [1, 1]


def test_a_model_that_mixes_rows_is_found_out_before_anybody_gets_a_wrong_result(serve, caplog):
    caplog.set_level(logging.WARNING)
    served = serve(MIXES_ROWS)
    for calls in ([2, 1, 1], [1, 1]):
        results = served.together(x([1, 2]), x([3, 5]))
        assert [result["y"].tolist() for result in results] == [[[0, 0]], [[0, 0]]]
        assert served.backend.rows == calls
    assert "tiny: requests are run one by one from now on: results differ" in caplog.text


def test_a_model_that_ignores_its_mask_shares_calls_among_equal_lengths_only(serve, caplog):
    caplog.set_level(logging.WARNING)
    served = serve(IGNORES_MASK)
    requests = [text([1, 2, 3]), text([4]), text([7, 8, 9])]
    for calls in ([3, 1, 1, 1], [2, 1, 1, 1], [2, 1]):  # padding is tried and refused, then equal lengths are tried
        for result, request in zip(served.together(*requests), requests, strict=True):
            assert_encoded(result, request)
        assert served.backend.rows == calls
    assert "requests of different length are not padded any more" in caplog.text


def test_one_bad_request_does_not_fail_its_neighbours(serve):
    served = serve(LOOKUP)
    served.together(ids([0, 1]), ids([2, 3]))
    hold = served.hold(ids([0, 0]))
    futures = [served.engine.submit_infer(ids(row)) for row in ([0, 1], [2, 9], [3, 3])]
    served.backend.rows.clear()
    served.backend.gate.set()
    hold.result(PATIENCE)
    assert futures[0].result(PATIENCE)["found"].tolist() == [[0.5, 1.5]]
    with pytest.raises(KilnError, match=r"the model failed on inputs of shape ids \[1, 2\]: .*out of data bounds"):
        futures[1].result(PATIENCE)
    assert futures[2].result(PATIENCE)["found"].tolist() == [[3.5, 3.5]]
    assert served.backend.rows == [3, 1, 1, 1]
    assert served.sample("requests_total", outcome="error") == 1
    served.together(ids([0, 1]), ids([2, 3]))
    assert served.backend.rows == [2], "one failure does not end batching"


def test_wrong_inputs_raise_in_the_caller(serve):
    served = serve(ENCODER)
    for use in (served.engine.infer, served.engine.submit_infer):
        with pytest.raises(KilnError, match="the model expects input_ids, attention_mask: add attention_mask"):
            use({"input_ids": np.ones((1, 2), np.int64)})
    assert served.backend.rows == []


def test_inputs_whose_rows_disagree_are_the_models_to_judge(serve):
    served = serve(ENCODER)
    request = text([1, 2], [3, 4])
    request["attention_mask"] = request["attention_mask"][:1]
    assert served.engine.infer(request)["pooled"].tolist() == [1.5, 3.5]
    served.together(request, text([1, 2]), request)
    assert served.backend.rows == [2, 1, 2]


def test_a_full_queue_refuses(serve):
    served = serve(ENCODER, max_waiting=2)
    served.hold(text([1]))
    futures = [served.engine.submit_infer(text([1])) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        served.engine.submit_infer(text([1]))
    assert futures[0].cancel()
    served.engine.submit_infer(text([1]))
    assert served.sample("requests_total", outcome="refused") == 1


def test_interactive_requests_go_first(serve):
    served = serve(ENCODER)
    served.hold(text([1]))
    batch = served.engine.submit_infer(text([1, 2]), lane="batch")
    interactive = served.engine.submit_infer(text([1, 2], [3, 4], [5, 6]), lane="interactive")
    wide = served.engine.submit_infer(text(*[[1, 2]] * 40), lane="interactive")
    served.backend.rows.clear()
    served.backend.gate.set()
    wait([batch, interactive, wide], PATIENCE)
    assert served.backend.rows == [4, 3, 1, 40]  # the two that fit share a call, computed both ways


def test_a_deadline_ends_a_request_that_waits_or_runs(serve):
    served = serve(ENCODER)
    hold = served.hold(text([1]))
    waiting = served.engine.submit_infer(text([2]), timeout=0.05)
    patient = served.engine.submit_infer(text([3]), timeout=3600)
    with pytest.raises(TimeoutError, match=r"not done after 0\.05 s; try again later"):
        waiting.result(PATIENCE)
    served.backend.gate.set()
    hold.result(PATIENCE)
    assert patient.result(PATIENCE)["pooled"].tolist() == [3]
    running = served.hold(text([4]), timeout=1)
    with pytest.raises(TimeoutError):
        running.result(PATIENCE)
    served.backend.gate.set()
    assert served.engine.infer(text([5]))["pooled"].tolist() == [5]
    assert [array.tolist() for array in served.backend.seen] == [[[1]], [[3]], [[4]], [[5]]], "the late one never ran"
    assert served.sample("requests_total", outcome="timeout") == 2


def test_a_deadline_in_the_past_is_an_outcome_too(serve):
    served = serve(ENCODER)
    with pytest.raises(TimeoutError, match="not done after 0 s"):
        served.engine.infer(text([1]), timeout=0)
    assert served.backend.rows == []


def test_a_cancelled_request_never_runs(serve):
    served = serve(ENCODER)
    hold = served.hold(text([1]))
    gone, stays = served.engine.submit_infer(text([2])), served.engine.submit_infer(text([3]))
    assert gone.cancel()
    assert gone.cancel()
    assert wait([gone], PATIENCE).done == {gone}, "who waits for it is told at once"
    assert not hold.cancel(), "it runs"
    served.backend.gate.set()
    assert stays.result(PATIENCE)["pooled"].tolist() == [3]
    with pytest.raises(CancelledError):
        gone.result(PATIENCE)
    assert [array.tolist() for array in served.backend.seen] == [[[1]], [[3]]]
    assert served.sample("requests_total", outcome="cancelled") == 1


def test_cancelling_the_task_that_awaits_takes_the_request_out(serve):
    served = serve(ENCODER)
    served.hold(text([1]))

    async def give_up() -> None:
        task = asyncio.ensure_future(asyncio.wrap_future(served.engine.submit_infer(text([2]))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    served.backend.gate.set()
    served.engine.infer(text([3]))
    assert [array.tolist() for array in served.backend.seen] == [[[1]], [[3]]]


def test_the_next_full_batch_is_joined_while_one_runs(serve, monkeypatch):
    served = serve(ENCODER, max_batch=4)
    served.together(text([1]), text([2]))
    joined_by, joined = [], threading.Event()
    merge = BatchLayout.merge

    def note(layout, requests):
        joined_by.append((threading.current_thread().name, len(requests)))
        joined.set()
        return merge(layout, requests)

    monkeypatch.setattr(BatchLayout, "merge", note)
    hold = served.hold(text([1]))
    first = [served.engine.submit_infer(text([number]), lane="batch") for number in range(4)]
    assert joined.wait(PATIENCE)
    served.backend.rows.clear()
    served.backend.gate.set()
    assert [future.result(PATIENCE)["pooled"].tolist() for future in (hold, *first)] == [[1], [0], [1], [2], [3]]
    assert served.backend.rows == [4]
    assert joined_by == [("kiln-infer-ahead", 4)]


def test_who_comes_before_a_joined_batch_still_goes_first(serve, monkeypatch):
    served = serve(ENCODER, max_batch=2)
    served.together(text([1]), text([2]))
    joined = threading.Event()
    merge = BatchLayout.merge
    monkeypatch.setattr(BatchLayout, "merge", lambda *args: (joined.set(), merge(*args))[1])
    served.hold(text([1]))
    batch = [served.engine.submit_infer(text([number]), lane="batch") for number in (1, 2)]
    assert joined.wait(PATIENCE)
    urgent = served.engine.submit_infer(text([7] * 20))  # of another bucket
    served.backend.seen.clear()
    served.backend.gate.set()
    wait([*batch, urgent], PATIENCE)
    assert [array.tolist() for array in served.backend.seen] == [[[7] * 20], [[1], [2]]]


def test_closing_gives_everyone_an_outcome(serve):
    served = serve(ENCODER)
    hold = served.hold(text([1]))
    waiting = [served.engine.submit_infer(text([2])) for _ in range(5)]
    closing = threading.Thread(target=served.engine.close)
    closing.start()
    while not served.engine._batcher._closing:
        assert closing.is_alive()
    served.backend.gate.set()
    closing.join(PATIENCE)
    assert hold.result(PATIENCE)["pooled"].tolist() == [1], "what runs is finished"
    for future in waiting:
        with pytest.raises(KilnError, match="the engine was closed before the request ran"):
            future.result(PATIENCE)
    with pytest.raises(KilnError, match="closed; open it again"):
        served.engine.infer(text([1]))
    assert served.sample("requests_total", outcome="cancelled") == 5


def test_an_engine_may_be_closed_from_a_callback(serve):
    served = serve(ENCODER)
    closed = threading.Event()
    future = served.engine.submit_infer(text([1]))
    future.add_done_callback(lambda _: (served.engine.close(), closed.set()))
    assert closed.wait(PATIENCE)


def test_a_callback_may_submit(serve):
    served = serve(ENCODER)
    second: Future = Future()

    def again(_) -> None:
        served.engine.submit_infer(text([5])).add_done_callback(lambda done: second.set_result(done.result()))

    served.engine.submit_infer(text([1])).add_done_callback(again)
    assert second.result(PATIENCE)["pooled"].tolist() == [5]


@pytest.mark.parametrize("method", ["take", "select"])
def test_a_bug_of_ours_leaves_nobody_waiting(serve, monkeypatch, method):
    served = serve(ENCODER)
    served.hold(text([1]))
    futures = [served.engine.submit_infer(text([2])) for _ in range(3)]

    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(f"engines.runtime.batch_queue.BatchQueue.{method}", broken)
    served.backend.gate.set()
    for future in futures:
        with pytest.raises(KilnError, match=r"the engine has stopped: ZeroDivisionError\('a bug'\); open it again"):
            future.result(PATIENCE)
    with pytest.raises(KilnError, match="the engine has stopped"):
        served.engine.infer(text([1]))


def test_metrics_count_requests_and_batches(serve):
    served = serve(ENCODER)
    served.together(text([1, 2]), text([3, 4]))  # with the one that holds: calls of 1, 2, 1 and 1 rows
    assert served.sample("requests_total", outcome="done") == 3
    for name in ("queue_seconds", "request_seconds"):
        assert served.sample(f"{name}_count") == 3
    assert served.sample("step_seconds_count") == served.sample("batch_size_count") == 4
    assert served.sample("batch_size_sum") == 5
    assert served.sample("batch_size_bucket", le="1.0") == 3


def test_many_threads_get_what_they_would_get_alone(serve):
    served = serve(ENCODER, max_batch=8, buckets=(4, 8), max_waiting=4096)

    def client(seed: int) -> dict[str, int]:
        choose = random.Random(seed)
        counts = {"done": 0, "cancelled": 0, "timeout": 0}
        for _ in range(60):
            length = choose.randint(1, 10)
            request = text(*[[choose.randint(0, 99) for _ in range(length)] for _ in range(choose.randint(1, 3))])
            lane = choose.choice(["interactive", "batch"])
            future = served.engine.submit_infer(request, lane=lane, timeout=choose.choice([None, 0.0005, PATIENCE]))
            if choose.random() < 0.2 and future.cancel():
                counts["cancelled"] += 1
                continue
            try:
                assert_encoded(future.result(PATIENCE), request)
                counts["done"] += 1
            except TimeoutError:
                assert future.done()
                counts["timeout"] += 1
        return counts

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(client, range(8)))
    for outcome in ("done", "cancelled", "timeout"):
        assert served.sample("requests_total", outcome=outcome) == sum(count[outcome] for count in counts)
    assert sum(count["done"] for count in counts) > 200
    assert served.engine._batcher._requests == {}
    assert len(served.engine._batcher._queue) == 0


def test_a_program_may_end_while_requests_wait(twice_bundle):
    code = (
        "import numpy as np\n"
        "from engines.runtime.engine import Engine\n"
        f"engine = Engine.open({str(twice_bundle.path)!r}, threads=1)\n"
        "futures = [engine.submit_infer({'x': np.ones(3, np.float32)}) for _ in range(200)]\n"
        "print(futures[0].result()['twice'].tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2.0, 2.0, 2.0]\n", "")


def test_a_bundle_may_say_how_large_its_batches_are(twice_bundle):
    from engines.manifest import ServingRecord
    from engines.runtime.opening import default_batching

    assert default_batching(twice_bundle.manifest) == BatchingConfig()
    tuned = ServingRecord.model_construct(max_batch=7)
    manifest = twice_bundle.manifest.model_copy(update={"serving": tuned})
    assert default_batching(manifest) == BatchingConfig(max_batch=7)
