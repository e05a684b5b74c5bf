"""What the gate's values are held against, and where each limit comes from.

A limit is, in this order: the user's (a TOML file, for all strata or for one); a convention for the scheme; or derived
from the noise floor of the same run. The floor is what a change that everybody accepts does to the reference: for a
decoder a KV cache rounded to BF16, for other models another order of sums. Noise of such an origin and that of
quantisation shape a model's outputs alike as long as both are small: squared errors and KL divergence grow with the
noise's power, largest errors and swapped first choices with its amplitude. So the floor's figures, scaled to the power
that the convention allows (perplexity for a decoder, cosine for other models), say how a sound model of that scheme
looks; `margin` is what a value may be beyond that. A broken layer or a broken length makes errors of another shape.

Where neither exists a value is reported and not judged.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.compare.report import Direction
from pipeline.compare.tolerance import Limit
from pipeline.gate.metrics import db_from_ratio, expected_agreement, ratio_from_db
from plugins.errors import KilnError, first_problem

Dimension = Literal["numeric", "distribution", "generation"]
Law = Literal["power", "amplitude", "share", "cosine", "db", "hazard", "spread", "resolution", "perplexity", "kl"]


@dataclass(frozen=True)
class Metric:
    """`law` says how its limit follows from the noise floor, or that a convention has it."""

    title: str
    dimension: Dimension
    direction: Direction
    law: Law


METRICS: Mapping[str, Metric] = {
    "output_max_error": Metric("largest output error", "numeric", "at most", "amplitude"),
    "output_cosine": Metric("cosine of outputs", "numeric", "at least", "cosine"),
    "output_snr_db": Metric("SNR at the output, dB", "numeric", "at least", "db"),
    "layer_snr_db": Metric("SNR of the worst layer, dB", "numeric", "at least", "db"),
    "perplexity": Metric("relative difference of perplexity", "distribution", "at most", "perplexity"),
    "perplexity_worst": Metric(
        "relative difference of perplexity, worst 1000 positions", "distribution", "at most", "perplexity"
    ),
    "kl_mean": Metric("mean KL divergence, nats", "distribution", "at most", "kl"),
    "kl_worst": Metric("mean KL divergence, worst 1000 positions", "distribution", "at most", "kl"),
    "kl_p99": Metric("99th percentile of KL divergence, nats", "distribution", "at most", "power"),
    "kl_max": Metric("largest KL divergence, nats", "distribution", "at most", "power"),
    "top1_agreement": Metric("top-1 agreement", "distribution", "at least", "share"),
    "top5_agreement": Metric("reference's first choice among the first 5", "distribution", "at least", "share"),
    "accuracy_drop": Metric("top-1 accuracy lost", "distribution", "at most", "resolution"),
    "top5_accuracy_drop": Metric("top-5 accuracy lost", "distribution", "at most", "resolution"),
    "embedding_cosine": Metric("mean cosine of embeddings", "distribution", "at least", "cosine"),
    "embedding_cosine_min": Metric("smallest cosine of an embedding", "distribution", "at least", "cosine"),
    "task_drop": Metric("task accuracy lost", "distribution", "at most", "resolution"),
    "task_drop_kept": Metric(
        "task accuracy lost by the classifier made for the reference", "distribution", "at most", "resolution"
    ),
    "greedy_agreement": Metric("greedy tokens before the first difference", "generation", "at least", "hazard"),
    "repetition": Metric("repeated n-grams beyond the reference's", "generation", "at most", "spread"),
    "drift": Metric("continuations' surprise to the reference, nats", "generation", "at most", "spread"),
}

PERPLEXITY: Mapping[str, float] = {
    "float": 0.001,
    "int8-k": 0.01,
    "int8-kv": 0.01,
    "w8a16": 0.005,
    "w8a8-dynamic": 0.02,
    "w8a8": 0.03,
    "fp8": 0.03,
    "w4a16": 0.06,
    "w4a8-dynamic": 0.06,
}
"""Largest relative difference of perplexity by scheme, a convention."""
COSINE: Mapping[str, float] = {
    "float": 0.9999,
    "w8a16": 0.999,
    "w8a8-dynamic": 0.99,
    "w8a8": 0.99,
    "fp8": 0.99,
    "w4a16": 0.98,
    "w4a8-dynamic": 0.98,
}
"""Smallest cosine of outputs by scheme, of models without a KV cache, a convention."""
_LOST = 0.01
"""Share of a task's accuracy that may be lost: one point."""
_TAILS = {"perplexity_worst": 2.0, "kl_worst": 2.0}
"""How much more a thousand positions may have than the whole: they scatter more."""
_SWAPPED = 0.1
"""Share of a classifier's first choices that may change, where the floor changes none."""
_SPREAD = 0.1
"""Least limit of repetition (share of n-grams) and drift (nats a token)."""


@dataclass(frozen=True)
class GateLimits:
    """A user's limits; an empty one leaves all to conventions and the noise floor. Read from TOML:

    margin = 2.0
    [limits]
    perplexity = 0.01
    [strata.long]
    kl_mean = 0.02
    """

    margin: float = 2.0
    """How far beyond the scaled noise floor a value may be."""
    limits: Mapping[str, float] = field(default_factory=dict)
    strata: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    origin: str = "given"

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if not 1 <= self.margin < math.inf:
            raise ValueError(f"margin is {self.margin}; expected at least 1")
        for where, limits in (("limits", self.limits), *((f"strata.{k}", v) for k, v in self.strata.items())):
            for name, value in limits.items():
                if name not in METRICS:
                    raise ValueError(f"{where} has '{name}'; known are {', '.join(METRICS)}")
                if math.isnan(value):
                    raise ValueError(f"{where}.{name} is no number")

    def require_strata(self, known: Sequence[str]) -> None:
        """Raise KilnError for limits of a stratum that the data lacks: they would never be applied."""
        if unknown := [name for name in self.strata if name not in known]:
            raise KilnError(f"there are limits for the stratum '{unknown[0]}'; the data has {', '.join(known)}")


def limits_from_toml(path: Path) -> GateLimits:
    """Raises KilnError for a file that holds no limits, naming the field."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KilnError(f"the limits {path} cannot be read: {error}") from error
    try:
        return TypeAdapter(GateLimits).validate_python({"origin": path.name, **document})
    except ValidationError as error:
        where, problem = first_problem(error)
        place = f"field '{where}': " if where else ""
        raise KilnError(f"the limits {path}: {place}{problem}") from error


@dataclass(frozen=True)
class Basis:
    """What one stratum's limits follow from: schemes in use, the noise floor's values, and how fine shares are."""

    schemes: tuple[str, ...]
    is_decoder: bool
    floor: Mapping[str, float] = field(default_factory=dict)
    floor_origin: str = ""
    resolution: Mapping[str, float] = field(default_factory=dict)
    """One sample's weight in a share, by metric."""
    greedy_tokens: int = 64

    def __post_init__(self) -> None:
        known = PERPLEXITY if self.is_decoder else COSINE
        for scheme in self.schemes:
            if scheme not in known:
                raise KilnError(f"the gate has no limits for the scheme '{scheme}'; it knows {', '.join(known)}")

    @property
    def scheme(self) -> str:
        """The coarsest."""
        known = PERPLEXITY if self.is_decoder else {name: -value for name, value in COSINE.items()}
        return max(self.schemes or ("float",), key=lambda name: known[name])


def limit_of(metric: str, stratum: str, limits: GateLimits, basis: Basis) -> Limit | None:
    """The limit of a metric on a stratum, None where nothing gives one."""
    if metric in limits.strata.get(stratum, {}):
        return Limit(limits.strata[stratum][metric], f"{limits.origin}, [strata.{stratum}]")
    if metric in limits.limits:
        return Limit(limits.limits[metric], f"{limits.origin}, [limits]")
    return _conventional(metric, limits, basis, stratum) or _from_floor(metric, stratum, limits, basis)


def _conventional(metric: str, limits: GateLimits, basis: Basis, stratum: str) -> Limit | None:
    law = METRICS[metric].law
    if law == "perplexity":
        base = _base("perplexity", limits, stratum) or Limit(
            PERPLEXITY[basis.scheme], f"convention for {basis.scheme}: perplexity within {PERPLEXITY[basis.scheme]:.1%}"
        )
        return _tail(metric, base)
    if law == "kl":
        base = _base("kl_mean", limits, stratum) or Limit(
            allowed_kl(limits, stratum, basis), f"{limits.margin:g} times ln(1 + limit of perplexity)"
        )
        return _tail(metric, base)
    if metric in ("embedding_cosine", "output_cosine") and not basis.is_decoder:
        return Limit(COSINE[basis.scheme], f"convention for {basis.scheme}")
    if metric == "output_snr_db" and not basis.is_decoder:
        snr = db_from_ratio(_allowed_noise(limits, stratum, basis)) - 20 * math.log10(limits.margin)
        return Limit(snr, f"SNR that the limit of the cosine stands for, margin {limits.margin:g}")
    if law == "resolution":
        one = basis.resolution.get(metric, 0.0)
        return Limit(max(_LOST, one), "convention: one point" if one <= _LOST else "one sample, the data's resolution")
    return None


def _base(metric: str, limits: GateLimits, stratum: str) -> Limit | None:
    """A user's limit on which another one rests."""
    value = limits.strata.get(stratum, {}).get(metric, limits.limits.get(metric))
    return None if value is None else Limit(value, f"{limits.origin}, {metric}")


def _tail(metric: str, base: Limit) -> Limit:
    factor = _TAILS.get(metric)
    return base if factor is None else Limit(base.value * factor, f"{factor:g} times: {base.origin}")


def allowed_kl(limits: GateLimits, stratum: str, basis: Basis) -> float:
    """Nats a token: `margin` times the likelihood that may be lost. A model that knows the text's true distribution
    loses exactly its KL divergence; one that does not loses less, so that KL shows what perplexity hides."""
    base = _base("perplexity", limits, stratum)
    return limits.margin * math.log1p(PERPLEXITY[basis.scheme] if base is None else base.value)


def _allowed_noise(limits: GateLimits, stratum: str, basis: Basis) -> float:
    """Noise power over signal power of outputs at the limit of their cosine: |a - b|^2 of unit vectors."""
    base = _base("embedding_cosine", limits, stratum) or _base("output_cosine", limits, stratum)
    return 2.0 * (1.0 - (COSINE[basis.scheme] if base is None else base.value))


def power(limits: GateLimits, stratum: str, basis: Basis) -> float | None:
    """How many times the noise floor's power is allowed, at least 1; None without a measurable floor."""
    if basis.is_decoder:
        base = _base("kl_mean", limits, stratum)
        allowed = allowed_kl(limits, stratum, basis) if base is None else base.value
        floor = basis.floor.get("kl_mean", 0.0)
    else:
        allowed = _allowed_noise(limits, stratum, basis)
        floor = ratio_from_db(basis.floor.get("output_snr_db", math.inf))
    return max(1.0, allowed / floor) if floor > 0 and math.isfinite(floor) else None


def _from_floor(metric: str, stratum: str, limits: GateLimits, basis: Basis) -> Limit | None:
    law, margin = METRICS[metric].law, limits.margin
    floor, times = basis.floor.get(metric), power(limits, stratum, basis)
    if law == "spread":
        if floor is None or margin * floor <= _SPREAD:
            return Limit(_SPREAD, "convention; prompts scatter less" if floor is not None else "convention")
        return Limit(margin * floor, f"{margin:g} times what the reference's own prompts scatter by: {floor:.3g}")
    if floor is None or not math.isfinite(floor) or times is None:
        return _swapped(metric, basis)
    amplitude = math.sqrt(times)
    told = f"1 - {1.0 - floor:.3g}" if law in ("cosine", "share") else f"{floor:.4g}"
    origin = f"{basis.floor_origin} has {told}; at {times:.3g} times its power, margin {margin:g}"
    match law:
        case "power":
            return Limit(floor * times * margin, origin)
        case "amplitude":
            return Limit(floor * amplitude * margin, origin)
        case "db":
            return Limit(floor - 10 * math.log10(times) - 20 * math.log10(margin), origin)
        case "cosine":
            return Limit(1.0 - (1.0 - floor) * times * margin, origin)
        case "share":
            if floor == 1.0:
                return _swapped(metric, basis)
            return Limit(max(0.0, 1.0 - (1.0 - floor) * amplitude * margin), origin)
        case "hazard":
            return Limit(expected_agreement(floor * amplitude * margin, basis.greedy_tokens), origin)
    raise AssertionError(law)


def _swapped(metric: str, basis: Basis) -> Limit | None:
    """The limit of a classifier's choices where the noise floor changes none of them."""
    if METRICS[metric].law != "share" or basis.is_decoder:
        return None
    one = basis.resolution.get(metric, 0.0)
    return Limit(1.0 - max(_SWAPPED, one), "convention; the noise floor changes no choice")
