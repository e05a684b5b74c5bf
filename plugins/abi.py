"""The operators of the plugin library, all folders', and a digest of what graphs rely on."""

import hashlib
import json
from dataclasses import asdict

from plugins.dense.schema import LINEAR, LINEAR_SWIGLU
from plugins.elementwise.schema import ADD_RMS_NORM, SWIGLU
from plugins.paged_attention.schema import PAGED_ATTENTION
from plugins.quant_matmul.cuda_schema import QUANT_LINEAR, QUANT_LINEAR_SWIGLU
from plugins.quant_matmul.schema import (
    ADD_RMS_NORM_QUANTIZE,
    INT8_MATMUL,
    QUANTIZE_ROWS,
    SWIGLU_QUANTIZE,
    WEIGHT_MATMUL,
)
from plugins.sampling.schema import FEED_TOKENS, SAMPLE
from plugins.spec import OperatorSpec

OPERATORS: tuple[OperatorSpec, ...] = (
    *(PAGED_ATTENTION, ADD_RMS_NORM, SWIGLU),
    *(QUANTIZE_ROWS, ADD_RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE, INT8_MATMUL, WEIGHT_MATMUL),
    *(LINEAR, LINEAR_SWIGLU, QUANT_LINEAR, QUANT_LINEAR_SWIGLU),
    *(SAMPLE, FEED_TOKENS),
)


def abi_hash() -> str:
    """SHA-256 of everything a compiled plugin library and a graph must agree on."""
    abi = [asdict(operator) for operator in OPERATORS]
    return hashlib.sha256(json.dumps(abi, sort_keys=True).encode()).hexdigest()
