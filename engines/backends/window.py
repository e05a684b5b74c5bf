"""A serving graph that attends to a sliding window only, made when an engine with a static cache is opened."""

from pathlib import Path

from plugins.errors import KilnError
from plugins.paged_attention.schema import OP_TYPE

_ATTRIBUTE = "local_window_size"


def graph_with_window(engine: Path, window: int) -> bytes:
    """The .onnx file's bytes, without its external weights, with every attention limited to `window` tokens.

    A layer whose own window is smaller keeps that. Raises KilnError when the graph has no paged attention.
    """
    import onnx

    model = onnx.load(engine, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == OP_TYPE]
    if not nodes:
        raise KilnError(f"{engine} has no {OP_TYPE} at its top level; a static cache needs a serving graph: rebuild it")
    for node in nodes:
        found = [attribute for attribute in node.attribute if attribute.name == _ATTRIBUTE]
        own = found[0].i if found else 0
        for attribute in found:
            node.attribute.remove(attribute)
        node.attribute.append(onnx.helper.make_attribute(_ATTRIBUTE, min(window, own) if own > 0 else window))
    return model.SerializeToString()
