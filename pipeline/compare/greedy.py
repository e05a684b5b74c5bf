"""Greedy generation with both sides: how far the texts agree, and how close the call was where they part."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.runtime.request import RequestError
from pipeline.compare.report import PromptRow
from pipeline.compare.subjects import DecoderSubject


@dataclass(frozen=True)
class Prompt:
    """What to continue: a short title for people, and the tokens."""

    title: str
    token_ids: tuple[int, ...]


def compare_greedy(a: DecoderSubject, b: DecoderSubject, prompt: Prompt, tokens: int, chunk: int) -> PromptRow:
    """Generate `tokens` tokens with each side, end-of-sequence ignored, and count the leading ones that agree."""
    try:
        text_a = a.generate_greedy(prompt.token_ids, tokens)
        text_b = b.generate_greedy(prompt.token_ids, tokens)
    except RequestError as error:  # a model whose logits are not finite cannot generate: a finding, not bad input
        return PromptRow(prompt.title, len(prompt.token_ids), tokens, 0, str(error))
    agreed = next((i for i, (x, y) in enumerate(zip(text_a, text_b, strict=True)) if x != y), tokens)
    note = ""
    if agreed < tokens:
        gap = _gap(a, [*prompt.token_ids, *text_a[:agreed]], text_a[agreed], text_b[agreed], chunk)
        note = f"A chose {text_a[agreed]}, B chose {text_b[agreed]}; A's logits differ by {gap:.3g} there"
    return PromptRow(prompt.title, len(prompt.token_ids), tokens, agreed, note)


def _gap(a: DecoderSubject, context: Sequence[int], chosen: int, other: int, chunk: int) -> float:
    """By how much `a` prefers one token to another after `context`: near zero means a tie, not an error."""
    row = None
    for logits in a.logits(context, chunk):
        row = logits[-1]
    assert row is not None
    return float(np.float64(row[chosen]) - np.float64(row[other]))
