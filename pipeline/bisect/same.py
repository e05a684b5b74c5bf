"""Whether two parts are the same: nodes, attributes and weights, whatever their inner tensors are called."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import onnx

from pipeline.bisect.cuts import Cut, Side, node_reads, spans


def part_digests(side: Side, cuts: Sequence[Cut]) -> list[str]:
    """One digest for each part between two cuts."""
    weights: dict[str, bytes] = {}
    return [_digest(side, side.between(span), span.targets, weights) for span in spans(side.outputs, cuts)]


def _digest(side: Side, nodes: Sequence[int], targets: Sequence[str], weights: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    made: dict[str, str] = {}  # inner tensors by number, in the order of the nodes
    for index in nodes:
        node = side.nodes[index]
        digest.update(f"{node.domain}::{node.op_type}".encode())
        for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
            digest.update(attribute.SerializeToString(deterministic=True))
        for name in (*node.input, *node_reads(node)):  # absent inputs count, and what bodies read
            known = name in side.initializers
            digest.update(_weight(side, name, weights) if known else made.get(name, name).encode())
        for name in node.output:
            made[name] = name if name in targets else f"#{len(made)}"
    digest.update(" ".join(made.get(name, name) for name in targets).encode())
    return digest.hexdigest()


def _weight(side: Side, name: str, known: dict[str, bytes]) -> bytes:
    if name not in known:
        tensor = side.initializers[name]
        header = f"{tensor.data_type} {list(tensor.dims)} ".encode()
        known[name] = hashlib.sha256(header + _content(side.path.parent, tensor)).digest()
    return known[name]


def _content(folder: Path, tensor: onnx.TensorProto) -> bytes:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return bytes(onnx.numpy_helper.to_array(tensor).tobytes())
    place = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / place["location"]).open("rb") as file:
        file.seek(int(place.get("offset", 0)))
        return file.read(int(place["length"]) if "length" in place else -1)
