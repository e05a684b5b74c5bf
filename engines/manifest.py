"""What a bundle says about itself: the schema of `manifest.json`.

Data only. Reading, verifying and writing bundles is `engines.bundle`'s work.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engines.backends.tensorrt.api import Attention
from engines.backends.tensorrt.key import EngineKey
from engines.backends.tensorrt.profiles import Profile
from passes.onnx_model import DecoderSpec, Tensor

SCHEMA_VERSION = 1


DISTRIBUTION = "kiln-engine"
"""Under which pip knows Kiln; its version is a manifest's `kiln_version`."""


class Record(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(Record):
    """One file of the bundle."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class TensorRecord(Record):
    """An input or output: numpy dtype name; a symbolic dimension is a string."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorRecord":
        return cls(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)

    @property
    def tensor(self) -> Tensor:
        return Tensor(self.name, self.dtype, self.shape)


class ModelRecord(Record):
    """Where the model came from."""

    source: str
    architecture: str
    sha256: str
    parameters: int


class SkuRecord(Record):
    """The machine type that the engine was built for; `cpu_features` are needed to open it."""

    name: str
    arch: str
    cpu_features: tuple[str, ...] = ()


class BackendRecord(Record):
    """The inference library that runs the engine, and the version that it was checked with."""

    name: Literal["onnxruntime", "tensorrt", "tensorrt_rtx"]
    version: str
    provider: str
    options: dict[str, str] = {}
    """Of ONNX Runtime's provider."""


class PluginRecord(Record):
    """A compiled operator library in the bundle."""

    file: str
    operator: str
    abi_hash: str


class PassRecord(Record):
    """What one graph pass did. `rolled_back` says why its result was not kept.

    Errors are those against the graph before the pass, None where they were not measured or not finite; times are
    seconds of one run before and after it, where they were measured. Nodes are counted by operator.
    """

    name: str
    changed: bool
    seconds: float
    effect: str = ""
    rewrites: int = 0
    nodes_before: dict[str, int] = {}
    nodes_after: dict[str, int] = {}
    absolute_error: float | None = None
    relative_error: float | None = None
    cosine: float | None = None
    limit: float | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None
    timing_noise: float | None = None
    rolled_back: str | None = None
    notes: tuple[str, ...] = ()


class CheckRecord(Record):
    """A numeric check that the bundle passed before it was published; `limit` None: reported, not judged."""

    name: str
    value: float
    limit: float | None
    origin: str

    def sentence(self) -> str:
        """For people."""
        limit = "no limit" if self.limit is None else f"limit {self.limit:.0e}"
        return f"error {self.value:.1e}, {limit} ({self.origin})"


class ServingMeasurement(Record):
    """One setting as it was measured: medians over repetitions, times in seconds, rates per second.

    `concurrency` requests were in flight, or so many items in a batch. `noise` is half the relative range of the rates.
    `goodput` and `first_token`, `inter_token` (P99s) are None where they have no meaning or no limit was given.
    """

    concurrency: int
    tokens_per_step: int | None = None
    block_size: int | None = None
    repetitions: int
    requests_per_second: float
    latency: float
    noise: float
    efficiency: float
    first_token: float | None = None
    inter_token: float | None = None
    goodput: float | None = None


class ServingRecord(Record):
    """How the bundle is served unless the caller says otherwise, and the measurements that chose it (`kiln tune`).

    A decoder has `max_running` and `tokens_per_step`, any other model `max_batch`. Limits of the objective are seconds.
    """

    max_running: int | None = Field(default=None, ge=1)
    tokens_per_step: int | None = Field(default=None, ge=1)
    kv_blocks: int | None = Field(default=None, ge=1)
    max_batch: int | None = Field(default=None, ge=1)
    decode_steps: dict[int, float] = {}
    """On a GPU: seconds of a captured decode step by batch size, of the sizes that are to be captured."""
    objective: Literal["throughput", "goodput"]
    slo: dict[str, float] = {}
    knee: int
    """The batch size beyond which efficiency falls; the largest measured where it does not fall."""
    falls: bool
    workload: str
    machine: dict[str, str]
    threads: int
    measurements: tuple[ServingMeasurement, ...]

    def sentence(self) -> str:
        """For people."""
        chosen = {
            "max_running": self.max_running,
            "tokens_per_step": self.tokens_per_step,
            "kv_blocks": self.kv_blocks,
            "max_batch": self.max_batch,
        }
        settings = ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)
        limits = "".join(f", {name} at most {value:g} s" for name, value in self.slo.items())
        falls = "falls beyond" if self.falls else "does not fall up to"
        return f"{settings} for {self.objective}{limits}; efficiency {falls} batch {self.knee}"


class QuantizationRecord(Record):
    """How the layers were quantised. Paths are those of files in the bundle."""

    schemes: dict[str, int]
    """Layers by scheme, those that stay float included."""
    kv: str = ""
    """What of the cache is INT8."""
    plan: str
    table: str | None = None
    data_sha256: str | None = None
    """Of the data that the ranges were calibrated on."""
    gate: str
    """The gate's report."""
    verdict: str
    unmeasured: int = 0
    """Quantised layers whose speed on the SKU was not known, nor that of layers like them."""

    def sentence(self) -> str:
        """For people."""
        layers = ", ".join(f"{count} {name}" for name, count in self.schemes.items())
        return f"{layers}{f', cache {self.kv}' if self.kv else ''}; {self.verdict}"


class MemoryPhase(Record):
    """Bytes that one kind of step takes: tensors alive at once, scratch inside kernels, keys and values.

    `peak` is their sum, and the weights.
    """

    name: str
    activations: int
    workspace: int
    cache: int
    peak: int


class MemoryRecord(Record):
    """Where an engine's memory goes, in bytes. `kv_pool` is what its cache reserves unless the caller says otherwise.

    Weights are counted as they are stored; pages of the pool are committed when they are first used.
    """

    weights: int
    kv_pool: int
    phases: tuple[MemoryPhase, ...]

    def sentence(self) -> str:
        """For people."""
        most = max(self.phases, key=lambda phase: phase.peak)
        whole = _sizes({"weights": self.weights, "KV pool": self.kv_pool})
        inside = _sizes({"cache": most.cache, "activations": most.activations, "workspace": most.workspace})
        return f"{whole}; most in {most.name}, {most.peak / 2**20:.1f} MiB: weights, {inside}"


def _sizes(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count / 2**20:.1f} MiB" for name, count in parts.items() if count)


class TensorRtRecord(Record):
    """How a TensorRT plan was built. Sizes in bytes; timings are those that the timing cache had and lacked."""

    key: EngineKey
    options: dict[str, bool | int | float | str | None]
    profiles: tuple[Profile, ...]
    attention: Attention | None = None
    """Of a decoder, whose cache is as large as the profiles say."""
    weights: str | None = None
    """The ONNX file that a plan without weights is refitted from."""
    build_memory: int
    build_memory_forecast: int
    engine_memory: dict[str, int] = {}
    timings_before: int | None = None
    timings_added: int | None = None
    warnings: tuple[str, ...] = ()

    def sentence(self) -> str:
        """For people."""
        profiles = "; ".join(
            f"{profile.name} {', '.join(f'{symbol} {sizes}' for symbol, sizes in profile.symbols.items())}".strip()
            for profile in self.profiles
        )
        return f"for {self.key.sku} ({self.key.arch}), driver {self.key.driver or 'not recorded'}; profiles {profiles}"


class Manifest(Record):
    """`manifest.json`. `parent` is the identity of the bundle that this one was tuned from.

    `unverified` says, a sentence each, what could not be checked on the machine that built it; `kiln tune` on a machine
    of the SKU's type checks it and writes a bundle without. `expected` is a file with logits for that.
    """

    schema_version: Literal[1] = 1
    kiln_version: str
    created: str
    name: str
    model: ModelRecord
    sku: SkuRecord
    backend: BackendRecord
    precision: Literal["fp32", "fp16", "bf16"]
    engine: str = "engine.onnx"
    tokenizer: str | None = None
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    decoder: DecoderSpec | None = None
    plugins: tuple[PluginRecord, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    checks: tuple[CheckRecord, ...] = ()
    parent: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    serving: ServingRecord | None = None
    quantization: QuantizationRecord | None = None
    memory: MemoryRecord | None = None
    unverified: tuple[str, ...] = ()
    expected: str | None = None
    tensorrt: TensorRtRecord | None = None
    files: dict[str, FileRecord]
