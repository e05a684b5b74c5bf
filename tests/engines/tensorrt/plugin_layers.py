"""The plug-in's layers for ONNX's reference evaluator, by `reference.py`: what a graph of them computes."""

import numpy as np
from onnx.reference.op_run import OpRun

from plugins.paged_attention import reference
from plugins.paged_attention.reference import Attributes, Inputs
from plugins.paged_attention.tensorrt_plugin import LAYERS, SCRATCH, Fields


class _Layer(OpRun):
    """A layer of the plug-in in ONNX's reference evaluator, by `reference.py`."""

    op_domain = "kiln"

    def _run(self, *tensors, fields=None, plugin_namespace=None, plugin_version=None):
        layer = next(one for one in LAYERS if one.name == type(self).__name__)
        given, made = dict(zip(layer.inputs, tensors, strict=True)), Fields.from_text(fields)
        attributes = Attributes(
            *(made.num_heads, made.kv_num_heads, made.scale, made.softcap, made.local_window_size),
            *(made.do_rotary, made.rotary_interleaved),
        )
        names = [name for name in Inputs.__dataclass_fields__ if name in given]
        blank = dict.fromkeys(("query", "key", "value", "slot_mapping"))
        inputs = Inputs(**{**blank, **{name: given[name] for name in names}})
        if layer is LAYERS[0]:
            after = reference.written(inputs, attributes)
            return after.key_cache, after.value_cache
        if layer is LAYERS[1]:
            return reference.attention(inputs, attributes).astype(np.float16), given[SCRATCH]
        return (given["output"],)


EVALUATED = [type(layer.name, (_Layer,), {}) for layer in LAYERS]
