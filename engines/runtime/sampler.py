"""Chooses one token from one row of logits. NumPy only; knows nothing of sequences or text.

Each request brings its own generator, and a row is treated by itself, so a request with a seed gives the
same tokens whatever else runs. One draw is used per sampled token, none by greedy.
"""

import secrets
from array import array
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.runtime.request import SamplingParams, TokenLogprobs

_FIRST_CANDIDATES = 512


class History(Protocol):
    """The tokens before the one to be chosen: an int32 array, the prompt's first."""

    token_ids: "array[int]"
    prompt_length: int


class NonFiniteLogitsError(ArithmeticError):
    """The model gave no usable logits: NaN, or no finite maximum."""


class Mask(Protocol):
    """Says which tokens may come next (`engines.runtime.guidance`)."""

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of `logits` [vocabulary] with -inf for those that may not."""
        ...


def require_token(token: int) -> None:
    """Raise NonFiniteLogitsError for what a step that samples by itself gives for a row without usable logits."""
    if token < 0:
        raise NonFiniteLogitsError("the logits have a NaN or no finite maximum; expected finite numbers")


def generator_from_seed(seed: int | None, choice: int = 0) -> np.random.Generator:
    """An answer's own generator; without a seed it comes from the operating system. Choices of one request differ."""
    if seed is None or not choice:
        return np.random.Generator(np.random.PCG64(seed))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(choice,))))


def device_seed(seed: int | None, choice: int = 0) -> int:
    """The 64 bits that seed an answer's draws where the step samples by itself (`plugins.sampling`).

    Those numbers are others than `generator_from_seed`'s. Without a seed they come from the operating system.
    """
    if seed is None:
        return secrets.randbits(64)
    if not choice:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(choice,)).generate_state(1, np.uint64)[0])


def choose(
    logits: NDArray[np.float32],
    most_likely: int,
    params: SamplingParams,
    generator: np.random.Generator,
    history: History,
    guide: Mask | None = None,
) -> int:
    """A token id from `logits` [vocabulary], whose highest is at `most_likely`. Raises NonFiniteLogitsError."""
    # argmax gives the first NaN where there is one, so this one look covers the row.
    if not np.isfinite(logits[most_likely]):
        raise NonFiniteLogitsError(f"the highest logit is {logits[most_likely]}; expected a finite number")
    if params.temperature == 0 and not params.adjusts_logits and guide is None:
        return most_likely
    if params.adjusts_logits:
        logits = adjusted(logits, params, history)
    if guide is not None:
        logits = guide.mask(logits)
    return sample_row(logits, params, generator)


def adjusted(logits: NDArray[np.float32], params: SamplingParams, history: History) -> NDArray[np.float32]:
    """A copy of `logits` [vocabulary] with bias and penalties."""
    changed = logits.copy()
    for token, bias in params.logit_bias.items():
        if token < len(changed):
            changed[token] += bias
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.frombuffer(history.token_ids, np.int32))
        values = changed[seen]
        penalty = np.float32(params.repetition_penalty)
        changed[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        generated = np.frombuffer(history.token_ids, np.int32)[history.prompt_length :]
        seen, counts = np.unique(generated, return_counts=True)
        changed[seen] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
    return changed


def logprobs_of(logits: NDArray[np.float32], token: int, most_likely: int) -> TokenLogprobs:
    """Log-probabilities of a token and of the `most_likely` first ones in `logits` [vocabulary]; equals by id."""
    shifted = logits.astype(np.float64) - float(logits.max())
    normaliser = float(np.log(np.exp(shifted).sum()))
    top: list[int] = []
    if most_likely:
        least = np.partition(logits, -most_likely)[-most_likely]
        candidates = np.flatnonzero(logits >= least)
        order = np.lexsort((candidates, -logits[candidates]))
        top = candidates[order[:most_likely]].tolist()
    return TokenLogprobs(
        token, float(shifted[token]) - normaliser, tuple((one, float(shifted[one]) - normaliser) for one in top)
    )


def sample_row(logits: NDArray[np.float32], params: SamplingParams, generator: np.random.Generator) -> int:
    """Draw a token id from `logits` [vocabulary] by temperature and filters; the highest must be finite."""
    if params.temperature == 0:
        return int(np.argmax(logits))
    kept = None
    if params.top_k is not None and params.top_k < len(logits):
        kept = np.argpartition(logits, -params.top_k)[-params.top_k :]
        logits = logits[kept]
    # The maximum is subtracted before dividing, so that a tiny temperature cannot overflow.
    weights = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    if params.top_p < 1:
        weights[weights < _nucleus_threshold(weights, params.top_p)] = 0
    if params.min_p > 0:
        weights[weights < params.min_p] = 0  # the most likely token's weight is 1
    cumulative = np.cumsum(weights)
    # side="right" skips entries of weight zero; should the product round up to the total, the last other one is meant.
    last = np.searchsorted(cumulative, cumulative[-1])
    drawn = int(min(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"), last))
    return drawn if kept is None else int(kept[drawn])


def _nucleus_threshold(weights: NDArray[np.float64], top_p: float) -> np.float64:
    """The smallest of the fewest largest weights whose sum reaches top_p of the total.

    Values are sorted, not indices, which is several times faster; and first only the largest, which mostly suffice.
    """
    target = top_p * weights.sum()
    for count in (min(_FIRST_CANDIDATES, len(weights)), len(weights)):
        ordered = np.sort(np.partition(weights, -count)[-count:])[::-1]
        reached = int(np.searchsorted(np.cumsum(ordered), target))
        if reached < count:
            return ordered[reached]
    return ordered[-1]  # the last sum was rounded to below the target
