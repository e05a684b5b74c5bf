"""What a plan was built for and by, and the refusal of a plan that does not belong here.

A plan is machine code for one GPU type, TensorRT and set of plugins; TensorRT finds some mismatches while it
deserialises, with messages that do not name both sides, and some not at all. So the key is compared before that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.backends.tensorrt.api import Product
from engines.backends.tensorrt.options import Hardware
from plugins.errors import KilnError

_WORDS = {
    "product": "product",
    "tensorrt": "TensorRT",
    "sku": "SKU",
    "arch": "architecture",
    "driver": "driver",
    "plugin_abi": "plugin ABI",
    "model_sha256": "model",
    "options": "options",
    "profiles": "profiles",
}
_AMPERE = 80


@dataclass(frozen=True)
class EngineKey:
    """Digests are SHA-256, `options` and `profiles` included. `driver` is None for a plan that was built, and then not
    checked, on a machine without one: it is opened nowhere until it is built where it belongs. `plugin_abi` is None
    without plug-in.

    `hardware` and `version_compatible` say how far the others may differ.
    """

    product: Product
    tensorrt: str
    sku: str
    arch: str
    driver: str | None
    plugin_abi: str | None
    model_sha256: str
    options: str
    profiles: str
    hardware: Hardware = "this"
    version_compatible: bool = False


def mismatches(built: EngineKey, here: EngineKey) -> tuple[str, ...]:
    """Fields in which a plan does not belong here, as far as its own options allow differences."""
    allowed: dict[str, Callable[[], bool]] = {
        "tensorrt": lambda: built.version_compatible and _at_least(here.tensorrt, built.tensorrt),
        "sku": lambda: built.hardware != "this",
        "arch": lambda: built.hardware == "ampere-plus" and _capability(here.arch) >= _AMPERE,
    }
    return tuple(
        name
        for name in _WORDS
        if getattr(built, name) != getattr(here, name) and not (name in allowed and allowed[name]())
    )


def refuse_mismatch(built: EngineKey, here: EngineKey, plan: Path) -> None:
    """Raise KilnError naming both sides of every field in which they differ. Nothing is deserialised."""
    names = mismatches(built, here)
    if names:
        sides = "; ".join(f"{_WORDS[name]} {_short(name, built)}, here {_short(name, here)}" for name in names)
        raise KilnError(
            f"{plan} was built for another setting and was not opened: built for {sides}. Build it again here, "
            "or run the bundle where it belongs"
        )


def _at_least(found: str, wanted: str) -> bool:
    """Whether a version-compatible plan of `wanted` runs on `found`: an equal or later version."""
    return _numbers(found) >= _numbers(wanted)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _capability(arch: str) -> int:
    digits = arch.removeprefix("sm_")
    return int(digits) if digits.isdigit() else 0


def _short(name: str, key: EngineKey) -> str:
    value = getattr(key, name)
    if value is None:
        return "not recorded" if name == "driver" else "none"
    return str(value)[:12] if len(str(value)) == 64 else str(value)
