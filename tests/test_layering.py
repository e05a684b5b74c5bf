"""Imports go one way: plugins <- passes <- engines <- pipeline."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("plugins", "passes", "engines", "pipeline")
SOURCES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imported_layers(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}; write the package's name"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names} & set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_lower_layers(path: Path) -> None:
    own = LAYERS.index(path.relative_to(ROOT).parts[0])
    assert imported_layers(path) <= set(LAYERS[: own + 1])


def test_sees_imports_inside_functions(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("def f():\n    from pipeline.build import build\n    import engines.sku\n")
    assert imported_layers(source) == {"pipeline", "engines"}
