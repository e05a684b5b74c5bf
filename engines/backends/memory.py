"""What the system would give now: the words of an error for memory that is not to be had.

Asks the system only; knows nothing of sessions, caches or models beyond their sizes.
"""

import mmap
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from engines.sku import host_memory
from plugins.errors import KilnError
from plugins.paged_attention.schema import KvSpec

_GRAIN = 1 << 20
"""Bytes to which the largest piece is found."""
_ORT_REFUSED = re.compile(r"requested buffer of size (\d+)")
_ORT_WORDS = ("bad allocation", "bad_alloc", "Failed to allocate memory")


def free_memory() -> int:
    """Bytes that this process could still take: what the system has available, or its control group if that is less."""
    free = host_memory()
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # without a limit the file says "max"
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(free, 0)


def largest_contiguous() -> int:
    """Most bytes that one allocation gets now, within 1 MiB: found by asking for address space and returning it."""
    least, most = 0, host_memory() // _GRAIN + 1  # in units of the grain: least is to be had, most is not
    while most - least > 1:
        middle = (least + most) // 2
        try:
            mmap.mmap(-1, middle * _GRAIN).close()
            least = middle
        except (OSError, MemoryError, ValueError):
            most = middle
    return least * _GRAIN


def shortage(asked: int | None) -> str:
    """How much was asked for, what is free, and the largest piece of it; None where the library did not say."""
    amount = "an amount that it does not name" if asked is None else f"{_gib(asked)} ({asked} bytes)"
    return f"asked for {amount}, {_gib(free_memory())} are free, {_gib(largest_contiguous())} at most in one piece"


def shortage_in(error: Exception) -> str | None:
    """The same for an error of ONNX Runtime that is about memory; None for any other."""
    text = str(error)
    asked = _ORT_REFUSED.search(text)
    if asked is None and not isinstance(error, MemoryError) and not any(words in text for words in _ORT_WORDS):
        return None
    return shortage(int(asked[1]) if asked else None)


def process_memory(field: Literal["VmRSS", "VmHWM"], process: int | Literal["self"] = "self") -> float | None:
    """Bytes of a process's resident memory, now or (VmHWM) at most so far; None where the system does not say.

    Of a child not what getrusage says: that starts at its parent's.
    """
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return float(line.split()[1]) * 1024
    return None


def check_pool(kv: KvSpec, num_blocks: int) -> None:
    """Raise KilnError for a cache that this machine cannot hold at all."""
    if num_blocks < 1:
        raise KilnError(f"the cache has {num_blocks} blocks; expected at least 1")
    needed, memory = num_blocks * kv.bytes_per_block, host_memory()
    if needed > memory:
        raise KilnError(
            f"{num_blocks} cache blocks of {kv.block_size} tokens need {_gib(needed)}, this machine has "
            f"{_gib(memory)}; at most {memory // kv.bytes_per_block} blocks fit beside nothing else "
            f"({shortage(needed)})"
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
