"""Requests that tests of the engine share."""

from engines.runtime.request import Request, SamplingParams

PROMPTS = [[(7 * i + j) % 90 + 2 for j in range(length)] for i, length in enumerate((1, 3, 4, 5, 17, 30, 64, 90))]


def request(prompt, **sampling) -> Request:
    return Request(tuple(prompt), SamplingParams(**sampling))
