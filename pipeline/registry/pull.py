"""Bundles out of the registry: verified, resumable, and never an older one unnoticed.

Beside the bundle's folder lies a small file that says which release it is and which state of the channel it came from.
A lower version, or an older state of the channel, is what an attacker would show who can write to the store but has no
key; it is refused unless the caller says so. A rollback is signed, so its lower version is taken.
"""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from engines.bundle import install_bundle
from pipeline.registry.records import Channel, ChannelEntry, Release
from pipeline.registry.registry import Registry
from pipeline.registry.store import RegistryError
from pipeline.registry.transfer import Told, download, partial_folder

_SEEN = ".release.json"
"""Suffix of the file beside a pulled bundle."""


class Seen(BaseModel):
    """What was pulled into a folder last: lower versions, and older states of a channel, are refused there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str
    sku: str
    version: int
    bundle: str
    channels: dict[str, int] = {}


def pull(
    registry: Registry,
    model: str,
    sku: str,
    target: Path,
    channel: Channel = "stable",
    version: int | None = None,
    allow_downgrade: bool = False,
    told: Told = lambda _: None,
) -> Release:
    """Bring a release into a folder: that of a channel, or one version. The folder holds the old or the new one.

    Raises RegistryError for a lower version than was pulled there before, unless the channel was rolled back since.
    """
    registry.access.require_format()
    seen_path = target.resolve().with_name(target.resolve().name + _SEEN)
    seen = _seen(seen_path, model, sku)
    head = None
    if version is None:
        head = registry.head(model, sku, channel)
        version = head.version
    if seen is not None and not allow_downgrade:
        _refuse_downgrade(registry, seen, version, head, target)
    release = registry.release(model, sku, version)
    with partial_folder(target, release.bundle) as partial:
        download(registry.store, partial, release.files, release.chunk_bytes, told)
        bundle = install_bundle(target, lambda folder: _move_files(partial, folder, release))
        os.rmdir(partial)
    if bundle.sha256 != release.bundle:
        raise RegistryError(f"{target} has the identity {bundle.sha256}, its release says {release.bundle}")
    numbers: dict[str, int] = dict(seen.channels) if seen else {}
    if head is not None:
        numbers[channel] = head.number
    record = Seen(model=model, sku=sku, version=version, bundle=release.bundle, channels=numbers)
    part = seen_path.with_name(seen_path.name + ".part")
    part.write_text(record.model_dump_json() + "\n")
    part.replace(seen_path)
    return release


def pull_outputs(registry: Registry, release: Release, target: Path) -> bool:
    """Bring what a release's engine computed where it was built; whether that was kept."""
    if release.outputs is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    download(registry.store, target.parent, {target.name: release.outputs}, release.chunk_bytes)
    return True


def _refuse_downgrade(registry: Registry, seen: Seen, version: int, head: ChannelEntry | None, target: Path) -> None:
    told = "say --allow-downgrade if you know why"
    if head is None:
        if version < seen.version:
            raise RegistryError(f"{target} has version {seen.version}; {version} is lower: {told}")
        return
    known = seen.channels.get(head.channel, 0)
    if head.number < known:
        raise RegistryError(
            f"{head.channel} of {head.model} for {head.sku} is at move {head.number}, it was at {known} before: "
            f"somebody put an old state back; {told}"
        )
    if version >= seen.version:
        return
    moves = (registry.entry(head.model, head.sku, head.channel, n) for n in range(known + 1, head.number + 1))
    if not known or not any(entry.action == "rollback" for entry in moves):
        raise RegistryError(f"{target} has version {seen.version}; {head.channel} has {version}: {told}")


def _move_files(partial: Path, folder: Path, release: Release) -> None:
    for name in release.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).rename(folder / name)
    for path in sorted((path for path in partial.rglob("*") if path.is_dir()), reverse=True):
        path.rmdir()


def _seen(path: Path, model: str, sku: str) -> Seen | None:
    try:
        seen = Seen.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RegistryError(f"{path} is damaged; remove it if you know which version lies beside it") from error
    return seen if (seen.model, seen.sku) == (model, sku) else None
