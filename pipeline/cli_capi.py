"""`kiln capi`: the C API's header and library."""

import shlex
from pathlib import Path

import click


@click.group("capi")
def capi_group() -> None:
    """Build the library with which C, C++ and other programs run bundles."""


@capi_group.command("build")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for include and lib.")
def build_command(out: Path) -> None:
    """Make include/kiln.h, lib/libkiln.so and lib/pkgconfig/kiln.pc.

    The library is bound to this Python; the folder may be moved. It needs a C compiler and Python's headers.
    """
    from engines.capi.build import HEADER, build

    built = build(out)
    for path in (built.header, built.library, built.pkg_config):
        print(path)
    folder, libraries = (
        shlex.quote(str(built.pkg_config.parent.resolve())),
        shlex.quote(str(built.library.parent.resolve())),
    )
    print(
        f"\nCompile with:\n  export PKG_CONFIG_PATH={folder}\n"
        f"  cc {shlex.quote(str(HEADER.parent / 'examples' / 'chat.c'))} $(pkg-config --cflags --libs kiln) "
        f"-Wl,-rpath,{libraries} -o chat"
    )
