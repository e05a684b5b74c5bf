"""The registry's operations: publish, list, check, attest, promote, roll back.

A release is immutable; channels and attestations are logs (`pipeline.registry.access`). Whatever is read is checked
against its signature and digests before it is parsed. `pipeline.registry.pull` gets bundles out,
`pipeline.registry.collect` removes what nobody needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Literal

from engines.bundle import EngineBundle, verify_bundle
from pipeline.registry.access import Access, now, number_of
from pipeline.registry.keys import SigningKey, TrustedKeys
from pipeline.registry.records import (
    CHANNELS,
    Attestation,
    Channel,
    ChannelEntry,
    Release,
    chunk_key,
    folder_of,
    numbered,
    release_key,
)
from pipeline.registry.store import RegistryError, Store, UntrustedError
from pipeline.registry.transfer import CHUNK_BYTES, Told, read_chunk, stored_file, upload

Lower = Literal["take", "leave", "refuse"]
"""What becomes of a channel's move to a lower version; `leave`: another writer was faster with a higher one."""


@dataclass(frozen=True)
class Listed:
    """A release, the channels that point to it, and how it was judged last."""

    release: Release
    channels: tuple[Channel, ...]
    attestation: Attestation | None

    @property
    def state(self) -> str:
        """In words."""
        where = ", ".join(self.channels) or "no channel"
        if self.attestation is None:
            return f"{where}, unverified"
        return f"{where}, {'verified' if self.attestation.passed else 'failed'}"


class Registry:
    """`trusted` None takes unsigned records, `key` None writes such: both only where the caller was told to."""

    def __init__(
        self,
        store: Store,
        trusted: TrustedKeys | None,
        key: SigningKey | None = None,
        owner: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.store = store
        self.access = Access(store, trusted, key, owner)
        self._chunk_bytes = chunk_bytes

    # Releases

    def publish(
        self,
        path: Path,
        model: str | None = None,
        version: int | None = None,
        inputs: Mapping[str, str] | None = None,
        outputs: Path | None = None,
        repair: bool = False,
        allow_downgrade: bool = False,
        told: Told = lambda _: None,
    ) -> Release:
        """Publish a bundle and point `candidate` to it. One that is published already stays as it is.

        `version` is one more than the highest by default; a lower one is refused unless told. `repair` uploads again
        what is there already.
        """
        bundle = verify_bundle(path)
        model, sku = model or bundle.manifest.name, bundle.manifest.sku.name
        folder = folder_of("releases", model, sku)
        files = {
            file.relative_to(path).as_posix(): stored_file(file, self._chunk_bytes)
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }
        computed = None if outputs is None else stored_file(outputs, self._chunk_bytes)
        with self.access.lease():
            upload(self.store, path, files, self._chunk_bytes, told, repair)
            if outputs is not None and computed is not None:
                upload(self.store, outputs.parent, {outputs.name: computed}, self._chunk_bytes, told, repair)
            while (release := self._published(model, sku, bundle)) is None:
                highest = self.access.newest(folder)
                release = Release(
                    model=model,
                    sku=sku,
                    version=self._free_version(version, highest, allow_downgrade),
                    bundle=bundle.sha256,
                    created=now(),
                    kiln_version=installed_version("kiln-engine"),
                    chunk_bytes=self._chunk_bytes,
                    files=files,
                    inputs=dict(inputs or {}),
                    outputs=computed,
                )
                self._require_chunks(release)
                self.access.require_lease()
                if self.access.create(release_key(model, sku, release.version), release):
                    break
                if version is not None:
                    raise RegistryError(f"version {version} of {model} for {sku} exists; versions never change")
            self._require_chunks(release)
            self._move(model, sku, "candidate", release.version, "take" if allow_downgrade else "leave")
        return release

    @staticmethod
    def _free_version(wanted: int | None, highest: int, allow_downgrade: bool) -> int:
        if wanted is None:
            return highest + 1
        if wanted < 1:
            raise RegistryError(f"version is {wanted}; expected 1 or more")
        if wanted < highest and not allow_downgrade:
            raise RegistryError(
                f"version {wanted} is lower than {highest}, the highest; say --allow-downgrade to publish it"
            )
        return wanted

    def _published(self, model: str, sku: str, bundle: EngineBundle) -> Release | None:
        for version in self.versions(model, sku)[::-1]:
            try:
                release = self.find(model, sku, version)
            except UntrustedError:
                continue  # somebody changed it; so it is not this one
            if release is not None and release.bundle == bundle.sha256:
                return release
        return None

    def _require_chunks(self, release: Release) -> None:
        """What was counted on while it was not yet named may have been collected, or cut off on its way."""
        for digest, size in release.chunks.items():
            found = self.store.size(chunk_key(digest))
            if found != size:
                has = "is missing" if found is None else f"has {found} bytes"
                raise RegistryError(
                    f"{self.store.url}/{chunk_key(digest)} {has}, expected {size} bytes; publish the bundle again"
                )

    def versions(self, model: str, sku: str) -> list[int]:
        """Ascending."""
        keys = self.store.keys(folder_of("releases", model, sku))
        return sorted(number for key in keys if (number := number_of(key)))

    def find(self, model: str, sku: str, version: int) -> Release | None:
        """None where there is none. Raises RegistryError for one that must not be used."""
        key = release_key(model, sku, version)
        found = self.access.load(key, Release)
        if found is None:
            return None
        release = found[0]
        if (release.model, release.sku, release.version) != (model, sku, version):
            raise UntrustedError(
                f"{self.store.url}/{key} is version {release.version} of {release.model} for {release.sku}: it was put "
                "into another's place; do not use it"
            )
        return release

    def release(self, model: str, sku: str, version: int) -> Release:
        """Raises RegistryError where there is none."""
        found = self.find(model, sku, version)
        if found is None:
            raise RegistryError(
                f"{self.store.url} has no version {version} of {model} for {sku}; see kiln registry list"
            )
        return found

    def listing(self, model: str | None = None, sku: str | None = None) -> list[Listed]:
        """Releases, newest last within a model and SKU."""
        self.access.require_format()
        found = []
        for name, machine in self.pairs():
            if model not in (None, name) or sku not in (None, machine):
                continue
            heads = {channel: self.channel(name, machine, channel) for channel in CHANNELS}
            for version in self.versions(name, machine):
                channels = tuple(channel for channel, head in heads.items() if head and head.version == version)
                attestation = self.attestation(name, machine, version)
                found.append(Listed(self.release(name, machine, version), channels, attestation))
        return found

    def pairs(self) -> Sequence[tuple[str, str]]:
        """Models and SKUs that have releases."""
        places = (key.split("/") for key in self.store.keys("releases"))
        return sorted({(place[1], place[2]) for place in places if len(place) == 4})

    # Channels

    def channel(self, model: str, sku: str, channel: Channel) -> ChannelEntry | None:
        """Where a channel points; None where nothing was put into it."""
        folder = folder_of("channels", model, sku, channel)
        number = self.access.newest(folder)
        return self.entry(model, sku, channel, number) if number else None

    def head(self, model: str, sku: str, channel: Channel) -> ChannelEntry:
        """As `channel`. Raises RegistryError where nothing was put into it."""
        found = self.channel(model, sku, channel)
        if found is None:
            raise RegistryError(f"{model} for {sku} has nothing in {channel}; see kiln registry list")
        return found

    def entry(self, model: str, sku: str, channel: Channel, number: int) -> ChannelEntry:
        key = numbered(folder_of("channels", model, sku, channel), number)
        found = self.access.load(key, ChannelEntry)
        if found is None:
            raise RegistryError(f"{self.store.url}/{key} is missing; somebody deleted a part of the channel's history")
        entry, signer = found
        if (entry.model, entry.sku, entry.channel, entry.number) != (model, sku, channel, number):
            raise UntrustedError(f"{self.store.url}/{key} was put into another's place; do not use it")
        if signer is not None and channel not in signer.channels:
            raise UntrustedError(
                f"{self.store.url}/{key} is signed by the key '{signer.name}', which may move only "
                f"{', '.join(signer.channels)}; do not use it"
            )
        return entry

    def promote(
        self,
        model: str,
        sku: str,
        channel: Channel,
        version: int | None = None,
        allow_unverified: bool = False,
        allow_downgrade: bool = False,
    ) -> ChannelEntry:
        """Point a channel to a version, by default to that of the channel before it.

        It must have passed a judgement, and for `stable` have been in `canary`. A lower version than the channel's is
        refused unless told.
        """
        before = CHANNELS[CHANNELS.index(channel) - 1] if channel != "candidate" else None
        source = self.channel(model, sku, before) if before else None
        if version is None:
            if source is None:
                raise RegistryError(
                    f"{model} for {sku} has nothing in {before or 'the channel before'}; name a --version"
                )
            version = source.version
        if before == "canary" and (source is None or version not in (source.version, *source.previous)):
            raise RegistryError(f"version {version} of {model} for {sku} was never in canary; promote it there first")
        with self.access.lease():
            release = self.release(model, sku, version)
            judged = self.attestation(model, sku, version)
            if not allow_unverified and (judged is None or not judged.passed):
                why = "has not been verified" if judged is None else "has failed its last verification"
                raise RegistryError(
                    f"version {version} of {model} for {sku} {why}; run kiln nightly verify on a machine of that type, "
                    "or say --allow-unverified"
                )
            self._require_chunks(release)
            return self._move(model, sku, channel, version, "take" if allow_downgrade else "refuse")

    def _move(self, model: str, sku: str, channel: Channel, version: int, lower: Lower) -> ChannelEntry:
        action: Literal["publish", "promote"] = "publish" if channel == "candidate" else "promote"
        while True:
            head = self.channel(model, sku, channel)
            if head is not None and (head.version == version or (version < head.version and lower == "leave")):
                return head
            if head is not None and version < head.version and lower == "refuse":
                raise RegistryError(
                    f"{channel} of {model} for {sku} has version {head.version}; {version} is lower: use kiln registry "
                    "rollback, or say --allow-downgrade"
                )
            entry = (
                ChannelEntry(
                    model=model, sku=sku, channel=channel, number=1, version=version, action=action, created=now()
                )
                if head is None
                else head.moved(version, action, now())
            )
            if self._append(entry):
                return entry

    def _append(self, entry: ChannelEntry) -> bool:
        self.access.require_lease()
        folder = folder_of("channels", entry.model, entry.sku, entry.channel)
        return self.access.create(numbered(folder, entry.number), entry)

    def rollback(self, model: str, sku: str, channel: Channel = "stable", version: int | None = None) -> ChannelEntry:
        """Point a channel to the version before, or to another one that it had."""
        with self.access.lease():
            while True:
                head = self.channel(model, sku, channel)
                if head is None or not head.previous:
                    raise RegistryError(f"{channel} of {model} for {sku} has no earlier version to roll back to")
                target = head.previous[-1] if version is None else version
                if target not in head.previous:
                    had = ", ".join(map(str, head.previous))
                    raise RegistryError(f"{channel} of {model} for {sku} had the versions {had}, not {target}")
                self._require_chunks(self.release(model, sku, target))
                entry = head.rolled_back(target, now())
                if self._append(entry):
                    return entry

    # Judgements

    def attestation(self, model: str, sku: str, version: int) -> Attestation | None:
        """The newest judgement of a release."""
        folder = folder_of("attestations", model, sku, f"{version:08d}")
        number = self.access.newest(folder)
        found = self.access.load(numbered(folder, number), Attestation) if number else None
        if found is None:
            return None
        judged = found[0]
        if (judged.model, judged.sku, judged.version, judged.number) != (model, sku, version, number):
            raise UntrustedError(f"{self.store.url}/{folder} holds another release's attestation; do not use it")
        return judged

    def attest(
        self, release: Release, passed: bool, machine: Mapping[str, str], findings: Mapping[str, str]
    ) -> Attestation:
        """Record a judgement; the same one again is not recorded twice."""
        place = (release.model, release.sku, release.version)
        folder = folder_of("attestations", release.model, release.sku, f"{release.version:08d}")
        with self.access.lease():
            while True:
                last = self.attestation(*place)
                if last is not None and (last.passed, last.findings) == (passed, dict(findings)):
                    return last
                judged = Attestation(
                    model=release.model,
                    sku=release.sku,
                    version=release.version,
                    bundle=release.bundle,
                    number=1 if last is None else last.number + 1,
                    passed=passed,
                    created=now(),
                    machine=dict(machine),
                    findings=dict(findings),
                )
                self.access.require_lease()
                if self.access.create(numbered(folder, judged.number), judged):
                    return judged

    # Contents

    def check(self, release: Release, told: Told = lambda _: None) -> list[str]:
        """Read all of a release and say what is wrong with it; nothing where it is whole."""
        problems = []
        for digest, size in release.chunks.items():
            try:
                read_chunk(self.store, digest, size)
            except RegistryError as error:
                problems.append(str(error))
            told(size)
        return problems
