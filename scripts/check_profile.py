"""Whether profiles say what happens: operators sum to the pass, and verdicts foretell INT8 and a doubled batch.

    python scripts/check_profile.py FLOAT_BUNDLE INT8_BUNDLE

INT8_BUNDLE is the same decoder with INT8 weights; the other has them in FP32 or, on a GPU, in 16 bits. Prints a table
and one JSON line; exit code 1 where operators miss the pass, on a GPU what the device takes for it, by more than 10 %.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.profile import Profile, ProfileConfig, profile
from pipeline.profile.analysis import TWICE_THE_BATCH, Change, Phase, seconds_if
from pipeline.profile.report import remarks
from pipeline.progress import Progress

_BATCHES = (1, 2, 16, 32)
_MOST = 0.1


def rows(float_profile: Profile, int8_profile: Profile, longer: Profile) -> list[dict[str, Any]]:
    """For each phase what was foretold and what happened, as shares of its time."""
    phases = {phase.name: phase for one in (longer, float_profile) for phase in one.phases}
    int8 = {phase.name: phase for phase in int8_profile.phases}
    on_device = float_profile.threads is None
    fewer = Change(constants=0.5 if on_device else 0.25)  # the cache, which stays, is small beside the weights
    found = []
    for name, doubled in (
        ("prefill_512", "prefill_1024"),
        ("decode_batch_1", "decode_batch_2"),
        ("decode_batch_16", "decode_batch_32"),
    ):
        phase = phases[name]
        found.append(
            {
                "phase": name,
                "ms": phase.seconds * 1e3,
                "host": phase.host / phase.seconds,
                "operators_of_pass": phase.in_operators / (phase.seconds - (phase.host if on_device else 0)),
                "verdict": phase.verdict,
                "int8_foretold": _share(phase, float_profile, fewer),
                "int8_measured": int8[name].seconds / phase.seconds,
                "double_foretold": _share(phase, float_profile, TWICE_THE_BATCH),
                "double_measured": phases[doubled].seconds / phase.seconds,
            }
        )
    return found


def _share(phase: Phase, one: Profile, change: Change) -> float:
    assert one.roofline is not None
    return seconds_if(phase, one.roofline, change) / phase.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("float", type=Path)
    parser.add_argument("int8", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    progress = Progress()
    first = profile(arguments.float, ProfileConfig(512, _BATCHES, tokens=arguments.tokens), progress)
    second = profile(arguments.int8, ProfileConfig(512, (1, 16), tokens=arguments.tokens), progress)
    longer = profile(arguments.float, ProfileConfig(1024, (1,), tokens=8, tokens_per_step=1024), progress)
    found = rows(first, second, longer)
    for row in found:
        print(
            "  ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )
    for one in (first, second, longer):
        for remark in remarks(one):
            print(f"note: {remark}")
    print(json.dumps(found))
    sys.exit(any(abs(row["operators_of_pass"] - 1) > _MOST for row in found))


if __name__ == "__main__":
    main()
