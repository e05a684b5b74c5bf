"""Geometry of convolution and pooling windows: sizes, steps and padding, one entry a spatial axis.

Knows nothing of channels or weights. Formulas: the ONNX operator specification of Conv and AveragePool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs


@dataclass(frozen=True)
class Window:
    """Output p of an axis reads inputs `strides * p - begin + dilations * j`, j < kernel; beyond the ends lie zeros."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def pads(self) -> bool:
        """Whether implicit zeros enter."""
        return any(self.begin) or any(self.end)

    @property
    def growth(self) -> tuple[int, ...]:
        """How much longer the output is than the input at stride 1; with the strides it decides the output's size."""
        axes = zip(self.kernel, self.dilations, self.begin, self.end, strict=True)
        return tuple(begin + end - dilation * (size - 1) for size, dilation, begin, end in axes)

    def taps_in(self, host: "Window") -> list[list[int]] | None:
        """For each axis, which of `host`'s taps read what these read.

        None if some of these fall beside the host's or if the outputs differ in size.
        """
        if self.strides != host.strides or self.growth != host.growth:
            return None
        found = []
        for axis, size in enumerate(self.kernel):
            start = host.begin[axis] - self.begin[axis]
            places = [divmod(start + self.dilations[axis] * tap, host.dilations[axis]) for tap in range(size)]
            if any(beside or not 0 <= tap < host.kernel[axis] for tap, beside in places):
                return None
            found.append([tap for tap, _ in places])
        return found


def window_of(node: gs.Node, kernel: Sequence[int]) -> Window | None:
    """The window of a Conv or pooling node; None where the padding depends on the input's size or is negative."""
    axes = len(kernel)
    strides = tuple(node.attrs.get("strides", [1] * axes))
    dilations = tuple(node.attrs.get("dilations", [1] * axes))
    mode = node.attrs.get("auto_pad", "NOTSET")
    if mode == "NOTSET":
        pads = list(node.attrs.get("pads", [0] * (2 * axes)))
    elif mode == "VALID" or all(size == 1 for size in kernel):
        pads = [0] * (2 * axes)
    elif all(stride == 1 for stride in strides):
        total = [dilation * (size - 1) for size, dilation in zip(kernel, dilations, strict=True)]
        less, more = [t // 2 for t in total], [t - t // 2 for t in total]
        pads = less + more if mode == "SAME_UPPER" else more + less
    else:
        return None
    if min(pads, default=0) < 0:
        return None
    return Window(tuple(kernel), strides, dilations, tuple(pads[:axes]), tuple(pads[axes:]))
