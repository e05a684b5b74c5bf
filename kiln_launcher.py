"""Entry point of the console scripts, and the guard against foreign packages with our names.

`plugins`, `passes`, `engines` and `pipeline` are generic names: another distribution, or a folder of the
same name in the working directory, can shadow one. This module has a name that nobody else uses, imports
nothing but the standard library, and checks where each of the four would come from before any is used.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("plugins", "passes", "engines", "pipeline")
ROOT = Path(__file__).resolve().parent


class ShadowedPackageError(ImportError):
    """A package of ours would be imported from somewhere else."""


def check_packages() -> None:
    """Raise ShadowedPackageError unless all four packages resolve to those beside this module."""
    for name in PACKAGES:
        expected = ROOT / name / "__init__.py"
        spec = importlib.util.find_spec(name)
        origin = None
        if spec is not None:  # a folder without __init__.py has search locations but no origin
            origin = spec.origin or next(iter(spec.submodule_search_locations or []), None)
        if origin is None or Path(origin).resolve() != expected:
            raise ShadowedPackageError(
                f"the package '{name}' would be imported from {origin or 'nowhere'}, but Kiln's is {expected.parent}. "
                f"Ways out: run from a folder that has no '{name}' in it, or set PYTHONSAFEPATH=1 (python -P); "
                f"uninstall or rename the other package; or install Kiln into a virtual environment of its own."
            )


def _guarded(command: str) -> None:
    try:
        check_packages()
    except ShadowedPackageError as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C while modules are imported ends as quietly as later."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def build_engine() -> None:
    """Console script `build-engine`."""
    with _interruptible():
        _guarded("build-engine")
        from pipeline.cli import build_engine_command, run_command

        run_command(build_engine_command)


def kiln() -> None:
    """Console script `kiln`."""
    with _interruptible():
        _guarded("kiln")
        from pipeline.cli import kiln_group, run_command

        run_command(kiln_group)
