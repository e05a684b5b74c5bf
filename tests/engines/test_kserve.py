"""The KServe v2 protocol over a real model and the real application; its codec, also on hostile bytes."""

import hashlib
import json
import tracemalloc
from contextlib import suppress

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper
from starlette.testclient import TestClient

from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo, TensorInfo
from engines.server.app import create_app
from engines.server.auth import Caller, KeyRing
from engines.server.served import LocalEngine
from engines.server.v2_tensors import DATATYPES, InferHeader, body_from_outputs, request_from_body
from plugins.errors import KilnError

LENGTH = "Inference-Header-Content-Length"
INPUTS = (TensorInfo("x", "float32", ("batch", 3)), TensorInfo("n", "int64", ("batch", 2)))
OUTPUTS = (
    TensorInfo("double", "float32", ("batch", 3)),
    TensorInfo("negative", "int64", ("batch", 2)),
    TensorInfo("half", "float16", ("batch", 3)),
    TensorInfo("positive", "bool", ("batch", 3)),
    TensorInfo("ratio", "float32", ("batch", 3)),
)
X = {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4.5, -5, 6]}
N = {"name": "n", "datatype": "INT64", "shape": [2, 2], "data": [1, 2, 3, 4]}
SIZED = {"binary_data_size": 24}
JSON_OUTPUTS = [{"name": "negative"}, {"name": "double"}]


class Recorded(LocalEngine):
    """Notes how requests are run."""

    def __init__(self, engine):
        super().__init__(engine)
        self.calls = []

    async def infer(self, inputs, **options):
        self.calls.append(options)
        return await super().infer(inputs, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Every datatype that leaves a model: `double` is x + x, `negative` -n, `half` x in FP16, `ratio` x / x."""
    types = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "float16": TensorProto.FLOAT16, "bool": 9}
    nodes = [
        helper.make_node("Add", ["x", "x"], ["double"]),
        helper.make_node("Neg", ["n"], ["negative"]),
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Greater", ["x", "zero"], ["positive"]),
        helper.make_node("Div", ["x", "x"], ["ratio"]),
    ]
    value = helper.make_tensor_value_info
    inputs, outputs = ([value(t.name, types[t.dtype], t.shape) for t in tensors] for tensors in (INPUTS, OUTPUTS))
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])
    graph = helper.make_graph(nodes, "several", inputs, outputs, [zero])
    path = tmp_path_factory.mktemp("several") / "several.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def engine(model):
    info = EngineInfo("several", "model", inputs=INPUTS, outputs=OUTPUTS)
    with Engine.from_model(OnnxRuntimeModel(model), info=info) as engine:
        yield Recorded(engine)


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(create_app({"several": engine})) as client:
        yield client


def infer(client, inputs, outputs=JSON_OUTPUTS, **more):
    return client.post("/v2/models/several/infer", json={"inputs": inputs, "outputs": outputs, **more})


def in_bytes(inputs, arrays, **more):
    """Body and headers of a request whose `arrays` follow the JSON part."""
    header = json.dumps({"inputs": inputs, **more}).encode()
    return header + b"".join(arrays), {LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}


def test_what_the_server_and_the_model_are(client):
    server = client.get("/v2").json()
    assert (server["name"], server["extensions"]) == ("kiln", ["binary_tensor_data"])
    assert client.get("/v2/models/several").json() == {
        "name": "several",
        "platform": "kiln_bundle",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "n", "datatype": "INT64", "shape": [-1, 2]},
        ],
        "outputs": [
            {"name": "double", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "negative", "datatype": "INT64", "shape": [-1, 2]},
            {"name": "half", "datatype": "FP16", "shape": [-1, 3]},
            {"name": "positive", "datatype": "BOOL", "shape": [-1, 3]},
            {"name": "ratio", "datatype": "FP32", "shape": [-1, 3]},
        ],
    }


def test_health(client):
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/several/ready").json() == {"name": "several", "ready": True}
    answer = client.get("/v2/models/other/ready")
    assert answer.status_code == 404
    assert answer.json() == {"error": "the model 'other' is not served here; expected one of several"}


def test_a_closed_engine_is_not_ready(model):
    closed = Engine.from_model(OnnxRuntimeModel(model))
    closed.close()
    with TestClient(create_app({"gone": LocalEngine(closed)})) as client:
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/v2/health/ready").status_code == 503
        assert client.get("/v2/models/gone/ready").status_code == 503


@pytest.mark.parametrize("data", [[1, 2, 3, 4.5, -5, 6], [[1, 2, 3], [4.5, -5, 6]]], ids=["flat", "nested"])
def test_tensors_in_json(client, data):
    answer = infer(client, [{**X, "data": data}, N], id="request 7")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "model_name": "several",
        "id": "request 7",
        "outputs": [
            {"name": "negative", "datatype": "INT64", "shape": [2, 2], "data": [-1, -2, -3, -4]},
            {"name": "double", "datatype": "FP32", "shape": [2, 3], "data": [2, 4, 6, 9, -10, 12]},
        ],
    }


def test_tensors_as_bytes(client):
    x = np.array([[1, 2, 3], [4.5, -5, 0]], "<f4")
    inputs = [{**X, "data": None, "parameters": SIZED}, N]
    body, headers = in_bytes(inputs, [x.tobytes()], parameters={"binary_data_output": True})
    answer = client.post("/v2/models/several/infer", content=body, headers=headers)
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[LENGTH])
    described, raw = json.loads(answer.content[:length])["outputs"], answer.content[length:]
    found = {}
    for tensor in described:
        size = tensor["parameters"]["binary_data_size"]
        found[tensor["name"]] = np.frombuffer(raw[:size], DATATYPES[tensor["datatype"]]).reshape(tensor["shape"])
        raw = raw[size:]
    assert raw == b""
    np.testing.assert_array_equal(found["double"], 2 * x)
    np.testing.assert_array_equal(found["half"], x.astype(np.float16))
    np.testing.assert_array_equal(found["positive"], x > 0)
    np.testing.assert_array_equal(found["negative"], [[-1, -2], [-3, -4]])
    assert np.isnan(found["ratio"][1, 2])


def test_each_output_in_its_own_way(client):
    outputs = [{"name": "double"}, {"name": "half", "parameters": {"binary_data": True}}]
    answer = infer(client, [X, N], outputs)
    length = int(answer.headers[LENGTH])
    double, half = json.loads(answer.content[:length])["outputs"]
    assert double["data"] == [2, 4, 6, 9, -10, 12]
    assert half == {"name": "half", "datatype": "FP16", "shape": [2, 3], "parameters": {"binary_data_size": 12}}
    np.testing.assert_array_equal(np.frombuffer(answer.content[length:], "<f2"), X["data"])
    outputs = [{"name": "double", "parameters": {"binary_data": False}}, {"name": "half"}]
    assert infer(client, [X, N], outputs, parameters={"binary_data_output": True}).status_code == 200


def test_lane_and_timeout_reach_the_engine(client, engine):
    engine.calls.clear()
    assert infer(client, [X, N], parameters={"lane": "batch", "timeout": 7.5}).status_code == 200
    assert infer(client, [X, N], parameters={"timeout": 1e9}).status_code == 200
    assert infer(client, [X, N]).status_code == 200
    assert engine.calls == [
        {"lane": "batch", "timeout": 7.5},
        {"lane": "interactive", "timeout": 600},
        {"lane": "interactive", "timeout": 600},
    ]


def test_a_key_without_a_lane_is_refused_it(engine):
    caller = Caller("night", lane="batch", highest_lane="batch")
    keys = KeyRing({hashlib.sha256(b"secret-key").digest(): caller})
    with TestClient(create_app({"several": engine}, keys=keys)) as client:
        assert infer(client, [X, N]).status_code == 401
        client.headers["Authorization"] = "Bearer secret-key"
        refused = infer(client, [X, N], parameters={"lane": "interactive"})
        assert (refused.status_code, "may not use the lane interactive" in refused.json()["error"]) == (403, True)
        engine.calls.clear()
        assert infer(client, [X, N]).status_code == 200
        assert engine.calls[0]["lane"] == "batch"


REFUSED = {
    "no inputs": ([], {}, "inputs: List should have at least 1 item"),
    "missing input": ([X], {}, "add n"),
    "unknown input": ([X, N, {**X, "name": "y"}], {}, "leave out y"),
    "twice": ([X, N, X], {}, "input 'x' is there twice"),
    "output twice": ([X, N], {"outputs": [*JSON_OUTPUTS, JSON_OUTPUTS[0]]}, "output 'negative' is there twice"),
    "text": ([{**X, "datatype": "BYTES"}, N], {}, "datatype 'BYTES'; engines take BOOL, .*turn text into token ids"),
    "unknown datatype": ([{**X, "datatype": "FP8"}, N], {}, "datatype 'FP8'; engines take BOOL"),
    "other datatype": ([{**X, "datatype": "FP64"}, N], {}, "x has datatype FP64; several expects FP32"),
    "half in JSON": ([{**X, "datatype": "FP16"}, N], {}, "FP16, which the protocol cannot express in JSON; send it as"),
    "bfloat in JSON": ([{**X, "datatype": "BF16"}, N], {}, "BF16, which the protocol cannot express in JSON"),
    "half out": ([X, N], {"outputs": [{"name": "half"}]}, "output half is FP16, .* ask for it as bytes"),
    "all out": ([X, N], {"outputs": []}, "output half is FP16"),
    "NaN out": ([{**X, "data": [0, 1, 2, 3, 4, 5]}, N], {"outputs": [{"name": "ratio"}]}, "NaN or infinite values"),
    "unknown output": ([X, N], {"outputs": [{"name": "z"}]}, "no output 'z'; it has double, negative"),
    "few values": ([{**X, "data": [1, 2]}, N], {}, "2 values, its shape .2, 3. holds 6"),
    "huge shape": ([{**X, "shape": [2**31 - 1] * 8}, N], {}, "6 values, its shape"),
    "beyond any shape": ([{**X, "shape": [2**70]}, N], {}, r"inputs.0.shape.0: Input should be less than or equal"),
    "empty": ([{**X, "shape": [0, 3], "data": []}, N], {}, "inputs.0.shape.0: .* greater than or equal to 1"),
    "deep shape": ([{**X, "shape": [1] * 33}, N], {}, "inputs.0.shape: List should have at most 32 items"),
    "other nesting": ([{**X, "data": [[1, 2], [3, 4], [5, 6]]}, N], {}, "do not follow its shape .2, 3. in axis 0"),
    "ragged": ([{**X, "data": [[1, 2, 3], [4, 5]]}, N], {}, "do not follow its shape .2, 3. in axis 1"),
    "deeper": ([{**X, "data": [[[1], [2], [3]]] * 2}, N], {}, "there are list in its data"),
    "text among numbers": ([{**X, "data": [1, 2, 3, 4, 5, "6"]}, N], {}, "FP32, but there are str in its data"),
    "truth among numbers": ([X, {**N, "data": [1, 2, 3, True]}], {}, "INT64, but there are bool in its data"),
    "fractions": ([X, {**N, "data": [1, 2, 3, 4.0]}], {}, "INT64, but there are float in its data"),
    "out of range": ([X, {**N, "data": [1, 2, 3, 2**63]}], {}, "a value beyond the range of INT64"),
    "no data": ([{**X, "data": None}, N], {}, "neither data and binary_data_size"),
    "both": ([{**X, "parameters": SIZED}, N], {}, "both data and binary_data_size"),
    "bytes that are not there": ([{**X, "data": None, "parameters": SIZED}, N], {}, "the body has 0 of them"),
    "negative size": ([{**X, "parameters": {"binary_data_size": -1}}, N], {}, "binary_data_size: .* or equal to 0"),
    "unknown parameter": ([X, N], {"parameters": {"sequence_id": 1}}, "parameters.sequence_id: Extra inputs"),
    "shared memory": ([{**X, "parameters": {"shared_memory_region": "r"}}, N], {}, "shared_memory_region: Extra"),
    "unknown lane": ([X, N], {"parameters": {"lane": "fast"}}, "parameters.lane: .*'interactive' or 'batch'"),
    "no time": ([X, N], {"parameters": {"timeout": 0}}, "parameters.timeout: .*greater than 0"),
    "other shape": ([{**X, "shape": [3, 2]}, N], {}, r"input x has shape \[3, 2\]; expected \[batch, 3\]"),
}


@pytest.mark.parametrize(("inputs", "more", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_refused_and_said(client, inputs, more, message):
    answer = infer(client, inputs, **{"outputs": JSON_OUTPUTS, **more})
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    with pytest.raises(KilnError, match=message):
        raise KilnError(answer.json()["error"])


def test_requests_that_are_wrong_as_a_whole(client, tiny_bundle):
    path = "/v2/models/several/infer"
    text = json.dumps({"inputs": [X, N], "outputs": JSON_OUTPUTS}).encode()
    for body, length, message in (
        (b"", None, "not JSON in UTF-8"),
        (b"[]", None, "the body: Input should be"),
        (b"\xff" + text, None, "not JSON in UTF-8"),
        (b"[" * 100_000, None, "not JSON in UTF-8"),
        (text.replace(b"4.5", b"NaN"), None, "not JSON in UTF-8"),
        (text, str(len(text) + 1), f"is {len(text) + 1}; the body has {len(text)} bytes"),
        (text, "5", "says how long it is"),
        (text, "-1", "expected the length of the JSON part"),
        (text, "9" * 30, "expected the length of the JSON part"),
        (text + b"xx", str(len(text)), "2 bytes follow the JSON part"),
    ):
        answer = client.post(path, content=body, headers={LENGTH: length} if length else {})
        assert (answer.status_code, message in answer.json()["error"]) == (400, True), (body[:30], answer.text)
    with Engine.open(tiny_bundle.path) as decoder, TestClient(create_app({"text": LocalEngine(decoder)})) as other:
        answer = other.post("/v2/models/text/infer", content=text)
        assert answer.json() == {"error": "text generates text; use /v1/completions or /v1/chat/completions"}


def arrays():
    shapes = hnp.array_shapes(max_dims=4, max_side=4)
    native = [dtype for name, dtype in DATATYPES.items() if name != "BF16"]
    random = st.sampled_from(native).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
    bfloat = hnp.arrays(np.float32, shapes).map(lambda array: array.astype(ml_dtypes.bfloat16))
    return random | bfloat


@settings(max_examples=50, deadline=None)
@given(arrays())
def test_bytes_come_back_as_they_were(array):
    name = next(name for name, dtype in DATATYPES.items() if dtype == array.dtype)
    sized = {"binary_data_size": array.nbytes}
    tensor = {"name": "a", "datatype": name, "shape": list(array.shape), "parameters": sized}
    body, headers = in_bytes([tensor], [array.tobytes()], parameters={"binary_data_output": True})
    header, inputs = request_from_body(body, int(headers[LENGTH]))
    assert inputs["a"].dtype == array.dtype
    assert inputs["a"].flags.aligned
    answer, length = body_from_outputs(inputs, header, "m")
    assert answer[length:] == array.tobytes()
    assert json.loads(answer[:length])["outputs"] == [tensor]


@settings(max_examples=50, deadline=None)
@given(arrays().filter(lambda array: array.dtype.itemsize != 2 or array.dtype.kind in "iu"))
def test_json_comes_back_as_it_was(array):
    name = next(name for name, dtype in DATATYPES.items() if dtype == array.dtype)
    finite = np.nan_to_num(array, posinf=1, neginf=-1) if array.dtype.kind == "f" else array
    for data in (finite.ravel().tolist(), finite.tolist()):
        tensor = {"name": "a", "datatype": name, "shape": list(array.shape), "data": data}
        header, inputs = request_from_body(json.dumps({"inputs": [tensor]}).encode(), None)
        np.testing.assert_array_equal(inputs["a"], finite)
        answer, length = body_from_outputs(inputs, header, "m")
        assert length is None
        assert json.loads(answer)["outputs"] == [{**tensor, "data": finite.ravel().tolist()}]


def hostile_requests():
    """Requests that follow the protocol nearly, cut and changed anywhere."""
    scalar = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    data = st.recursive(scalar, lambda inner: st.lists(inner, max_size=4), max_leaves=12)
    size = st.integers(-2, 40) | st.sampled_from([2**31 - 1, 2**40, 2**63])
    tensor = st.fixed_dictionaries(
        {"name": st.sampled_from(["x", "n", "z"]), "datatype": st.sampled_from([*DATATYPES, "BYTES", "FP8"])},
        optional={
            "shape": st.lists(size, max_size=4) | data,
            "data": data,
            "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": size | scalar}),
        },
    )
    output = st.fixed_dictionaries({"name": st.sampled_from(["double", "half", "z"])}, optional={"parameters": data})
    request = st.fixed_dictionaries(
        {"inputs": st.lists(tensor, max_size=3)}, optional={"outputs": st.lists(output, max_size=3), "id": scalar}
    )
    written = request.map(lambda document: json.dumps(document).encode())
    whole = st.tuples(written, st.binary(max_size=64), st.integers(-3, 3), st.booleans()).map(
        lambda parts: (parts[0] + parts[1], max(0, len(parts[0]) + (parts[2] if parts[3] else 0)))
    )
    return whole | st.tuples(st.binary(max_size=200), st.none() | st.integers(0, 300))


@settings(max_examples=250, deadline=None)
@given(hostile_requests())
def test_hostile_bytes_are_refused_within_their_own_size(request_):
    body, length = request_
    with suppress(KilnError):
        request_from_body(body, length)  # imports and caches
    tracemalloc.start()
    try:
        with suppress(KilnError):
            request_from_body(body, length)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 + 100 * len(body)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hostile_requests())
def test_hostile_requests_are_answered(client, request_):
    body, length = request_
    headers = {} if length is None else {LENGTH: str(length)}
    answer = client.post("/v2/models/several/infer", content=body, headers=headers)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert set(answer.json()) == {"error"}


def test_the_openapi_document_describes_the_body(client):
    paths = client.get("/openapi.json").json()["paths"]
    schema = paths["/v2/models/{name}/infer"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["inputs"]["items"]["required"] == ["name", "shape", "datatype"]
    assert "$ref" not in json.dumps(schema)
    assert InferHeader.model_validate({"inputs": [X, N]}).wants_binary("double") is False
