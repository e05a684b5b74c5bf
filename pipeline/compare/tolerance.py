"""How far apart two models may be, and where each limit comes from.

Knows limits by kind of model and by the lowest precision of the two sides' weights and caches; knows nothing of how a
value is measured. A limit always carries its origin as text, because a verdict that nobody can trace
is not worth printing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from plugins.errors import KilnError

ModelKind = Literal["plain", "decoder"]

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Limit:
    """One limit and its origin."""

    value: float
    origin: str


@dataclass(frozen=True)
class Tolerances:
    """Limits of one comparison; the fields a kind of model does not use are never read.

    atol, rtol   an output element passes if |a - b| <= atol or |a - b| <= rtol * |b| (Polygraphy's rule);
                 for decoders atol bounds the largest logit error and rtol is 0
    logit_mean   mean |a - b| over all logits of the text
    kl           mean over the text's tokens of KL(A || B), in nats
    top1         smallest share of tokens on which both sides prefer the same next token
    perplexity   largest |perplexity(B) / perplexity(A) - 1|
    greedy       smallest share of greedily generated tokens that agree before the first difference
    """

    atol: Limit
    rtol: Limit
    logit_mean: Limit
    kl: Limit
    top1: Limit
    perplexity: Limit
    greedy: Limit


_PLAIN = {
    "fp32": ((1e-4, 1e-3), "default for fp32 against fp32: same arithmetic, sums taken in another order"),
    "fp16": ((1e-2, 1e-2), "default where weights or cache are fp16: 10 bits of mantissa, a convention"),
    "bf16": ((5e-2, 5e-2), "default where weights or cache are bf16: 7 bits of mantissa, a convention"),
    "int8": ((1e-1, 1e-1), "default where weights or cache are int8, a convention; `build-engine --quant` has a gate"),
}
"""Precision to ((atol, rtol), origin)."""

_DECODER = {
    "fp32": (
        (2e-3, 2e-4, 1e-6, 0.999, 1e-3, 1.0),
        "default for fp32 against fp32: what SmolLM2-135M must hold against torch",
    ),
    "fp16": ((0.25, 0.02, 1e-3, 0.99, 5e-3, 0.5), "default where weights or cache are fp16: a convention"),
    "bf16": ((1.0, 0.1, 1e-2, 0.97, 1e-2, 0.25), "default where weights or cache are bf16: a convention"),
    "int8": (
        (4.0, 0.4, 2e-2, 0.9, 2e-2, 0.1),
        "default where weights or cache are int8, a convention; `build-engine --quant` has a gate",
    ),
}
"""Precision to ((atol, logit_mean, kl, top1, perplexity, greedy), origin)."""

_ORDER = ("int8", "bf16", "fp16", "fp32")
"""Precisions from the coarsest to the finest."""
PRECISION_OF_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"}


def tolerances_from_precisions(
    kind: ModelKind, precisions: Sequence[str], overrides: Mapping[str, float] | None = None
) -> Tolerances:
    """Default limits for the coarsest of some precisions, with a user's own values put over them.

    Raises KilnError for a precision without defaults, an unknown limit or a negative value.
    """
    for precision in precisions:
        if precision not in _ORDER:
            raise KilnError(f"no tolerances are known for precision '{precision}'; known are {', '.join(_ORDER)}")
    coarsest = min(precisions, key=_ORDER.index)
    (plain_atol, rtol), plain_origin = _PLAIN[coarsest]
    (atol, logit_mean, kl, top1, perplexity, greedy), origin = _DECODER[coarsest]
    decoder = kind == "decoder"
    default = Tolerances(
        atol=Limit(atol, origin) if decoder else Limit(plain_atol, plain_origin),
        rtol=Limit(0.0, "logits are held to the absolute limit alone") if decoder else Limit(rtol, plain_origin),
        logit_mean=Limit(logit_mean, origin),
        kl=Limit(kl, origin),
        top1=Limit(top1, origin),
        perplexity=Limit(perplexity, origin),
        greedy=Limit(greedy, origin),
    )
    return _overridden(default, overrides or {})


def _overridden(default: Tolerances, overrides: Mapping[str, float]) -> Tolerances:
    known = [field.name for field in fields(Tolerances)]
    for name, value in overrides.items():
        if name not in known:
            raise KilnError(f"unknown tolerance '{name}'; known are {', '.join(known)}")
        if not value >= 0:
            raise KilnError(f"tolerance {name} is {value}; it must be 0 or more")
    return replace(default, **{name: Limit(value, COMMAND_LINE) for name, value in overrides.items()})
