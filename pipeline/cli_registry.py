"""`kiln registry`: options and output; the work is in `pipeline.registry`."""

import json
from pathlib import Path
from typing import Any, cast

import click
from rich.table import Table

from pipeline.forecast import size
from pipeline.printing import print_result
from pipeline.progress import Progress
from pipeline.registry.collect import CollectConfig, collect
from pipeline.registry.keys import create_key, public_path, signing_key_from_pem, trusted_keys_from_file
from pipeline.registry.pull import pull
from pipeline.registry.records import CHANNELS, Channel, ChannelEntry
from pipeline.registry.registry import Listed, Registry
from pipeline.registry.store import RegistryError, Store
from plugins.errors import KilnError

_COLLECT = CollectConfig()
_FILE = click.Path(path_type=Path)
_CHANNEL = click.Choice(CHANNELS)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


def _reading(command: Any) -> Any:
    """Options of every command that opens a registry."""
    for option in (
        click.option("--allow-unsigned", is_flag=True, help="Take records that nobody whom you trust signed."),
        click.option("--trust", type=_FILE, help="Trusted keys: a PEM file, or TOML with [keys.NAME] tables."),
    ):
        command = option(command)
    return click.argument("url")(command)


def _writing(command: Any) -> Any:
    """Options of every command that changes one."""
    for option in (
        click.option("--single-writer", is_flag=True, help="Nobody else writes, so any file system will do."),
        click.option("--key", type=_FILE, help="Private key to sign with; made by kiln registry key."),
    ):
        command = option(command)
    return _reading(command)


def require_trust(trust: Path | None, allow_unsigned: bool) -> None:
    """Raises RegistryError where records would be taken from anybody and nobody said that they may."""
    if trust is None and not allow_unsigned:
        raise RegistryError("no trusted keys: give --trust FILE, or say --allow-unsigned to take what nobody signed")


def _opened(
    url: str,
    trust: Path | None,
    allow_unsigned: bool,
    key: Path | None = None,
    single_writer: bool = False,
    writes: bool = False,
) -> Registry:
    require_trust(trust, allow_unsigned)
    if writes and key is None and not allow_unsigned:
        raise RegistryError("nothing to sign with: give --key FILE, or say --allow-unsigned to write unsigned records")
    trusted = trusted_keys_from_file(trust) if trust and not allow_unsigned else None
    return Registry(Store(url, single_writer), trusted, signing_key_from_pem(key) if key else None)


@click.group("registry")
def registry_group() -> None:
    """Keep bundles in a folder or an object store: signed, with candidate, canary and stable channels.

    URL is a folder or an fsspec URL, such as s3://BUCKET/PREFIX with the s3fs package.
    """


@registry_group.command("key")
@click.argument("path", type=_FILE)
def key_command(path: Path) -> None:
    """Make an Ed25519 key pair: PATH, which signs, and PATH.pub, which others trust."""
    key = create_key(path)
    click.echo(f"{path}: keep it secret\n{public_path(path)}: give it to those who read\n")
    click.echo(f'# for a file of trusted keys\n[keys.{path.stem}]\npublic = "{key.public_text}"')


@registry_group.command("publish")
@_writing
@click.argument("bundle", type=_FILE)
@click.option("--model", help="Name in the registry.  [default: the bundle's]")
@click.option("--version", type=int, help="Version.  [default: one more than the highest]")
@click.option("--allow-downgrade", is_flag=True, help="Publish a lower version than the highest.")
@click.option("--repair", is_flag=True, help="Upload what is there already, too.")
@_as_json
def publish_command(
    bundle: Path,
    model: str | None,
    version: int | None,
    allow_downgrade: bool,
    repair: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Upload BUNDLE as a new version and point the candidate channel to it. Goes on where it was broken off."""
    registry, progress = _opened(**options, writes=True), Progress()
    with progress.stage("publish") as told:
        done = _Counter(told)
        release = registry.publish(bundle, model, version, None, None, repair, allow_downgrade, done)
    if as_json:
        click.echo(release.model_dump_json())
    else:
        click.echo(f"{release.model} {release.sku} {release.version}")


@registry_group.command("list")
@_reading
@click.option("--model", help="Only this model.")
@click.option("--sku", help="Only this machine type.")
@_as_json
def list_command(model: str | None, sku: str | None, as_json: bool, **options: Any) -> None:
    """Show releases, the channels that point to them, and how each was judged."""
    found = _opened(**options).listing(model, sku)
    if as_json:
        click.echo(json.dumps([_document(item) for item in found]))
        return
    table = Table(title_justify="left")
    for heading in ("model", "SKU", "version", "state", "size", "published", "bundle"):
        table.add_column(heading, justify="right" if heading in ("version", "size") else "left")
    for item in found:
        release = item.release
        cells = (size(release.bytes), release.created, release.bundle[:12])
        table.add_row(release.model, release.sku, str(release.version), item.state, *cells)
    print_result(table if found else "no releases")


@registry_group.command("pull")
@_reading
@click.argument("model")
@click.argument("sku")
@click.option("--out", type=_FILE, help="The bundle's folder.  [default: bundles/MODEL-SKU]")
@click.option("--channel", type=_CHANNEL, default="stable", show_default=True)
@click.option("--version", type=int, help="A version instead of what the channel has.")
@click.option("--allow-downgrade", is_flag=True, help="Take a lower version than was pulled there before.")
def pull_command(
    model: str,
    sku: str,
    out: Path | None,
    channel: Channel,
    version: int | None,
    allow_downgrade: bool,
    **options: Any,
) -> None:
    """Download a verified bundle. Goes on where it was broken off; the folder holds the old or the new one."""
    registry, progress = _opened(**options), Progress()
    target = out or Path("bundles") / f"{model}-{sku}"
    with progress.stage("pull") as told:
        release = pull(registry, model, sku, target, channel, version, allow_downgrade, _Counter(told))
    progress.note(f"{model} {sku} {release.version}")
    click.echo(target)


@registry_group.command("verify")
@_reading
@click.option("--model", help="Only this model.")
@click.option("--sku", help="Only this machine type.")
def verify_command(model: str | None, sku: str | None, **options: Any) -> None:
    """Check every signature and every byte. Exit code 1 where something is wrong."""
    registry, progress = _opened(**options), Progress()
    problems: list[str] = []
    registry.access.require_format()
    for name, machine in registry.pairs():
        if model in (None, name) and sku in (None, machine):
            with progress.stage(f"{name} {machine}") as told:
                problems += _problems_of(registry, name, machine, _Counter(told))
    for problem in problems:
        click.echo(problem)
    if problems:
        raise click.exceptions.Exit(1)


def _problems_of(registry: Registry, model: str, sku: str, done: "_Counter") -> list[str]:
    problems = []
    for version in registry.versions(model, sku):
        try:
            problems += registry.check(registry.release(model, sku, version), done)
            registry.attestation(model, sku, version)
        except KilnError as error:
            problems.append(str(error))
    for channel in CHANNELS:
        try:
            registry.channel(model, sku, channel)
        except KilnError as error:
            problems.append(str(error))
    return problems


@registry_group.command("promote")
@_writing
@click.argument("model")
@click.argument("sku")
@click.option("--to", "channel", type=_CHANNEL, required=True)
@click.option("--version", type=int, help="A version instead of what the channel before has.")
@click.option("--allow-unverified", is_flag=True, help="Although no gate has passed it.")
@click.option("--allow-downgrade", is_flag=True, help="Although the channel has a higher version.")
def promote_command(
    model: str,
    sku: str,
    channel: Channel,
    version: int | None,
    allow_unverified: bool,
    allow_downgrade: bool,
    **options: Any,
) -> None:
    """Point a channel to a verified release: candidate to canary, canary to stable."""
    registry = _opened(**options, writes=True)
    _tell(registry.promote(model, sku, channel, version, allow_unverified, allow_downgrade))


@registry_group.command("rollback")
@_writing
@click.argument("model")
@click.argument("sku")
@click.option("--channel", type=_CHANNEL, default="stable", show_default=True)
@click.option("--version", type=int, help="Which earlier one.  [default: the last]")
def rollback_command(model: str, sku: str, channel: Channel, version: int | None, **options: Any) -> None:
    """Point a channel back to a version that it had before."""
    _tell(_opened(**options, writes=True).rollback(model, sku, channel, version))


@registry_group.command("gc")
@_writing
@click.option("--keep", type=int, default=_COLLECT.keep, show_default=True, help="Newest releases of each to keep.")
@click.option("--grace", type=float, default=_COLLECT.grace, show_default=True, help="Seconds until a lease is dead.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
@click.option("--break-lock", is_flag=True, help="The collector that holds the lock is dead.")
def gc_command(keep: int, grace: float, dry_run: bool, break_lock: bool, **options: Any) -> None:
    """Delete old releases that no channel needs, and parts that no release has."""
    registry = _opened(**options)
    found = collect(registry, CollectConfig(keep, grace, dry_run, break_lock))
    for name in found.releases:
        click.echo(name)
    would = "would delete" if dry_run else "deleted"
    click.echo(f"{would} {len(found.releases)} releases, {found.objects} objects, {size(found.bytes)}", err=True)


class _Counter:
    """Shows how many bytes are done."""

    def __init__(self, told: Any) -> None:
        self._told, self._done = told, 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._told(size(self._done))


def _tell(entry: ChannelEntry) -> None:
    click.echo(f"{entry.model} {entry.sku} {entry.channel}: version {entry.version}, move {entry.number}")


def _document(item: Listed) -> dict[str, Any]:
    attestation = None if item.attestation is None else item.attestation.model_dump(mode="json")
    release = cast(dict[str, Any], item.release.model_dump(mode="json", exclude={"files"}))
    return {**release, "bytes": item.release.bytes, "channels": item.channels, "attestation": attestation}
