"""Prints, as JSON, the signatures in a `tensorrt` module of the classes and members named on the command line.

Run by test_contract.py in a process that has TensorRT. pybind11 writes signatures into docstrings.
"""

import json
import re
import sys

import tensorrt

SIGNATURE = re.compile(r"^\s*(?:\d+\. )?(\w*)\((.*)\) -> (.*)$")


def signatures(member: object) -> list[dict[str, object]]:
    """Of each overload: names of the arguments without self, those with a default, and the result's type."""
    text = (member.fget.__doc__ if isinstance(member, property) else member.__doc__) or ""
    found = []
    for line in text.splitlines():
        match = SIGNATURE.match(line)
        if match:
            arguments = re.findall(r"(?:^|, )(\w+): ((?:[^,\[<]|\[[^\]]*\]|<[^>]*>)+)", match[2])
            names = [name for name, _ in arguments][1:] if arguments else []
            optional = [name for name, kind in arguments if "=" in kind]
            found.append({"names": names, "optional": optional, "result": re.sub(r"[\w.]*\.", "", match[3])})
    return found


def described(name: str) -> object:
    holder, _, member = name.partition(".")
    kind = getattr(tensorrt, holder, None)
    found = getattr(kind, member, None) if member else kind
    if found is None:
        return None
    what = "property" if isinstance(found, property) else "method" if callable(found) else "value"
    settable = isinstance(found, property) and found.fset is not None
    return {"kind": what, "settable": settable, "signatures": signatures(found)}


print(json.dumps({"version": tensorrt.__version__, "members": {name: described(name) for name in sys.argv[1:]}}))
