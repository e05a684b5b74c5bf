"""Nothing grows with the work that is done: in Python's memory, and in C's by valgrind.

Python, ONNX Runtime and pydantic keep what they make once, so absolute figures say nothing. Both tests do the same
rounds few and many times, with every function and with failures, and compare what is left.
"""

import gc
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from engines.capi.client import CApiError, Library
from engines.runtime.request import Request, SamplingParams

HERE = Path(__file__).parent
FEW, MANY = 2, 20


@pytest.fixture(scope="module")
def rounds(capi, tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("rounds") / "rounds"
    flags = ["-std=c11", "-g", "-Wall", "-Wextra", "-Werror", f"-I{capi / 'include'}"]
    library = [f"-L{capi / 'lib'}", "-lkiln", f"-Wl,-rpath,{capi / 'lib'}"]
    subprocess.run(["cc", *flags, HERE / "rounds.c", *library, "-o", program], check=True)
    return program


def test_the_rounds_work(rounds, bare_bundle, twice_bundle):
    command = ["/usr/bin/env", "-i", rounds, bare_bundle.path, twice_bundle.path, sys.executable, str(MANY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_python_keeps_nothing(capi, bare_bundle, twice_bundle):
    library = Library(capi / "lib/libkiln.so")
    engine = library.open(bare_bundle.path, {"threads": 1})
    wanted = Request((3, 1, 4), SamplingParams(max_tokens=4, n=2, logprobs=2, ignore_eos=True))

    def one_round() -> None:
        for cancel in (False, True):
            stream = library.submit(engine, wanted)
            while library.wait(stream) is not None:
                if cancel:
                    library.cancel(stream)
            library.stream_close(stream)
            with pytest.raises(CApiError):
                library.wait(stream)
        model = library.open(twice_bundle.path)
        library.infer(model, {"x": np.ones(1000, np.float32)})
        library.close(model)
        library.metrics(engine), library.describe(engine)

    def blocks_after(count: int) -> int:
        for _ in range(count):
            one_round()
        gc.collect()
        return sys.getallocatedblocks()

    blocks_after(20)  # caches fill
    before = blocks_after(20)
    # Caches of the engine still grow by about one object a round; one chunk or handle has more.
    assert blocks_after(100) - before < 3 * 100
    library.close(engine)


@pytest.mark.sanitize
def test_c_keeps_nothing_by_valgrind(request, rounds, bare_bundle, twice_bundle, tmp_path):
    """Compares bytes by kind of loss: of blocks that libkiln allocates, and of all that its calls lead to.

    Invalid accesses count where our code makes them; the dynamic linker's own, known to valgrind, do not.
    """
    if "sanitize" not in request.config.getoption("-m"):
        pytest.skip("opt-in: -m sanitize")
    arguments = rounds, bare_bundle.path, twice_bundle.path
    few, many = (left_after(count, *arguments, tmp_path / f"{count}.xml") for count in (FEW, MANY))
    assert few.invalid == many.invalid == []
    assert many.allocated == few.allocated
    for kind in ("Leak_DefinitelyLost", "Leak_IndirectlyLost", "Leak_PossiblyLost"):
        assert many.reached[kind] == few.reached[kind]
    growth = many.reached["Leak_StillReachable"] - few.reached["Leak_StillReachable"]
    assert growth < (MANY - FEW) * 1000, "what Python holds differs with the time of its collections, not by the round"


@dataclass(frozen=True)
class Left:
    """What valgrind found at the end of a run. Bytes by kind of loss."""

    allocated: Counter[str]
    """Of blocks that libkiln itself allocated."""
    reached: Counter[str]
    """Of all blocks that were allocated during a call of libkiln."""
    invalid: list[str]
    """Invalid accesses of libkiln."""


def left_after(count: int, program: Path, decoder: Path, model: Path, report: Path) -> Left:
    options = ["--leak-check=full", "--show-leak-kinds=all", "--num-callers=100", "--undef-value-errors=no"]
    command = ["valgrind", "-q", *options, "--xml=yes", f"--xml-file={report}", program, decoder, model]
    subprocess.run([*command, sys.executable, str(count)], check=True, timeout=1200)
    left = Left(Counter(), Counter(), [])
    for error in ElementTree.parse(report).getroot().iter("error"):
        kind, frames = error.findtext("kind"), list(next(error.iter("stack")))
        objects = [Path(frame.findtext("obj") or "").name for frame in frames]
        functions = [frame.findtext("fn") for frame in frames]
        culprit = next((name for name in objects if not name.startswith(("vgpreload", "libc.so", "ld-linux"))), "")
        if not kind.startswith("Leak"):
            if culprit == "libkiln.so" and "dlopen_implementation" not in functions:
                left.invalid.append(f"{error.findtext('what')}: {functions}")
            continue
        lost = int(error.findtext("xwhat/leakedbytes"))
        if culprit == "libkiln.so":
            left.allocated[kind] += lost
        if "libkiln.so" in objects:
            left.reached[kind] += lost
    return left
