"""What the device takes for a decode step when the host is always ahead of it."""

import time
from dataclasses import replace

import numpy as np

from engines.backends.base import DecoderBackend, LaunchingBackend, SamplingInputs, StepInputs
from pipeline.packed import step_of_chunk

STEPS, WARM_UP = 64, 8


def device_step(backend: LaunchingBackend, batch: int, context: int) -> float:
    """Seconds of a decode step of `batch` sequences that hold `context` tokens; the next step always waits already.

    No request may run on the backend meanwhile.
    """
    inputs = decode_inputs(backend, batch, context)
    sampling, feed = greedy(batch), np.arange(batch, dtype=np.int32)
    backend.launch(inputs, sampling, np.full(batch, -1, np.int32), logits=False)
    start = 0.0
    for step in range(WARM_UP + STEPS):
        backend.launch(inputs, sampling, feed, logits=False)
        backend.collect()
        if step == WARM_UP - 1:
            start = time.perf_counter()
    taken = time.perf_counter() - start
    backend.collect()
    return taken / STEPS


def run_step(backend: DecoderBackend, inputs: StepInputs) -> None:
    """One step by itself, from the arrays on the host to the tokens there."""
    if isinstance(backend, LaunchingBackend):
        feed = np.full(len(inputs.input_ids), -1, np.int32)
        backend.launch(inputs, greedy(len(inputs.logits_indices)), feed, logits=False)
        backend.collect()
    else:
        backend.step(inputs)


def greedy(rows: int) -> SamplingInputs:
    return SamplingInputs(
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.int64),
        sample_position=np.zeros(rows, np.int32),
    )


def decode_inputs(backend: DecoderBackend, batch: int, context: int) -> StepInputs:
    """A step of `batch` sequences that hold `context` tokens each, in blocks from all over the cache."""
    return mixed_inputs(backend, batch, context, 0, 0)


def mixed_inputs(backend: DecoderBackend, batch: int, context: int, prompts: int, tokens: int) -> StepInputs:
    """The same and `prompts` whole prompts, with logits for their last tokens."""
    size = backend.kv.block_size
    lengths = np.array([1] * batch + [tokens] * prompts, np.int32)
    past = np.array([context] * batch + [0] * prompts, np.int32)
    width = -(-max(context + 1, tokens) // size)
    table = np.random.default_rng(batch).permutation(backend.num_blocks)[: len(past) * width]
    table = table.reshape(-1, width).astype(np.int32)
    rows = np.repeat(np.arange(len(past)), lengths)
    positions = np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in zip(past, lengths, strict=True)])
    ends = np.cumsum(lengths, dtype=np.int32)
    return StepInputs(
        input_ids=np.arange(len(positions), dtype=np.int32),
        position_ids=positions,
        logits_indices=ends - np.int32(1),
        cumulative_sequence_length=np.concatenate([np.zeros(1, np.int32), ends]),
        past_seqlens=past,
        block_table=table,
        slot_mapping=table[rows, positions // size] * np.int32(size) + positions % np.int32(size),
    )


def prompt_inputs(backend: DecoderBackend, tokens: int) -> StepInputs:
    """A whole prompt in one step, with logits for its last token."""
    whole = step_of_chunk(np.arange(tokens, dtype=np.int32), 0, tokens, backend.kv.block_size)
    return replace(whole, logits_indices=whole.logits_indices[-1:])
