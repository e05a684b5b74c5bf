"""What is switched on and off, and in which order: fusion, KV cache, batching, quantisation.

The order is the recommended one: each pays whatever comes after it, and quantisation, which alone costs accuracy, is
last. Data only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from passes.standard import PassSwitches
from pipeline.config import BuildConfig
from pipeline.quantize.config import QuantizeConfig
from plugins.errors import KilnError

DECODER_SWITCHES = ("fusion", "kv", "batching", "quantisation")
PLAIN_SWITCHES = ("fusion", "batching", "quantisation")
_BUILT = ("fusion", "quantisation")
"""Switches that take a bundle of their own."""
_NO_FUSION = {True: ("bind_attention",), False: ("remove_unused",)}
"""Passes that stay, for a decoder and for others: those that an engine needs, or one that changes no operator."""


@dataclass(frozen=True)
class AblateConfig:
    """The workload, and what to build. `requests` of `prompt` tokens give `output` tokens each; samples for others."""

    out: Path | None = None
    requests: int = 8
    prompt: int = 64
    output: int = 16
    repetitions: int = 3
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    build: BuildConfig = field(default_factory=BuildConfig)
    threads: int | None = None
    compared_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"requests": 1, "prompt": 1, "output": 2, "repetitions": 1, "compared_tokens": 2}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least {smallest}")


@dataclass(frozen=True)
class Variant:
    """What is on. `parent` is the index of the variant that it is compared with, None for the first."""

    on: frozenset[str]
    parent: int | None
    change: str

    @property
    def bundle(self) -> frozenset[str]:
        """What decides its bundle."""
        return self.on.intersection(_BUILT)

    def title(self, switches: Sequence[str]) -> str:
        return " + ".join(switch for switch in switches if switch in self.on) or "none"


def variants(switches: Sequence[str]) -> list[Variant]:
    """Nothing; each switch alone; then all of them one after the other, of which the first is there already."""
    found = [Variant(frozenset(), None, "the baseline")]
    found += [Variant(frozenset({switch}), 0, f"{switch} on") for switch in switches]
    parent = 1
    for place, switch in enumerate(switches[1:], 2):
        found.append(Variant(frozenset(switches[:place]), parent, f"{switch} on"))
        parent = len(found) - 1
    return found


def build_config(config: AblateConfig, bundle: frozenset[str], decoder: bool, path: Path) -> BuildConfig:
    """How the bundle of a variant is built."""
    switches = config.build.passes if "fusion" in bundle else PassSwitches(only=_NO_FUSION[decoder])
    quantize = config.quantize if "quantisation" in bundle else None
    return replace(config.build, out=path, passes=switches, quantize=quantize)
