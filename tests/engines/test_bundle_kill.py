"""`kill -9` and concurrency: at every moment a bundle's path holds nothing, the old bundle or the new one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.bundle import open_bundle

HARNESS = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_bundle as t
from engines import bundle as module

path = Path({path!r})

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid
"""


def run_harness(path: Path, program: str) -> str:
    """Run a program of its own that may fork: this process has threads."""
    code = HARNESS.format(tests=str(Path(__file__).parent), path=str(path)) + program
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_kill_at_every_line_of_the_writer(tmp_path):
    """A child replaces the bundle and kills itself at line number n of bundle.py, for every n."""
    output = run_harness(
        tmp_path / "bundle",
        """
def write_and_die(limit, mark):
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    t.make(path, mark)
    sys.settrace(None)

seen = {"m": 0, "mx": 0}
for start in ("absent", "present"):
    limit = 0
    name = None
    while True:
        limit += 1
        if start == "present" and name != "m":
            t.make(path)
        pid = child(lambda: write_and_die(limit, b"x"))
        killed = os.waitpid(pid, 0)[1] != 0
        if path.exists() or start == "present":
            name = module.open_bundle(path).manifest.name
            seen[name] += 1
        if start == "absent" and path.exists():
            t.shutil.rmtree(path)
        if not killed:
            break
t.make(path)
print(seen["m"], seen["mx"], len(t.leftovers(path.parent)))
""",
    )
    old, new, remains = map(int, output.split())
    assert old > 50
    assert new >= 2
    assert remains == 0


def test_kill_at_random_moments_of_a_loop_of_writers(tmp_path):
    output = run_harness(
        tmp_path / "bundle",
        """
def loop():
    while True:
        t.make(path, b"b")
        t.make(path, b"a")

seen = {"ma": 0, "mb": 0}
generator = random.Random(1)
t.make(path, b"a")
for _ in range(80):
    pid = child(loop)
    time.sleep(generator.uniform(0, 0.06))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    seen[module.open_bundle(path).manifest.name] += 1
    assert len(t.leftovers(path.parent)) <= 1
t.make(path)
print(*seen.values(), len(t.leftovers(path.parent)))
""",
    )
    first, second, remains = map(int, output.split())
    assert first + second == 80
    assert second > 5
    assert remains == 0


def test_writers_and_readers_at_once(tmp_path):
    """Two processes replace one bundle as fast as they can; whoever opens it meanwhile gets a whole one."""
    output = run_harness(
        tmp_path / "bundle",
        """
def loop(mark):
    for _ in range(80):
        t.make(path, mark)
    print("written", flush=True)

writers = [child(lambda: loop(b"a")), child(lambda: loop(b"b"))]
seen = set()
while not path.exists():
    time.sleep(0.001)
while writers:
    writers = [pid for pid in writers if os.waitpid(pid, os.WNOHANG)[0] == 0]
    seen.add(module.open_bundle(path).manifest.name)
print(",".join(sorted(seen)), t.leftovers(path.parent))
""",
    )
    assert output.split("\n")[:3] == ["written", "written", "ma,mb []"]


@pytest.mark.slow
def test_kill_a_real_build(tiny_llama_bundle, tiny_llama_folder, tmp_path):
    """build-engine replaces a bundle and is killed after each stage; a build that is left alone then succeeds."""
    path = tmp_path / "out" / "bundle"
    shutil.copytree(tiny_llama_bundle.path, path)
    program = Path(sys.executable).with_name("build-engine")
    command = [str(program), str(tiny_llama_folder), "--out", str(path), "--block-size", "32"]
    for stage in ("load weights", "graph passes", "check"):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert process.stderr
        for line in process.stderr:
            if stage in line:
                break
        else:
            pytest.fail(f"the build did not report its stage '{stage}'")
        process.kill()
        process.stderr.close()
        assert process.wait() == -9
        assert open_bundle(path).manifest.decoder.kv.block_size in (16, 32)
    subprocess.run(command, check=True, capture_output=True)
    assert open_bundle(path).manifest.decoder.kv.block_size == 32
    assert os.listdir(path.parent) == ["bundle"]
