"""The table itself: null pointers, sizes of structs, statuses, what crosses and what does not."""

import gc
import math
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from engines.capi.build import HEADER, declarations
from engines.capi.choices import ChoiceReader
from engines.capi.client import ClientEngine, Code, Library
from engines.capi.convert import Converter, dtype_from_name
from engines.capi.handles import LentMemory
from engines.runtime.metrics import EngineMetrics
from engines.runtime.request import Guidance, Request, RequestError, SamplingParams, TokenChunk
from engines.runtime.stream import Stream
from plugins.errors import KilnError


@pytest.fixture(scope="module")
def library(capi) -> Library:
    return Library(capi / "lib/libkiln.so")


@pytest.fixture(scope="module")
def engine(library, tiny_bundle):
    with ClientEngine.open(library, tiny_bundle.path, {"threads": 1}) as engine:
        yield engine


def outcome(library, status) -> tuple[Code, str]:
    """Code and message of a status, which is freed."""
    assert status != library.ffi.NULL
    found = Code(library.table.status_code(status)), library.ffi.string(library.table.status_message(status)).decode()
    library.table.status_free(status)
    return found


def test_versions(library):
    get_api = library._lib.kiln_get_api
    assert get_api(0) == get_api(2) == get_api(2**32 - 1) == library.ffi.NULL
    assert get_api(1) == library.table
    assert (library.table.version, library.table.size) == (1, library.ffi.sizeof("kiln_api"))


def test_about_twenty_functions_all_of_them_there(library):
    functions = [name for name, _ in library.ffi.typeof("kiln_api").fields if name not in ("version", "size")]
    assert len(functions) == 20
    assert all(getattr(library.table, name) != library.ffi.NULL for name in functions)


@pytest.mark.parametrize("compiler", [["gcc", "-std=c99"], ["g++", "-std=c++17"]], ids=lambda c: c[0])
def test_the_header_is_plain_c_and_has_the_layout_that_cffi_sees(library, compiler, tmp_path):
    ffi = library.ffi
    structs = [name for name in ffi.list_types()[0] if ffi.typeof(name).kind == "struct" and ffi.typeof(name).fields]
    assert len(structs) == 10
    places = [(s, field, at.offset) for s in structs for field, at in ffi.typeof(s).fields]
    lines = [f"CHECK({s}, {field}, {at})" for s, field, at in places]
    lines += [f"typedef char size_of_{s}[sizeof({s}) == {ffi.sizeof(s)} ? 1 : -1];" for s in structs]
    source = tmp_path / ("header.c" if compiler[0] == "gcc" else "header.cc")
    source.write_text(
        f'#include "{HEADER}"\n'
        "#define CHECK(type, field, at) typedef char at_##type##_##field[offsetof(type, field) == at ? 1 : -1];\n"
        + "\n".join(lines)
        + "\n"
    )
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    subprocess.run([*compiler, *flags, source], check=True)
    assert "kiln_get_api" not in declarations()


def test_null_pointers(library, engine):
    """Every out-parameter and every struct, one at a time; other out-parameters are then empty."""
    ffi, table, null, handle = library.ffi, library.table, library.ffi.NULL, engine.handle
    request = ffi.new("kiln_request *")
    library.check(table.default_request(request, ffi.sizeof("kiln_request")))
    inference = ffi.new("kiln_inference *")
    library.check(table.default_inference(inference, ffi.sizeof("kiln_inference")))
    params = ffi.new("kiln_open_params *")
    library.check(table.default_open_params(params, ffi.sizeof("kiln_open_params")))
    tokens, count = ffi.new("const int32_t **", ffi.cast("int32_t *", 8)), ffi.new("size_t *", 7)
    event, chunk = ffi.new("kiln_event *", 2), ffi.new("const kiln_chunk **")
    engines, streams = ffi.new("kiln_engine **", handle), ffi.new("kiln_stream **")
    outputs, text = ffi.new("const kiln_outputs **"), ffi.new("char[]", b"A")
    texts = ffi.new("const char **", text)
    stream = engine.submit(Request("A", SamplingParams(max_tokens=1)))
    wrong = [
        (table.default_open_params(null, 8), "params"),
        (table.default_request(null, 8), "request"),
        (table.default_inference(null, 8), "inference"),
        (table.open(null, engines), "params"),
        (table.open(params, null), "engine"),
        (table.open(params, engines), "bundle"),
        (table.describe(handle, null), "json"),
        (table.metrics(handle, null), "text"),
        (table.tokenize(handle, text, null, count), "tokens"),
        (table.tokenize(handle, text, tokens, null), "count"),
        (table.tokenize(handle, null, tokens, count), "text"),
        (table.tokenize_chat(handle, text, null, count), "tokens"),
        (table.tokenize_chat(handle, text, tokens, null), "count"),
        (table.tokenize_chat(handle, null, tokens, count), "messages"),
        (table.detokenize(handle, null, 3, texts), "tokens"),
        (table.detokenize(handle, null, 0, null), "text"),
        (table.submit(handle, null, streams), "request"),
        (table.submit(handle, request, null), "stream"),
        (table.wait(stream.handle, 0.0, null, chunk), "event"),
        (table.wait(stream.handle, 0.0, event, null), "chunk"),
        (table.infer(handle, null, outputs), "inference"),
        (table.infer(handle, inference, null), "outputs"),
    ]
    for status, field in wrong:
        code, message = outcome(library, status)
        assert code is Code.INVALID_ARGUMENT
        assert message.startswith(f"{field} is null"), message
    assert (tokens[0], count[0], engines[0], event[0], texts[0]) == (null, 0, null, 0, null)
    for status in (table.release(null), table.detokenize(handle, null, 0, texts)):
        library.check(status)
    library.release(texts[0])
    with stream:
        pass


def test_null_and_wrong_fields_of_a_request(library, engine):
    ffi, stream = library.ffi, library.ffi.new("kiln_stream **")
    text, tokens = ffi.new("char[]", b"A"), ffi.new("int32_t[]", [1])
    for fields, message in (
        ({}, "neither prompt nor tokens"),
        ({"prompt": text, "tokens": tokens}, "both prompt and tokens"),
        ({"tokens": tokens}, "the prompt is empty"),
        ({"prompt": text, "tenant": ffi.NULL}, "tenant is null"),
        ({"prompt": text, "lane": 2}, "lane is 2; expected 0 to 1"),
        ({"prompt": text, "lane": -1}, "lane is -1"),
        ({"prompt": text, "guidance": 6}, "guidance is 6; expected 0 to 5"),
        ({"prompt": text, "guidance": 3}, "guide is null"),
        ({"prompt": text, "guidance": 4}, "the choices are"),
        ({"prompt": text, "guidance": 4, "choice_count": 1}, "choices is null, but its count is 1"),
        ({"prompt": text, "stop_count": 2}, "stop is null, but its count is 2"),
        ({"prompt": text, "logit_bias_count": 2}, "logit_bias is null, but its count is 2"),
        ({"prompt": text, "timeout": 0.0}, "timeout is 0.0"),
        ({"prompt": text, "timeout": math.nan}, "timeout is nan"),
        ({"prompt": text, "temperature": math.inf}, "temperature is inf"),
    ):
        request = ffi.new("kiln_request *")
        library.check(library.table.default_request(request, ffi.sizeof("kiln_request")))
        for name, value in fields.items():
            setattr(request, name, value)
        code, found = outcome(library, library.table.submit(engine.handle, request, stream))
        assert (code, stream[0]) == (Code.INVALID_ARGUMENT, ffi.NULL)
        assert message in found


@pytest.mark.parametrize("type_", ["kiln_open_params", "kiln_request", "kiln_inference"])
def test_sizes_of_structs(library, engine, type_):
    ffi, table = library.ffi, library.table
    fill = {
        "kiln_open_params": table.default_open_params,
        "kiln_request": table.default_request,
        "kiln_inference": table.default_inference,
    }[type_]
    out = ffi.new("void **")
    use = {
        "kiln_open_params": lambda c: table.open(c, ffi.cast("kiln_engine **", out)),
        "kiln_request": lambda c: table.submit(engine.handle, c, ffi.cast("kiln_stream **", out)),
        "kiln_inference": lambda c: table.infer(engine.handle, c, ffi.cast("const kiln_outputs **", out)),
    }[type_]
    c, right = ffi.new(f"{type_} *"), ffi.sizeof(type_)
    library.check(fill(c, right))
    assert c.size == right
    for size in (0, 8, right - 1, right + 1, 2**40):
        assert outcome(library, fill(c, size))[0] is Code.INVALID_ARGUMENT
        c.size = size
        code, message = outcome(library, use(c))
        assert code is Code.INVALID_ARGUMENT
        assert f"{type_} has size {size}; expected {right} to {right}" in message


def test_statuses(library):
    ffi, table = library.ffi, library.table
    assert (table.status_code(ffi.NULL), ffi.string(table.status_message(ffi.NULL))) == (0, b"")
    table.status_free(ffi.NULL)
    statuses = [table.default_request(ffi.NULL, n) for n in range(5)]
    assert len(set(statuses)) == 5
    freed = statuses.pop(2)
    table.status_free(freed)
    for wrong in (freed, ffi.cast("kiln_status *", 0xDEADBEEF), ffi.cast("kiln_status *", 16)):
        assert table.status_code(wrong) == Code.INVALID_HANDLE
        assert b"no status" in ffi.string(table.status_message(wrong))
        table.status_free(wrong)
    assert [outcome(library, status)[0] for status in statuses] == [Code.INVALID_ARGUMENT] * 4


def test_statuses_from_many_threads(library):
    def work(_: int) -> None:
        for _ in range(300):
            statuses = [library.table.default_request(library.ffi.NULL, n) for n in range(3)]
            assert [outcome(library, s)[0] for s in statuses] == [Code.INVALID_ARGUMENT] * 3

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), SystemExit(3), GeneratorExit(), MemoryError()])
def test_no_exception_crosses(library, engine, monkeypatch, error):
    def fail(self):
        raise error

    monkeypatch.setattr(EngineMetrics, "text", fail)
    code, message = outcome(library, library.table.metrics(engine.handle, library.ffi.new("const char **")))
    if isinstance(error, MemoryError):
        assert (code, message) == (Code.OUT_OF_MEMORY, "MemoryError")
    else:
        assert code is Code.INTERNAL
        assert message.startswith(f"{type(error).__name__}: ")
        assert "test_boundary.py:" in message


def test_an_interrupt_of_a_python_host_arrives_as_one(library, engine, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineMetrics, "text", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.metrics()


def test_everything_lent_comes_home(library, engine, twice_bundle):
    """Nothing that the calls of this process lent is still lent, by any libkiln in it."""
    with engine.submit(Request("HELLO", SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True, n=2))) as stream:
        assert len(list(stream)) >= 2
    engine.describe(), engine.metrics(), library.tokenize(engine.handle, "A"), library.detokenize(engine.handle, [1])
    with ClientEngine.open(library, twice_bundle.path) as model:
        model.infer({"x": np.ones(3, np.float32)})
    lenders = [thing for thing in gc.get_objects() if type(thing) is LentMemory]
    assert lenders
    assert [len(lender) for lender in lenders] == [0] * len(lenders)


REQUESTS = [
    Request("text"),
    Request((5, 6), SamplingParams(), "batch", 2.5, "tenant"),
    Request(
        "é\n",
        SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            frequency_penalty=-1.5,
            presence_penalty=1.5,
            repetition_penalty=0.75,
            logit_bias={7: 2.5, 0: -100.0},
            logprobs=0,
            seed=2**64 - 1,
            max_tokens=17,
            stop=("a", "bé"),
            ignore_eos=True,
            n=128,
            guidance=Guidance("choices", ("x", "")),
        ),
    ),
    *(Request("a", SamplingParams(guidance=Guidance(kind, "{}"))) for kind in ("json_schema", "regex", "grammar")),
    Request("a", SamplingParams(guidance=Guidance("json_object"), logprobs=20, seed=0)),
]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_requests_cross_whole(library, number):
    """Also says that the defaults in C are those of Python: the binding sets what differs from None only."""
    c = library.ffi.new("kiln_request *")
    library.check(library.table.default_request(c, library.ffi.sizeof("kiln_request")))
    owners = library._fill_request(c, REQUESTS[number])
    found = Converter(library.ffi).request_from_c(c)
    assert found.sampling.max_tokens in (REQUESTS[number].sampling.max_tokens, 2**31 - 1)
    object.__setattr__(found.sampling, "max_tokens", REQUESTS[number].sampling.max_tokens)
    assert found == REQUESTS[number]
    del owners


def test_default_request_is_the_runtimes(library):
    c, text = library.ffi.new("kiln_request *"), library.ffi.new("char[]", b"A")
    library.check(library.table.default_request(c, library.ffi.sizeof("kiln_request")))
    c.prompt = text
    found = Converter(library.ffi).request_from_c(c)
    object.__setattr__(found.sampling, "max_tokens", None)
    assert found == Request("A")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_tensors_cross_whole(library, dtype, shape):
    ffi, converter = library.ffi, Converter(library.ffi)
    array = (np.arange(math.prod(shape)).reshape(shape) % 2).astype(getattr(ml_dtypes, dtype, dtype))
    for given in (array, array.T):  # the second is not in row-major order
        outputs, owners = converter.c_from_outputs({"x": given})
        inference = ffi.new("kiln_inference *", {"inputs": outputs.tensors, "input_count": 1, "timeout": math.inf})
        arrays, lane, timeout = converter.arrays_from_c(inference)
        assert (lane, timeout, list(arrays)) == ("interactive", None, ["x"])
        assert (arrays["x"].dtype, arrays["x"].shape) == (given.dtype, given.shape)
        np.testing.assert_array_equal(arrays["x"], given)
        del owners


def test_wrong_tensors(library):
    ffi, converter = library.ffi, Converter(library.ffi)
    name, dtype, data = ffi.new("char[]", b"x"), ffi.new("char[]", b"float32"), ffi.new("float[3]")
    shape = ffi.new("int64_t[]", [3])
    right = {"name": name, "dtype": dtype, "shape": shape, "rank": 1, "data": data, "bytes": 12}
    for fields, message in (
        ({"name": ffi.NULL}, "the name of input 0 is null"),
        ({"dtype": ffi.NULL}, "the dtype of x is null"),
        ({"shape": ffi.NULL}, "the shape of x is null"),
        ({"data": ffi.NULL}, "the data of x is null"),
        ({"bytes": 13}, r"x has 13 bytes; its shape \[3\] of float32 takes 12"),
        ({"shape": ffi.new("int64_t[]", [-3])}, "at least 0"),
        ({"shape": ffi.new("int64_t[]", [2**62])}, "takes 18446744073709551616"),
    ):
        tensors = ffi.new("kiln_tensor[]", [right | fields])
        with pytest.raises(KilnError, match=message):
            converter.arrays_from_c(ffi.new("kiln_inference *", {"inputs": tensors, "input_count": 1}))
    twice = ffi.new("kiln_tensor[]", [right, right])
    with pytest.raises(KilnError, match="two inputs are named x"):
        converter.arrays_from_c(ffi.new("kiln_inference *", {"inputs": twice, "input_count": 2}))


@pytest.mark.parametrize("name", ["object", "float", "S4", "str", "float32,int8", "f4", "", "datetime64", "finfo"])
def test_wrong_dtypes(name):
    with pytest.raises(KilnError, match="expected a NumPy name"):
        dtype_from_name(name, "x")


def test_many_readers_share_the_chunks_of_choices():
    streams = [Stream(1, lambda: None) for _ in range(3)]
    streams[0].push(TokenChunk((0,), ""))  # before anybody reads
    reader = ChoiceReader(streams)

    def write(choice: int) -> None:
        for token in range(1, 200):
            streams[choice].push(TokenChunk((token,), "", "stop" if token == 199 and choice else None))
        if choice == 0:
            streams[0].fail(ValueError("broken"))

    def read(_: int) -> list:
        found = []
        while True:
            try:
                item = reader.wait(60)
            except RequestError as error:
                item = str(error)
            if item is None:
                return found
            found.append(item if isinstance(item, str) else (item[0], *item[1].token_ids))

    writers = [threading.Thread(target=write, args=(choice,)) for choice in range(3)]
    with ThreadPoolExecutor(8) as pool:
        results = pool.map(read, range(8))
        for thread in writers:
            thread.start()
        found = [item for result in results for item in result]
    failures = [item for item in found if isinstance(item, str)]
    assert len(failures) == 1
    assert failures[0].startswith("choice 0: the request failed after 200 tokens: broken")
    expected = [(0, 0), *((choice, token) for choice in range(3) for token in range(1, 200))]
    assert sorted(item for item in found if not isinstance(item, str)) == expected
