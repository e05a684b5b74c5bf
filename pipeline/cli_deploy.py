"""`kiln deploy ray`: options and output; the work is in `pipeline.deploy`."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
from rich.table import Table

from engines.server.auth import require_safe
from pipeline.cli_registry import require_trust
from pipeline.cli_serving import Serving, serving_options
from pipeline.deploy import application
from pipeline.deploy.bundles import CACHE, BundleSource, FolderSource, ReleaseSource, registry_at
from pipeline.deploy.figures import Limits
from pipeline.deploy.options import Contract, DeployOptions, HttpOptions, ReplicaCount, Version, require_name
from pipeline.deploy.placement import place
from pipeline.deploy.prefixes import Routing, RoutingConfig
from pipeline.deploy.rollout import Plan
from pipeline.deploy.update import finish, judged_badly, require_alike, start, unfinished
from pipeline.printing import print_result
from pipeline.progress import Progress
from pipeline.ray_cluster import connected, nodes, serve_module
from pipeline.registry.keys import signing_key_from_pem, trusted_keys_from_file
from pipeline.registry.records import CHANNELS, Channel
from pipeline.registry.registry import Registry
from pipeline.registry.store import Store, absolute_url
from plugins.errors import KilnError

WENT_BACK = 3
_PATIENCE = 1800.0
_LIMITS_ON_RAY = ("max_body_bytes", "max_concurrent", "max_prompts", "request_timeout", "body_timeout", "drain_timeout")
"""The others are of the server's own connections, which Serve's proxies keep here."""
_FILE = click.Path(path_type=Path)
_LIMITS, _PLAN, _SECONDS = Limits(), Plan("", "", 2), 1.0
_address = click.option(
    "--address", default="auto", show_default=True, help="Of the cluster: HOST:6379; auto: the one that runs here."
)
_app = click.option("--app", default="kiln", show_default=True, help="Name of the application.")


def _source_options(command: Any) -> Any:
    for option in (
        click.option("--cache", default=CACHE, show_default=True, help="Folder of each node for pulled bundles."),
        click.option("--allow-unsigned", is_flag=True, help="Take releases that nobody whom you trust signed."),
        click.option("--trust", type=_FILE, help="Trusted keys of the registry."),
        click.option("--sku", help="With --registry: the machine type."),
        click.option("--registry", help="MODEL is a model of this registry: a folder or an fsspec URL."),
    ):
        command = option(command)
    return command


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Connected; Serve's own lines for people are left out, because the commands have theirs."""
    with connected(address):
        serve_module()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield


@click.group("deploy")
def deploy_group() -> None:
    """Serve on many machines."""


@deploy_group.group("ray")
def ray_group() -> None:
    """Serve engine replicas on a Ray cluster, behind one endpoint, with rolling updates.

    \b
      kiln deploy ray up BUNDLE                        one application, engines on every node that can
      kiln deploy ray roll MODEL --registry URL ...    from stable to canary, and back where it is worse
      kiln deploy ray status | abort | down
    """


@ray_group.command("up", context_settings={"show_default": True})
@click.argument("model", metavar="BUNDLE|MODEL")
@_source_options
@click.option("--channel", type=click.Choice(CHANNELS), default="stable", help="With --registry: whose version.")
@_address
@_app
@click.option("--name", help="What clients call the model.  [default: the model's own]")
@click.option("--host", default="127.0.0.1", help="Address that the proxies of all nodes listen on.")
@click.option("--port", type=int, default=8000)
@click.option("--replicas", type=int, help="Of the engine.  [default: as many as fit]")
@click.option("--max-replicas", type=int, help="With it, from --replicas (default: 1) up to so many, by load.")
@click.option("--per-node", type=int, default=1, help="Replicas that share a node without GPUs.")
@click.option("--cpus", type=float, help="Of each replica.  [default: its share of the node; 1 beside a GPU]")
@click.option("--http-replicas", type=int, default=1, help="Of the HTTP side, which tokenises and routes.")
@click.option("--retries", type=int, default=3, help="Replicas that a request is sent to after the first failed it.")
@click.option("--routing", type=click.Choice(get_args(Routing)), default="prefix", help="Which replica gets a request.")
@click.option("--patience", type=float, default=_PATIENCE, help="Seconds that replicas may take to come up.")
@serving_options(_LIMITS_ON_RAY)
def up_command(
    model: str,
    channel: Channel,
    address: str,
    app: str,
    name: str | None,
    host: str,
    port: int,
    replicas: int | None,
    max_replicas: int | None,
    per_node: int,
    cpus: float | None,
    http_replicas: int,
    retries: int,
    routing: Routing,
    patience: float,
    serving: Serving,
    **source_options: Any,
) -> None:
    """Start an application and print its address; it runs on until `down`."""
    require_name(app)
    require_safe(host, serving.keys, serving.allow_anonymous)
    source = _source(model, channel, **source_options)
    manifest, progress = source.manifest(), Progress()
    with _cluster(address):
        on_gpu = manifest.sku.arch.startswith("sm_")
        placement = place(manifest.sku.name, on_gpu, nodes(), per_node, cpus)
        engine, called = replace(serving.engine, threads=placement.threads), name or manifest.name
        config = engine.config(manifest)
        options = DeployOptions(
            app,
            Contract.of(manifest),
            engine,
            _count(replicas, max_replicas, placement.fitting, progress),
            placement.options,
            HttpOptions(called, serving.config, serving.keys, serving.embeddings([called]), retries, http_replicas),
            RoutingConfig(routing),
            places=1 if config is None else config.max_running,
            drain=serving.config.drain_timeout,
        )
        with progress.stage(f"{options.count.least} replicas of {called}"):
            url = application.up(options, source, host, port, patience, progress.note)
    click.echo(url)


def _count(replicas: int | None, most: int | None, fitting: int, progress: Progress) -> ReplicaCount:
    least = replicas if replicas is not None else (fitting if most is None else 1)
    count = ReplicaCount(least, least if most is None else most)
    if count.most > fitting:
        progress.note(f"the cluster's nodes hold {fitting} replicas now; more start when there are more nodes")
    if count.least > fitting:
        raise KilnError(
            f"there shall be {count.least} replicas, the cluster's nodes hold {fitting}; lower --replicas, raise "
            "--per-node, or start more nodes"
        )
    return count


@ray_group.command("roll", context_settings={"show_default": True})
@click.argument("model", metavar="BUNDLE|MODEL")
@_source_options
@click.option("--to", "channel", type=click.Choice(CHANNELS), default="canary", help="With --registry: whose version.")
@click.option("--key", type=_FILE, help="Private key; with it what was found is attested, and stable promoted.")
@_address
@_app
@click.option("--steps", default=",".join(f"{each:g}" for each in _PLAN.steps), help="Shares of the traffic.")
@click.option("--surge", type=int, default=_PLAN.surge, help="Replicas that may run beyond the usual number.")
@click.option("--errors", type=float, default=_LIMITS.errors, help="Share of requests that it may fail more.")
@click.option("--latency", type=float, default=_LIMITS.latency, help="Share by which it may be slower.")
@click.option("--requests", type=int, default=_LIMITS.requests, help="Answers that each step needs.")
@click.option("--patience", type=float, default=_LIMITS.patience, help="Seconds that a step may take.")
@click.option("--again", is_flag=True, help="Also a version that went back before.")
def roll_command(
    model: str,
    channel: Channel,
    key: Path | None,
    address: str,
    app: str,
    steps: str,
    surge: int,
    errors: float,
    latency: float,
    requests: int,
    patience: float,
    again: bool,
    **source_options: Any,
) -> None:
    """Update an application to another version, step by step; exit code 3 where it went back to the old one.

    The update goes on in the cluster if this command ends; `status` shows it, and `roll` again ends it properly.
    """
    source, progress = _source(model, channel, **source_options), Progress()
    limits = Limits(errors, latency, requests, patience=patience)
    writer = _writer(source, key)
    if not again:
        judged_badly(source)
    with _cluster(address):
        state, new = application.require(app), Version.of(app, source)
        if not unfinished(state, new):
            if state.traffic.sides[0].app == new.app:
                click.echo(f"{source.title} serves already")
                return
            require_alike(state.options, source)
            with progress.stage(f"replicas of {source.title}"):
                start(state, new, _steps(steps), surge, limits)
        report = _follow(app, progress)
        finish(state.options, report, new, writer, progress)
    click.echo(f"{new.app}: {report.text}")
    if report.phase == "back":
        raise click.exceptions.Exit(WENT_BACK)


def _follow(app: str, progress: Progress) -> application.Report:
    """Until the update ends; says what changes."""
    said = ""
    with progress.stage("update") as tell:
        while True:
            report = application.report(app)
            tell(report.text)
            if report.text != said and not report.text.endswith("requests"):
                progress.note(report.text)
            said = report.text
            if not report.under_way:
                return report
            time.sleep(_SECONDS)


def _steps(text: str) -> tuple[float, ...]:
    with suppress(ValueError):
        return tuple(float(part) for part in text.split(","))
    raise KilnError(f"--steps is {text!r}; expected rising shares of the traffic: 0.1,0.5,1")


@ray_group.command("status")
@_address
@_app
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status_command(address: str, app: str, as_json: bool) -> None:
    """Show versions, their replicas and shares of the traffic, and an update that is under way."""
    with _cluster(address):
        state = application.require(app)
    shares = {side.app: side.share for side in state.traffic.sides}
    if as_json:
        versions = {name: {"share": shares.get(name, 0.0), "replicas": found} for name, found in state.replicas.items()}
        update = {"phase": state.report.phase, "text": state.report.text}
        click.echo(json.dumps({"app": app, "versions": versions, "update": update}))
        return
    table = Table(title=f"{app}: {state.options.http.model}", title_justify="left")
    for heading in ("version", "traffic", "replicas", "since the steward started"):
        table.add_column(heading)
    for name, found in state.replicas.items():
        counted = ", ".join(f"{count} {what.lower()}" for what, count in found.items())
        table.add_row(name, f"{shares.get(name, 0.0):.0%}", counted, state.report.figures.get(name, ""))
    print_result(table)
    if state.report.phase:
        print_result(f"update: {state.report.phase}: {state.report.text}")


@ray_group.command("abort")
@_address
@_app
def abort_command(address: str, app: str) -> None:
    """End an update that is under way: all traffic goes back to the old version."""
    with _cluster(address):
        application.require(app)
        went_back = application.abort(app)
    click.echo("the update went back" if went_back else "no update is under way")


@ray_group.command("down")
@_address
@_app
def down_command(address: str, app: str) -> None:
    """End an application, after the requests that run."""
    with _cluster(address), Progress().stage(f"ending {app}"):
        names = application.down(app)
    click.echo("\n".join(names) if names else f"nothing of {app} runs")


def _source(
    model: str,
    channel: Channel,
    registry: str | None,
    sku: str | None,
    trust: Path | None,
    allow_unsigned: bool,
    cache: str,
) -> BundleSource:
    """Raises KilnError where there is no such bundle or version."""
    if registry is None:
        if sku is not None or trust is not None:
            raise KilnError(f"--sku and --trust are for a registry; give --registry URL, or leave them out for {model}")
        return FolderSource.open(Path(model))
    if sku is None:
        raise KilnError(f"give --sku: the registry may have {model} for several machine types")
    require_trust(trust, allow_unsigned)
    trusted = None
    if trust is not None and not allow_unsigned:
        trusted_keys_from_file(trust)  # what is wrong with the file is said here, not by a replica
        trusted = trust.read_bytes()
    url = absolute_url(registry)
    head = registry_at(url, trusted).head(model, sku, channel)
    return ReleaseSource.find(url, trusted, model, sku, head.version, cache)


def _writer(source: BundleSource, key: Path | None) -> Registry | None:
    if key is None:
        return None
    if not isinstance(source, ReleaseSource):
        raise KilnError("--key signs in a registry; give --registry URL, or leave it out")
    return Registry(Store(source.url), registry_at(source.url, source.trust).access.trusted, signing_key_from_pem(key))
