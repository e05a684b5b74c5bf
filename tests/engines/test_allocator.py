"""How many arenas glibc has after threads allocated, as its own report says; what the collector passes over."""

import os
import platform
import subprocess
import sys

import pytest

ARENAS = """
import ctypes, tempfile, threading
from engines.runtime.allocator import share_one_malloc_arena

{call}
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
met = threading.Barrier(6)

def allocate():
    met.wait()
    libc.malloc(5000)
    met.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap nr="))
"""


def arenas(call: str) -> int:
    program = [sys.executable, "-c", ARENAS.format(call=call)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return int(subprocess.run(program, capture_output=True, text=True, check=True, env=environment).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_share_one_arena():
    assert arenas("") > 1
    assert arenas("share_one_malloc_arena()") == 1


def test_what_exists_is_not_collected_again():
    program = """
import gc
from engines.runtime.allocator import exempt_from_collection
exempt_from_collection()
print(len(gc.get_objects()) < gc.get_freeze_count())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
