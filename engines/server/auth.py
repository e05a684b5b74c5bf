"""Who calls: API keys from a file, and what each may do. Knows nothing of HTTP.

The file is TOML or JSON: a list `keys` of tables.

    [[keys]]
    name = "team-a"          # appears in the log
    key = "sk-..."           # or sha256 = "..." of it, so that the file holds no secret
    tenant = "team-a"        # whose cached prefixes it shares; by default the name
    lane = "interactive"     # of requests that name none
    highest_lane = "batch"   # by default interactive, that is, any
    max_concurrent = 8       # requests at a time; by default only the server's own limit
"""

import hashlib
import hmac
import ipaddress
import json
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.runtime.sequence import LANES, Lane
from plugins.errors import KilnError, first_line, first_problem


@dataclass(frozen=True)
class Caller:
    """The holder of one key, or whoever calls a server without keys."""

    name: str = "anonymous"
    tenant: str = ""
    """Salt of the cached prefixes that its requests share."""
    lane: Lane = "interactive"
    """Of requests that name none."""
    highest_lane: Lane = "interactive"
    max_concurrent: int | None = None

    def may_use(self, lane: Lane) -> bool:
        return LANES.index(lane) >= LANES.index(self.highest_lane)


ANONYMOUS = Caller()


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[\w.@-]{1,64}$")]
    key: Annotated[str, Field(min_length=8, pattern=r"^[!-~]+$")] | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    tenant: str | None = None
    lane: Lane | None = None
    highest_lane: Lane = "interactive"
    max_concurrent: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "_Key":
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("expected either key or sha256, the digest of it")
        if self.lane is not None and LANES.index(self.lane) < LANES.index(self.highest_lane):
            raise ValueError(f"lane is {self.lane} but highest_lane {self.highest_lane}")
        return self

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 else hashlib.sha256((self.key or "").encode()).digest()

    @property
    def caller(self) -> Caller:
        tenant = self.name if self.tenant is None else self.tenant
        return Caller(self.name, tenant, self.lane or self.highest_lane, self.highest_lane, self.max_concurrent)


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: Annotated[list[_Key], Field(min_length=1)]


class KeyRing:
    """The known keys, as digests."""

    def __init__(self, keys: dict[bytes, Caller]) -> None:
        self._keys = tuple(keys.items())

    @classmethod
    def read(cls, path: Path) -> "KeyRing":
        """Raises KilnError, which quotes no key, when the file cannot be read or says something unexpected."""
        try:
            text = path.read_text()
            document: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
            keys = _KeyFile.model_validate(document).keys
        except ValidationError as error:
            where, problem = first_problem(error)
            raise KilnError(f"{path}: {where}: {problem}; see engines/server/auth.py for the format") from error
        except (OSError, ValueError) as error:
            raise KilnError(
                f"{path}: {first_line(error)}; expected a TOML or .json file with a list of keys"
            ) from error
        for what, values in (("name", [k.name for k in keys]), ("key", [k.digest for k in keys])):
            if len(set(values)) < len(values):
                raise KilnError(f"{path}: two keys have the same {what}; give every key its own")
        return cls({key.digest: key.caller for key in keys})

    def caller(self, presented: str) -> Caller | None:
        """Whose key this is; None for an unknown one. Takes the same time whichever key matches."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found: Caller | None = None
        for known, caller in self._keys:  # all of them: where the search ends would tell which one matched
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def require_safe(host: str, keys: KeyRing | None, allow_anonymous: bool) -> None:
    """Raises KilnError when strangers could use the server without a key and nobody said that they may."""
    if keys is not None or allow_anonymous or host == "localhost":
        return
    with suppress(ValueError):  # another name: whose it is only the resolver knows
        if ipaddress.ip_address(host).is_loopback:
            return
    raise KilnError(
        f"without API keys everybody who reaches {host} could use the server; give --api-keys FILE, listen on "
        "127.0.0.1, or say --allow-anonymous"
    )
