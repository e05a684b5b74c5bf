"""ONNX Runtime's own profile of what a backend runs, by operator."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnxruntime


def operator_micros(make: Callable[[], Any], run: Callable[[Any], object]) -> Counter[str]:
    """Microseconds by operator of what `run` does with the backend that `make` opens; closes it."""
    original = onnxruntime.SessionOptions
    with tempfile.TemporaryDirectory(prefix="kiln-profile-") as folder:

        def options() -> Any:
            made = original()
            made.enable_profiling = True
            made.profile_file_prefix = f"{folder}/profile"
            return made

        with patch.object(onnxruntime, "SessionOptions", options):
            backend = make()
        run(backend)
        events = json.loads(Path(backend._session.end_profiling()).read_text())
        backend.close()
    spent: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
    return spent
