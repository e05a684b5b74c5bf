"""What one step costs by what is in it: eight decoding sequences, and a piece of a prompt at some depth."""

import time

import numpy as np

from engines.backends.base import DecoderBackend, StepInputs
from engines.runtime.sequence import blocks_for
from serving_bench.setting import Findings, Setting, median
from serving_bench.static_batching import packed_step

DECODING, CONTEXT = 8, 300
DEPTHS = (0, 1000, 2000, 3900)


def steps(setting: Setting) -> Findings:
    pieces = (32, 128) if setting.quick else (8, 16, 32, 64, 128, 256)
    rounds = 3 if setting.quick else 7
    with setting.open(share_prefixes=False) as engine:
        backend = engine.backend
        alone = _milliseconds(backend, _inputs(setting, backend, 0, 0), rounds)
        table = {
            depth: [_milliseconds(backend, _inputs(setting, backend, piece, depth), rounds) for piece in pieces]
            for depth in DEPTHS
        }
    first = (f"the {DECODING} alone", f"{alone:.1f}", *[""] * (len(pieces) - 1))
    rows = [first, *((f"and a piece at {depth}", *(f"{value:.1f}" for value in row)) for depth, row in table.items())]
    floor = setting.decode_floor(DECODING, CONTEXT) * 1e3
    return Findings(
        "steps",
        f"Milliseconds of a step that decodes {DECODING} sequences of {CONTEXT} tokens",
        ("prompt tokens", *map(str, pieces)),
        rows,
        [],
        {"alone": alone, "pieces": pieces, "by_depth": table, "floor": floor},
        [
            f"Depth: tokens of the prompt before the piece. The floor of the {DECODING} alone is {floor:.1f} ms "
            f"({floor / alone:.0%}). A prompt's tokens cost the same in such a step as in one of their own, and more "
            "the deeper they are: no number of tokens is right at every depth, so the scheduler bounds time."
        ],
    )


def _inputs(setting: Setting, backend: DecoderBackend, piece: int, depth: int) -> StepInputs:
    generator = np.random.default_rng(setting.seed)
    past = np.asarray([CONTEXT] * DECODING + ([depth] if piece else []), np.int32)
    lengths = [1] * DECODING + ([piece] if piece else [])
    needed = [blocks_for(int(p) + n, backend.kv.block_size) for p, n in zip(past, lengths, strict=True)]
    tables = np.zeros((len(past), max(needed)), np.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = sum(needed[:row]) + np.arange(count)
    tokens = [generator.integers(0, setting.vocabulary, length).astype(np.int32) for length in lengths]
    return packed_step(tokens, past, tables, backend.kv.block_size)


def _milliseconds(backend: DecoderBackend, inputs: StepInputs, rounds: int) -> float:
    backend.step(inputs)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        backend.step(inputs)
        times.append(time.perf_counter() - start)
    return median(times) * 1e3
