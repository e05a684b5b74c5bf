"""Layers planned as w8a16 or w4a16: weights as integers by group of the depth, activations as they are.

1. `MatMul(x, W) [+ b]`, `Gemm(x, W, b)` -> `kiln::WeightMatMul(x, W', scales, [b], [zeros])` where the engine has
   Kiln's operators;
2. the same -> `com.microsoft::MatMulNBits(x, W', scales, [zeros], [b])` elsewhere. One scale for all of the depth is
   repeated for blocks of 128.

4-bit weights have zeros, 8-bit ones are symmetric.

`accuracy_level` is MatMulNBits' own: 4 rounds activations to INT8 within blocks of a row, in the kernel. On ONNX
Runtime's CPU provider 8-bit weights are unusably slow at other levels (a hundred times).
"""

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from passes.base import Effect, Outcome
from passes.pattern import CONTRIB, new_constant
from passes.quantization.grid import QuantisedWeight
from passes.quantization.plan import PrecisionPlan, Scheme
from passes.quantization.products import Product, products_of
from passes.quantization.rescale import Rescaled
from passes.quantization.support import Kernels, require_supported
from passes.quantization.weights import quantise_weight, zeros_of
from plugins.errors import KilnError
from plugins.quant_matmul.packing import pack, pack_scales
from plugins.quant_matmul.schema import WEIGHT_MATMUL

WEIGHT_ONLY: tuple[Scheme, ...] = ("w8a16", "w4a16")
_WHOLE_DEPTH = 128
"""Block size that stands for one scale of all of the depth."""


class QuantizeWeights:
    """Implements `passes.base.Pass`. `moments` [depth, depth] by layer name are for GPTQ."""

    name = "quantize_weights"
    effect = Effect.QUANTISES

    def __init__(
        self,
        plan: PrecisionPlan,
        kernels: Kernels = "cpu",
        moments: Mapping[str, NDArray] | None = None,
        rescaled: Rescaled | None = None,
        accuracy_level: int = 4,
    ) -> None:
        self.plan = plan
        self.kernels: Kernels = kernels
        self.moments = moments or {}
        self.rescaled = Rescaled() if rescaled is None else rescaled
        self.accuracy_level = accuracy_level

    def call(self, graph: gs.Graph) -> Outcome:
        products = products_of(graph, self.plan, WEIGHT_ONLY)
        for product in products:
            require_supported(product.layer, product.plan, self.kernels)
            if self.kernels == "cpu-plugins":
                self._with_kiln(graph, product)
            else:
                self._with_blocks(graph, product)
        return Outcome(len(products))

    def _with_kiln(self, graph: gs.Graph, product: Product) -> None:
        found = self._quantised(product)
        inputs = [product.activation, *packed_weights(product, found)]
        attributes = {"n": product.layer.width, "bits": found.grid.bits, "group_size": found.grid.group_size}
        spec = WEIGHT_MATMUL
        product.replace(graph, gs.Node(spec.op_type, product.layer.name, attributes, inputs, domain=spec.domain))

    def _with_blocks(self, graph: gs.Graph, product: Product) -> None:
        layer, result = product.layer, product.result
        found = self._quantised(product)
        bits, block = found.grid.bits, found.grid.group_size or _WHOLE_DEPTH
        blocks = -(-layer.depth // block)
        scales, zeros = (
            None if part is None else np.ascontiguousarray(np.broadcast_to(part, (layer.width, blocks)))
            for part in (found.scales, found.zeros)
        )
        assert scales is not None
        inputs = [
            product.activation,
            new_constant(result, "weight", blocked(found.integers, bits, block)),
            new_constant(result, "weight_scale", scales.astype(product.dtype)),
        ]
        if zeros is not None:
            inputs.append(new_constant(result, "weight_zero", _packed_bits(zeros.astype(np.int8), bits)))
        if product.bias is not None:
            inputs += [gs.Variable.empty() for _ in range(5 - len(inputs))]
            inputs.append(new_constant(result, "bias", product.bias.astype(product.dtype)))
        attributes = {"K": layer.depth, "N": layer.width, "bits": bits, "block_size": block}
        attributes["accuracy_level"] = self.accuracy_level if self.kernels == "cpu" else 0
        product.replace(graph, gs.Node("MatMulNBits", layer.name, attributes, inputs, domain=CONTRIB))

    def _quantised(self, product: Product) -> QuantisedWeight:
        moments, zeros = self.rescaled.moments(product.layer, self.moments), zeros_of(product.plan, self.kernels)
        return quantise_weight(product.layer.name, product.weight, product.plan, moments, zeros)


def packed_weights(product: Product, found: QuantisedWeight) -> list[gs.Tensor]:
    """Weight, scales, bias and zeros, the last two where there are any, as Kiln's products take them.

    Raises KilnError for other than FP32.
    """
    if product.dtype != np.float32:
        raise KilnError(
            f"layer {product.layer.name} has {product.dtype} weights; Kiln's quantised products take float32 "
            "activations: build it with --precision fp32"
        )
    result = product.result
    inputs: list[gs.Tensor] = [
        new_constant(result, "weight", pack(found.integers, found.grid.bits)),
        new_constant(result, "weight_scale", pack_scales(found.scales)),
    ]
    if product.bias is not None or found.zeros is not None:
        inputs.append(gs.Variable.empty() if product.bias is None else new_constant(result, "bias", product.bias))
    if found.zeros is not None:
        inputs.append(new_constant(result, "weight_zero", pack_scales(found.zeros)))
    return inputs


def blocked(integers: NDArray[np.int8], bits: int, block: int) -> NDArray[np.uint8]:
    """[width, blocks, block * bits / 8], as MatMulNBits has it: unsigned, the even one of two in the low half."""
    depth, width = integers.shape
    padded = np.zeros((-(-depth // block) * block, width), np.int8)
    padded[:depth] = integers
    return _packed_bits(padded.T.reshape(width, -1, block), bits)


def _packed_bits(values: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Signed values, their sign made an offset, two to a byte along the last dimension where they have 4 bits."""
    unsigned = (values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    if bits == 8:
        return np.ascontiguousarray(unsigned)
    if unsigned.shape[-1] % 2:
        unsigned = np.concatenate([unsigned, np.zeros_like(unsigned[..., :1])], axis=-1)
    return np.ascontiguousarray(unsigned[..., 0::2] | unsigned[..., 1::2] << 4)
