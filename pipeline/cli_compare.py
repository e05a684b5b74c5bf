"""`kiln compare`: options, output and exit code; the work is in `pipeline.compare`."""

from pathlib import Path
from typing import Any

import click

from pipeline.compare import CompareConfig, compare
from pipeline.compare.html import write_html
from pipeline.compare.report import tables_from_report
from pipeline.ledger.recording import ledger_options, record
from pipeline.ledger.records import entry_from_comparison
from pipeline.printing import print_result
from pipeline.progress import Progress

_DEFAULTS = CompareConfig()
_LIMITS = {
    "atol": "Largest |a - b| of an output element or a logit.",
    "rtol": "Largest |a - b| / |b| of an output element; meeting either is enough.",
    "logit_mean": "Largest mean |a - b| over all logits of the text.",
    "kl": "Largest mean KL(A || B) over the text's tokens, in nats.",
    "top1": "Smallest share of tokens on which both prefer the same next token.",
    "perplexity": "Largest relative difference of the perplexities.",
    "greedy": "Smallest share of greedy tokens that agree before the first difference.",
}


def _limit_options(command: Any) -> Any:
    for name, text in reversed(_LIMITS.items()):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, name, type=float, help=f"{text}  [default: by precision]")(command)
    return command


@click.command("compare")
@click.argument("a")
@click.argument("b")
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 text to score.  [default: Kiln's own]")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="Prompts, one a line.  [default: 8 from Kiln's own text]"
)
@click.option(
    "--tokens", type=int, default=_DEFAULTS.tokens, show_default=True, help="Greedy tokens after each prompt."
)
@click.option(
    "--text-tokens", type=int, default=_DEFAULTS.text_tokens, show_default=True, help="Tokens of text to score."
)
@click.option(
    "--window", type=int, default=_DEFAULTS.window, show_default=True, help="Tokens of context while scoring."
)
@click.option(
    "--samples", type=int, default=_DEFAULTS.samples, show_default=True, help="Random inputs without a KV cache."
)
@click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Seed of random inputs.")
@click.option("--threads", type=int, help="Threads of ONNX Runtime.  [default: every CPU]")
@_limit_options
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write a self-contained page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
@ledger_options
def compare_command(
    a: str, b: str, html_path: Path | None, as_json: bool, ledger: Path, no_ledger: bool, **options: Any
) -> None:
    """Compare B with the reference A.

    Each is an engine bundle, an ONNX file, or anything that build-engine takes as MODEL. Exit code 0: every
    check is within its limit; 1: some are beyond; 2: the two cannot be compared.
    """
    limits = {name: value for name in _LIMITS if (value := options.pop(name)) is not None}
    progress = Progress()
    report = compare(a, b, CompareConfig(limits=limits, **options), progress)
    if html_path is not None:
        write_html(report, html_path)
    if as_json:
        click.echo(report.to_json())
    else:
        print_result(tables_from_report(report))
    if not no_ledger:
        record(ledger, lambda: entry_from_comparison(report), progress)
    if not report.passed:
        raise click.exceptions.Exit(1)
