"""A server that is killed leaves no engine behind, whether that computes tokens or hangs in a model."""

import subprocess
import sys

import psutil
import pytest

PARENT = """
import asyncio, sys
import numpy as np
from pathlib import Path
from engines.runtime.request import Request, SamplingParams
from engines.server.engine_process import EngineProcess, SupervisionConfig
from engines.server.messages import EngineSpec

async def main():
    engine = await EngineProcess.start(EngineSpec(Path(sys.argv[1]), threads=1), SupervisionConfig(close_seconds=0.5))
    if engine.info.kind == "decoder":
        await anext((await engine.submit(Request((1, 2, 3), SamplingParams(ignore_eos=True))))[0])
        work = asyncio.sleep(600)
    else:
        work = engine.infer({"times": np.array(2**62)})
    print(engine.pid, flush=True)
    await work

asyncio.run(main())
"""


@pytest.mark.parametrize("which", ["bundle", "endless_bundle"])
def test_a_killed_parent_leaves_no_orphan(which, request):
    path = request.getfixturevalue(which).path
    with subprocess.Popen([sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(30)
