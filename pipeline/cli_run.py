"""`kiln run`: one answer, or a conversation, in the terminal."""

from pathlib import Path

import click

from plugins.errors import KilnError


@click.command("run")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--system", help="System message of the chat template.")
@click.option("--raw", is_flag=True, help="Complete PROMPT as it is, without the chat template.")
@click.option("--max-tokens", type=int, default=512, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, help="Sample among the k most likely tokens.")
@click.option("--top-p", type=float, help="Sample among the most likely tokens that hold this probability together.")
@click.option("--seed", type=int, help="Makes sampling reproducible.")
@click.option("--stop", multiple=True, help="Text at which generation ends; may be given several times.")
@click.option("--threads", type=int, help="Threads of a step.  [default: all CPUs]")
def run_bundle_command(
    bundle: Path,
    prompt: str | None,
    system: str | None,
    raw: bool,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    threads: int | None,
) -> None:
    """Answer PROMPT with BUNDLE, streaming. Without PROMPT: standard input if piped, else a conversation."""
    raise KilnError("not yet")
