"""What builds of plugin libraries share: a cache by content, a lock between builders, compilers side by side.

Knows neither compilers nor sources; those are each library's own, see build.py and cuda_build.py.
"""

import contextlib
import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from plugins.errors import KilnError

ROOT = Path(__file__).parent


def cache_folder() -> Path:
    """Where compiled libraries are kept: $XDG_CACHE_HOME/kiln, by default ~/.cache/kiln."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification says to ignore a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kiln"


def content_key(facts: object, root: Path, sources: Iterable[Path]) -> str:
    """Hexadecimal name of what `facts` (by their repr) and the sources' content make."""
    digest = hashlib.sha256()
    digest.update(repr(facts).encode())
    for source in sorted(sources):
        content = source.read_bytes()
        digest.update(f"{source.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def cached_library(key: str, file_name: str, compile_to: Callable[[Path], None]) -> Path:
    """Path of the library of this key; `compile_to` makes it if it is not there, in one process at a time."""
    folder = cache_folder() / "plugins" / key
    if found := existing_library(key, file_name):
        return found
    library = folder / file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KilnError(f"cannot create the cache folder {folder}: {error.strerror}; set XDG_CACHE_HOME") from error
    with _locked(folder / "lock"):
        if not library.exists():  # another process may have built it meanwhile
            compile_to(library)
    return library


def existing_library(key: str, file_name: str) -> Path | None:
    """Path of the library of this key if it was compiled before."""
    library = cache_folder() / "plugins" / key / file_name
    return library if library.exists() else None


def run_all(commands: list[list[str]], compiler: str = "C++ compiler") -> None:
    """Runs compiler commands side by side; the first that fails becomes a `KilnError` with its last lines."""
    running: list[tuple[list[str], subprocess.Popen[str]]] = []
    failed: tuple[list[str], str] | None = None
    waiting = list(commands)
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            command = waiting.pop(0)
            running.append(
                (command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            )
        command, process = running.pop(0)
        output = process.communicate()[0]
        if process.returncode != 0 and failed is None:
            failed = (command, output)
            waiting.clear()
    if failed:
        command, output = failed
        tail = "\n".join(output.strip().splitlines()[-15:])
        raise KilnError(f"the {compiler} failed; its last lines are below. Command: {shlex.join(command)}\n{tail}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the system if the process dies
        yield
