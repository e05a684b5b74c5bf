"""The SKU table: which machine types Kiln builds for, and what their numbers are.

Reads `skus.toml` and files of the same form that users write. `cpu` is not an entry but a name for the best CPU entry
that this machine can run. Which GPU this machine has is found by `engines.sku_detect`; what a model would do on a
machine type is forecast by `pipeline.forecast`.
"""

import os
import platform
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.backends.tensorrt.options import options_from_dict
from plugins.cuda_build import ARCHITECTURES
from plugins.errors import KilnError, first_problem

TABLE = Path(__file__).with_name("skus.toml")
LIKE = "like"
"""Key of a user's entry: the entry whose values it starts from."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_CPU = "CPUExecutionProvider"

Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8", "fp4"]


class Sku(BaseModel):
    """One machine type. Numbers that no source gives are None, or missing in `peak`.

    arch                  `sm_` and the compute capability of a GPU, or the micro-architecture level of a CPU
    generation            what the maker calls that architecture
    provider              ONNX Runtime's execution provider; None for another backend
    options               of that provider, or TensorRT's (`TensorRtOptions`), unless a build says otherwise
    precisions            types that the hardware multiplies
    plugin_architectures  of the plugin library's code; empty where the attention plugin does not run
    names                 what nvidia-smi, or a Jetson's device tree, calls the machine
    multiprocessors       of a GPU
    memory                bytes
    bandwidth             bytes/s
    peak                  dense operations/s by precision, two a multiply-add
    source                where the numbers come from
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str = ""
    arch: str = Field(pattern=r"^(sm_\d{2,3}|x86-64-v[234])$")
    generation: str = ""
    backend: Literal["onnxruntime", "tensorrt"]
    provider: str | None = None
    options: dict[str, bool | int | float | str] = {}
    precisions: tuple[Precision, ...] = Field(min_length=1)
    plugin_architectures: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    cpu_features: tuple[str, ...] = ()
    multiprocessors: int | None = Field(default=None, gt=0)
    memory: int | None = Field(default=None, gt=0)
    bandwidth: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    peak: dict[Precision, float] = {}
    source: str = Field(min_length=1)

    @property
    def is_cpu(self) -> bool:
        return self.provider == _CPU

    @property
    def capability(self) -> tuple[int, int] | None:
        """A GPU's compute capability."""
        digits = self.arch.removeprefix("sm_")
        return None if digits == self.arch else (int(digits[:-1]), int(digits[-1]))

    @property
    def runs_attention_plugin(self) -> bool:
        return bool(self.plugin_architectures)

    @model_validator(mode="after")
    def _consistent(self) -> "Sku":
        if (self.backend == "onnxruntime") != (self.provider is not None):
            raise ValueError("backend onnxruntime needs a provider, and no other backend has one")
        if self.is_cpu != (self.capability is None):
            raise ValueError(f"arch {self.arch} and provider {self.provider} are not of one machine")
        if not self.is_cpu and self.memory is None:
            raise ValueError("a GPU needs memory: it decides what fits")
        for precision, rate in self.peak.items():
            if precision not in self.precisions:
                raise ValueError(f"peak has {precision}, which precisions has not")
            if not 0 < rate < float("inf"):
                raise ValueError(f"peak of {precision} is {rate}; expected operations/s")
        for code in () if self.is_cpu else self.plugin_architectures:
            if code not in ARCHITECTURES or not runs_code_of(code, self.arch):
                fitting = [known for known in ARCHITECTURES if runs_code_of(known, self.arch)]
                raise ValueError(
                    f"plugin_architectures has {code}; expected some of {', '.join(fitting) or 'none'} for {self.arch}"
                )
        return self


def runs_code_of(code: str, arch: str) -> bool:
    """Whether a GPU runs machine code of an architecture: of its own major version, no newer than itself."""
    built, own = code.removeprefix("sm_"), arch.removeprefix("sm_")
    return built[:-1] == own[:-1] and built[-1] <= own[-1]


@cache
def sku_table() -> dict[str, Sku]:
    """All entries of `skus.toml` by name."""
    return _entries_from_file(TABLE, {})


def skus_from_file(path: Path | None) -> dict[str, Sku]:
    """The table and the entries of a user's file. Raises KilnError that names file, SKU and key.

    A user's entry may say `like = "l4"` and give only what differs; its `source` is always its own.
    """
    if path is None:
        return sku_table()
    return {**sku_table(), **_entries_from_file(path, sku_table())}


def _entries_from_file(path: Path, known: Mapping[str, Sku]) -> dict[str, Sku]:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KilnError(f"cannot read the SKU file {path}: {error.strerror}; expected a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KilnError(f"the SKU file {path} is not TOML: {error}; docs/skus.md shows one") from error
    if not entries:
        raise KilnError(f"the SKU file {path} is empty; expected a table for each SKU, as in [my-gpu]")
    found: dict[str, Sku] = {}
    for name, entry in entries.items():
        where = f"{path}: SKU {name}"
        if not isinstance(entry, dict):
            raise KilnError(f"{path}: {name} is not a table; expected [NAME] and below it the keys of one SKU")
        if not _NAME.fullmatch(name) or name == "cpu":
            raise KilnError(f"{where}: bad name; expected small letters, digits, dots and dashes, and not cpu")
        if name in known:
            raise KilnError(f"{where}: the name is taken by Kiln's own table; choose another")
        found[name] = _sku(name, entry, {**known, **found}, where)
    return found


def _sku(name: str, entry: Mapping[str, Any], known: Mapping[str, Sku], where: str) -> Sku:
    values = {key: value for key, value in entry.items() if key != LIKE}
    if LIKE in entry:
        like = entry[LIKE]
        if like not in known:
            raise KilnError(f"{where}: {LIKE} is {like!r}; expected one of {', '.join(known)}, or one above it")
        kept = known[like].model_dump(exclude={"name", "title", "names", "source"}, exclude_unset=True)
        values = {**kept, **values}
    try:
        sku = Sku.model_validate({**values, "name": name})
    except ValidationError as error:
        key, problem = first_problem(error)
        named = f"key {key}: " if key else ""
        keys = ", ".join(field for field in Sku.model_fields if field != "name")
        raise KilnError(f"{where}: {named}{problem}; keys are {keys}, {LIKE}") from error
    if sku.backend == "tensorrt":
        try:
            options_from_dict(sku.options)
        except (KilnError, TypeError) as error:
            raise KilnError(f"{where}: key options: {error}") from error
    return sku


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


def resolve_sku(name: str, file: Path | None = None) -> Sku:
    """The entry called `name`, also of a user's file; `cpu` gives the best CPU entry this machine can run.

    Raises KilnError.
    """
    table = skus_from_file(file)
    if name != "cpu":
        if name not in table:
            raise KilnError(
                f"unknown SKU '{name}'; known are cpu, {', '.join(table)}"
                + ("" if file else ", and those of a file given as --sku-file")
            )
        return table[name]
    features = host_cpu_features()
    for candidate in ("cpu-avx512", "cpu-avx2"):
        if features.issuperset(table[candidate].cpu_features):
            return table[candidate]
    raise KilnError(
        f"this CPU ({platform.machine()}) lacks {', '.join(sorted(set(table['cpu-avx2'].cpu_features) - features))}; "
        "Kiln's CPU SKUs need AVX2"
    )
