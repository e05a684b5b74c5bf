"""What the errors of allocations that fail say: how much was asked for, what is free, the largest piece."""

import subprocess
import sys

import pytest

from engines.backends.memory import check_pool, free_memory, largest_contiguous, shortage_in
from engines.backends.onnxruntime import ort_message
from engines.sku import host_memory
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvLayer, KvSpec

LIMITED = """
import resource, sys
from engines.backends.memory import largest_contiguous
import numpy as np
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (256 << 20),) * 2)
piece = largest_contiguous()
np.empty(piece - (1 << 20), np.uint8)
try:
    np.empty(piece + (2 << 20), np.uint8)
except MemoryError:
    print(piece >> 20)
"""


def test_the_largest_piece_is_what_an_allocation_gets() -> None:
    found = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert 200 < int(found.stdout) <= 256


def test_free_memory_is_within_the_machine() -> None:
    assert 0 < free_memory() <= host_memory()
    assert largest_contiguous() > 0


def test_a_pool_beyond_the_machine_says_asked_free_and_largest() -> None:
    kv = KvSpec((KvLayer(1, 64),), 16, "float32")
    blocks = host_memory() // kv.bytes_per_block + 1
    with pytest.raises(
        KilnError, match=rf"asked for .* \({blocks * kv.bytes_per_block} bytes\), .* free, .* one piece"
    ):
        check_pool(kv, blocks)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 77",
            "77",
        ),
        ("std::bad_alloc", "an amount that it does not name"),
    ],
)
def test_onnx_runtime_out_of_memory_is_recognised(text: str, asked: str) -> None:
    message = ort_message(RuntimeError(text))
    assert asked in message
    assert "are free" in message


def test_other_errors_are_left_alone() -> None:
    assert shortage_in(RuntimeError("Got invalid dimensions for input: x")) is None
    assert "free" not in ort_message(RuntimeError("Got invalid dimensions for input: x"))
