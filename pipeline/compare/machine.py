"""What a report says about the machine and the library versions that its figures come from."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engines.sku import host_memory


def machine_description() -> dict[str, str]:
    """CPU model, usable cores, memory and system, in words."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{host_memory() / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def package_versions(*names: str) -> dict[str, str]:
    """Installed versions of distributions; one that is not installed is left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
