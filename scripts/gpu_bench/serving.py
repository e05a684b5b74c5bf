"""What an engine does for its users: steps, first tokens and a trace of mixed requests, through `Engine` alone.

Requests are random tokens, greedy, with answers of a given length, so that the work is known. Knows nothing of GPUs:
any decoder bundle on any machine will do.
"""

import statistics
import time

import numpy as np
from serving_bench.setting import Job

from engines.runtime.engine import Engine
from engines.runtime.scheduler import SchedulerConfig
from gpu_bench.limits import DeviceLimits
from pipeline.floors import DecoderWork
from pipeline.load_test.trace import Lengths, Trace, Workload

SCHEDULING = SchedulerConfig(max_running=256, tokens_per_step=8192, step_stretch=None, share_prefixes=False)
"""As vLLM's was: as many tokens a step whoever waits, no prefix is shared."""
MIXED = Workload(prompt=Lengths(600, 0.8, 200, 4000), output=Lengths(150, 1.0, 16, 512))
"""With 256 requests about the 213,522 prompt tokens and 50,787 output tokens that vLLM had."""
STEPS = 48
"""Steps that a decode step is the mean of."""
_ROUNDS = 3


def random_prompt(generator: np.random.Generator, vocabulary: int, tokens: int) -> tuple[int, ...]:
    return tuple(generator.integers(0, vocabulary, tokens).tolist())


def decode_step(engine: Engine, batch: int, prompt: int, steps: int = STEPS) -> float:
    """Seconds between two tokens of one of `batch` requests that all decode, the median of three rounds' means.

    Their contexts grow from `prompt` on.
    """
    return statistics.median(_decode_round(engine, batch, prompt, steps, seed) for seed in range(_ROUNDS))


def _decode_round(engine: Engine, batch: int, prompt: int, steps: int, seed: int) -> float:
    """The last request to begin is watched; the others began before it and have more to say."""
    generator = np.random.default_rng([seed, batch])
    output = steps + 1
    others = [
        engine.submit(Job(random_prompt(generator, engine.info.vocab_size, prompt), 3 * output + batch).request())
        for _ in range(batch - 1)
    ]
    watched = engine.submit(Job(random_prompt(generator, engine.info.vocab_size, prompt), output).request())
    times = [time.perf_counter() for chunk in watched for _ in chunk.token_ids]
    ended = [stream for stream in others if stream.done]
    for stream in others:
        stream.cancel()
    for stream in others:
        stream.result()
    assert not ended, f"{len(ended)} of {batch} requests ended before the last one"
    return (times[-1] - times[0]) / (len(times) - 1)


def first_token(engine: Engine, prompt: int, repetitions: int = 7) -> float:
    """Seconds from asking to the first token of an answer to a prompt, on an idle engine; the median."""
    taken = []
    for seed in range(repetitions):
        generator = np.random.default_rng([seed, prompt])
        request = Job(random_prompt(generator, engine.info.vocab_size, prompt), 1).request()
        start = time.perf_counter()
        next(stream := engine.submit(request))
        taken.append(time.perf_counter() - start)
        stream.result()
    return statistics.median(taken)


def serve_trace(engine: Engine, trace: Trace, seed: int = 0) -> float:
    """Seconds for all requests of a trace, asked at once."""
    requests = [
        Job(asked.token_ids(index, seed, engine.info.vocab_size), asked.output_tokens).request()
        for index, asked in enumerate(trace)
    ]
    start = time.perf_counter()
    completions = engine.generate(requests)
    taken = time.perf_counter() - start
    made = [len(completion.token_ids) for completion in completions]
    assert made == [asked.output_tokens for asked in trace], "an answer has another length than was asked for"
    return taken


def step_floor(work: DecoderWork, limits: DeviceLimits, batch: int, context: float) -> float:
    """Least seconds of a decode step."""
    return limits.seconds(work.decode_operations(batch, context), work.decode_bytes(batch, context))


def first_token_floor(work: DecoderWork, limits: DeviceLimits, prompt: int) -> float:
    """Least seconds of a prompt."""
    return limits.seconds(work.prefill_operations(prompt), work.weight_bytes)


def trace_floor(work: DecoderWork, limits: DeviceLimits, trace: Trace) -> float:
    """Least seconds of a trace: all products and attention, or the reading.

    Read are the weights in as many steps as the longest answer takes, and each token's keys and values.
    """
    operations, contexts = 0.0, 0.0
    for asked in trace:
        prompt, output = asked.prompt_tokens or 0, asked.output_tokens
        context = prompt + (output - 1) / 2
        operations += work.prefill_operations(prompt) + (output - 1) * work.decode_operations(1, context)
        contexts += (output - 1) * context
    steps = max(asked.output_tokens for asked in trace)
    cache = work.decode_bytes(1, 1) - work.weight_bytes
    return limits.seconds(operations, steps * work.weight_bytes + contexts * cache)


def trace_totals(trace: Trace) -> tuple[int, int]:
    """Prompt tokens and output tokens."""
    return sum(asked.prompt_tokens or 0 for asked in trace), sum(asked.output_tokens for asked in trace)
