"""Every module imports on a machine that has neither torch nor any inference library."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABSENT = ("torch", "onnxruntime", "tensorrt", "triton", "ray", "polygraphy", "matplotlib", "cupy", "pycuda")

PROGRAM = """
import importlib, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
root = Path({root!r})
count = 0
for layer in ("plugins", "passes", "engines", "pipeline"):
    for path in sorted((root / layer).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        count += 1
importlib.import_module("kiln_launcher")
print(count)
"""


def test_every_module_imports_without_heavy_packages() -> None:
    program = PROGRAM.format(absent=ABSENT, root=str(ROOT))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 30
