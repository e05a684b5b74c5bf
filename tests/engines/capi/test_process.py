"""What the library does to the process that it is loaded into: how Python is found, signals, interrupts, the end."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engines.capi.client import CApiError, Code
from engines.runtime.request import Request, SamplingParams

HANDLED_SIGNALS = [str(signal.SIGINT.value)]
"""driver.cc sets a handler for it."""


def test_nothing_works_before_open_and_python_is_not_started(start_driver):
    driver = start_driver()
    calls = {
        "engine": ("describe", "metrics", "close", "tokenize", "tokenize_chat", "detokenize", "submit", "infer"),
        "stream": ("wait", "cancel", "stream_close"),
    }
    arguments = {"tokens": "1", "text": "A", "messages": "[]", "timeout": 0, "inputs": "x:float32:1:%00%00%00%00"}
    for handle, names in calls.items():
        for name in names:
            for value in (0, 16, 0xDEADBEEF):
                with pytest.raises(CApiError, match=f"{handle} is .*; nothing was opened in this process yet") as info:
                    driver.call(name, **arguments, **{handle: value})
                assert info.value.code is Code.INVALID_HANDLE
    driver.release(0)
    with pytest.raises(CApiError, match="nothing was opened"):
        driver.release(16)
    tasks, patience = Path(f"/proc/{driver.process.pid}/task"), time.monotonic() + 30
    while len(list(tasks.iterdir())) > 1:  # each call of the driver's has a thread, which ends after its answer
        assert time.monotonic() < patience, "a thread of ours"
        time.sleep(0.01)


def test_signals_stay_the_programs_own(start_driver, tiny_bundle):
    driver = start_driver()
    before = driver.call("signals")
    assert before == [",".join(HANDLED_SIGNALS)]
    engine = driver.open(tiny_bundle.path, {"threads": 1})
    stream = driver.submit(engine, Request("A", SamplingParams(max_tokens=3)))
    while driver.wait(stream) is not None:
        pass
    assert driver.call("signals") == before
    driver.call("raise_sigint")
    assert driver.describe(engine)["name"] == "tiny"
    assert driver.end() == "1\n", "its own handler ran, and Python said nothing"


def test_a_program_may_end_while_requests_run(start_driver, bare_bundle):
    driver = start_driver()
    for options in ({"threads": 1}, {"threads": 1, "batch_wait": 600.0}):
        engine = driver.open(bare_bundle.path, options)
        for _ in range(20):
            driver.submit(engine, Request((1,), SamplingParams(ignore_eos=True, n=2)))
    assert driver.end() == "0\n"


def test_python_is_found_by_the_parameters(start_driver, bare_bundle, tmp_path):
    if sys.prefix == sys.base_prefix:
        pytest.skip("these tests run outside a virtual environment, so there is no Python without Kiln to start")
    driver = start_driver()

    def refused(message: str, **parameters: str) -> None:
        with pytest.raises(CApiError, match=message) as info:
            driver.open(bare_bundle.path, **parameters)
        assert info.value.code is Code.NO_PYTHON

    for wrong in ("/nowhere/python", str(tmp_path), "/etc/passwd"):
        refused(f"{wrong} is no program", python_executable=wrong)
    base = os.path.realpath(sys.executable)
    refused(f"Kiln cannot be imported: ModuleNotFoundError: .*Python is {base}.*pip install", python_executable=base)
    refused("Kiln cannot be imported", python_path=str(tmp_path))
    root = os.path.dirname(os.path.dirname(sys.modules["engines"].__file__))
    packages = next(path for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages"))
    engine = driver.open(bare_bundle.path, {"threads": 1}, python_executable=base, python_path=f"{root}:{packages}:")
    assert driver.describe(engine)["name"] == "tiny"
    driver.close(engine)


def test_threads_may_open_the_first_engine_together(start_driver, tiny_bundle):
    driver = start_driver()
    with ThreadPoolExecutor(8) as pool:
        engines = list(pool.map(lambda _: driver.open(tiny_bundle.path, {"threads": 1, "kv_blocks": 32}), range(8)))
    assert len(set(engines)) == 8
    for engine in engines:
        driver.close(engine)


INTERRUPTED = """
import datetime, sys
from engines.capi.client import ClientEngine, Library
from engines.runtime.request import Request

datetime.datetime_CAPI.__doc__  # a capsule: cffi's own way of embedding breaks in Python 3.11 where one was used
with ClientEngine.open(Library(sys.argv[1]), sys.argv[2], {"threads": 1, "batch_wait": 600.0}) as engine:
    with engine.submit(Request((1,))) as stream:
        try:
            print("ready", flush=True)
            list(stream)
        except KeyboardInterrupt:
            stream.cancel()
            print([chunk.finish_reason for _, chunk in stream])
"""


def test_control_c_interrupts_a_python_program_that_waits(capi, bare_bundle):
    program = [sys.executable, "-c", INTERRUPTED, capi / "lib/libkiln.so", bare_bundle.path]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "['cancelled']\n", "")
