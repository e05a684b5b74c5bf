"""The kernel's tests once more under AddressSanitizer. Opt-in: `pytest -m sanitize tests/plugins`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugins import build

pytestmark = pytest.mark.sanitize
ROOT = Path(build.__file__).parents[1]
QUANTISED = ("test_quant_matmul.py", "test_quant_matmul_rows.py")

# The tests take the library from cpu_library(), so replacing it before they are imported is all it takes.
RUN_TESTS = """
import sys, pytest  # -s: a report of the sanitizer must get past pytest
from plugins import build
build.cpu_library = build.sanitized_cpu_library
sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "-m", "not sanitize", *sys.argv[1:]]))
"""
OVERRUN = """
import ctypes
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.memset(ctypes.c_void_p(c.malloc(64)), 0, 65)
"""


@pytest.fixture(autouse=True)
def only_when_asked_for(request: pytest.FixtureRequest) -> None:
    if "sanitize" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m sanitize")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python that has the compiler's AddressSanitizer loaded first, as it must be."""
    # The C++ runtime too, or AddressSanitizer finds no __cxa_throw to wrap before the library brings it.
    runtimes = [
        subprocess.run([*build.find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtime.stdout.strip() for runtime in runtimes),
        # Python itself frees little at exit; its small-object allocator would hide overruns.
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_sanitizer_is_at_work() -> None:
    found = python(OVERRUN)
    assert found.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in found.stderr
    assert b"__asan_report_load4" in build.sanitized_cpu_library().read_bytes()


@pytest.mark.parametrize(
    "tests",
    [
        *("test_paged_attention.py", "test_paged_attention_errors.py", "test_elementwise.py", "test_sampling.py"),
        *QUANTISED,
    ],
)
def test_kernel_stays_inside_its_buffers(tests: str) -> None:
    found = python(RUN_TESTS, f"tests/plugins/{tests}")
    assert "AddressSanitizer" not in found.stderr, found.stderr[:8000]
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-4000:]
    assert " passed" in found.stdout
