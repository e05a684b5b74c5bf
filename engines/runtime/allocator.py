"""Memory in a process that serves for weeks: the C library's allocator, and Python's collector of cycles.

For processes that are Kiln's own. Who opens an engine in a process of theirs decides for themselves.
"""

import ctypes
import gc

_M_ARENA_MAX = -8  # malloc.h


def share_one_malloc_arena() -> None:
    """Have all threads of this process allocate from one arena; where the C library is not glibc, nothing happens.

    glibc gives up to eight arenas a core to threads, and what one frees another cannot use. Buffers of a step, whose
    sizes differ each time, leave holes in all of them: SmolLM2 under mixed load grew by some 40 MiB an hour, with the
    same bytes in use, and by none with one arena, at the same rate of requests.

    To be called before threads start; `MALLOC_ARENA_MAX=1` in the environment does the same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def exempt_from_collection() -> None:
    """Have Python's collector pass over all that exists now, in every collection to come.

    A whole collection stops all threads for as long as it takes to walk over every object: with torch imported
    0.1 to 0.3 s, in which no step is launched. What is there when an engine has been opened stays anyway.
    """
    gc.collect()
    gc.freeze()
