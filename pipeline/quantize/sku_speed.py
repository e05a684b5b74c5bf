"""What quantising a layer gives on a GPU that is not at hand: from what was measured there, else from bytes.

A layer's shape counts as measured where the SKU's table (`plugins.quant_matmul.cuda_choice`) has the same width and
depth, gated or not. Else the nearest shape stands for it that is at most twice as wide and as deep, or half: what a
product takes is its weight's bytes and how they fall into tiles, and both are alike there. The distance is |log(width /
width')| + |log(depth / depth')|. Beyond that nothing is known: the layer is quantised, since fewer bytes are read, with
the default `kernel_rows`, until `kiln tune` measures it on the device.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from engines.sku import Sku
from passes.quantization.cuda_schemes import DEFAULT_ROWS, FORMAT_OF
from passes.quantization.layers import Layer
from passes.quantization.plan import LayerPlan
from plugins.quant_matmul.cuda_choice import SIXTEEN_BITS, Choices, Measured, recorded
from plugins.quant_matmul.cuda_schema import WeightFormat

_REACH = 2.0
"""How many times as wide or as deep a shape may be that stands for another one."""
_BYTES: Mapping[WeightFormat, float] = {"int8": 1.0, "float8e4m3fn": 1.0, "int4": 0.5}
_SIXTEEN_BITS = 2.0


@dataclass(frozen=True)
class Speed:
    """Of one layer with one plan. `saved`: seconds of a decode step, the mean over what was measured."""

    wins: bool
    kernel_rows: int
    saved: float
    origin: str
    measured: bool
    """Whether it is known of this shape, or of one near to it."""


@dataclass(frozen=True)
class SkuSpeed:
    """What is known of one SKU. `bandwidth` in bytes a second."""

    name: str
    bandwidth: float
    choices: Choices | None

    def of(self, layer: Layer, gated: bool, plan: LayerPlan) -> Speed:
        """`gated`: SwiGLU is part of the layer's product. `plan` has one of the schemes of Kiln's CUDA products."""
        form = FORMAT_OF[plan.scheme]
        width = layer.width // 2 if gated else layer.width
        near = self._near(width, layer.depth, gated)
        if near is None or self.choices is None:
            saved = layer.parameters * (_SIXTEEN_BITS - _BYTES[form]) / self.bandwidth
            return Speed(True, DEFAULT_ROWS, saved, f"a shape that was not measured on {self.name}", False)
        rows = [one for one in self.choices.measured if one.layer == near.layer]
        choice = self.choices.of_layer(near.layer, (form,))
        gains = [one.gain((form,)) for one in rows if one.is_timed(form)]
        exact = (near.width, near.depth) == (width, layer.depth)
        like = f"as {near.layer}" if exact else f"as the nearest shape, {near.layer} [{near.width}, {near.depth}],"
        origin = f"{min(gains):.2f} to {max(gains):.2f} of 16 bits' time {like} on {self.choices.device}"
        saved = fmean(one.microseconds[one.best(SIXTEEN_BITS)] - one.microseconds[one.best((form,))] for one in rows)
        kernel_rows = self.choices.fastest_rows(near.layer, form)
        return Speed(choice.format is not None, kernel_rows, saved * 1e-6, origin, True)

    def _near(self, width: int, depth: int, gated: bool) -> Measured | None:
        def distance(one: Measured) -> float:
            return abs(math.log(one.width / width)) + abs(math.log(one.depth / depth))

        known = [
            one
            for one in (self.choices.measured if self.choices else ())
            if one.swiglu == gated
            and all(1 / _REACH <= size / own <= _REACH for size, own in ((one.width, width), (one.depth, depth)))
        ]
        return min(known, key=distance, default=None)


def speed_of(sku: Sku) -> SkuSpeed:
    """From the SKU's table of choices, where there is one, and its bandwidth, 1 TB/s where nobody gave any."""
    return SkuSpeed(sku.name, sku.bandwidth or 1e12, recorded(sku.name))
