"""Times the CUDA kernels of paged attention in CUDA graphs, beside the bandwidth and the rate that the device reaches.

    python scripts/bench_cuda_attention.py [--library PATH] [--block-size 16]

32 query and 8 KV heads of 128, bfloat16, shuffled blocks, with rotation and cache write in every call; inputs rotate
among as many sets as exceed the L2 cache. Decode stands against the time of reading the cache once at the bandwidth of
a device-to-device copy measured in the same run; prefill against a large bfloat16 matrix product, with torch's
attentions on dense, gathered, rotated inputs beside it (so they do less). Some calls are repeated over caches of int8,
of keys or of keys and values, whose floor is their own bytes'. Errors are against float32 on the same inputs. Prints
one table and one JSON line.
"""

import argparse
import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.device_limits import copy_bandwidth, device_seconds, product_rate
from plugins.cuda_build import cuda_library
from plugins.paged_attention.cuda_calls import CudaAttention, Operands
from plugins.paged_attention.reference import Attributes

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ATTRIBUTES = Attributes(HEADS, KV_HEADS, do_rotary=1)
DECODE = ((1, 512), (1, 4096), (8, 4096), (64, 512), (64, 4096), (128, 512), (256, 1024))
INT8_DECODE = ((1, 4096), (64, 512), (64, 4096), (256, 1024))
PREFILL = ((1, 512, 0), (1, 4096, 0), (8, 2048, 0), (1, 2048, 14336))
INT8_PREFILL = ((1, 4096, 0), (1, 2048, 14336))
TARGETS = {"decode 64 x 4096": 270, "decode 1 x 4096": 18, "decode 256 x 1024": 290}
"""Microseconds."""
MIN_RATE = 350
"""TFLOP/s of one prompt of 4096."""
SET_BYTES = 3e8
"""All sets of inputs together hold at least so much: several times the L2 cache."""


def cache_of(shape: tuple[int, ...], int8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Numbers around 1 at most, with scales where they are int8."""
    if not int8:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16), None
    levels = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
    return levels, torch.rand(shape[:-1], device="cuda") * 0.01 + 0.01


def operands(seqs: int, new: int, past: int, block_size: int, int8: str = "") -> Operands:
    """`int8` names the caches that are of that type: k, v or kv."""
    length = new + past
    width = -(-length // block_size)
    shape = (seqs * width, block_size, KV_HEADS, HEAD_DIM)
    (keys, key_scale), (values, value_scale) = (cache_of(shape, one in int8) for one in "kv")
    table = torch.randperm(seqs * width, device="cuda").int().view(seqs, width)
    positions = past + torch.arange(new, device="cuda")
    slots = table[:, positions // block_size].long() * block_size + positions % block_size
    packed = torch.randn(seqs * new, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(length, HEAD_DIM // 2, device="cuda") * 6.28
    return Operands(
        *(packed, None, None, keys, values),
        *((torch.arange(seqs + 1, device="cuda") * new).int(), torch.full((seqs,), past, device="cuda").int()),
        *(table, slots.int().flatten(), angles.cos(), angles.sin(), key_scale, value_scale),
    )


def bytes_per_position(int8: str) -> int:
    return KV_HEADS * sum(HEAD_DIM + 4 if one in int8 else 2 * HEAD_DIM for one in "kv")


def sets(seqs: int, new: int, past: int, block_size: int, int8: str) -> list[Operands]:
    bytes_each = seqs * (new + past) * bytes_per_position(int8)
    return [operands(seqs, new, past, block_size, int8) for _ in range(max(1, min(8, int(SET_BYTES / bytes_each) + 1)))]


def dense(given: Operands, seqs: int, new: int, past: int) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Rotated queries, keys and values [seqs, heads, length, head_dim] in float32 from the caches after a call."""
    length, block_size = new + past, given.key_cache.shape[1]
    at = torch.arange(length, device="cuda")
    blocks = given.block_table[:, at // block_size].long()
    caches = ((given.key_cache, given.k_scale), (given.value_cache, given.v_scale))
    keys, values = (
        (c.float() if scale is None else c.float() * scale[..., None])[blocks, at % block_size].transpose(1, 2)
        for c, scale in caches
    )
    query = given.query[:, : HEADS * HEAD_DIM].float().view(seqs, new, HEADS, HEAD_DIM).transpose(1, 2)
    assert given.cos_cache is not None
    assert given.sin_cache is not None
    cos, sin = given.cos_cache[past:], given.sin_cache[past:]
    low, high = query.split(HEAD_DIM // 2, dim=-1)
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).bfloat16().float()
    return rotated, keys, values


def error(output: "torch.Tensor", given: Operands, seqs: int, new: int, past: int) -> float:
    """max|output - reference| / max|reference|, over the last sequence."""
    query, keys, values = (x[-1:] for x in dense(given, seqs, new, past))
    own = past + torch.arange(new, device="cuda")
    hidden = torch.arange(new + past, device="cuda")[None] > own[:, None]
    worst, largest = 0.0, 0.0
    for head in range(HEADS):
        kv = head * KV_HEADS // HEADS
        scores = query[0, head] @ keys[0, kv].T * HEAD_DIM**-0.5
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values[0, kv]
        found = output.view(seqs, new, HEADS, HEAD_DIM)[-1, :, head].float()
        worst = max(worst, float((found - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return worst / largest


def measure(
    operator: CudaAttention, seqs: int, new: int, past: int, block_size: int, int8: str = ""
) -> tuple[float, float]:
    """Seconds of one call, and its error."""
    inputs = sets(seqs, new, past, block_size, int8)
    output = torch.full((seqs * new, HEADS * HEAD_DIM), torch.nan, device="cuda", dtype=torch.bfloat16)
    operator(inputs[0], ATTRIBUTES, output)
    found = error(output, inputs[0], seqs, new, past)
    turn = iter(range(1 << 30))
    calls = 24 if new == 1 else 4
    taken = device_seconds(lambda: operator(inputs[next(turn) % len(inputs)], ATTRIBUTES, output), calls)
    return taken, found


def torch_attentions(seqs: int, new: int) -> Iterator[tuple[str, float]]:
    """Names and seconds of torch's attentions on whole prompts."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    given = operands(seqs, new, 0, 16)
    query, keys, values = (x.bfloat16().contiguous() for x in dense(given, seqs, new, 0))
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))

    def attend() -> "torch.Tensor":
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)

    for name, backend in (("FlashAttention 2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                yield name, device_seconds(attend, 4)
            except RuntimeError as problem:
                print(f"{name}: torch cannot run it here: {str(problem).splitlines()[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="a compiled libkiln_cuda.so; by default it is compiled")
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    library = args.library or cuda_library([f"sm_{major}{minor}"])
    operator = CudaAttention(ctypes.CDLL(str(library)))
    bandwidth, rate = copy_bandwidth(), product_rate()
    results: dict[str, dict[str, float]] = {}
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
    print(f"{'call':26}{'us':>8}{'floor':>8}{'ratio':>7}{'target':>8}{'error':>10}")
    for seqs, length, int8 in (
        *((*one, "") for one in DECODE),
        *((*one, k) for one in INT8_DECODE for k in ("k", "kv")),
    ):
        name = f"decode {seqs} x {length}" + (f", int8 {int8}" if int8 else "")
        taken, found = measure(operator, seqs, 1, length - 1, args.block_size, int8)
        floor = seqs * length * bytes_per_position(int8) / bandwidth
        results[name] = {"us": taken * 1e6, "ratio": taken / floor, "error": found}
        target = str(TARGETS.get(name, ""))
        print(f"{name:26}{taken * 1e6:8.1f}{floor * 1e6:8.1f}{taken / floor:7.2f}{target:>8}{found:10.1e}")
    print(f"{'call':26}{'us':>8}{'TFLOP/s':>9}{'of product':>11}{'error':>10}")
    for seqs, new, past, int8 in (*((*one, "") for one in PREFILL), *((*one, "kv") for one in INT8_PREFILL)):
        name = f"prefill {seqs} x {new}" + (f" after {past}" if past else "") + (f", int8 {int8}" if int8 else "")
        operations = 4 * HEADS * HEAD_DIM * seqs * (new * past + new * (new + 1) / 2)
        taken, found = measure(operator, seqs, new, past, args.block_size, int8)
        speed = operations / taken
        results[name] = {"us": taken * 1e6, "tflops": speed / 1e12, "error": found}
        print(f"{name:26}{taken * 1e6:8.0f}{speed / 1e12:9.0f}{speed / rate:11.2f}{found:10.1e}")
        for other, theirs in torch_attentions(seqs, new) if not past and not int8 else ():
            results[f"{name}, {other}"] = {"us": theirs * 1e6, "tflops": operations / theirs / 1e12}
            print(f"{'  ' + other:26}{theirs * 1e6:8.0f}{operations / theirs / 1e12:9.0f}")
    met = all(results[name]["us"] <= limit for name, limit in TARGETS.items())
    met &= results["prefill 1 x 4096"]["tflops"] >= MIN_RATE
    print(f"targets {'met' if met else 'missed'}: {TARGETS} us, prefill of 4096 at {MIN_RATE} TFLOP/s or more")
    print(json.dumps({"copy_tb_s": bandwidth / 1e12, "product_tflops": rate / 1e12, "met": met, "calls": results}))


if __name__ == "__main__":
    main()
