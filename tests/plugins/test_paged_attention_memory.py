"""What a call of the operator allocates: no score matrix, and no copy of a cache that is bound in place."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plugins.paged_attention.reference import Attributes

from .conftest import Case, Operator, Sequence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ATTRIBUTES = Attributes(num_heads=8, kv_num_heads=2)
CASE = Case(
    seed=4,
    sequences=(Sequence(4096, 0),),
    attributes=ATTRIBUTES,
    head_dim=32,
    block_size=16,
    key_dtype="float32",
    value_dtype="float32",
    rotary_dim=32,
)
MIB = 1 << 20


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the process was larger during the call than before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size
    before = _peak()
    call()
    return _peak() - before


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_prefill_keeps_no_score_matrix(operator: Operator) -> None:
    """One head's scores alone would be 64 MiB, all of them 512 MiB."""
    inputs = CASE.inputs()
    operator.run_in_place(inputs, ATTRIBUTES)  # the scratch of the threads and the session's own things
    output_bytes = inputs.query.nbytes
    assert peak_growth(lambda: operator.run_in_place(inputs, ATTRIBUTES)) < output_bytes + 16 * MIB


@pytest.mark.parametrize("new", [1, 40])
def test_cost_in_memory_does_not_depend_on_the_pool(operator: Operator, new: int) -> None:
    inputs = replace(CASE, sequences=(Sequence(new, 500),)).inputs()
    pool = (50_000, *inputs.key_cache.shape[1:])  # 195 MiB each; zeros that are never touched cost nothing
    large = replace(inputs, key_cache=np.zeros(pool, np.float32), value_cache=np.zeros(pool, np.float32))
    used = len(inputs.key_cache)
    large.key_cache[:used], large.value_cache[:used] = inputs.key_cache, inputs.value_cache
    outputs = []
    assert peak_growth(lambda: outputs.append(operator.run_in_place(large, ATTRIBUTES))) < 16 * MIB
    assert outputs[0].tobytes() == operator.run_in_place(inputs, ATTRIBUTES).tobytes()
