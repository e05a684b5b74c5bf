"""`kiln nightly`'s TOML file: which models for which SKUs, and what a candidate must hold.

    registry = "s3://engines/kiln"          # a folder, or an fsspec URL
    key = "nightly.pem"                     # signs; kiln registry key makes it
    trust = "trusted.toml"
    work = "/var/lib/kiln"                  # journal, bundles, reports
    skus = ["cpu-avx512", "cpu-avx2"]
    memory = "8 GiB"                        # of each child process
    timeout = 3600                          # seconds of each child process

    [models.smollm2]
    source = "smollm2"
    build = { block_size = 32 }

    [models.classifier]
    source = "models/classifier.onnx"
    skus = ["cpu-avx512"]
    accuracy = { samples = "labelled.npz", limits = "limits.toml" }

Paths are relative to the file. An unknown key is an error. Data only.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from passes.standard import PassSwitches
from pipeline.config import BuildConfig
from pipeline.quantize.config import QuantizeConfig
from plugins.errors import KilnError, first_problem
from plugins.paged_attention.schema import CacheDtype

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)")
_FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BuildOptions(_Part):
    """How a model is built: `build-engine`'s options of the same names."""

    kv_dtype: CacheDtype | None = None
    """None is what `build-engine` takes without the option."""
    block_size: int = 16
    max_context: int | None = None
    io_layout: Literal["nchw", "nhwc"] = "nchw"
    enable: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    verify_passes: bool = True
    inputs: Path | None = None
    quant: str | None = None
    keep: tuple[str, ...] = ()

    def config(self, out: Path, sku_file: Path | None) -> BuildConfig:
        """Raises KilnError for values that no build takes."""
        return BuildConfig(
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            max_context=self.max_context,
            io_layout=self.io_layout,
            passes=PassSwitches((), self.enable, self.disable, {}),
            verify_passes=self.verify_passes,
            inputs=self.inputs,
            quantize=None if self.quant is None else QuantizeConfig(quant=self.quant, keep=self.keep),
            out=out,
            sku_file=sku_file,
            elsewhere=True,
        )


class AccuracyOptions(_Part):
    """What the accuracy gate measures on, and a user's limits (`pipeline.gate.limits`)."""

    limits: Path | None = None
    text: Path | None = None
    """Of a decoder; None for Python's documentation, or random tokens without a tokenizer."""
    samples: Path | None = None
    """An .npz of inputs, perhaps with labels, of any other model; None for random ones."""
    count: int = Field(default=16, ge=1)
    """Random samples."""
    generate: int = Field(default=64, ge=1)
    """Tokens of a continuation, where the context holds them."""
    seed: int = 0


class SpeedOptions(_Part):
    """A candidate is slower where the paired ratios' median exceeds 1 + `limit` at this confidence."""

    limit: float = Field(default=0.05, ge=0)
    pairs: int = Field(default=11, ge=8)
    most_pairs: int = Field(default=44, ge=8)
    """Measured where fewer do not decide."""
    confidence: float = Field(default=0.99, gt=0.5, lt=1)
    seconds: float = Field(default=0.1, gt=0)
    """Least of one measurement."""
    prompt: int = Field(default=128, ge=1)
    tokens: int = Field(default=16, ge=1)
    batch: int = Field(default=1, ge=1)


class DeterminismOptions(_Part):
    """Outputs that are not those of `stable` must lie within `margin` times what `rebuilds` of the candidate differ."""

    rebuilds: int = Field(default=2, ge=1)
    margin: float = Field(default=2.0, ge=1)
    samples: int = Field(default=4, ge=1)
    tokens: int = Field(default=64, ge=2)
    seed: int = 0


class ModelEntry(_Part):
    """One model; parts that are None are those of the whole file."""

    source: str
    skus: tuple[str, ...] | None = None
    build: BuildOptions = BuildOptions()
    accuracy: AccuracyOptions | None = None
    speed: SpeedOptions | None = None
    determinism: DeterminismOptions | None = None


class NightlyConfig(_Part):
    """The whole file. `memory` in bytes, None for no limit; `timeout` in seconds."""

    registry: str
    key: Path
    trust: Path
    work: Path
    skus: tuple[str, ...] = ()
    sku_file: Path | None = None
    single_writer: bool = False
    retries: int = Field(default=1, ge=0)
    """Of what crashed or ran out of time or memory."""
    memory: int | None = Field(default=None, gt=0)
    timeout: float = Field(default=3600.0, gt=0)
    threads: int | None = Field(default=None, ge=1)
    accuracy: AccuracyOptions = AccuracyOptions()
    speed: SpeedOptions = SpeedOptions()
    determinism: DeterminismOptions = DeterminismOptions()
    models: dict[str, ModelEntry]

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is no size; expected bytes, or as in '8 GiB'")
        return int(float(match[1]) * _FACTORS[match[2]])

    @property
    def jobs(self) -> tuple[tuple[str, str], ...]:
        """Model and SKU of every job, in the file's order."""
        return tuple(
            (name, sku)
            for name, entry in self.models.items()
            for sku in (self.skus if entry.skus is None else entry.skus)
        )


def config_from_toml(path: Path) -> NightlyConfig:
    """Raises KilnError naming the field."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KilnError(
            f"{path} cannot be read: {error.strerror}; expected a TOML file, docs/nightly.md shows one"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KilnError(f"{path} is not TOML: {error}; docs/nightly.md shows one") from error
    try:
        config = NightlyConfig.model_validate(document)
    except ValidationError as error:
        where, problem = first_problem(error)
        raise KilnError(f"{path}: field '{where}': {problem}") from error
    if not config.models:
        raise KilnError(f"{path} names no model; expected a table [models.NAME] with 'source' for each")
    for name, entry in config.models.items():
        if not config.skus and not entry.skus:
            raise KilnError(f"{path}: models.{name} has no SKU; give 'skus' there or for the whole file")
    return _with_paths_from(config, path.resolve().parent)


def _with_paths_from(config: NightlyConfig, folder: Path) -> NightlyConfig:
    """Relative paths become those of the file's folder: cron jobs start anywhere."""

    def resolved(part: Any) -> Any:
        if isinstance(part, Path):
            return folder / part.expanduser()
        if isinstance(part, BaseModel):
            return part.model_copy(update={name: resolved(getattr(part, name)) for name in type(part).model_fields})
        if isinstance(part, dict):
            return {name: resolved(value) for name, value in part.items()}
        return part

    whole: NightlyConfig = resolved(config)
    models = {
        name: entry.model_copy(update={"source": _source(entry.source, folder)}) for name, entry in whole.models.items()
    }
    registry = whole.registry if "://" in whole.registry else str(folder / whole.registry)
    return whole.model_copy(update={"models": models, "registry": registry})


def _source(source: str, folder: Path) -> str:
    """A path that exists beside the file; anything else as it is: a short name, a hub id, a callable."""
    beside = folder / Path(source).expanduser()
    return str(beside) if beside.exists() else source
