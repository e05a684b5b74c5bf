"""`kiln load` of a bundle, which it serves itself, and the options that it refuses."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli_load import load_command
from pipeline.load_test.run import LoadConfig, Run, replay
from pipeline.load_test.targets import BundleTarget
from pipeline.load_test.trace import TraceRequest, trace_from_file
from plugins.errors import KilnError


def test_a_bundle_is_loaded_by_the_command(llama_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--requests", "6", "--rate", "50", "--prompt-tokens", "30,0.4", "--output-tokens", "5,0.3"]
    files = ["--html", str(tmp_path / "page.html"), "--save-trace", str(tmp_path / "trace.jsonl")]
    slo = ["--slo-first-token", "60", "--slo-inter-token", "60"]
    arguments = [str(llama_bundle), *options, *files, *slo, "--json", "--threads", "1"]
    result = CliRunner().invoke(load_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    trace = trace_from_file(tmp_path / "trace.jsonl")
    assert (document["answered"], document["errors"], document["short_answers"]) == (6, [], 0)
    assert document["miscounted_prompts"] == 0
    assert document["goodput"] == pytest.approx(document["requests_per_second"])
    tokens = document["output_tokens_per_second"] * document["seconds"]
    assert tokens == pytest.approx(sum(request.output_tokens for request in trace))
    assert "6 of 6 answered" in result.stderr
    assert (tmp_path / "page.html").read_text().count("<svg") == 7


def test_requests_that_a_bundle_refuses_are_counted(llama_bundle: Path) -> None:
    async def run() -> Run:
        target = BundleTarget.open(llama_bundle, threads=1)
        trace = (
            TraceRequest(prompt_tokens=9999, output_tokens=1),
            TraceRequest(prompt="Hello", output_tokens=2),
            TraceRequest(prompt_tokens=7, output_tokens=3, lane="batch"),
        )
        try:
            return await replay(target, trace, LoadConfig(2, warmup=0, timeout=60))
        finally:
            await target.close()

    first, second, third = sorted(asyncio.run(run()).outcomes, key=lambda each: each.index)
    assert first.error == "refused"
    assert "9999 tokens" in first.message
    assert second.output_tokens == 2
    assert (third.prompt_tokens, third.output_tokens, third.lane) == (7, 3, "batch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "t", "--fit", "t"], "--fit has no meaning beside it"),
        (["--trace", "t", "--rate", "2"], "--rate has no meaning beside it"),
        (["--rate", "0"], "the rate is 0.0"),
        (["--burstiness", "-1"], "burstiness is -1"),
        (["--prompt-tokens", "many"], "lengths are 'many'"),
        (["--requests", "0"], "expected at least 1"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--timeout", "0"], "timeout is 0"),
        (["--warmup", "-1"], "warmup is -1"),
        (["--seed", "-1"], "seed is -1"),
        (["--slo-first-token", "0"], "limit of first_token is 0"),
        (["--api-key-file", "absent"], "no API key can be read"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(KilnError, match=message):
        CliRunner().invoke(load_command, ["http://127.0.0.1:1", *options], catch_exceptions=False)
