"""An engine bundle as one side of a comparison: its generation through the runtime that serves it.

Text is scored step by step on a backend of its own, because the runtime gives tokens, not logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.backends.onnxruntime import OnnxRuntimeDecoder, OnnxRuntimeModel
from engines.bundle import EngineBundle, open_bundle
from passes.onnx_model import DecoderSpec, load_structure
from pipeline.compare.inputs import input_specs_from_graph
from pipeline.compare.machine import package_versions
from pipeline.compare.paged_text import greedy_continuation, logits_of_text
from pipeline.compare.report import Side
from pipeline.compare.subjects import Encode, Subject


def bundle_subject_from_path(path: Path, threads: int | None = None) -> Subject:
    """Verify and open a bundle. Raises KilnError for one that must not be opened."""
    bundle = open_bundle(path)
    side = Side(
        kind="bundle",
        name=f"bundle {bundle.manifest.name}",
        path=str(path),
        sha256=bundle.sha256,
        precision=bundle.manifest.precision,
        versions={"kiln": bundle.manifest.kiln_version, **package_versions("onnxruntime")},
    )
    if bundle.manifest.decoder is None:
        return _BundlePlain(side, bundle, threads)
    return _BundleDecoder(side, bundle, bundle.manifest.decoder, threads)


class _BundlePlain:
    def __init__(self, side: Side, bundle: EngineBundle, threads: int | None) -> None:
        tensors = [(record.name, record.dtype, record.shape) for record in bundle.manifest.inputs]
        self.side = side
        self.inputs = input_specs_from_graph(load_structure(bundle.engine_path), tensors)
        self._backend = OnnxRuntimeModel(bundle.engine_path, plugins=bundle.plugin_paths, threads=threads)

    def infer(self, feeds: Mapping[str, NDArray]) -> dict[str, NDArray]:
        return self._backend.infer(feeds)

    def close(self) -> None:
        self._backend.close()


class _BundleDecoder:
    def __init__(self, side: Side, bundle: EngineBundle, spec: DecoderSpec, threads: int | None) -> None:
        self.side = side
        self.vocab_size = spec.vocab_size
        self.max_context = spec.max_context
        self.encode: Encode | None = None
        if bundle.tokenizer_path is not None:
            from engines.runtime.tokenizer import Tokenizer

            self.encode = Tokenizer(bundle.tokenizer_path).encode
        blocks = -(-spec.max_context // spec.kv.block_size)
        self._backend = OnnxRuntimeDecoder(
            bundle.engine_path, spec.kv, blocks, plugins=bundle.plugin_paths, threads=threads
        )

    def logits(self, token_ids: Sequence[int], chunk: int) -> Iterator[NDArray[np.float32]]:
        return logits_of_text(self._backend, token_ids, chunk)

    def generate_greedy(self, token_ids: Sequence[int], tokens: int) -> list[int]:
        return greedy_continuation(self._backend, token_ids, tokens)

    def close(self) -> None:
        self._backend.close()
