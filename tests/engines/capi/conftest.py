"""The C API as tests see it: built, loaded into this process, and driven in a process that is no Python program."""

import json
import math
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

import numpy as np
import pytest

from engines.bundle import EngineBundle
from engines.capi.build import build
from engines.capi.client import CApiError, Code, Library
from engines.capi.convert import FINISH, GUIDANCE, LANES
from engines.runtime.engine import Engine
from engines.runtime.request import TokenChunk, TokenLogprobs

HERE = Path(__file__).parent


class Driver:
    """The same methods as `Library`, in a process of driver.cc with an empty environment. Handles are numbers."""

    def __init__(self, program: Path, library: Path) -> None:
        self.process = subprocess.Popen(
            ["/usr/bin/env", "-i", program, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
        )
        self._outcomes: dict[str, Future[list[str]]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, function: str, **arguments: object) -> list[str]:
        outcome: Future[list[str]] = Future()
        given = {name: value for name, value in arguments.items() if value is not None}
        with self._lock:
            tag = str(len(self._outcomes))
            self._outcomes[tag] = outcome
            fields = [tag, function, *(f"{name}={_encoded(value)}" for name, value in given.items())]
            self.process.stdin.write("\t".join(fields).encode() + b"\n")
            self.process.stdin.flush()
        kind, *values = outcome.result(120)
        if kind == "error":
            raise CApiError(Code(int(values[0])), unquote_to_bytes(values[1]).decode())
        assert kind == "ok", values
        return values

    def end(self) -> str:
        """End of input; what the program says on standard error at its end."""
        self.process.stdin.close()
        self._reader.join(60)
        assert self.process.wait(60) == 0
        return self.process.stderr.read().decode()

    def version(self):
        return self.call("library_version")[0]

    def open(self, bundle, options=None, *, python_executable=None, python_path=None):
        options = None if options is None else json.dumps(options)
        arguments = {"python_executable": python_executable, "python_path": python_path}
        return int(self.call("open", bundle=bundle, options=options, **arguments)[0])

    def close(self, engine):
        self.call("close", engine=engine)

    def describe(self, engine):
        return json.loads(unquote_to_bytes(self.call("describe", engine=engine)[0]))

    def metrics(self, engine):
        return unquote_to_bytes(self.call("metrics", engine=engine)[0]).decode()

    def tokenize(self, engine, text):
        return _integers(self.call("tokenize", engine=engine, text=text)[0])

    def tokenize_chat(self, engine, messages):
        return _integers(self.call("tokenize_chat", engine=engine, messages=json.dumps(messages))[0])

    def detokenize(self, engine, tokens):
        return unquote_to_bytes(self.call("detokenize", engine=engine, tokens=_joined(tokens))[0]).decode()

    def submit(self, engine, request):
        s = request.sampling
        arguments = {
            name: getattr(s, name)
            for name in (
                *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
                *("n", "max_tokens", "top_k", "seed"),
            )
        }
        prompt = {"prompt": request.prompt} if isinstance(request.prompt, str) else {"tokens": _joined(request.prompt)}
        if s.guidance is not None:
            arguments["guidance"] = GUIDANCE.index(s.guidance.kind)
            choices = isinstance(s.guidance.value, tuple)
            arguments |= {"choices": _texts(s.guidance.value)} if choices else {"guide": s.guidance.value}
        return int(
            self.call(
                "submit",
                engine=engine,
                **prompt,
                **arguments,
                tenant=request.tenant,
                lane=LANES.index(request.lane),
                timeout=request.timeout,
                ignore_eos=int(s.ignore_eos),
                seeded=int(s.seed is not None),
                logprobs=int(s.logprobs is not None),
                top_logprobs=s.logprobs,
                stop=_texts(s.stop),
                logit_bias=",".join(f"{token}:{bias}" for token, bias in s.logit_bias.items()),
            )[0]
        )

    def wait(self, stream, timeout=math.inf):
        event, *values = self.call("wait", stream=stream, timeout=timeout)
        if event == "nothing":
            raise TimeoutError
        if event == "end":
            return None
        choice, finish, tokens, text, logprobs = [*values, ""][:5]
        positions = [_logprobs(position) for position in logprobs.split(";") if position]
        return int(choice), TokenChunk(
            tuple(_integers(tokens)), unquote_to_bytes(text).decode(), FINISH[int(finish)], tuple(positions)
        )

    def cancel(self, stream):
        self.call("cancel", stream=stream)

    def stream_close(self, stream):
        self.call("stream_close", stream=stream)

    def infer(self, engine, inputs, *, lane="interactive", timeout=None):
        tensors = [
            f"{name}:{a.dtype.name}:{'x'.join(map(str, a.shape))}:{quote_from_bytes(a.tobytes(), '')}"
            for name, a in inputs.items()
        ]
        values = self.call("infer", engine=engine, inputs=",".join(tensors), lane=LANES.index(lane), timeout=timeout)
        outputs = {}
        for name, dtype, shape, data in (value.split(":") for value in values):
            dimensions = [int(dimension) for dimension in shape.split("x") if dimension]
            outputs[name] = np.frombuffer(unquote_to_bytes(data), dtype).reshape(dimensions)
        return outputs

    def release(self, memory):
        self.call("release", memory=memory)

    def _read(self) -> None:
        for line in self.process.stdout:
            tag, *values = line.decode().rstrip("\n").split("\t")
            self._outcomes[tag].set_result(values)
        for outcome in self._outcomes.values():
            if not outcome.done():
                outcome.set_exception(RuntimeError("the driver ended"))


def _encoded(value: object) -> str:
    return quote_from_bytes(str(value).encode(errors="surrogateescape"), safe=":,")


def _joined(tokens) -> str:
    return ",".join(map(str, tokens))


def _texts(texts) -> str:
    return "".join(quote_from_bytes(text.encode(), "") + "," for text in texts)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _logprobs(text: str) -> TokenLogprobs:
    chosen, *top = ((int(token), float(logprob)) for token, logprob in (pair.split(":") for pair in text.split(",")))
    return TokenLogprobs(*chosen, tuple(top))


@pytest.fixture(scope="session")
def capi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C API as `kiln capi build` makes it: a folder with include and lib."""
    out = tmp_path_factory.mktemp("capi")
    build(out)
    return out


@pytest.fixture(scope="session")
def bare_bundle(make_bundle, tiny_model, cpu_plugin) -> EngineBundle:
    """The tiny serving graph without a tokenizer, which takes most of the time to open in a new process."""
    model = tiny_model()
    return make_bundle(model.path, model.decoder, cpu_plugin)


@pytest.fixture(scope="session")
def driver_program(capi: Path, tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("driver") / "driver"
    flags = ["-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{capi / 'include'}"]
    subprocess.run(["g++", *flags, HERE / "driver.cc", "-ldl", "-o", program], check=True)
    return program


@pytest.fixture(scope="module")
def start_driver(driver_program: Path, capi: Path) -> Iterator[Callable[[], Driver]]:
    """Starts processes; each must end well."""
    drivers = []

    def start() -> Driver:
        drivers.append(Driver(driver_program, capi / "lib/libkiln.so"))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.stdin.close()
        assert driver.process.wait(60) == 0


@pytest.fixture(scope="module", params=["python", "c"])
def api(request, capi: Path) -> Library | Driver:
    if request.param == "python":
        return Library(capi / "lib/libkiln.so")
    return request.getfixturevalue("start_driver")()


@pytest.fixture(scope="module")
def engine(api, tiny_bundle):
    handle = api.open(tiny_bundle.path, {"threads": 1})
    yield handle
    api.close(handle)


@pytest.fixture(scope="module")
def truth(tiny_bundle) -> Iterator[Engine]:
    """The same bundle, without the C API."""
    with Engine.open(tiny_bundle.path, threads=1) as engine:
        yield engine
