"""What a TensorRT build was made from and for: the engine's key, and the bundle's manifest."""

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from engines.backends.tensorrt.api import Product
from engines.backends.tensorrt.build import profiles_digest
from engines.backends.tensorrt.key import EngineKey
from engines.backends.tensorrt.profiles import Profile
from engines.bundle import file_records
from engines.manifest import (
    DISTRIBUTION,
    BackendRecord,
    CheckRecord,
    Manifest,
    ModelRecord,
    PassRecord,
    SkuRecord,
    TensorRecord,
    TensorRtRecord,
)
from engines.sku_detect import Gpu
from passes.onnx_model import OnnxModel
from pipeline.tensorrt_config import TensorRtBuild
from pipeline.tensorrt_decoder import DecoderForm
from pipeline.tensorrt_quantize import Quantised
from plugins.abi import abi_hash

TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Made:
    """The graph that TensorRT gets, what it was made from, and what for. `reference` is what the engine is judged by:
    the source, or what quantising made of it."""

    source: OnnxModel
    reference: OnnxModel
    model: OnnxModel
    passes: tuple[PassRecord, ...]
    profiles: tuple[Profile, ...]
    form: DecoderForm | None
    config: TensorRtBuild
    gpu: Gpu | None
    quantised: Quantised | None = None

    @property
    def floats(self) -> OnnxModel | None:
        """What a quantised model was made from."""
        return None if self.quantised is None else self.quantised.floats

    def key(self, product: Product, tensorrt: str) -> EngineKey:
        config = self.config
        return EngineKey(
            product=product,
            tensorrt=tensorrt,
            sku=config.sku.name,
            arch=config.sku.arch,
            driver=None if self.gpu is None else self.gpu.driver,
            plugin_abi=None if self.form is None or self.form.kernels is None else abi_hash(),
            model_sha256=self.source.sha256,
            options=config.options.digest,
            profiles=profiles_digest(self.profiles),
            hardware=config.options.hardware,
            version_compatible=config.options.version_compatible,
        )


def manifest_of(
    made: Made,
    backend: BackendRecord,
    engine: str,
    record: TensorRtRecord,
    checks: tuple[CheckRecord, ...],
    folder: Path,
) -> Manifest:
    source, sku = made.source, made.config.sku
    return Manifest(
        kiln_version=version(DISTRIBUTION),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        name=source.path.stem,
        model=ModelRecord(
            source=made.config.origin or str(source.path),
            architecture="ONNX",
            sha256=source.sha256,
            parameters=source.parameters,
        ),
        sku=SkuRecord(name=sku.name, arch=sku.arch),
        backend=backend,
        precision=made.config.precision,
        engine=engine,
        tokenizer=TOKENIZER if (folder / TOKENIZER).is_dir() else None,
        decoder=made.model.decoder,
        inputs=tuple(map(TensorRecord.of, made.model.inputs)),
        outputs=tuple(map(TensorRecord.of, made.model.outputs)),
        passes=made.passes,
        checks=checks,
        quantization=None if made.quantised is None else made.quantised.record,
        tensorrt=record,
        files=file_records(folder),
    )
