"""Answers that must match a JSON Schema, a regular expression, one of some texts, or a grammar.

Wraps the library llguidance: it says after every token which tokens may follow. Knows nothing of requests, sampling
or scheduling, and chooses no token.

Guidance comes from strangers, so every cost has a bound: the length of the text, the size of the grammar, and the
work, memory and stack of compiling and of every step. What exceeds one is refused or fails its own answer.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engines.runtime.request import Guidance, GuidanceKind
from engines.runtime.tokenizer import Tokenizer
from plugins.errors import KilnError, first_line

_CACHED_GUIDES = 8
"""A hostile one holds up to about 60 MB, an ordinary one some hundred kB; compiling that again takes milliseconds."""
_LEXER_STATES = 20_000
"""Of one guide, about 1 kB each, shared by its answers; a guide that has used them up is compiled again."""
_GRAMMAR_SYMBOLS = 10_000
"""About 2,300 required properties. The library's time for one token can grow with the square of this."""
_STACK_BYTES = 256 * 2**20
"""Of the thread that compiles. The library recurses along references that follow one another and has no limit of its
own there: an overflow would end the process, and 8 MiB do not suffice. The deepest schemas within the bounds here touch
60 MB (measured); what is not touched costs no memory."""
_NO_END = "<|kiln: no end of sequence|>"
_PROBED_TOKENS = 4
"""So far a guide is followed when it is compiled: most that exceed a limit do so at once."""
# One break at most where JSON permits white space, else a small model may write blanks until its tokens are used up.
_WHITE_SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"


@dataclass(frozen=True)
class _Kind:
    """How one kind of guidance is called and how much of it is accepted."""

    name: str
    max_bytes: int
    row_items: int = 2000
    step_items: int = 50_000


_KINDS: dict[GuidanceKind, _Kind] = {
    "json_schema": _Kind("JSON schema", 128 * 1024),
    "json_object": _Kind("JSON object", 0),
    "regex": _Kind("regular expression", 64 * 1024),
    "choices": _Kind("list of choices", 64 * 1024),
    # An ambiguous grammar makes the library's parser slow: at these bounds a token took at most 45 ms.
    "grammar": _Kind("grammar", 16 * 1024, row_items=500, step_items=10_000),
}

T = TypeVar("T")


class GuideCompiler:
    """Makes guides for one model. Safe from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the width of the model's logits, which may be more than the tokenizer has tokens."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(sorted(set(eos_token_ids)))
        self._lock = threading.Lock()
        self._loaded: tuple[Any, list[int]] | None = None
        self._cached = lru_cache(_CACHED_GUIDES)(self._compile)

    def compile(self, guidance: Guidance) -> "Guide":
        """The guide of a request. Raises KilnError where the guidance is wrong, too large or not supported.

        Takes milliseconds, at worst some seconds: call it in the thread that submits. Equal guidance is compiled once.
        """
        return self._cached(guidance)

    def _compile(self, guidance: Guidance) -> "Guide":
        kind = _KINDS[guidance.kind]
        values = (guidance.value,) if isinstance(guidance.value, str) else guidance.value
        try:
            size = sum(len(value.encode()) for value in values)
        except UnicodeEncodeError as error:
            raise KilnError(f"the {kind.name} contains half a character: {error}; expected valid Unicode") from error
        if size > kind.max_bytes > 0:
            raise KilnError(
                f"the {kind.name} has {size} bytes of text; at most {kind.max_bytes} are accepted: make it shorter"
            )
        grammar = _grammar_from_guidance(guidance)
        tokenizer, never = self._loaded_tokenizer()
        never = [token for token in never if token < self._vocab_size]
        return Guide(kind, lambda: _matcher_from_grammar(tokenizer, grammar, kind), never)

    def _loaded_tokenizer(self) -> tuple[Any, list[int]]:
        """The library's form of the tokenizer, made once, and the tokens that no answer may have."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load_tokenizer()
            return self._loaded

    def _load_tokenizer(self) -> tuple[Any, list[int]]:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer as Core

        core: Any = Core.from_str(self._tokenizer.core.to_str())
        core.no_padding()  # the library encodes pieces of text with it
        core.no_truncation()
        eos = [token for token in self._eos if core.id_to_token(token) is not None]
        never = []
        if not eos:
            # The library must have an end, and left to choose it may take a token of ordinary text: `!`, token 0.
            core.add_special_tokens([_NO_END])
            eos = never = [core.token_to_id(_NO_END)]
        size = max(self._vocab_size, core.get_vocab_size(with_added_tokens=True))
        try:
            return LLTokenizer(core.to_str(), n_vocab=size, eos_token=eos), never
        except Exception as error:  # the library raises several types for a tokenizer that it cannot read
            raise KilnError(
                f"guided output does not work with this model's tokenizer: {first_line(error)}; "
                "submit the request without guidance"
            ) from error


class Guide:
    """Compiled guidance, shared by all answers that follow it. Safe from several threads."""

    def __init__(self, kind: _Kind, make_matcher: Callable[[], Any], never: list[int]) -> None:
        self.kind = kind
        self.never = never
        self._make_matcher = make_matcher
        self._matcher = make_matcher()  # never moves: answers follow copies, which share its lexer

    def start(self) -> "GuideState":
        """The state of a new answer; takes about a microsecond."""
        return GuideState(self, self._matcher.deep_copy(), [])

    def renewed(self, token_ids: list[int]) -> Any:
        """A matcher after `token_ids`, with a lexer that no answer has filled yet. New answers use that one, too."""
        self._matcher = self._make_matcher()
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(token_ids)
        return matcher


class GuideState:
    """Where one answer stands in its guide. Not safe from several threads at once.

    Its methods raise KilnError when the library gives up, because the guidance is too complex here: the answer fails.
    """

    def __init__(self, guide: Guide, matcher: Any, token_ids: list[int]) -> None:
        self._guide = guide
        self._matcher = matcher
        self._token_ids = token_ids  # accepted so far
        self._prepared: bytes | None = None

    @property
    def finished(self) -> bool:
        """The answer is complete: nothing but an end of sequence may follow, or one has followed."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def prepare(self) -> None:
        """Find out now which tokens may follow, while there is time; the next `mask` needs it."""
        self._bits()

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of `logits` [vocabulary] in which every token that may not follow has -inf.

        An end of sequence may follow where the answer may end.
        """
        bits = self._bits()
        if self._matcher.is_error():
            self._renew()
            bits = self._matcher.compute_bitmask()
            self._require_no_error()
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(logits), bitorder="little").view(np.bool_)
        allowed[self._guide.never] = False
        if not allowed.any():
            raise KilnError(
                f"no token of the model can continue the answer by its {self._guide.kind.name} "
                f"after {len(self._token_ids)} tokens; loosen it"
            )
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Go on to after `token`, which must be one that `mask` left."""
        self._prepared = None
        if not self._matcher.consume_token(token):
            self._renew()
            self._matcher.consume_token(token)
            self._require_no_error()
        self._token_ids.append(token)

    def forced(self) -> list[int]:
        """Tokens that spell what the guidance requires next; may be empty.

        Other tokens may spell the same text, so these are good drafts for speculation, not the only answer.
        """
        return self._matcher.compute_ff_tokens()

    def fork(self) -> "GuideState":
        """A second answer from here."""
        return GuideState(self._guide, self._matcher.deep_copy(), self._token_ids.copy())

    def _bits(self) -> bytes:
        """One bit for each token: may it follow."""
        if self._prepared is None:
            self._prepared = self._matcher.compute_bitmask()
        return self._prepared

    def _renew(self) -> None:
        """After an error: it may be due to what other answers have put into the shared lexer."""
        self._matcher = self._guide.renewed(self._token_ids)

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            raise KilnError(
                f"the answer cannot follow its {self._guide.kind.name} after {len(self._token_ids)} tokens: "
                f"{_reason(self._matcher.get_error())}; make it simpler"
            )


def _grammar_from_guidance(guidance: Guidance) -> str:
    """llguidance's own JSON form."""
    from llguidance import LLMatcher

    value = guidance.value
    if guidance.kind == "choices":
        # Code points, so that no character of a choice can be taken for syntax.
        escaped = ("".join(f"\\x{{{ord(character):x}}}" for character in choice) for choice in value)
        return LLMatcher.grammar_from_regex("|".join(escaped))
    assert isinstance(value, str)
    if guidance.kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if guidance.kind == "grammar":
        return json.dumps({"grammars": [{"lark_grammar": value}]})
    schema = value if guidance.kind == "json_schema" else '{"type": "object"}'
    try:
        return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _WHITE_SPACE})
    except ValueError as error:
        raise KilnError(
            f"the JSON schema cannot be read: {first_line(error)}; expected the JSON text of an object"
        ) from error


def _matcher_from_grammar(tokenizer: Any, grammar: str, kind: _Kind) -> Any:
    """The library's matcher at the beginning of an answer, tried for some tokens. Raises KilnError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=kind.row_items,
        step_max_items=kind.step_items,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )

    def make() -> tuple[Any, str]:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        return matcher, _probe(matcher)

    matcher, error = _on_deep_stack(make)
    if error:
        raise KilnError(f"no answer can be guided by this {kind.name}: {_reason(error)}; {_advice(error, kind)}")
    return matcher


def _probe(matcher: Any) -> str:
    """The error that the first tokens of some answer meet; empty: none."""
    probe = matcher.deep_copy()
    for _ in range(_PROBED_TOKENS):
        if probe.is_stopped():
            break
        allowed = np.unpackbits(np.frombuffer(probe.compute_bitmask(), np.uint8), bitorder="little")
        if not probe.is_error():
            probe.consume_token(int(np.argmax(allowed)))
    return probe.get_error()


def _on_deep_stack(work: Callable[[], T]) -> T:
    """The result of `work` from a thread with a stack of `_STACK_BYTES`."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="kiln-guide", daemon=True)
    with _STACK_SIZE_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise KilnError(
                f"no thread with a stack of {_STACK_BYTES // 2**20} MiB for compiling guidance: {error}; "
                "raise the limit of virtual memory"
            ) from error
        finally:
            threading.stack_size(before)
    thread.join()
    assert results, "the library raises nothing"
    return results[0]


_STACK_SIZE_LOCK = threading.Lock()  # the stack size of new threads is one setting of the whole process


def _reason(error: str) -> str:
    """What the library's message says, in one line."""
    if "NoExtension" in error:
        return "nothing can match it"
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["unknown error"]
    # Of a regular expression the library shows the place first and says at last, after `error: `, what is wrong.
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return f"{lines[0]:.200}{f' {said[0]:.200}' if said else ''}"


def _advice(error: str, kind: _Kind) -> str:
    if error.startswith(("Unimplemented", "Unknown format", "oneOf")):
        return 'leave it out, or write "x-guidance": {"lenient": true} into the schema to have it ignored'
    if any(word in error for word in ("too ", "limit", "fuel")):
        return "make it smaller or simpler"
    return f"correct the {kind.name}"
