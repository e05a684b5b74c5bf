"""Every module imports without torch or any inference library, and the commands without any optional package."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABSENT = ("torch", "onnxruntime", "tensorrt", "triton", "ray", "polygraphy", "matplotlib", "cupy", "pycuda")
OPTIONAL = (
    *ABSENT,
    *("accelerate", "gguf", "onnxscript", "PIL", "sentencepiece", "fastapi", "starlette", "uvicorn", "httpx", "cffi"),
    *("cryptography", "fsspec", "scipy"),
)
"""What the extras of pyproject.toml install."""

WITHOUT = """
import importlib, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
PROGRAM = (
    WITHOUT
    + """
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
)


def test_every_module_imports_without_heavy_packages() -> None:
    program = PROGRAM.format(absent=ABSENT, root=str(ROOT))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 30


def test_commands_start_without_any_extra() -> None:
    program = WITHOUT + "sys.argv = ['kiln', 'sku', 'list']\nimport kiln_launcher\nkiln_launcher.kiln()"
    command = [sys.executable, "-c", program.format(absent=OPTIONAL)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "h200" in result.stdout
