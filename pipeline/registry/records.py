"""What the registry says about bundles: the schemas of its signed records, and where each lies.

    kiln-registry.json                        format of the registry
    chunks/AB/SHA256                          parts of files, named by their digest, never changed
    releases/MODEL/SKU/00000007               one published bundle: its files and their chunks
    channels/MODEL/SKU/stable/00000003        one move of a channel; the newest says where it points
    attestations/MODEL/SKU/00000007/00000001  one judgement of a release; the newest counts
    leases/OWNER                              a writer at work; gc/lock: a collector at work

Data only. Signing is `pipeline.registry.signed`'s work, reading and writing the registry's.
"""

import re
from pathlib import PurePosixPath
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.registry.store import RegistryError

FORMAT = 1
Channel = Literal["candidate", "canary", "stable"]
CHANNELS: tuple[Channel, ...] = get_args(Channel)
"""In the order in which a release moves through them."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = "^[0-9a-f]{64}$"
_HISTORY = 20
"""Earlier versions that a channel remembers to roll back to."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredFile(_Record):
    """One file of a bundle; `chunks` are the digests of its parts, in order; none where it is empty."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_DIGEST)
    chunks: tuple[str, ...]


class Release(_Record):
    """One published bundle. `bundle` is its identity, `inputs` digests of what it was made from, by name."""

    format: Literal[1] = 1
    model: str
    sku: str
    version: int = Field(ge=1)
    bundle: str = Field(pattern=_DIGEST)
    created: str
    kiln_version: str
    chunk_bytes: int = Field(ge=1)
    files: dict[str, StoredFile]
    inputs: dict[str, str] = {}
    outputs: StoredFile | None = None
    """What the engine computed where it was built, an .npz: what later versions are compared with."""

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or str(path) != name or name == "." or "\0" in name:
                raise ValueError(f"{name!r} lies outside the bundle")
        return files

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def chunks(self) -> dict[str, int]:
        """Bytes of every chunk, by digest."""
        found = {}
        for file in (*self.files.values(), *([self.outputs] if self.outputs else [])):
            for index, digest in enumerate(file.chunks):
                found[digest] = min(self.chunk_bytes, file.bytes - index * self.chunk_bytes)
        return found


class ChannelEntry(_Record):
    """Where a channel points after one move. `previous` are the versions that it left, newest last."""

    format: Literal[1] = 1
    model: str
    sku: str
    channel: Channel
    number: int = Field(ge=1)
    version: int = Field(ge=1)
    action: Literal["publish", "promote", "rollback"]
    created: str
    previous: tuple[int, ...] = ()

    def moved(self, version: int, action: Literal["publish", "promote"], created: str) -> "ChannelEntry":
        """The entry after this one."""
        return self.model_copy(
            update={
                "number": self.number + 1,
                "version": version,
                "action": action,
                "created": created,
                "previous": (*self.previous, self.version)[-_HISTORY:],
            }
        )

    def rolled_back(self, version: int, created: str) -> "ChannelEntry":
        """The entry that points to an earlier version again, forgetting those after it."""
        place = len(self.previous) - 1 - self.previous[::-1].index(version)
        return self.model_copy(
            update={
                "number": self.number + 1,
                "version": version,
                "action": "rollback",
                "created": created,
                "previous": self.previous[:place],
            }
        )


class Attestation(_Record):
    """A judgement of a release on a machine that can run it."""

    format: Literal[1] = 1
    model: str
    sku: str
    version: int = Field(ge=1)
    bundle: str = Field(pattern=_DIGEST)
    number: int = Field(ge=1)
    passed: bool
    created: str
    machine: dict[str, str]
    findings: dict[str, str]
    """What each gate found, in words."""


def folder_of(kind: Literal["releases", "channels", "attestations"], model: str, sku: str, *more: str) -> str:
    """A folder of the registry. Raises RegistryError for names that cannot be a part of a key."""
    for what, name in (("model", model), ("SKU", sku)):
        if not _NAME.fullmatch(name):
            raise RegistryError(f"the {what} is called {name!r}; expected letters, digits, '.', '_' and '-'")
    return "/".join((kind, model, sku, *more))


def numbered(folder: str, number: int) -> str:
    """Keys sort as their numbers do."""
    return f"{folder}/{number:08d}"


def release_key(model: str, sku: str, version: int) -> str:
    return numbered(folder_of("releases", model, sku), version)


def chunk_key(digest: str) -> str:
    return f"chunks/{digest[:2]}/{digest}"
