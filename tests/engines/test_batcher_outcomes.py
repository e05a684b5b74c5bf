"""Each request to a model without a KV cache has an outcome: refused, late, cancelled, closed, called back, a bug."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Future, wait

import pytest

from engines.runtime.scheduler import QueueFullError
from plugins.errors import KilnError
from tests.engines.gated_model import ENCODER, PATIENCE, text


def test_a_full_queue_refuses(serve):
    served = serve(ENCODER, max_waiting=2)
    served.hold(text([1]))
    futures = [served.engine.submit_infer(text([1])) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        served.engine.submit_infer(text([1]))
    assert futures[0].cancel()
    served.engine.submit_infer(text([1]))
    assert served.sample("requests_total", outcome="refused") == 1


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
