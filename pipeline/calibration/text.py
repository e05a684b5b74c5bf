"""Text as calibration samples: files of lines or of running text, and JSON Lines of prompts, chats or token ids.

A text file with an empty line in it is running text (a book, a speech): it is cut into samples of every length
stratum. One without is a list: each line is a sample and stays as short as it is. `lines:PATH` and `text:PATH` say
which it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.runtime.tokenizer import Tokenizer
from pipeline.calibration.samples import Draw
from pipeline.calibration.strata import Strata
from plugins.errors import KilnError, first_problem

TokenIds = NDArray[np.int32]
TextKind = Literal["auto", "lines", "text"]
_TOGETHER = 1024
"""Lines that are tokenised in one call."""
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class TokenSample:
    """Token ids [tokens], and where they come from."""

    origin: str
    token_ids: TokenIds


class _Line(BaseModel):
    """One line of JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[Annotated[int, Field(le=_LARGEST_ID)]] | None = None
    token_ids: list[Annotated[int, Field(le=_LARGEST_ID)]] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "_Line":
        given = [value for value in (self.prompt, self.messages, self.tokens, self.token_ids) if value is not None]
        if len(given) != 1:
            raise ValueError("give one of prompt, messages and token_ids")
        if not given[0]:
            raise ValueError("it is empty")
        return self


def samples_from_jsonl(path: Path, tokenizer: Tokenizer | None) -> Iterator[TokenSample]:
    """A sample for each line. Raises KilnError naming the line that is wrong."""
    for number, line in _numbered_lines(path):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            found = _Line.model_validate_json(line)
        except ValidationError as error:
            where, problem = first_problem(error)
            raise KilnError(
                f"{origin}: {f'{where}: ' if where else ''}{problem}; expected an object such as "
                '{"prompt": "text"}, {"messages": [{"role": "user", "content": "text"}]} or {"token_ids": [1, 2]}'
            ) from error
        try:
            ids = _ids_of_line(found, tokenizer)
        except KilnError as error:
            raise KilnError(f"{origin}: {error}") from error
        yield TokenSample(origin, np.asarray(ids, np.int32))


def _ids_of_line(line: _Line, tokenizer: Tokenizer | None) -> Sequence[int]:
    if (ids := line.tokens or line.token_ids) is not None:
        return ids
    encoder = _required(tokenizer)
    return encoder.encode(line.prompt) if line.prompt is not None else encoder.chat_prompt(line.messages or [])


def samples_from_text(
    path: Path, tokenizer: Tokenizer | None, strata: Strata, draw: Draw, kind: TextKind = "auto"
) -> Iterator[TokenSample]:
    """A sample for each line, or what `draw` asks for of every stratum from running text. Raises KilnError."""
    encoder = _required(tokenizer)
    lines = list(_numbered_lines(path))
    while lines and not lines[-1][1].strip():
        lines.pop()
    while lines and not lines[0][1].strip():
        lines.pop(0)
    running = kind == "text" or (kind == "auto" and any(not line.strip() for _, line in lines))
    if running:
        ids = np.asarray(encoder.encode("\n".join(line for _, line in lines)), np.int32)
        yield from cut(str(path), ids, strata, draw)
        return
    full = [(number, line.strip()) for number, line in lines if line.strip()]
    for start in range(0, len(full), _TOGETHER):
        part = full[start : start + _TOGETHER]
        for (number, _), found in zip(part, encoder.encode_all([line for _, line in part]), strict=True):
            origin, ids = f"{path}, line {number}", np.asarray(found, np.int32)
            if len(ids) > strata.limit:
                yield from cut(origin, ids, strata, draw)
            else:
                yield TokenSample(origin, ids)


def cut(origin: str, ids: TokenIds, strata: Strata, draw: Draw) -> Iterator[TokenSample]:
    """As many pieces as `draw` asks for in each stratum, or as the text has room for, of lengths drawn by seed.

    Pieces of one stratum do not overlap; those of different strata may, so that strata differ in length and not in
    what they are about.
    """
    for number, stratum in enumerate(strata):
        generator = np.random.default_rng([draw.seed, number])
        shortest = max(stratum.shortest, min(_LEAST_PIECE, stratum.longest))
        typical = (shortest + stratum.longest) // 2
        count = min(max(draw.samples, -(-draw.tokens // typical)), len(ids) // shortest)
        room = len(ids) // max(count, 1)
        for piece in range(count):
            length = int(generator.integers(shortest, min(stratum.longest, room) + 1))
            start = piece * room + int(generator.integers(0, room - length + 1))
            yield TokenSample(f"{origin}, tokens {start} to {start + length - 1}", ids[start : start + length])


_LEAST_PIECE = 8
"""Tokens: shorter pieces of running text are no sentence."""


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise KilnError("the model comes without a tokenizer, so text cannot be used; give --tokenizer or token_ids")
    return tokenizer


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                yield number, line.rstrip("\n")
    except OSError as error:
        raise KilnError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise KilnError(f"{path} is not UTF-8 text ({error}); convert it") from error
