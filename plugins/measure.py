"""What this machine can do at best, measured: the figures that `kiln bench` compares with.

Thin wrapper of measure.cc, which is part of the CPU plugin library. Knows nothing of models.
"""

import ctypes
import os

from plugins.build import cpu_library
from plugins.errors import KilnError


def read_bandwidth(total_bytes: int = 512 << 20, threads: int | None = None, repetitions: int = 10) -> float:
    """Bytes per second that `threads` (default: the CPUs this process may use) read from memory together.

    The best of `repetitions` passes over `total_bytes`, which must be much larger than the cache; each thread reads
    its own part. Raises `KilnError` when the memory is not to be had.
    """
    library = ctypes.CDLL(str(cpu_library()))
    library.kiln_read_bandwidth.restype = ctypes.c_double
    library.kiln_read_bandwidth.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    rate = library.kiln_read_bandwidth(total_bytes, threads or usable_cpus(), repetitions)
    if rate == 0:
        raise KilnError(
            f"cannot measure read bandwidth: {total_bytes} bytes of memory are not to be had; ask for fewer"
        )
    return float(rate)


def fp32_peak(threads: int | None = None, seconds: float = 0.5) -> float:
    """FP32 operations per second (two for a multiply-add) of `threads` together, on registers only.

    Uses the widest vectors of this machine; takes about `seconds`.
    """
    library = ctypes.CDLL(str(cpu_library()))
    library.kiln_fp32_peak.restype = ctypes.c_double
    library.kiln_fp32_peak.argtypes = [ctypes.c_int, ctypes.c_double]
    return float(library.kiln_fp32_peak(threads or usable_cpus(), seconds))


def usable_cpus() -> int:
    """Number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))
