"""What a caller asks for and what comes back. Data only: no tokenizer, no scheduling.

Finish reasons: `stop` (an end-of-sequence token or a stop string), `length` (max_tokens or the context is
used up), `cancelled` (by the caller, or by closing the engine), `timeout` (its deadline passed), `error` (the step or
the sampler failed).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

from engines.runtime.sequence import LANES, Lane
from plugins.errors import KilnError

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

GuidanceKind = Literal["json_schema", "json_object", "regex", "choices", "grammar"]

_MAX_SEED = 2**64
_MAX_CHOICES = 128


@dataclass(frozen=True)
class Guidance:
    """What the whole answer must match. `engines.runtime.guidance` compiles it, and raises KilnError where it cannot.

    `value` by `kind`: a JSON Schema as JSON text; nothing for `json_object` (any JSON object); a regular expression;
    the choices as a tuple of texts; a grammar in llguidance's Lark dialect.
    """

    kind: GuidanceKind
    value: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuidanceKind):
            raise KilnError(f"guidance is by {self.kind!r}; expected one of {', '.join(get_args(GuidanceKind))}")
        if self.kind == "choices":
            choices = self.value
            if not isinstance(choices, (tuple, list)) or not choices or not all(isinstance(c, str) for c in choices):
                raise KilnError(f"the choices are {choices!r:.80}; expected one text or more: ('yes', 'no')")
            object.__setattr__(self, "value", tuple(choices))
        elif not isinstance(self.value, str) or (not self.value and self.kind != "json_object"):
            raise KilnError(f"guidance by {self.kind} is {self.value!r:.80}; expected text")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Raises KilnError for a value out of range.

    Order: logit_bias, repetition_penalty, frequency and presence penalties; then, unless greedy, temperature, top_k,
    top_p, min_p. The default is greedy, hence reproducible. Names and meanings are those of the OpenAI API; top_k,
    min_p, repetition_penalty and ignore_eos are common additions to it.
    """

    temperature: float = 0.0
    """0 is greedy: the most likely token, the lowest id among equals."""
    top_k: int | None = None
    """Keep only the k most likely tokens; None keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probability reaches top_p, and their equals; 1 keeps all."""
    min_p: float = 0.0
    """Keep only tokens at least min_p times as likely as the most likely one; 0 keeps all."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it was generated; -2 to 2."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that was generated already; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt and the answer, multiplies negative ones (CTRL, 1909.05858)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of tokens, by id; -100 to 100."""
    logprobs: int | None = None
    """Report the log-probability of each token and of so many most likely ones, of the model's own distribution."""
    seed: int | None = None
    """Seed of this request's own generator; None draws one from the operating system. It gives the same tokens whatever
    else runs; others where the step samples by itself (`plugins.sampling`) than where the host does."""
    max_tokens: int | None = None
    """Most tokens to generate; None, or more than the context leaves, means what the context leaves."""
    stop: tuple[str, ...] = ()
    """Generation ends where one of these appears in the text; the stop string itself is not returned."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    n: int = 1
    """Answers to one prompt, which is computed once; the first is the one that n=1 would give."""
    guidance: Guidance | None = None
    """Only tokens that can still lead to a match are chosen."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, "0 (greedy) or a finite positive number", lambda x: x >= 0)
        _check_number("top_p", self.top_p, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
        _check_number("min_p", self.min_p, "a number from 0 to 1", lambda x: 0 <= x <= 1)
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), "a number from -2 to 2", lambda x: -2 <= x <= 2)
        _check_number("repetition_penalty", self.repetition_penalty, "a finite number above 0", lambda x: x > 0)
        _check_integer("logprobs", self.logprobs, "None or an integer from 0 to 20", lambda n: 0 <= n <= 20)
        self._check_bias()
        _check_integer("top_k", self.top_k, "None (no limit) or an integer of at least 1", lambda k: k >= 1)
        _check_integer("max_tokens", self.max_tokens, "None or an integer of at least 1", lambda n: n >= 1)
        _check_integer("seed", self.seed, "None or an integer from 0 to 2**64 - 1", lambda s: 0 <= s < _MAX_SEED)
        if not isinstance(self.stop, (tuple, list)) or not all(isinstance(s, str) and s for s in self.stop):
            raise KilnError(f"stop is {self.stop!r}; expected non-empty strings: write stop=('first', 'second')")
        object.__setattr__(self, "stop", tuple(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise KilnError(f"ignore_eos is {self.ignore_eos!r}; expected True or False")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or not 1 <= self.n <= _MAX_CHOICES:
            raise KilnError(f"n is {self.n!r}; expected an integer from 1 to {_MAX_CHOICES}")
        if not isinstance(self.guidance, Guidance | None):
            raise KilnError(f"guidance is a {type(self.guidance).__name__}; expected a Guidance, or None")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the values it is made from, because a mapping proxy cannot be; checked again where it arrives."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return partial(SamplingParams, **values | {"logit_bias": dict(self.logit_bias)}), ()

    @property
    def adjusts_logits(self) -> bool:
        """Whether the model's logits are changed before a token is chosen."""
        return bool(
            self.logit_bias or self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise KilnError(f"logit_bias is {self.logit_bias!r}; expected a mapping of token ids to numbers")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0:
                raise KilnError(f"logit_bias has the token id {token!r}; expected an integer of at least 0")
            _check_number(f"logit_bias of token {token}", bias, "a number from -100 to 100", lambda x: abs(x) <= 100)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))


def _check_number(name: str, value: object, expected: str, valid: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not valid(value):
        raise KilnError(f"{name} is {value!r}; expected {expected}")


def _check_integer(name: str, value: object, expected: str, valid: Callable[[Any], bool]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not valid(value):
        raise KilnError(f"{name} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class Request:
    """A prompt, as text or as token ids, and how to continue it."""

    prompt: str | tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    lane: Lane = "interactive"
    """`interactive` goes first; `batch` takes what is left, and its share where both want more than there is."""
    timeout: float | None = None
    """Seconds after which the request ends with what it has; None: never."""
    tenant: str = ""
    """Requests share the cached prefixes of their own tenant only."""
    whole: bool = False
    """Nobody sees the answer before its end: it may come in one chunk, and be begun anew where its engine died."""

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise KilnError(f"lane is {self.lane!r}; expected one of {', '.join(LANES)}")
        if self.timeout is not None:
            _check_number("timeout", self.timeout, "None or a positive number of seconds", lambda x: x > 0)
        if not isinstance(self.tenant, str):
            raise KilnError(f"tenant is {self.tenant!r}; expected text")
        if not isinstance(self.whole, bool):
            raise KilnError(f"whole is {self.whole!r}; expected True or False")
        if isinstance(self.prompt, str):
            return
        if not isinstance(self.prompt, Sequence) or not all(type(token) is int for token in self.prompt):
            raise KilnError(
                f"the prompt is a {type(self.prompt).__name__}; expected text or a sequence of integer token ids"
            )
        object.__setattr__(self, "prompt", tuple(self.prompt))


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities in nats at one position: of the token chosen, and of the most likely ones, the first first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenChunk:
    """What one step added to one request.

    `text` may be empty although there are tokens: a character is still incomplete, or the text could be the
    beginning of a stop string. It is then part of a later chunk.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where the request asked for them."""


@dataclass(frozen=True)
class Completion:
    """The outcome of one request."""

    token_ids: tuple[int, ...]
    """Every generated token, an end-of-sequence token and the tokens of a stop string included."""
    text: str
    """The text of these tokens without special tokens, cut before a stop string; empty without a tokenizer."""
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()


class RequestError(KilnError):
    """A request that ended with finish reason `error`; `completion` holds what it gave before that."""

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(message)
        self.completion = completion

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestError, (str(self), self.completion)
