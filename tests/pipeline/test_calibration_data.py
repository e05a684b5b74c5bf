"""Every form of --calibration, its digest and its draw; what is wrong with data is said with file and line."""

import json
import sys

import numpy as np
import onnx
import pytest
from onnx import parser

from engines.runtime.tokenizer import Tokenizer
from passes.onnx_model import DecoderSpec, OnnxModel, onnx_model_from_path
from pipeline.calibration.data import DataConfig, calibration_set
from pipeline.calibration.images import Preprocessing, image_from_file, preprocessing_from_toml
from pipeline.calibration.samples import Draw
from pipeline.calibration.subject import CalibrationModel, calibration_model_from_path
from pipeline.calibration.text import cut
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec

LIMIT, VOCABULARY = 256, 61
CNN = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 3, 8, 8] image) => (float[N, 3, 8, 8] y) { y = Relu (image) }"""
ENCODER = """<ir_version: 8, opset_import: ["" : 17]>
net (int64[batch, seq] input_ids, int64[batch, seq] attention_mask) => (float[batch, seq, 2] y)
<float[4, 2] table = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}>
{ h = Gather (table, input_ids)
  m = Cast <to = 1> (attention_mask)
  axes = Constant <value = int64[1] {2}> ()
  wide = Unsqueeze (m, axes)
  y = Mul (h, wide) }"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Words w0 to w59 are tokens 1 to 60."""
    from tokenizers import Tokenizer as Core
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    core = Core(models.WordLevel({"<end>": 0, **{f"w{i}": i + 1 for i in range(60)}}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    saved.chat_template = "{% for m in messages %}w7 {{ m.content }} {% endfor %}w8"
    saved.save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture
def decoder(tmp_path, tokenizer):
    spec = DecoderSpec(KvSpec((KvLayer(1, 8),), 8, "float32"), VOCABULARY, LIMIT, (0,))
    model = OnnxModel(tmp_path / "engine.onnx", "0" * 64, (), (), spec, 1)
    return CalibrationModel(model, (), tokenizer, LIMIT)


def plain(tmp_path, text, name="net.onnx", **options):
    onnx.save(parser.parse_model(text), tmp_path / name)
    return CalibrationModel(onnx_model_from_path(tmp_path / name), **options)


def words(count, start=0):
    return " ".join(f"w{(start + i) % 60}" for i in range(count))


def ids_of(data):
    return [sample.read()["input_ids"].tolist() for sample in data.samples]


def written(path, text):
    path.write_text(text)
    return str(path)


def test_lines_stay_as_short_as_they_are(tmp_path, decoder):
    spec = written(tmp_path / "lines.txt", "\n\nw0 w1\nw2\nw3 w4 w5\n\n")
    data = calibration_set([spec], decoder)
    assert ids_of(data) == [[1, 2], [3], [4, 5, 6]]
    assert data.samples[1].origin == f"{spec}, line 4"
    assert data.counts == {"short": 3, "medium": 0, "long": 0, "near-limit": 0}


def test_one_long_text_fills_every_stratum(tmp_path, decoder):
    spec = written(tmp_path / "book.txt", "\n\n".join(words(100, i) for i in range(30)))
    data = calibration_set([spec], decoder, DataConfig(samples=5, tokens=0))
    assert data.counts == {"short": 5, "medium": 5, "long": 5, "near-limit": 5}
    again = calibration_set([spec], decoder, DataConfig(samples=5, tokens=0))
    other = calibration_set([spec], decoder, DataConfig(samples=5, tokens=0, seed=1))
    assert again.sha256 == data.sha256 != other.sha256
    assert ids_of(again) == ids_of(data)
    assert "tokens " in data.samples[0].origin
    as_lines = calibration_set([f"lines:{spec}"], decoder, DataConfig(samples=50))
    assert set(as_lines.lengths) == {100}


def test_pieces_of_a_stratum_do_not_overlap(decoder):
    strata = calibration_strata(decoder)
    ids = np.arange(1000, dtype=np.int32)
    found = list(cut("book", ids, strata, Draw(8, 0, 3)))
    for stratum in strata:
        pieces = [p.token_ids for p in found if strata.of(len(p.token_ids)) == stratum.name]
        joined = np.concatenate(pieces)
        assert len(set(joined.tolist())) == len(joined)
        assert all((np.diff(piece) == 1).all() for piece in pieces)
    assert len([p for p in found if len(p.token_ids) > 128]) == 7  # as many as 1000 tokens have room for
    assert {strata.of(len(p.token_ids)) for p in cut("line", ids[:20], strata, Draw(8, 0, 0))} == {"short"}


def calibration_strata(model):
    from pipeline.calibration.data import strata_of

    return strata_of(model, DataConfig())


def test_a_line_beyond_the_context_is_cut(tmp_path, decoder):
    spec = written(tmp_path / "one.txt", words(2000))
    data = calibration_set([spec], decoder)
    assert min(data.counts.values()) > 3
    assert max(data.lengths) <= LIMIT


def test_jsonl(tmp_path, decoder):
    lines = [
        {"prompt": "w0 w1"},
        {"messages": [{"role": "user", "content": "w2"}]},
        {"token_ids": [5, 6, 7]},
        {"tokens": [8]},
    ]
    spec = written(tmp_path / "set.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert ids_of(calibration_set([spec], decoder)) == [[1, 2], [8, 3, 9], [5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{nonsense", "Invalid JSON"),
        ("[1, 2]", "expected an object such as"),
        ("{}", "give one of prompt, messages and token_ids"),
        ('{"prompt": "w0", "token_ids": [1]}', "give one of"),
        ('{"prompt": ""}', "it is empty"),
        ('{"prompts": "w0"}', "prompts"),
        ('{"token_ids": [1, "x"]}', "token_ids.1"),
        ('{"token_ids": [1, 61]}', "token id 61; the model's vocabulary is 0 to 60"),
        ('{"token_ids": [-1]}', "token id -1"),
        ('{"token_ids": [99999999999]}', "less than or equal"),
        ('{"messages": [{"content": "w2"}]}', "message 0"),
        (json.dumps({"prompt": words(300)}), "300 tokens are more than the 256"),
    ],
)
def test_wrong_lines_are_named(tmp_path, decoder, line, words):
    spec = written(tmp_path / "set.jsonl", f'{{"prompt": "w0"}}\n\n{line}\n')
    with pytest.raises(KilnError, match=r"set\.jsonl, line 3") as error:
        calibration_set([spec], decoder)
    assert words in str(error.value)


def test_empty_and_one_line_sets(tmp_path, decoder):
    for name, text, found in (
        ("empty.txt", "", "no samples"),
        ("blank.jsonl", "\n\n", "no samples"),
        ("one.txt", "w0 w1\n", "one sample"),
        ("one.jsonl", '{"prompt": "w0"}\n', "one sample"),
    ):
        with pytest.raises(KilnError, match=found):
            calibration_set([written(tmp_path / name, text)], decoder)
    with pytest.raises(KilnError, match="no calibration data"):
        calibration_set([], decoder)


def test_what_cannot_be_read(tmp_path, decoder):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.npz").write_bytes(b"PK no zip")
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "single.npy").rename(tmp_path / "single.npz")
    for spec, found in (
        ("latin.txt", "not UTF-8"),
        ("missing.txt", "does not exist; expected a text"),
        ("empty", "holds no"),
        ("bad.npz", "no .npz of arrays"),
        ("single.npz", "no .npz of arrays"),
    ):
        with pytest.raises(KilnError, match=found):
            calibration_set([str(tmp_path / spec)], decoder)
    other = written(tmp_path / "data.csv", "a,b\n")
    with pytest.raises(KilnError, match="text:"):
        calibration_set([other], decoder)
    assert calibration_set([f"text:{written(tmp_path / 'prose.csv', words(50))}"], decoder).lengths


def test_text_needs_a_tokenizer_and_a_model_that_takes_tokens(tmp_path, decoder):
    spec = written(tmp_path / "set.txt", "w0\nw1\n")
    with pytest.raises(KilnError, match="without a tokenizer"):
        calibration_set([spec], CalibrationModel(decoder.model, limit=LIMIT))
    cnn = plain(tmp_path, CNN, tokenizer=decoder.tokenizer)
    with pytest.raises(KilnError, match="the model takes image"):
        calibration_set([spec], cnn)


def test_the_draw_is_by_stratum_and_seed(tmp_path, decoder):
    lines = [words(length, length) for length in [5] * 30 + [50] * 30 + [200]]
    spec = written(tmp_path / "set.txt", "\n".join(lines))
    data = calibration_set([spec], decoder, DataConfig(samples=4, tokens=0))
    assert data.counts == {"short": 4, "medium": 4, "long": 0, "near-limit": 1}
    one = calibration_set([spec], decoder, DataConfig(samples=4, tokens=0, seed=1))
    two = calibration_set([spec], decoder, DataConfig(samples=4, tokens=0, seed=2))
    assert [s.origin for s in one.samples] != [s.origin for s in two.samples]
    more = calibration_set([spec], decoder, DataConfig(samples=4, tokens=60))
    assert more.counts == {"short": 12, "medium": 4, "long": 0, "near-limit": 1}
    with pytest.raises(KilnError, match="0 samples"):
        calibration_set([spec], decoder, DataConfig(samples=0))


def test_encoders_get_masks(tmp_path, tokenizer):
    model = plain(tmp_path, ENCODER, tokenizer=tokenizer, limit=16)
    spec = written(tmp_path / "set.txt", "w0 w1 w2\nw0\n")
    data = calibration_set([spec], model)
    feed = next(sample for sample in data.samples if sample.length == 3).read()
    assert {name: (array.dtype, array.tolist()) for name, array in feed.items()} == {
        "input_ids": (np.int64, [[1, 2, 3]]),
        "attention_mask": (np.int64, [[1, 1, 1]]),
    }
    with pytest.raises(KilnError, match="token id 5; the model's vocabulary is 0 to 3"):
        calibration_set([written(tmp_path / "out.txt", "w4\nw0\n")], model)


def test_npz_rows(tmp_path, decoder):
    cnn = plain(tmp_path, CNN)
    folder = tmp_path / "batches"
    folder.mkdir()
    images = np.random.default_rng(0).normal(size=(5, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "a.npz", image=images[:3])
    np.savez(folder / "b.npz", image=images[3:])
    data = calibration_set([str(folder)], cnn)
    assert data.counts == {"all": 5}
    assert all((sample.read()["image"][0] == image).all() for sample, image in zip(data.samples, images, strict=True))
    assert data.samples[4].origin.endswith("b.npz, row 1")
    one_file = tmp_path / "all.npz"
    np.savez(one_file, image=images)
    assert calibration_set([str(one_file)], cnn).sha256 == data.sha256
    np.savez(one_file, input_ids=np.array([[1, 2], [3, 4]]))
    assert ids_of(calibration_set([str(one_file)], decoder)) == [[1, 2], [3, 4]]
    np.savez(one_file, tokens=np.array([[1, 2], [3, 4]]))
    with pytest.raises(KilnError, match="expected 'input_ids', integers"):
        calibration_set([str(one_file)], decoder)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"picture": np.zeros((2, 3, 8, 8), np.float32)}, "the model takes image"),
        (
            {"image": np.zeros((2, 3, 8, 9), np.float32)},
            r"float32 \[2, 3, 8, 9\]; the model takes float32 \[N, 3, 8, 8\]",
        ),
        ({"image": np.zeros((2, 3, 8, 8), np.float64)}, "is float64"),
        ({"image": np.zeros((3, 8, 8), np.float32)}, "the model takes"),
        ({"image": np.zeros((0, 3, 8, 8), np.float32)}, "the model takes"),
    ],
)
def test_arrays_that_are_not_the_models(tmp_path, arrays, words):
    np.savez(tmp_path / "batch.npz", **arrays)
    with pytest.raises(KilnError, match=words):
        calibration_set([str(tmp_path / "batch.npz")], plain(tmp_path, CNN))


CALLABLES = """
import numpy as np
def tokens():
    yield [1, 2, 3]
    yield np.array([4, 5])
def batches():
    return [{"image": np.zeros((2, 3, 8, 8), np.float32)}]
def wrong():
    yield [1]
    yield "text"
def outside():
    yield [1]
    yield [2**40]
def failing():
    yield [1]
    raise RuntimeError("disk on fire")
number = 3
"""


def test_callables(tmp_path, decoder, monkeypatch):
    (tmp_path / "calibration_source.py").write_text(CALLABLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert ids_of(calibration_set(["calibration_source:tokens"], decoder)) == [[1, 2, 3], [4, 5]]
    assert calibration_set(["calibration_source:batches"], plain(tmp_path, CNN)).counts == {"all": 2}
    for name, found in (
        ("wrong", "item 1 is a str"),
        ("outside", "item 1 holds the token id"),
        ("failing", "failed: RuntimeError: disk on fire"),
        ("number", "no callable 'number'"),
    ):
        with pytest.raises(KilnError, match=found):
            calibration_set([f"calibration_source:{name}"], decoder)
    with pytest.raises(KilnError, match="cannot be imported"):
        calibration_set(["calibration_source_2:x"], decoder)
    sys.modules.pop("calibration_source")


def image_folder(folder, count=3, spec='resize = [8, 8]\nmean = 127\nscale = 0.0078125\ninterpolation = "bicubic"\n'):
    image = pytest.importorskip("PIL.Image")
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(count):
        pixels = generator.integers(0, 256, (12, 20, 3), np.uint8)
        image.fromarray(pixels).save(folder / f"{number}.png")
    if spec:
        (folder / "preprocess.toml").write_text(spec)
    return str(folder)


def test_images(tmp_path):
    data = calibration_set([image_folder(tmp_path / "images")], plain(tmp_path, CNN))
    assert data.counts == {"all": 3}
    feed = data.samples[0].read()["image"]
    assert (feed.shape, feed.dtype) == ((1, 3, 8, 8), np.float32)
    assert -1 <= feed.min() < 0 < feed.max() <= 1.01


def test_preprocessing(tmp_path):
    from PIL import Image

    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = 10, 20, 30
    pixels[:, 0] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    target = plain(tmp_path, CNN).inputs[0]

    def read(**options):
        return image_from_file(tmp_path / "a.png", Preprocessing(**options), target)

    assert read().shape == (1, 3, 4, 6)
    assert read()[0, :, 1, 1].tolist() == [10, 20, 30]
    assert read(color="BGR", layout="NHWC")[0, 1, 1].tolist() == [30, 20, 10]
    assert read(mean=(10, 20, 30), scale=(1, 2, 0.5))[0, :, 1, 1].tolist() == [0, 0, 0]
    assert read(color="gray").shape == (1, 1, 4, 6)
    assert read(crop=(2, 4)).shape == (1, 3, 2, 4)
    assert read(crop=(2, 4))[0, :, 0, 0].tolist() == [10, 20, 30]  # the middle, without the first column
    assert read(resize=2).shape == (1, 3, 2, 3)
    assert read(resize=(5, 7), interpolation="nearest").shape == (1, 3, 5, 7)
    with pytest.raises(KilnError, match="less than the crop"):
        read(crop=(9, 9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resize = [224", "cannot be read"),
        ("resized = 224", "resized"),
        ('interpolation = "best"', "interpolation"),
        ("mean = [1, 2]", "mean has 2 numbers; expected 1 or 3"),
        ("resize = 0", "at least 1 pixel"),
    ],
)
def test_wrong_preprocessing(tmp_path, text, words):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(KilnError, match=words):
        preprocessing_from_toml(tmp_path / "p.toml")


def test_images_that_cannot_be_used(tmp_path, decoder):
    cnn = plain(tmp_path, CNN)
    bare = image_folder(tmp_path / "bare", spec="")
    with pytest.raises(KilnError, match=r"no preprocess\.toml"):
        calibration_set([bare], cnn)
    given = written(tmp_path / "given.toml", "resize = [8, 8]")
    assert calibration_set([bare], cnn, DataConfig(preprocess=tmp_path / "given.toml")).counts == {"all": 3}, given
    broken = image_folder(tmp_path / "broken")
    (tmp_path / "broken" / "3.jpg").write_bytes(b"no image at all")
    with pytest.raises(KilnError, match=r"3\.jpg cannot be read as an image"):
        calibration_set([broken], cnn)
    small = image_folder(tmp_path / "small", spec="resize = [4, 4]")
    with pytest.raises(KilnError, match=r"0\.png: 'image' is float32 \[1, 3, 4, 4\]"):
        calibration_set([small], cnn)
    with pytest.raises(KilnError, match="one image"):
        calibration_set([str(tmp_path / "small" / "0.png")], cnn)


def test_the_subject_of_an_onnx_file(tmp_path, tokenizer):
    onnx.save(parser.parse_model(ENCODER), tmp_path / "encoder.onnx")
    model = calibration_model_from_path(tmp_path / "encoder.onnx", max_context=32)
    assert (model.limit, model.takes_tokens, model.vocabulary) == (32, True, 4)
    with pytest.raises(KilnError, match="does not exist"):
        calibration_model_from_path(tmp_path / "other.onnx")
    with pytest.raises(KilnError, match="length strata"):
        calibration_set(["x"], calibration_model_from_path(tmp_path / "encoder.onnx"), DataConfig(strata="1,2"))
