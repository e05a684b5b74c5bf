"""Builds `libkiln.so`: cffi writes the glue, our C files the rest, and the machine's compiler makes a library of it.

The library is bound to the Python that builds it: it links that interpreter's libpython and starts that interpreter
unless `open` names another of the same version. `build` is what `kiln capi build` calls.
"""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plugins.build import find_compiler
from plugins.errors import KilnError

HEADER = Path(__file__).parent / "kiln.h"
_BEGIN, _END = "/* From here to END OF DECLARATIONS", "/* END OF DECLARATIONS */"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

_EMBEDDED = """
kiln_status *py_open(const kiln_open_params *params, kiln_engine **engine);
kiln_status *py_close(kiln_engine *engine);
kiln_status *py_describe(kiln_engine *engine, const char **json);
kiln_status *py_metrics(kiln_engine *engine, const char **text);
kiln_status *py_tokenize(kiln_engine *engine, const char *text, const int32_t **tokens, size_t *count);
kiln_status *py_tokenize_chat(kiln_engine *engine, const char *messages, const int32_t **tokens, size_t *count);
kiln_status *py_detokenize(kiln_engine *engine, const int32_t *tokens, size_t count, const char **text);
kiln_status *py_submit(kiln_engine *engine, const kiln_request *request, kiln_stream **stream);
kiln_status *py_wait(kiln_stream *stream, double timeout, kiln_event *event, const kiln_chunk **chunk);
kiln_status *py_cancel(kiln_stream *stream);
kiln_status *py_stream_close(kiln_stream *stream);
kiln_status *py_infer(kiln_engine *engine, const kiln_inference *inference, const kiln_outputs **outputs);
kiln_status *py_release(const void *memory);
void py_close_all(void);
"""
"""Functions that embedded.py implements; always called with pointers that table.c has checked."""

_FROM_C = """
kiln_status *new_status(kiln_code code, const char *message);
static const uintptr_t UNDESCRIBED;
"""
"""What embedded.py uses of status.c."""

_FLAGS = ("-x", "c", "-std=gnu11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
_WHOLE_API = "-D_CFFI_NO_LIMITED_API"  # starting Python is not part of the limited one
_QUIET = ("-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-unused-function")  # cffi's own code
_LINK = ("-shared", "-pthread", "-ldl", "-Wl,--as-needed", "-Wl,-z,defs", "-Wl,-soname,libkiln.so")
_KEEP_LOADED = "-Wl,-z,nodelete"  # Python runs in it until the process ends

_PKG_CONFIG = """\
prefix=${{pcfiledir}}/../..
includedir=${{prefix}}/include
libdir=${{prefix}}/lib

Name: kiln
Description: Runs Kiln engine bundles
Version: {version}
Cflags: -I${{includedir}}
Libs: -L${{libdir}} -lkiln
"""


@dataclass(frozen=True)
class BuiltLibrary:
    """What lies in the output folder, which may be moved as a whole."""

    header: Path
    library: Path
    pkg_config: Path


def declarations() -> str:
    """The declarations of kiln.h as cffi reads them; `kiln_get_api` is not among them."""
    return HEADER.read_text().split(_BEGIN)[1].split("*/", 1)[1].split(_END)[0]


def build(out: Path) -> BuiltLibrary:
    """Make include/kiln.h, lib/libkiln.so and lib/pkgconfig/kiln.pc in `out`.

    Raises KilnError when cffi, the compiler, Python's headers or its shared library are missing.
    """
    ffi = _builder()
    compiler, headers, libpython = find_compiler(), _python_headers(), _python_library()
    built = BuiltLibrary(out / "include/kiln.h", out / "lib/libkiln.so", out / "lib/pkgconfig/kiln.pc")
    for path in (built.header, built.library, built.pkg_config):
        path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.library.parent) as temporary:  # renamed into place, never half written
        folder = Path(temporary)
        with redirect_stdout(io.StringIO()):  # it prints what it does
            ffi.emit_c_code(str(folder / "kiln.c"))
        (folder / "exports").write_text("{ global: kiln_get_api; local: *; };\n")
        _compile(compiler, headers, libpython, folder)
        (folder / "libkiln.so").replace(built.library)
    shutil.copyfile(HEADER, built.header)
    built.pkg_config.write_text(_PKG_CONFIG.format(version=version("kiln-engine")))
    return built


def _builder() -> Any:
    try:
        from cffi import FFI
    except ImportError as error:
        raise KilnError(
            f"cffi is not installed ({error}); install the extra: pip install 'kiln-engine[capi]'"
        ) from error
    ffi = FFI()
    ffi.cdef(declarations() + _FROM_C + 'extern "Python" {' + _EMBEDDED + "}")
    ffi.set_source("_kiln_embedded", _c_source())
    return ffi


def _c_source() -> str:
    definitions = {
        "KILN_PYTHON": os.fspath(Path(sys.executable).absolute()),
        "KILN_PYTHON_VERSION": _PYTHON,
        "KILN_VERSION": version("kiln-engine"),
    }
    return "\n".join(
        [
            '#include "kiln.h"',
            *(f"#define {name} {_c_string(text)}" for name, text in definitions.items()),
            "PyMODINIT_FUNC PyInit__kiln_embedded(void);",
            *(f"static {line}" for line in _EMBEDDED.strip().splitlines()),
            *(f'#include "{name}"' for name in ("status.c", "start.c", "table.c")),
        ]
    )


def _c_string(text: str) -> str:
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isascii() else "".join(f"\\{byte:03o}" for byte in os.fsencode(c)) for c in plain)


def _compile(compiler: list[str], headers: Path, libpython: Path, folder: Path) -> None:
    command = [
        *(*compiler, *_FLAGS, *_QUIET, _WHOLE_API, f"-I{HEADER.parent}", f"-I{headers}", str(folder / "kiln.c")),
        *("-x", "none", str(libpython), f"-Wl,-rpath,{libpython.parent}", *_LINK, _KEEP_LOADED),
        *(f"-Wl,--version-script={folder / 'exports'}", "-o", str(folder / "libkiln.so")),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise KilnError(f"the compiler failed; its last lines are below. Command: {shlex.join(command)}\n{tail}")


def _python_headers() -> Path:
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise KilnError(
            f"Python's headers are missing: found no Python.h in {headers}; install them: python{_PYTHON}-dev (Debian, "
            "Ubuntu), python3-devel (Fedora, RHEL, openSUSE)"
        )
    return headers


def _python_library() -> Path:
    """The shared libpython of this interpreter."""
    names = [sysconfig.get_config_var(name) for name in ("INSTSONAME", "LDLIBRARY")]
    folders = [sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"]
    candidates = [Path(folder) / name for folder in folders if folder for name in names if name]
    for path in candidates:
        if ".so" in path.name and path.is_file():
            return path
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise KilnError(
            f"{sys.executable} is a static Python {_PYTHON}, without libpython{_PYTHON}.so, and cannot be embedded; "
            "install Kiln into an environment of a shared one: the system's python3, conda's or uv's, or pyenv's after "
            f"PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {_PYTHON}"
        )
    raise KilnError(
        f"Python's shared library is missing: looked for {', '.join(map(str, candidates))}; install "
        f"libpython{_PYTHON}-dev (Debian, Ubuntu) or python3-libs (Fedora, RHEL, openSUSE)"
    )
