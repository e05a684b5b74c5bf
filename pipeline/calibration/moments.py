"""Second moments of what enters matrix products, sum over tokens of x x^T, for GPTQ (2210.17323); a few at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.quantization.layers import layers_of
from pipeline.calibration.observe import ObserveConfig, run_over
from pipeline.calibration.running import prepared_graph
from pipeline.calibration.samples import CalibrationSet, Sample
from pipeline.calibration.subject import CalibrationModel
from pipeline.progress import Progress
from plugins.errors import KilnError


@dataclass(frozen=True)
class Moments:
    """Of one tensor that enters `layers`, which are matrix products of one depth."""

    tensor: str
    layers: tuple[str, ...]
    second: NDArray[np.float64]
    """X^T X [depth, depth], summed over `rows` rows."""
    mean_magnitude: NDArray[np.float64]
    """Mean |x| of each channel [depth]."""
    rows: int


def moments_of(
    model: CalibrationModel,
    data: CalibrationSet,
    config: ObserveConfig,
    layers: Sequence[str] | None = None,
    memory: int = 512 * 2**20,
    progress: Progress | None = None,
) -> Iterator[Moments]:
    """One for each tensor that enters the named layers, by default all MatMul and Gemm, in the graph's order.

    At most `memory` bytes of matrices are held at a time, at least one: the data is run once for each such part, on
    the graph up to there. Raises KilnError for an unknown layer, for a convolution, and for values that are not finite.
    """
    for group in _groups(_inputs(model, layers), memory):
        yield from _of_group(model, data, group, config, progress)


@dataclass(frozen=True)
class _Input:
    tensor: str
    depth: int
    layers: tuple[str, ...]


def _inputs(model: CalibrationModel, names: Sequence[str] | None) -> list[_Input]:
    known = {layer.name: layer for layer in layers_of(prepared_graph(model))}
    if unknown := [name for name in names or () if name not in known]:
        raise KilnError(
            f"the model has no layer '{unknown[0]}'; it has {len(known)}, such as {', '.join(list(known)[:3])}"
        )
    if convolutions := [name for name in names or () if known[name].kind == "Conv"]:
        raise KilnError(f"'{convolutions[0]}' is a convolution; second moments are taken for MatMul and Gemm")
    found: dict[str, _Input] = {}
    for layer in known.values():
        if layer.kind != "Conv" and (names is None or layer.name in names):
            before = found.get(layer.activation)
            layers = (*(before.layers if before else ()), layer.name)
            found[layer.activation] = _Input(layer.activation, layer.depth, layers)
    return list(found.values())


def _groups(inputs: Sequence[_Input], memory: int) -> Iterator[list[_Input]]:
    group: list[_Input] = []
    for item in inputs:
        if group and sum(8 * other.depth**2 for other in (*group, item)) > memory:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _of_group(
    model: CalibrationModel,
    data: CalibrationSet,
    group: Sequence[_Input],
    config: ObserveConfig,
    progress: Progress | None,
) -> list[Moments]:
    second = {item.tensor: np.zeros((item.depth, item.depth)) for item in group}
    sums = {item.tensor: np.zeros(item.depth) for item in group}
    rows = dict.fromkeys(second, 0)

    def take(sample: Sample, name: str, values: NDArray[np.float32]) -> None:
        flat = values.reshape(-1, values.shape[-1])
        product = flat.T @ flat  # float32 over one chunk, float64 over all of them
        if not np.isfinite(product).all():
            layers = next(item.layers for item in group if item.tensor == name)
            raise KilnError(
                f"the tensor '{name}', which the layer {', '.join(layers)} takes, holds NaN, infinite or too large "
                f"values on {sample.origin}; leave the sample out, or mend the model"
            )
        second[name] += product
        sums[name] += np.abs(flat).sum(axis=0, dtype=np.float64)
        rows[name] += len(flat)

    run_over(model, data, list(second), take, config, progress)
    return [
        Moments(
            item.tensor,
            item.layers,
            second[item.tensor],
            sums[item.tensor] / max(1, rows[item.tensor]),
            rows[item.tensor],
        )
        for item in group
    ]
