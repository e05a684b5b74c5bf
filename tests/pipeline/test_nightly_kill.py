"""`kill -9` at points drawn per stage: the registry ends as if nobody had disturbed the nights.

A harness imports everything once and forks for each attempt. In the forked process lines of the nightly's and the
registry's sources are counted within each call of a stage, and at the drawn one it dies. Later kills wait for later
jobs, so that they meet all of them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("onnxruntime")

from engines.sku import host_cpu_features

ROOT = Path(__file__).parents[2]
FEATURES = {"cpu-avx2": {"avx2", "fma"}, "cpu-avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
HARNESS = """
import io, json, os, random, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from rich.console import Console
from pipeline.nightly import accuracy, building, determinism, speed
from pipeline.progress import Progress
from tests.pipeline.nightly_material import World

silent = Progress(Console(file=io.StringIO()))
folder, models, skus, kills = Path({folder!r}), {models!r}, {skus!r}, {kills}
NIGHTS = ("code-1", "code-2")
STAGES = ("_build", "_publish", "_judge", "_gate", "attest", "_promote", "_end")
SOURCES = ("pipeline/nightly/", "pipeline/registry/")

def tracer(entered, reached, left):
    '''A trace function that tells of stages' calls and of the lines within them.'''
    stack = []
    def local(frame, event, argument):
        if event == "line" and stack:
            stack[-1][1] += 1
            reached(*stack[-1][:2])
        elif event == "return" and stack and stack[-1][2] is frame:
            left(*stack.pop()[:2])
        return local
    def trace(frame, event, argument):
        if not any(source in frame.f_code.co_filename for source in SOURCES):
            return None
        if frame.f_code.co_name in STAGES:
            stack.append([frame.f_code.co_name, 0, frame])
            entered(frame.f_code.co_name)
        return local
    return trace

def in_child(work):
    '''What a function gives, from a process of its own, for this one never opens an engine; minus a signal.'''
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            with os.fdopen(write, "w") as stream:
                json.dump(work(), stream)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return json.loads(text) if code == 0 else code

def night(world, code, trace=None):
    sys.settrace(trace)
    try:
        return world.night(silent, code).exit_code
    finally:
        sys.settrace(None)

def calm_night(world, code):
    '''The shortest call of each stage in lines.'''
    shortest = {{}}
    def left(stage, lines):
        shortest[stage] = min(shortest.get(stage, lines), lines)
    nothing = lambda *place: None
    assert night(world, code, tracer(nothing, nothing, left)) == 0
    return shortest

def killed_night(world, code, stage, line, jobs):
    '''Dies at a line of the first call of a stage after so many jobs, or at its end where it has fewer lines.'''
    ended = [0]
    def entered(name):
        ended[0] += name == "_end"
    def reached(name, at, last=False):
        if name == stage and (at == line or last) and ended[0] - (name == "_end") >= jobs:
            os.kill(os.getpid(), signal.SIGKILL)
    return night(world, code, tracer(entered, reached, lambda name, at: reached(name, at, last=True)))

calm, stormy = World(folder / "calm", models, skus), World(folder / "stormy", models, skus)
generator = random.Random({seed})
hits, each = dict.fromkeys(STAGES, 0), kills // len(NIGHTS)
for code in NIGHTS:
    shortest = in_child(lambda: calm_night(calm, code))
    assert set(shortest) == set(STAGES), shortest
    for number in range(each):
        stage = min(STAGES, key=lambda name: (hits[name], generator.random()))
        line, jobs = generator.randint(1, shortest[stage]), number * len(models) * len(skus) // each
        result = in_child(lambda: killed_night(stormy, code, stage, line, jobs))
        assert result == -signal.SIGKILL, (result, stage, line, jobs)
        hits[stage] += 1
    assert in_child(lambda: night(stormy, code)) == 0
    for world in (calm, stormy):
        in_child(world.make_stable)
print(json.dumps({{"hits": hits, "calm": in_child(calm.content), "stormy": in_child(stormy.content)}}))
"""


@pytest.mark.parametrize(
    ("models", "skus", "kills"),
    [
        (("mlp", "conv", "norm"), ("cpu-far", "cpu-avx2"), 8),
        pytest.param(
            ("mlp", "conv", "embedding", "norm"), ("cpu-far", "cpu-avx512", "cpu-avx2"), 20, marks=pytest.mark.slow
        ),
    ],
)
def test_killed_nights_end_as_undisturbed_ones(request, tmp_path, models, skus, kills):
    if kills == 20 and "slow" not in request.config.getoption("-m"):
        pytest.skip("opt-in, some two minutes: -m slow")
    lacking = {sku for sku in skus if not FEATURES.get(sku, set()) <= host_cpu_features()}
    if lacking:
        pytest.skip(f"this machine is no {', '.join(lacking)}")
    code = HARNESS.format(root=str(ROOT), folder=str(tmp_path), models=models, skus=skus, kills=kills, seed=1)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert sum(found["hits"].values()) == kills
    assert min(found["hits"].values()) >= kills // 7
    assert found["stormy"] == found["calm"]
    assert found["calm"]["leftovers"] == []
    pairs = len(models) * len(skus)
    assert sum(key.split()[-1] in ("1", "2") for key in found["calm"]) == 2 * pairs
    assert sum(key.endswith("stable") for key in found["calm"]) == pairs - len(models)
