"""Times the CUDA kernel that chooses tokens in CUDA graphs, beside the time of reading the logits once.

    python scripts/bench_cuda_sampling.py [--library PATH] [--vocabulary 128256]

Logits are normal with a standard deviation of 3, or nearly flat (0.1), and may still be in the L2 cache, as in a step
that has just written them. The floor is their bytes at the bandwidth of a device-to-device copy measured in the same
run. Prints one table and one JSON line.
"""

import argparse
import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.device_limits import copy_bandwidth, device_seconds
from plugins.cuda_build import cuda_library
from plugins.sampling.cuda_calls import CudaSampling

ROWS = (1, 8, 32, 128, 256)
KINDS: dict[str, tuple[float, float, int, float, float]] = {  # spread, temperature, top_k, top_p, min_p
    "greedy": (3.0, 0.0, 0, 1.0, 0.0),
    "temperature": (3.0, 1.0, 0, 1.0, 0.0),
    "min_p": (3.0, 1.0, 0, 1.0, 0.05),
    "top_k 50": (3.0, 1.0, 50, 1.0, 0.0),
    "top_p 0.95": (3.0, 1.0, 0, 0.95, 0.0),
    "top_k, top_p": (3.0, 1.0, 50, 0.95, 0.0),
    "flat, top_p": (0.1, 1.0, 0, 0.95, 0.0),
}


def microseconds(run: Callable[[], object], calls: int = 20) -> float:
    """Of one call, the median of nine replays of a graph."""
    return device_seconds(run, calls) * 1e6


def operands(rows: int, vocabulary: int, kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    spread, temperature, top_k, top_p, min_p = KINDS[kind]
    logits = (
        torch.randn(rows, vocabulary, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * spread
    ).to(dtype)
    of_rows = [(temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32)]
    filled = [torch.full((rows,), value, dtype=kind, device="cuda") for value, kind in of_rows]
    seeds = torch.arange(rows, dtype=torch.int64, device="cuda")
    return [logits, *filled, seeds, torch.full((rows,), 7, dtype=torch.int32, device="cuda")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--vocabulary", type=int, default=128256)
    arguments = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    kernels = CudaSampling(ctypes.CDLL(str(arguments.library or cuda_library([f"sm_{major}{minor}"]))))
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, vocabulary {arguments.vocabulary}; us")
    print(f"{'':>10}{'':>14}" + "".join(f"{rows:>9}" for rows in ROWS))
    results: dict[str, dict[str, dict[int, float]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        floor = {rows: rows * arguments.vocabulary * dtype.itemsize / bandwidth * 1e6 for rows in ROWS}
        print(f"{name:>10}{'floor':>14}" + "".join(f"{floor[rows]:>9.1f}" for rows in ROWS))
        results[name] = {"floor": floor}
        for kind in KINDS:
            found = {}
            for rows in ROWS:
                given = operands(rows, arguments.vocabulary, kind, dtype)
                out = torch.empty(rows, dtype=torch.int32, device="cuda")
                found[rows] = microseconds(lambda given=given, out=out: kernels.sample(*given, out=out))
            print(f"{name:>10}{kind:>14}" + "".join(f"{found[rows]:>9.1f}" for rows in ROWS), flush=True)
            results[name][kind] = found
    print(json.dumps({"vocabulary": arguments.vocabulary, "copy": bandwidth, "microseconds": results}))


if __name__ == "__main__":
    main()
