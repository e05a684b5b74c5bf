"""/v1/embeddings over a tiny real encoder: what is fed, pooled, refused and answered, by HTTP and OpenAI's client."""

import asyncio
import base64

import httpx
import numpy as np
import onnx
import openai
import pytest
from onnx import TensorProto, helper, numpy_helper
from starlette.testclient import TestClient

from engines.backends.onnxruntime import OnnxRuntimeModel
from engines.runtime.engine import Engine
from engines.runtime.info import EngineInfo, TensorInfo
from engines.runtime.scheduler import QueueFullError
from engines.server.app import create_app
from engines.server.encoder import EmbeddingConfig, Encoder
from engines.server.served import LocalEngine
from plugins.errors import KilnError

WIDTH, VOCABULARY = 8, 61
TABLE = np.random.default_rng(5).normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
TOKENS = tuple(TensorInfo(name, "int64", ("batch", "sequence")) for name in ("input_ids", "attention_mask"))
HIDDEN = TensorInfo("last_hidden_state", "float32", ("batch", "sequence", WIDTH))
POOLER = TensorInfo("pooler_output", "float32", ("batch", WIDTH))


class Recorded(LocalEngine):
    """Notes what is fed, and can refuse."""

    def __init__(self, engine):
        super().__init__(engine)
        self.fed = []
        self.lanes = []
        self.refuse_from = None
        self.cancelled = 0

    async def infer(self, inputs, *, lane, timeout):
        self.fed.append(inputs)
        self.lanes.append(lane)
        if self.refuse_from is not None:
            if len(self.fed) > self.refuse_from:
                raise QueueFullError("too many wait; try again later")
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return await super().infer(inputs, lane=lane, timeout=timeout)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Hidden states are rows of TABLE where the mask is 1, and huge where it is 0, so that pooling those shows."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["one", "mask"], ["outside"]),
        helper.make_node("Mul", ["outside", "huge"], ["noise"]),
        helper.make_node("Unsqueeze", ["noise", "last"], ["columns"]),
        helper.make_node("Add", ["rows", "columns"], ["last_hidden_state"]),
        helper.make_node("ReduceMax", ["rows", "middle"], ["pooler_output"], keepdims=0),
    ]
    constants = {
        "table": TABLE,
        "one": np.float32(1),
        "huge": np.float32(1e6),
        "last": np.array([-1]),
        "middle": np.array([1]),
    }
    value = helper.make_tensor_value_info
    inputs = [value(tensor.name, TensorProto.INT64, tensor.shape) for tensor in TOKENS]
    outputs = [value(tensor.name, TensorProto.FLOAT, tensor.shape) for tensor in (HIDDEN, POOLER)]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    path = tmp_path_factory.mktemp("encoder") / "encoder.onnx"
    made = helper.make_model(
        helper.make_graph(nodes, "encoder", inputs, outputs, weights),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    onnx.save(made, path)
    return path


@pytest.fixture(scope="module")
def info(tiny_bundle):
    folder = str(tiny_bundle.tokenizer_path)  # letters are tokens 1 to 60
    return EngineInfo("encoder", "model", tokenizer=folder, inputs=TOKENS, outputs=(HIDDEN, POOLER))


@pytest.fixture(scope="module")
def opened(graph, info):
    with Engine.from_model(OnnxRuntimeModel(graph), info=info) as engine:
        yield engine


@pytest.fixture
def engine(opened):
    return Recorded(opened)


@pytest.fixture
def client(engine):
    configs = {"encoder": EmbeddingConfig(dimensions=(4,), max_tokens=20, max_inputs=30)}
    with TestClient(create_app({"encoder": engine}, embeddings=configs)) as client:
        yield client


def embed(client, given, **more):
    return client.post("/v1/embeddings", json={"model": "encoder", "input": given, **more})


def ids(text):
    return [ord(letter) - ord("A") + 1 for letter in text]


def unit(vector):
    return vector / np.linalg.norm(vector)


def mean_of(text):
    return unit(TABLE[ids(text)].mean(0))


@pytest.mark.parametrize("given", ["HELLO", ["HELLO"], ids("HELLO"), [ids("HELLO")]])
def test_an_input_in_every_form(client, given):
    answer = embed(client, given).json()
    (item,) = answer["data"]
    np.testing.assert_allclose(item["embedding"], mean_of("HELLO"), rtol=1e-6)
    assert {**answer, "data": None} == {
        "object": "list",
        "model": "encoder",
        "data": None,
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert (item["object"], item["index"]) == ("embedding", 0)


def test_many_inputs_go_one_by_one_the_shorter_first_and_come_back_in_order(client, engine):
    texts = ["HELLO", "A", "WORLD", "BC", "A" * 20, "DEF"]
    answer = embed(client, texts).json()
    assert [item["index"] for item in answer["data"]] == list(range(6))
    for item, text in zip(answer["data"], texts, strict=True):
        np.testing.assert_allclose(item["embedding"], mean_of(text), rtol=1e-6)
    assert [inputs["input_ids"].shape for inputs in engine.fed] == [(1, n) for n in (1, 2, 3, 5, 5, 20)]
    assert all((inputs["attention_mask"] == 1).all() for inputs in engine.fed)
    assert answer["usage"]["prompt_tokens"] == 36


def test_base64_is_the_same_numbers(client):
    numbers = embed(client, "HELLO", encoding_format="float").json()["data"][0]["embedding"]
    text = embed(client, "HELLO", encoding_format="base64").json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), np.float32(numbers))


def test_dimensions_that_the_model_was_trained_for(client):
    cut = embed(client, "HELLO", dimensions=4).json()["data"][0]["embedding"]
    np.testing.assert_allclose(cut, unit(mean_of("HELLO")[:4]), rtol=1e-6)
    assert len(embed(client, "HELLO", dimensions=WIDTH).json()["data"][0]["embedding"]) == WIDTH


def test_openais_client(engine):
    async def main():
        transport = httpx.ASGITransport(create_app({"encoder": engine}))
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(base_url="http://kiln/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            got = await client.embeddings.create(model="encoder", input=["HELLO", "WORLD"])  # asks for base64
            numbers = await client.embeddings.create(model="encoder", input="HELLO", encoding_format="float", user="me")
            with pytest.raises(openai.BadRequestError, match="dimensions is 3; encoder gives vectors of 8") as refused:
                await client.embeddings.create(model="encoder", input="HELLO", dimensions=3)
            return got, numbers, refused.value

    got, numbers, refused = asyncio.run(main())
    np.testing.assert_allclose(got.data[1].embedding, mean_of("WORLD"), rtol=1e-6)
    np.testing.assert_allclose(numbers.data[0].embedding, got.data[0].embedding, rtol=1e-6)
    assert got.usage.prompt_tokens == 10
    assert refused.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("given", "more", "status", "message"),
    [
        ("", {}, 400, "at least 1 character"),
        ([], {}, 400, "at least 1 item"),
        (["A", ""], {}, 400, "at least 1 character"),
        ([[1], []], {}, 400, "at least 1 item"),
        (["A", 1], {}, 400, "input"),
        ([1.5], {}, 400, "input"),
        ([-1], {}, 400, "greater than or equal to 0"),
        ({"text": "A"}, {}, 400, "input"),
        ([61], {}, 400, "input 0 has token id 61, which encoder does not know"),
        ([2**40], {}, 400, "less than"),
        (["A", "B" * 21], {}, 400, "input 1 has 21 tokens, encoder takes 20 at most; split the text"),
        ([1] * 21, {}, 400, "input 0 has 21 tokens, encoder takes 20 at most"),
        (["A"] * 31, {}, 400, "the request has 31 inputs, the limit is 30"),
        ("A", {"dimensions": 5}, 400, "dimensions is 5; encoder gives vectors of 4, 8"),
        ("A", {"dimensions": 0}, 400, "dimensions"),
        ("A", {"encoding_format": "hex"}, 400, "encoding_format"),
        ("A", {"truncate": True}, 400, "truncate: unknown field"),
        ("A", {"model": "other"}, 404, "'other' is not served here; expected one of encoder"),
    ],
)
def test_what_is_refused(client, engine, given, more, status, message):
    answer = embed(client, given, **more)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert engine.fed == []


def test_one_refusal_takes_the_others_of_the_request_back(client, engine):
    engine.refuse_from = 5
    answer = embed(client, ["ABC"] * 8)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert engine.cancelled == 5


def test_the_lane_of_the_request(client, engine):
    assert embed(client, ["A", "B"], lane="batch").status_code == 200
    assert engine.lanes == ["batch", "batch"]


def test_decoders_and_models_of_images_give_no_embeddings(tiny_bundle, engine):
    pixels = (TensorInfo("pixels", "float32", ("batch", 3)),)
    engine.info = EngineInfo("image", "model", inputs=pixels, outputs=(POOLER,))
    with Engine.open(tiny_bundle.path) as decoder:
        app = create_app({"text": LocalEngine(decoder), "image": engine})
        for name, message in (("text", "text generates text"), ("image", "image takes pixels; an encoder")):
            answer = embed(TestClient(app), "A", model=name)
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]


# --- pooling by itself


def encoder(*outputs, inputs=TOKENS, **config):
    return Encoder(EngineInfo("e", "model", inputs=inputs, outputs=outputs), EmbeddingConfig(**config))


STATES = np.random.default_rng(6).normal(size=(1, 5, WIDTH)).astype(np.float32)
ONE = TensorInfo("sentence_embedding", "float32", ("batch", WIDTH))
OUT = {"last_hidden_state": STATES, "pooler_output": STATES[:, 0], "sentence_embedding": STATES[:, 4]}


@pytest.mark.parametrize(
    ("outputs", "config", "expected"),
    [
        ((HIDDEN, POOLER), {}, unit(STATES[0, :3].mean(0))),
        ((POOLER, HIDDEN), {"pooling": "cls"}, unit(STATES[0, 0])),
        ((HIDDEN,), {"pooling": "last"}, unit(STATES[0, 2])),
        ((HIDDEN, ONE), {}, unit(STATES[0, 4])),
        ((HIDDEN, ONE), {"pooling": "mean"}, unit(STATES[0, :3].mean(0))),
        ((HIDDEN,), {"normalize": False}, STATES[0, :3].mean(0)),
    ],
)
def test_pooling_follows_the_outputs_unless_told(outputs, config, expected):
    np.testing.assert_allclose(encoder(*outputs, **config).vector(OUT, 3, None), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("outputs", "config", "message"),
    [
        ((POOLER,), {}, "e gives pooler_output; expected hidden states"),
        ((HIDDEN,), {"pooling": "model"}, "expected a vector per text named sentence_embedding or"),
        ((), {}, "e gives nothing"),
        ((HIDDEN,), {"pooling": "max"}, "pooling is 'max'; expected one of mean, cls, last, model"),
        ((HIDDEN,), {"dimensions": (0,)}, r"dimensions is \(0,\); expected at least 1"),
    ],
)
def test_models_and_settings_that_do_not_go_together(outputs, config, message):
    with pytest.raises(KilnError, match=message):
        encoder(*outputs, **config)


def test_graphs_of_one_length_are_fed_padding():
    fixed = tuple(TensorInfo(t.name, "int32", (1, 6)) for t in (*TOKENS, TensorInfo("token_type_ids", "int32", ())))
    feeds = encoder(HIDDEN, inputs=fixed).feeds([7, 8, 9])
    assert {name: array.tolist() for name, array in feeds.items()} == {
        "input_ids": [[7, 8, 9, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 0, 0, 0]],
        "token_type_ids": [[0] * 6],
    }
    assert {array.dtype for array in feeds.values()} == {np.dtype("int32")}
    with pytest.raises(KilnError, match="takes exactly 6 tokens and no attention_mask; found 3"):
        encoder(HIDDEN, inputs=fixed[:1]).feeds([7, 8, 9])


def test_a_vector_of_zeros_stays_and_one_that_is_not_finite_is_an_error():
    zeros = {"last_hidden_state": np.zeros((1, 2, WIDTH), np.float32)}
    assert not encoder(HIDDEN).vector(zeros, 2, None).any()
    with pytest.raises(KilnError, match="NaN or infinite"):
        encoder(HIDDEN).vector({"last_hidden_state": zeros["last_hidden_state"] * np.nan}, 2, None)
