"""MkDocs hook: pages of the site that are made from other files, so that they cannot go stale.

1. README.md becomes the start page, CHANGELOG.md the page of changes.
2. reference/c-api.md comes from kiln.h; reference/cli.md is mkdocs-click's work.
3. Links that leave docs/, as in `../engines/capi/kiln.h`, go to copies of those files, so that strict mode checks them.

Knows MkDocs 1.6's events; does not know what pages say.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from document_capi import HEADER, markdown_from_header  # noqa: E402 - MkDocs loads this file by its path

SOURCES = "source"
"""Folder of the site with copies of files outside docs/."""
_LINK = re.compile(r"(\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add what is made here."""
    for name, source in (("index.md", "README.md"), ("changelog.md", "CHANGELOG.md")):
        files.append(File.generated(config, name, content=_moved((ROOT / source).read_text(encoding="utf-8"))))
    capi = markdown_from_header(HEADER.read_text(encoding="utf-8"))
    files.append(File.generated(config, "reference/c-api.md", content=capi))
    for page in [file for file in files if file.is_documentation_page()]:
        for outside in _outside(page.content_string, page.src_uri):
            if (uri := f"{SOURCES}/{outside}") not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / outside)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that leave docs/ to the copies."""

    def turned(match: re.Match[str]) -> str:
        outside = _file_outside(match[2], page.file.src_uri)
        if outside is None:
            return match[0]
        up = os.path.relpath(f"{SOURCES}/{outside}", os.path.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{up}{match[3]}"

    return _LINK.sub(turned, markdown)


def _moved(markdown: str) -> str:
    """A file of the repository's root as a page in docs/."""

    def turned(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith("/"):
            return match[0]
        inside = target.removeprefix("docs/")
        return f"{match[1]}{inside if inside != target else f'../{target}'}{match[3]}"

    return _LINK.sub(turned, markdown)


def _outside(markdown: str, uri: str) -> list[str]:
    found = (_file_outside(match[2], uri) for match in _LINK.finditer(markdown))
    return [path for path in found if path is not None]


def _file_outside(target: str, uri: str) -> str | None:
    """The file that a link of the page `uri` names, from the repository's root, if it lies outside docs/."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    path = os.path.normpath(os.path.join("docs", os.path.dirname(uri), target))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).is_file() else path
