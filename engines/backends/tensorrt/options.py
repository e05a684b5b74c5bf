"""Options of a TensorRT build: one frozen record. Each field carries what it gives and what it costs.

The command line, its --help and docs/tensorrt.md are made from the fields, so that an option cannot lack its price.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from plugins.errors import KilnError

Refit = Literal["none", "all", "identical"]
Hardware = Literal["this", "ampere-plus", "same-capability"]
REFITS: tuple[str, ...] = get_args(Refit)
HARDWARE: tuple[str, ...] = get_args(Hardware)
MAX_LEVEL = 5
_NOT_IN_PLAN = ("timing_cache", "error_on_cache_miss")
"""Options that say how a plan is found, not what it is."""


def _words(gives: str, price: str, choices: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"gives": gives, "price": price, "choices": choices}


@dataclass(frozen=True)
class TensorRtOptions:
    """How TensorRT builds a plan. Sizes in bytes. Raises KilnError for options that exclude one another.

    `metadata` of a field: `gives`, `price` and, for words, `choices`.
    """

    workspace: int | None = field(
        default=None,
        metadata=_words(
            "Most scratch memory, in MiB, that one layer may use.",
            "Too little excludes the fastest tactics and some layers altogether; not given, it may be all memory.",
        ),
    )
    optimization_level: int = field(
        default=3,
        metadata=_words(
            "How long TensorRT searches: 0 takes the first tactic that works, 5 compares the most.",
            "Each level above 3 builds longer than the one below; each below it gives up tactics.",
        ),
    )
    timing_cache: Path | None = field(
        default=None,
        metadata=_words(
            "Start from the timings in this file, such as an earlier bundle's timing.cache.",
            "Timings of another GPU or TensorRT are refused, not used.",
        ),
    )
    error_on_cache_miss: bool = field(
        default=False,
        metadata=_words(
            "Fail where a layer's timing is not in the timing cache, so that a build repeats an earlier one exactly.",
            "Any change of the model or of TensorRT fails the build. TensorRT 11.0 lets misses through.",
        ),
    )
    refit: Refit = field(
        default="none",
        metadata=_words(
            "Weights that can be put into the finished plan: any weights (all), or again the same ones (identical).",
            "all keeps TensorRT from rewriting weights ahead of time, which costs speed. identical does not, but other "
            "weights than those it was built with give undefined results.",
            REFITS,
        ),
    )
    strip_weights: bool = field(
        default=False,
        metadata=_words(
            "Leave the weights out of the plan; they lie beside it as the ONNX model and are put in when it is opened.",
            "Opening takes the time of a refit. Needs --trt-refit identical or all.",
        ),
    )
    weight_streaming: bool = field(
        default=False,
        metadata=_words(
            "Keep weights in host memory and stream them to the GPU layer by layer, for models larger than it.",
            "Each step waits for the bus wherever the budget does not hold a layer's weights.",
        ),
    )
    version_compatible: bool = field(
        default=False,
        metadata=_words(
            "A plan that later versions of TensorRT open as well.",
            "Slower by the tactics that the lean runtime lacks; the plan carries that runtime, whose code runs when "
            "it is opened, unless --trt-exclude-lean-runtime.",
        ),
    )
    exclude_lean_runtime: bool = field(
        default=False,
        metadata=_words(
            "Leave the lean runtime out of a version-compatible plan.",
            "The machine that opens it needs the lean runtime of the version that built it.",
        ),
    )
    hardware: Hardware = field(
        default="this",
        metadata=_words(
            "GPUs that may run the plan: of this type, of its compute capability, or Ampere and newer.",
            "same-capability and ampere-plus use neither cuDNN nor cuBLAS; ampere-plus keeps to 48 KiB of shared "
            "memory and to what Ampere has, which excludes FP8.",
            HARDWARE,
        ),
    )
    distributive_independence: bool = field(
        default=False,
        metadata=_words(
            "Batch items give the same bits whatever else is in the batch, with constant weights.",
            "Tactics that sum in an order that depends on the batch are excluded, which slows some layers.",
        ),
    )
    tf32: bool = field(
        default=False,
        metadata=_words(
            "FP32 products on tensor cores with operands rounded to 10 bits of mantissa.",
            "Relative errors of 1e-3 instead of 1e-7 a product; only FP32 layers are concerned.",
        ),
    )

    def __post_init__(self) -> None:
        if self.workspace is not None and self.workspace < 1:
            raise KilnError(f"the workspace is {self.workspace} bytes; expected a positive size, or none for no limit")
        if not 0 <= self.optimization_level <= MAX_LEVEL:
            raise KilnError(f"the optimisation level is {self.optimization_level}; expected 0 to {MAX_LEVEL}")
        for name, value, known in (("refit", self.refit, REFITS), ("hardware", self.hardware, HARDWARE)):
            if value not in known:
                raise KilnError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        if self.strip_weights and self.refit == "none":
            raise KilnError(
                "a plan without weights gets them by refit, which is none; add --trt-refit identical, or all"
            )
        if self.exclude_lean_runtime and not self.version_compatible:
            raise KilnError("only a version-compatible plan has a lean runtime; add --trt-version-compatible")
        if self.error_on_cache_miss and self.timing_cache is None:
            raise KilnError("without a timing cache every layer would miss it; give --trt-timing-cache")

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the `BuilderFlag`s that are set; the cache is always editable, so that misses can be counted."""
        refit = {"none": "", "all": "REFIT", "identical": "REFIT_IDENTICAL"}[self.refit]
        chosen = {
            "EDITABLE_TIMING_CACHE": True,
            "ERROR_ON_TIMING_CACHE_MISS": self.error_on_cache_miss,
            refit: bool(refit),
            "STRIP_PLAN": self.strip_weights,
            "WEIGHT_STREAMING": self.weight_streaming,
            "VERSION_COMPATIBLE": self.version_compatible,
            "EXCLUDE_LEAN_RUNTIME": self.exclude_lean_runtime,
            "DISTRIBUTIVE_INDEPENDENCE": self.distributive_independence,
            "TF32": self.tf32,
        }
        return tuple(name for name, is_set in chosen.items() if is_set)

    @property
    def hardware_level(self) -> str:
        """Member of `HardwareCompatibilityLevel`."""
        return {"this": "NONE", "ampere-plus": "AMPERE_PLUS", "same-capability": "SAME_COMPUTE_CAPABILITY"}[
            self.hardware
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides what the plan is."""
        decisive = {name: value for name, value in asdict(self).items() if name not in _NOT_IN_PLAN}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def options_from_dict(document: Mapping[str, Any]) -> TensorRtOptions:
    """Raises KilnError for an unknown option, or values that exclude one another."""
    known = [option.name for option in fields(TensorRtOptions)]
    if unknown := sorted(set(document) - set(known)):
        raise KilnError(f"TensorRT has no option {unknown[0]}; expected {', '.join(known)}")
    cache = document.get("timing_cache")
    return TensorRtOptions(**{**document, "timing_cache": Path(cache) if cache else None})
