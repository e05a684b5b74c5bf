"""`kiln run`: one answer, or a conversation, in the terminal."""

import sys
from pathlib import Path

import click

from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from plugins.errors import KilnError

Messages = list[dict[str, str]]


@click.command("run")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--system", help="System message of the chat template.")
@click.option("--raw", is_flag=True, help="Complete PROMPT as it is, without the chat template.")
@click.option("--max-tokens", type=int, default=512, show_default=True)
@click.option("--temperature", type=float, default=SamplingParams.temperature, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, help="Sample among the k most likely tokens.")
@click.option(
    "--top-p", type=float, default=SamplingParams.top_p, help="Sample among tokens of this total probability."
)
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
    top_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    threads: int | None,
) -> None:
    """Answer PROMPT with BUNDLE, streaming. Without PROMPT: standard input if piped, else a conversation."""
    if raw and system is not None:
        raise KilnError("--system needs the chat template, which --raw leaves out; use one of them")
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens, stop=stop
    )
    if prompt is None and not sys.stdin.isatty():
        prompt = _piped()
    history: Messages = [{"role": "system", "content": system}] if system is not None else []
    with Engine.open(bundle, config=SchedulerConfig(max_running=1), threads=threads) as engine:
        if prompt is None:
            _converse(engine, history, raw, sampling)
        else:
            _answer(engine, history, prompt, raw, sampling)


def _piped() -> str:
    try:
        prompt = sys.stdin.buffer.read().decode()  # sys.stdin itself may let wrong bytes through
    except UnicodeDecodeError as error:
        raise KilnError(f"standard input is not UTF-8 text ({error}); pipe a text file") from error
    if not prompt.strip():
        raise KilnError("standard input is empty; pipe a question, or give PROMPT")
    return prompt


def _converse(engine: Engine, history: Messages, raw: bool, sampling: SamplingParams) -> None:
    """Questions from the terminal until end of input; each answer becomes part of the history."""
    print("Type a question; end with Ctrl-D.", file=sys.stderr)
    while True:
        try:
            question = input("> ")
        except EOFError:
            print()
            return
        if not question.strip():
            continue
        answer = _answer(engine, history, question, raw, sampling)
        if not raw:
            history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _answer(engine: Engine, history: Messages, prompt: str, raw: bool, sampling: SamplingParams) -> str:
    """Stream one answer to standard output. An interrupt ends the answer, not the program's bookkeeping."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes of the command line or the terminal that Python could not decode
        raise KilnError(f"the prompt is not UTF-8 text ({error}); type it in UTF-8") from error
    if raw:
        request = Request(prompt, sampling)
    else:
        token_ids = engine.tokenizer.chat_prompt([*history, {"role": "user", "content": prompt}])
        request = Request(tuple(token_ids), sampling)
    stream = engine.submit(request)
    pieces = []
    try:
        for chunk in stream:
            pieces.append(chunk.text)
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.cancel()
        raise
    finally:
        print(flush=True)
    return "".join(pieces)
