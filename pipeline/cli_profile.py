"""`kiln profile`: options and output; the work is in `pipeline.profile`."""

from pathlib import Path

import click

from pipeline.page import write_page
from pipeline.printing import print_result
from pipeline.profile import ProfileConfig, profile
from pipeline.profile.html import html_from_profile
from pipeline.profile.report import json_from_profile, tables_from_profile
from pipeline.profile.trace import write_trace
from pipeline.progress import Progress
from plugins.errors import KilnError

_DEFAULTS = ProfileConfig()
_FILE = click.Path(path_type=Path)


@click.command("profile")
@click.argument("bundle", type=_FILE)
@click.option("--prompt", type=int, default=_DEFAULTS.prompt, show_default=True, help="Tokens of the prefill phase.")
@click.option(
    "--batches",
    default=",".join(map(str, _DEFAULTS.batches)),
    show_default=True,
    help="Sequences that decode together, or samples of a call; a phase for each.",
)
@click.option(
    "--context", type=int, default=_DEFAULTS.context, show_default=True, help="Tokens before those that decode."
)
@click.option("--tokens", type=int, default=_DEFAULTS.tokens, show_default=True, help="Decode steps to measure.")
@click.option("--repetitions", type=int, default=_DEFAULTS.repetitions, show_default=True, help="Prompts to measure.")
@click.option(
    "--tokens-per-step", type=int, default=_DEFAULTS.tokens_per_step, show_default=True, help="Of a prompt, at most."
)
@click.option("--threads", type=int, help="Threads of one step, on a CPU.  [default: every CPU this process may use]")
@click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Seed of random inputs.")
@click.option("--trace", "trace_path", type=_FILE, help="Write one pass of each phase for ui.perfetto.dev.")
@click.option("--html", "html_path", type=_FILE, help="Write a self-contained page with the roofline drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on standard output.")
def profile_command(
    bundle: Path,
    batches: str,
    trace_path: Path | None,
    html_path: Path | None,
    as_json: bool,
    prompt: int,
    context: int,
    tokens: int,
    repetitions: int,
    tokens_per_step: int,
    threads: int | None,
    seed: int,
) -> None:
    """Split BUNDLE's requests into phases and operators, and say what limits each on this machine.

    Each operator is placed on the measured roofline; each phase is compute-, bandwidth-, launch- or host-bound, with
    its largest wastes and the switch that addresses each.

    On a GPU the times of kernels come from CUPTI, which takes torch with CUDA.
    """
    config = ProfileConfig(prompt, _numbers(batches), context, tokens, repetitions, tokens_per_step, threads, seed)
    found = profile(bundle, config, Progress())
    if as_json:
        click.echo(json_from_profile(found))
    else:
        print_result(tables_from_profile(found))
    if trace_path is not None:
        write_trace(found, trace_path)
    if html_path is not None:
        write_page(html_from_profile(found), html_path)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise KilnError(f"batches are {text!r}; expected whole numbers as in 1,16") from error
