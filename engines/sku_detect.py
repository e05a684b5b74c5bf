"""Which SKU a machine is: its CPU by feature flags, its GPUs by what nvidia-smi says, a Jetson by its device tree.

Asks nvidia-smi rather than the CUDA driver, so that a broken driver is a message and not a crash. What another
machine's nvidia-smi printed can be given instead. Knows nothing of installed software.
"""

import csv
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.sku import Sku, host_memory
from plugins.errors import KilnError

FIELDS = ("index", "name", "memory.total", "compute_cap", "driver_version")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
"""What is run, and what another machine's user runs for `kiln sku detect --nvidia-smi`."""
DEVICE_TREE = Path("/proc/device-tree/model")
_MEMORY_TOLERANCE = 0.1
"""Of the table's figure: drivers and ECC change the total by a few per cent; a MIG slice or a vGPU by more."""
_UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "Not Supported", "")


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it; `memory` in bytes and `arch` are None where it does not say."""

    index: int
    name: str
    memory: int | None
    arch: str | None
    driver: str | None


@dataclass(frozen=True)
class Match:
    """A GPU and its SKU, or why it has none."""

    gpu: Gpu
    sku: Sku | None
    reason: str = ""


class NoDriverError(KilnError):
    """This machine has no nvidia-smi, or it does not work; the message says which."""


def gpus_from_nvidia_smi(text: str) -> list[Gpu]:
    """Parse what `QUERY` prints, also with a header or with units. Raises KilnError for anything else."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0] == FIELDS[0]:
            continue
        if len(cells) != len(FIELDS) or not cells[0].isdigit():
            raise KilnError(f"found the line {','.join(row)[:120]!r}; expected what this prints: {' '.join(QUERY)}")
        index, name, memory, capability, driver = cells
        gpus.append(Gpu(int(index), name, _mebibytes(memory), _arch(capability), _known(driver)))
    return gpus


def _known(cell: str) -> str | None:
    return None if cell in _UNKNOWN else cell


def _mebibytes(cell: str) -> int | None:
    number = cell.removesuffix("MiB").strip()
    return int(number) * 2**20 if number.isdigit() else None


def _arch(cell: str) -> str | None:
    major, _, minor = cell.partition(".")
    return f"sm_{major}{minor}" if major.isdigit() and minor.isdigit() else None


def query_gpus(query: Sequence[str] = QUERY) -> list[Gpu]:
    """This machine's GPUs. Raises NoDriverError without a working nvidia-smi."""
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        raise NoDriverError(f"no {query[0]} on the path") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoDriverError(f"{query[0]} does not answer: {error}") from error
    if answer.returncode != 0:
        words = " ".join((answer.stdout + answer.stderr).split())
        raise NoDriverError(f"{query[0]} failed with code {answer.returncode}: {words[:200]}")
    return gpus_from_nvidia_smi(answer.stdout)


def jetson_from_device_tree(path: Path = DEVICE_TREE) -> str | None:
    """The board's name on a Jetson, None elsewhere."""
    try:
        name = path.read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return None
    return name if "Jetson" in name else None


def match_gpu(gpu: Gpu, table: Mapping[str, Sku]) -> Match:
    """The entry that has this GPU's name, architecture and memory."""
    named = [sku for sku in table.values() if gpu.name in sku.names]
    for sku in named:
        if gpu.arch not in (None, sku.arch):
            continue
        assert sku.memory is not None, "a GPU's entry has memory"
        if gpu.memory is None or abs(gpu.memory - sku.memory) <= _MEMORY_TOLERANCE * sku.memory:
            return Match(gpu, sku)
    if named:
        wants = "; ".join(f"{sku.name} is {sku.arch} with {(sku.memory or 0) / 2**20:.0f} MiB" for sku in named)
        has = "an unknown size" if gpu.memory is None else f"{gpu.memory / 2**20:.0f} MiB"
        return Match(gpu, None, f"it is {gpu.arch} with {has}, but {wants}: a slice of a GPU, or a virtual one?")
    alike = [sku.name for sku in table.values() if sku.arch == gpu.arch]
    like = f"; of its architecture {gpu.arch} are {', '.join(alike)}" if alike else f"; none is {gpu.arch}"
    return Match(gpu, None, f"no SKU has the name {gpu.name!r}{like}")


def toml_from_gpu(gpu: Gpu, table: Mapping[str, Sku]) -> str | None:
    """An entry for a user's SKU file, like the entry nearest in memory of this GPU's architecture; None if none is."""
    alike = [sku for sku in table.values() if sku.arch == gpu.arch and sku.memory]
    if not alike or gpu.memory is None:
        return None
    memory = gpu.memory
    nearest = min(alike, key=lambda sku: abs((sku.memory or 0) - memory))
    words = "".join(letter if letter.isalnum() else "-" for letter in gpu.name.lower().removeprefix("nvidia "))
    name = "-".join(part for part in words.split("-") if part)
    return "\n".join(
        (
            f"[{name or 'my-gpu'}]",
            f'like = "{nearest.name}"',
            f"names = [{json.dumps(gpu.name)}]",
            f"memory = {memory}",
            "bandwidth = 0.0  # bytes/s, from its data sheet",
            "peak = {}  # dense operations/s by precision, from its data sheet",
            'source = ""  # which data sheet',
        )
    )


def own_gpus() -> list[Gpu]:
    """This machine's GPUs; on a Jetson its board stands for the one. Raises NoDriverError as `query_gpus` does."""
    board = jetson_from_device_tree()
    try:
        gpus = query_gpus()
    except NoDriverError:
        if board is None:
            raise
        gpus = []
    if board is None:
        return gpus
    # Its nvidia-smi, where there is one, says neither model nor memory, and it shares the CPU's memory.
    return [Gpu(0, board, host_memory(), None, gpus[0].driver if gpus else None)]
