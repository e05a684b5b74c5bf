"""The text and the prompts that language models are compared on: the user's, or our own short ones.

Our text was written for Kiln and ships with it. Prompts of any length are made from it without a
tokenizer's help: its tokens, started at another place for each prompt, repeated as often as needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from pipeline.compare.greedy import Prompt
from plugins.errors import KilnError

PROMPT_LENGTHS = (5, 16, 48, 128, 320, 640, 1280, 2000)
"""Tokens of the default prompts; a model with a shorter context gets shorter ones."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Material:
    """Token ids of a text and of prompts, and in words where they come from."""

    text: tuple[int, ...]
    text_origin: str
    prompts: tuple[Prompt, ...]
    prompts_origin: str


def default_text() -> str:
    """The prose that ships with Kiln."""
    return files("pipeline.compare").joinpath("data/text.txt").read_text(encoding="utf-8")


def material_from_files(
    encode: Encode | None,
    vocab_size: int,
    max_context: int,
    text: Path | None,
    prompts: Path | None,
    text_tokens: int,
    new_tokens: int,
    seed: int,
) -> Material:
    """Tokens to compare on. Without a tokenizer (`encode` None) they are random, and files cannot be used.

    The text is cut to `text_tokens` tokens. Raises KilnError for what cannot be read or is too short.
    """
    if max_context <= new_tokens:
        raise KilnError(f"the context holds {max_context} tokens, so {new_tokens} cannot be generated; lower --tokens")
    if encode is None:
        if text or prompts:
            raise KilnError("neither side has a tokenizer, so --text and --prompts cannot be used; leave them out")
        source = np.random.default_rng(seed).integers(0, vocab_size, text_tokens).tolist()
        origin = f"{len(source)} random token ids (seed {seed}): neither side has a tokenizer"
        return Material(tuple(source), origin, _prompts_from_tokens(source, max_context - new_tokens), origin)
    own = encode(default_text())
    tokens = own if text is None else encode(_read(text, "--text"))
    named = "Kiln's own text (pipeline/compare/data/text.txt)" if text is None else str(text)
    cut = tokens[:text_tokens]
    if len(cut) < 2:
        raise KilnError(f"{named} holds {len(cut)} tokens; at least 2 are needed")
    if prompts is None:
        made = _prompts_from_tokens(own, max_context - new_tokens)
        lengths = ", ".join(str(len(prompt.token_ids)) for prompt in made)
        prompts_origin = f"{len(made)} prompts made from Kiln's own text, {lengths} tokens"
    else:
        made = _prompts_from_lines(_read(prompts, "--prompts"), encode, prompts, max_context - new_tokens)
        prompts_origin = f"the lines of {prompts}, {len(made)} in all"
    return Material(tuple(cut), f"{named}, {len(cut)} of {len(tokens)} tokens", made, prompts_origin)


def _prompts_from_tokens(tokens: Sequence[int], longest: int) -> tuple[Prompt, ...]:
    lengths = sorted({min(length, longest) for length in PROMPT_LENGTHS})
    made = []
    for index, length in enumerate(lengths):
        start = index * len(tokens) // len(lengths)
        ids = tuple(tokens[(start + offset) % len(tokens)] for offset in range(length))
        made.append(Prompt(f"own text from token {start}", ids))
    return tuple(made)


def _prompts_from_lines(text: str, encode: Encode, path: Path, longest: int) -> tuple[Prompt, ...]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise KilnError(f"{path} holds no prompts; expected one prompt a line")
    made = []
    for line in lines:
        ids = tuple(encode(line))
        if not 1 <= len(ids) <= longest:
            raise KilnError(
                f"the prompt '{line[:40]}' of {path} has {len(ids)} tokens; the context leaves room for 1 to {longest}"
            )
        made.append(Prompt(line if len(line) <= 48 else f"{line[:47]}…", ids))
    return tuple(made)


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KilnError(f"{option} {path} cannot be read as UTF-8 text: {error}") from error
