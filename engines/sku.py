"""The SKU table: which machine types Kiln builds for, and which one this machine is.

Reads `skus.toml`. `cpu` is not an entry but a name for the best CPU entry that this machine can run.
"""

import os
import platform
import tomllib
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from plugins.errors import KilnError

TABLE = Path(__file__).with_name("skus.toml")


class Sku(BaseModel):
    """One machine type. `memory` (bytes), `bandwidth` (bytes/s) and `peak` (operations/s per dtype) may be unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arch: str
    backend: str
    provider: str
    precisions: tuple[str, ...]
    source: str
    cpu_features: tuple[str, ...] = ()
    memory: int | None = None
    bandwidth: float | None = None
    peak: dict[str, float] = {}

    @property
    def is_cpu(self) -> bool:
        return self.provider == "CPUExecutionProvider"


@cache
def sku_table() -> dict[str, Sku]:
    """All entries of `skus.toml` by name. An unknown key in the file raises ValidationError."""
    entries = tomllib.loads(TABLE.read_text())
    return {name: Sku.model_validate({"name": name, **entry}) for name, entry in entries.items()}


@cache
def host_cpu_features() -> frozenset[str]:
    """The CPU's feature flags as Linux names them; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit if lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total


def resolve_sku(name: str) -> Sku:
    """The entry called `name`; `cpu` gives the best CPU entry this machine can run. Raises KilnError."""
    table = sku_table()
    if name != "cpu":
        if name not in table:
            raise KilnError(f"unknown SKU '{name}'; known are cpu, {', '.join(table)}")
        return table[name]
    features = host_cpu_features()
    for candidate in ("cpu-avx512", "cpu-avx2"):
        if features.issuperset(table[candidate].cpu_features):
            return table[candidate]
    raise KilnError(
        f"this CPU ({platform.machine()}) lacks {', '.join(sorted(set(table['cpu-avx2'].cpu_features) - features))}; "
        "Kiln's CPU SKUs need AVX2"
    )
