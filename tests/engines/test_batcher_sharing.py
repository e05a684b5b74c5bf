"""Which requests of many threads share a call of a model without a KV cache, and that each gets its own result."""

import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from engines.runtime.batch_queue import BatchingConfig
from engines.runtime.shape_buckets import BatchLayout
from plugins.errors import KilnError
from tests.engines.gated_model import (
    ENCODER,
    FIXED,
    IGNORES_MASK,
    LOOKUP,
    MIXES_ROWS,
    PATIENCE,
    assert_encoded,
    ids,
    text,
    x,
)


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


def test_a_bundle_may_say_how_large_its_batches_are(twice_bundle):
    from engines.manifest import ServingRecord
    from engines.runtime.opening import default_batching

    assert default_batching(twice_bundle.manifest) == BatchingConfig()
    tuned = ServingRecord.model_construct(max_batch=7)
    manifest = twice_bundle.manifest.model_copy(update={"serving": tuned})
    assert default_batching(manifest) == BatchingConfig(max_batch=7)
