"""Language models: a tiny Llama as torch model, ONNX file and bundle, compared with each other and with others."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from passes.onnx_model import external_files, load_structure
from pipeline.cli_compare import compare_command
from pipeline.compare import CompareConfig, compare
from pipeline.compare.inputs import InputSpec
from pipeline.compare.report import Side
from pipeline.progress import Progress
from plugins.errors import KilnError
from plugins.paged_attention.schema import EXPORT_DOMAIN, OP_TYPE

pytest.importorskip("polygraphy")
pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

QUICK = CompareConfig(tokens=12, text_tokens=300, window=128, threads=1)


class PlainModel:
    """A model without a KV cache."""

    side = Side("onnx", "plain", "", "", "fp32", {})
    inputs = (InputSpec("x", "float32", (1,)),)

    def infer(self, feeds):
        return dict(feeds)

    def close(self) -> None:
        pass


def test_torch_and_bundle_agree(llama_folder: Path, llama_bundle: Path, silent: Progress) -> None:
    report = compare(str(llama_folder), llama_bundle, QUICK, silent)
    assert report.passed, report.to_json()
    checks = {check.name: check for check in report.checks}
    assert checks["logit_error_max"].value < 1e-4
    assert checks["greedy_agreement"].value == 1.0
    assert checks["logit_error_max"].limit == 2e-3
    assert report.outputs[0].name == "logits"
    assert report.outputs[0].shape == "128x512"
    assert [row.prompt_tokens for row in report.prompts] == [5, 16, 48, 128, 320, 500]
    assert report.b.cache == "fp32"
    assert len(report.b.sha256) == 64
    assert "Kiln's own text" in report.settings["text"]


def test_an_onnx_file_as_exported_is_a_side_too_without_a_tokenizer(
    llama_bundle: Path, tmp_path: Path, silent: Progress
) -> None:
    path = tmp_path / "exported.onnx"
    model = load_structure(llama_bundle / "engine.onnx")
    for node in model.graph.node:
        node.domain = EXPORT_DOMAIN if node.op_type == OP_TYPE else node.domain
    path.write_bytes(model.SerializeToString())
    for weights in external_files(llama_bundle / "engine.onnx", model):
        shutil.copy(weights, tmp_path)
    before = path.read_bytes()
    report = compare(path, llama_bundle, QUICK, silent)
    assert report.passed
    assert report.a.kind == "onnx"
    assert path.read_bytes() == before
    alone = compare(path, path, QUICK, silent)
    assert alone.passed
    assert "random token ids" in alone.settings["text"]
    with pytest.raises(KilnError, match="neither side has a tokenizer"):
        compare(path, path, CompareConfig(text=tmp_path / "t.txt"), silent)


def test_a_perturbed_weight_is_found(llama_bundle: Path, make_llama, silent: Progress) -> None:
    report = compare(str(make_llama(noise=1e-3)), llama_bundle, QUICK, silent)
    failed = {check.name for check in report.checks if not check.passed}
    assert {"output:logits", "logit_error_max", "logit_error_mean", "kl_mean"} <= failed
    assert not report.passed


def test_a_model_that_gives_nan_fails_and_does_not_stop_the_comparison(
    llama_folder: Path, make_llama, silent: Progress
) -> None:
    report = compare(str(llama_folder), str(make_llama(noise=float("nan"))), QUICK, silent)
    assert not any(check.passed for check in report.checks)
    json.loads(report.to_json())


def test_what_cannot_be_compared_says_why(llama_folder: Path, make_llama, silent: Progress, tmp_path: Path) -> None:
    with pytest.raises(KilnError, match=r"is a language model with a KV cache, .* is a model without a KV cache"):
        compare(str(llama_folder), PlainModel(), QUICK, silent)
    with pytest.raises(KilnError, match=r"vocabulary of 512 tokens, .* one of 500"):
        compare(str(llama_folder), str(make_llama(vocabulary=500)), QUICK, silent)
    with pytest.raises(KilnError, match=r"tokenizers .* split the same text differently"):
        compare(str(llama_folder), str(make_llama(reverse_text=True)), QUICK, silent)
    with pytest.raises(KilnError, match="the context holds 512 tokens, so 512 cannot be generated"):
        compare(str(llama_folder), str(llama_folder), CompareConfig(tokens=512), silent)


def test_users_texts_and_prompts_are_used_and_bad_ones_refused(
    llama_folder: Path, silent: Progress, tmp_path: Path
) -> None:
    text, prompts = tmp_path / "text.txt", tmp_path / "prompts.txt"
    text.write_text("The cat has had kittens in the coal. " * 8)
    prompts.write_text("The lighthouse\n\nLamp lit 17:52\n")
    config = CompareConfig(text=text, prompts=prompts, tokens=5)
    report = compare(str(llama_folder), str(llama_folder), config, silent)
    assert report.passed
    assert str(text) in report.settings["text"]
    assert [row.title for row in report.prompts] == ["The lighthouse", "Lamp lit 17:52"]
    prompts.write_text("\n")
    with pytest.raises(KilnError, match="holds no prompts"):
        compare(str(llama_folder), str(llama_folder), config, silent)
    prompts.write_text("word " * 900)
    with pytest.raises(KilnError, match="the context leaves room for 1 to 507"):
        compare(str(llama_folder), str(llama_folder), config, silent)
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KilnError, match="cannot be read as UTF-8"):
        compare(str(llama_folder), str(llama_folder), config, silent)
    text.write_text("")
    with pytest.raises(KilnError, match="at least 2 are needed"):
        compare(str(llama_folder), str(llama_folder), config, silent)


def test_the_command_prints_one_json_document_and_exits_1_beyond_the_tolerance(
    llama_folder: Path, make_llama, tmp_path: Path
) -> None:
    options = ["--tokens", "4", "--text-tokens", "64", "--threads", "1", "--json"]
    page = tmp_path / "report.html"
    same = CliRunner().invoke(compare_command, [str(llama_folder), str(llama_folder), *options, "--html", str(page)])
    assert same.exit_code == 0, same.output
    assert json.loads(same.stdout)["passed"] is True
    assert "score text" in same.stderr
    assert page.read_text().startswith("<!doctype html>")
    other = str(make_llama(noise=1e-2))
    different = CliRunner().invoke(compare_command, [str(llama_folder), other, *options])
    assert different.exit_code == 1
    assert json.loads(different.stdout)["passed"] is False
    loose = ["--atol", "9", "--logit-mean", "9", "--kl", "9", "--top1", "0", "--perplexity", "9", "--greedy", "0"]
    allowed = CliRunner().invoke(compare_command, [str(llama_folder), other, *options[:-1], *loose])
    assert allowed.exit_code == 0, allowed.output
    assert "command line" in allowed.stdout
    assert "Within tolerance" in allowed.stdout
