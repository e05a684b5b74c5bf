"""What tests of `kiln tune` share: a workload, and the tokens that a bundle gives."""

from pathlib import Path

import numpy as np

from engines.runtime.engine import Engine
from engines.runtime.request import SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from pipeline.load_test.trace import Lengths, Workload

TRACE = Workload(Lengths(20), Lengths(8)).draw(16, 0)


def answers(path: Path) -> list[tuple[int, ...]]:
    prompts = [np.random.default_rng(length).integers(1, 500, length).tolist() for length in (1, 7, 16, 33, 90)]
    with Engine.open(path, threads=1, config=SchedulerConfig(max_running=4)) as engine:
        return [c.token_ids for c in engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))]
