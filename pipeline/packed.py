"""Packed steps outside the runtime, for judging and timing serving graphs: chosen tokens through scattered blocks."""

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.backends.base import DecoderBackend, StepInputs
from engines.backends.onnxruntime import OnnxRuntimeDecoder
from passes.onnx_model import DecoderSpec


def packed_logits(
    engine: Path,
    decoder: DecoderSpec,
    plugins: Sequence[Path],
    texts: list[NDArray],
    steps: list[list[int]],
    *,
    optimized: bool = True,
    last_rows: int | None = None,
) -> list[NDArray]:
    """`logits_of_backend` of an engine that is opened for it on this machine's CPU."""
    blocks = sum(-(-len(text) // decoder.kv.block_size) for text in texts)
    backend = OnnxRuntimeDecoder(engine, decoder.kv, blocks, plugins=plugins, optimized=optimized)
    found = logits_of_backend(backend, decoder, texts, steps, last_rows=last_rows)
    backend.close()
    return found


def logits_of_backend(
    backend: DecoderBackend,
    decoder: DecoderSpec,
    texts: list[NDArray],
    steps: list[list[int]],
    *,
    last_rows: int | None = None,
) -> list[NDArray]:
    """Logits of every token of every text; each step takes its number of tokens from each text.

    With `last_rows` only the last so many tokens of each text's share in a step get logits.
    """
    size = decoder.kv.block_size
    blocks = [-(-len(text) // size) for text in texts]
    width, total = max(blocks), sum(blocks)
    order = np.random.default_rng(2).permutation(total).astype(np.int32)  # as scattered as in a busy pool
    table = np.zeros((len(texts), width), np.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = order[sum(blocks[:row]) :][:count]
    rows: list[list[NDArray]] = [[] for _ in texts]
    past = np.zeros(len(texts), np.int32)
    for step in steps:
        starts: list[int] = past.tolist()
        counts = [min(count, len(text) - start) for count, text, start in zip(step, texts, starts, strict=True)]
        positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [table[row, where // size] * size + where % size for row, where in enumerate(positions)]
        ids = [text[where] for text, where in zip(texts, positions, strict=True)]
        cumulative = np.cumsum([0, *counts]).astype(np.int32)
        asked = [
            np.arange(max(begin, end - (last_rows or end)), end, dtype=np.int32)
            for begin, end in itertools.pairwise(cumulative)
        ]
        logits = backend.step(
            StepInputs(
                input_ids=np.concatenate(ids).astype(np.int32),
                position_ids=np.concatenate(positions).astype(np.int32),
                logits_indices=np.concatenate(asked),
                cumulative_sequence_length=cumulative,
                past_seqlens=past.copy(),
                block_table=table,
                slot_mapping=np.concatenate(slots).astype(np.int32),
            )
        )
        for row, part in enumerate(np.split(logits, np.cumsum([len(rows) for rows in asked])[:-1])):
            rows[row].append(part)
        past += np.array(counts, np.int32)
    return [np.concatenate(parts) for parts in rows]


def decoder_feeds(decoder: DecoderSpec, tokens: int = 512) -> list[dict[str, NDArray]]:
    """One prompt with empty caches, as a session takes it by name."""
    inputs = step_inputs_of_prompt(min(tokens, decoder.max_context), decoder)
    feeds: dict[str, NDArray] = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    for layer in range(len(decoder.kv.layers)):
        for tensor in decoder.kv.tensors(layer):
            shape = decoder.kv.tensor_shape(tensor, inputs.block_table.size)
            feeds[tensor.name] = np.zeros(shape, np.dtype(tensor.dtype))
    return [feeds]


def step_inputs_of_prompt(tokens: int, decoder: DecoderSpec) -> StepInputs:
    """One prompt from position 0 in one step, with logits for its last token; needs as many blocks as its table has."""
    ids = np.random.default_rng(0).integers(0, decoder.vocab_size, tokens).astype(np.int32)
    whole = step_of_chunk(ids, 0, tokens, decoder.kv.block_size)
    return replace(whole, logits_indices=whole.logits_indices[-1:])


def step_of_chunk(ids: NDArray[np.int32], start: int, end: int, block_size: int) -> StepInputs:
    """Tokens [start, end) of one sequence in blocks 0, 1, ...; every token's hidden state reaches the head."""
    positions = np.arange(start, end, dtype=np.int32)
    return StepInputs(
        input_ids=np.ascontiguousarray(ids[start:end], np.int32),
        position_ids=positions,
        logits_indices=positions - np.int32(start),
        cumulative_sequence_length=np.array([0, end - start], np.int32),
        past_seqlens=np.array([start], np.int32),
        block_table=np.arange(-(-end // block_size), dtype=np.int32)[None],
        slot_mapping=positions,
    )
