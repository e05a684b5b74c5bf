"""Which algorithms of cuBLASLt an engine's 16-bit products take, measured on this machine's GPU.

A product is measured for the batch sizes of captured steps, beyond a few rows, which take Kiln's own kernels where
those are faster. Prompts keep cuBLAS's own choice: for 512 to 4096 rows others win up to 7 % by themselves (H200), and
nothing in a prompt, where the device's power limits them all.
"""

import ctypes
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engines.backends.cuda_graphs import ladder_up_to
from engines.bundle import EngineBundle
from engines.runtime.opening import check_plugins
from pipeline.progress import Progress
from pipeline.tune.derive import dense_products
from plugins.cuda_runtime import CudaRuntime
from plugins.dense.cuda_search import AlgorithmSearch, Choice, Product, text_of
from plugins.errors import KilnError

_FEW = 8


@dataclass(frozen=True)
class AlgorithmFindings:
    """What was measured of each product, and cuBLASLt's version."""

    version: int
    choices: Mapping[Product, list[Choice]]

    @property
    def texts(self) -> dict[Product, str]:
        """The attributes `algorithms`; none where cuBLAS's own choice is best for every product."""
        texts = {product: text_of(choices, self.version) for product, choices in self.choices.items()}
        return texts if any(texts.values()) else {}

    def gain(self, rows: int) -> float:
        """Time that products of so many rows take, over that of cuBLAS's own choice."""
        taken = [choice for choices in self.choices.values() for choice in choices if choice.rows == rows]
        return sum(choice.best.microseconds for choice in taken) / sum(choice.usual for choice in taken)

    @property
    def sentence(self) -> str:
        measured = sorted({choice.rows for choices in self.choices.values() for choice in choices})
        gains = ", ".join(f"{rows}: {gain:.2f}" for rows in measured if (gain := self.gain(rows)) < 0.995)
        found = f"time over that of cuBLAS's own choice, by rows: {gains}" if gains else "cuBLAS's own choice is best"
        return f"Algorithms of {len(self.choices)} products: {found}."


def cuda_plugin(bundle: EngineBundle) -> Path:
    """Kiln's CUDA library in a bundle. Raises KilnError where there is none."""
    found = [path for path in bundle.plugin_paths if "cuda" in path.name]
    if not found:
        names = ", ".join(path.name for path in bundle.plugin_paths)
        raise KilnError(f"{bundle.path} has the plug-ins {names or 'none'}; expected one for CUDA")
    return found[0]


def measured_algorithms(bundle: EngineBundle, most: int, progress: Progress) -> AlgorithmFindings:
    """For batches of up to `most`. Raises KilnError where they cannot be measured."""
    products = dense_products(bundle.engine_path)
    rows = [size for size in ladder_up_to(most) if size > _FEW]
    if not products or not rows:
        return AlgorithmFindings(0, {})
    check_plugins(bundle)
    with ExitStack() as stack:
        runtime = CudaRuntime()
        stack.callback(runtime.close)
        search = AlgorithmSearch(ctypes.CDLL(str(cuda_plugin(bundle))), runtime)
        stack.callback(search.close)
        with progress.stage(f"algorithms of {len(products)} products"):
            choices = {product: search.choices(product, rows) for product in products}
    findings = AlgorithmFindings(search.version, choices)
    progress.note(findings.sentence)
    return findings
