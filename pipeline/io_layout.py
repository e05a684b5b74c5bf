"""Models whose images are channels-last, fed and read as the model was before: what to permute, from its metadata."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from passes.io_layout import IO_LAYOUT
from passes.onnx_model import load_structure
from pipeline.compare.inputs import InputSpec
from plugins.errors import KilnError

Permutations = Mapping[str, Sequence[int]]
"""Name of an input or output to a permutation: the model's form is `original.transpose(permutation)`."""


def permutations_from_path(path: Path) -> Permutations:
    """What `--io-layout nhwc` permuted, empty for any other model. Raises KilnError for damaged metadata."""
    for entry in load_structure(path).metadata_props:
        if entry.key == IO_LAYOUT:
            try:
                return TypeAdapter(dict[str, list[int]]).validate_python(json.loads(entry.value))
            except ValueError as error:
                raise KilnError(f"{path}: metadata '{IO_LAYOUT}' is damaged; export the model again") from error
    return {}


def to_model(feeds: Mapping[str, NDArray], permutations: Permutations) -> dict[str, NDArray]:
    """Original inputs as the model takes them."""
    return {
        name: np.ascontiguousarray(value.transpose(permutations[name])) if name in permutations else value
        for name, value in feeds.items()
    }


def from_model(outputs: Mapping[str, NDArray], permutations: Permutations) -> dict[str, NDArray]:
    """The model's outputs as the original gave them."""
    return {
        name: value.transpose(np.argsort(permutations[name])) if name in permutations else value
        for name, value in outputs.items()
    }


def original_specs(specs: Sequence[InputSpec], permutations: Permutations) -> tuple[InputSpec, ...]:
    """Specs of the model's inputs as specs of the original's."""
    return tuple(
        replace(spec, shape=tuple(spec.shape[axis] for axis in np.argsort(permutations[spec.name])))
        if spec.name in permutations
        else spec
        for spec in specs
    )
