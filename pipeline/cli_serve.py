"""`kiln serve`: options and output; the work is in `engines.server`."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import click

from engines.bundle import open_bundle
from engines.manifest import Manifest
from engines.runtime.allocator import share_one_malloc_arena
from engines.runtime.opening import default_config
from engines.server.auth import KeyRing
from engines.server.config import ServerConfig
from engines.server.encoder import EmbeddingConfig, Pooling
from engines.server.messages import EngineSpec
from plugins.errors import KilnError

_LIMITS = {
    "max_body_bytes": "Bytes of a request's body at most.",
    "max_concurrent": "Requests in the works at a time, over all keys.",
    "max_prompts": "Prompts times answers of one request.",
    "request_timeout": "Seconds after which a request ends with what it has.",
    "header_timeout": "Seconds that a client may take for the headers of a request.",
    "body_timeout": "Seconds that a client may take for the body of a request.",
    "keep_alive": "Seconds that a connection may be idle between requests.",
    "stall_timeout": "Seconds that a client may take nothing of its answer.",
    "drain_timeout": "Seconds that running requests have when the server is asked to end.",
}


def _limit_options(command: Any) -> Any:
    for name, text in reversed(_LIMITS.items()):
        default = getattr(ServerConfig, name)
        option = click.option(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text)
        command = option(command)
    return command


@click.command("serve", context_settings={"show_default": True})
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--name", "names", multiple=True, help="Name of a model, once for each BUNDLE.  [default: the models' own]"
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=int, default=8000, help="0 takes one that is free.")
@click.option("--api-keys", type=click.Path(path_type=Path), help="TOML or JSON file of keys, see docs/server.md.")
@click.option("--allow-anonymous", is_flag=True, help="Without keys, serve others than this machine.")
@click.option("--open-metrics", is_flag=True, help="Show /metrics and the status page's figures without a key.")
@click.option("--max-running", type=int, help="Sequences that run at a time.  [default: the bundle's]")
@click.option("--tokens-per-step", type=int, help="Tokens that one step computes.  [default: the bundle's]")
@click.option("--max-waiting", type=int, help="Requests that may wait in an engine.  [default: 4096]")
@click.option("--speculate", type=int, help="Tokens that a step tries ahead by looking up the last ones.  [default: 0]")
@click.option("--kv-blocks", type=int, help="Cache blocks of each engine.  [default: the bundle's, or what fits]")
@click.option("--swap-blocks", type=int, default=0, help="Blocks of host memory for requests that give way.")
@click.option("--kv", type=click.Choice(("paged", "static")), default="paged", help="static: one ring for each place.")
@click.option("--window", type=int, help="Tokens that a ring keeps, with --kv static.  [default: the model's context]")
@click.option("--threads", type=int, help="Threads of a step.  [default: all CPUs]")
@click.option("--pooling", type=click.Choice(get_args(Pooling)), help="Of embeddings.  [default: the model's, or mean]")
@click.option("--log-requests/--no-log-requests", default=True, help="One line for every request, without its content.")
@_limit_options
def serve_command(
    bundles: tuple[Path, ...],
    names: tuple[str, ...],
    host: str,
    port: int,
    api_keys: Path | None,
    allow_anonymous: bool,
    open_metrics: bool,
    max_running: int | None,
    tokens_per_step: int | None,
    max_waiting: int | None,
    speculate: int | None,
    kv_blocks: int | None,
    swap_blocks: int,
    kv: Literal["paged", "static"],
    window: int | None,
    threads: int | None,
    pooling: Pooling | None,
    log_requests: bool,
    **limits: Any,
) -> None:
    """Serve BUNDLEs over HTTP: the OpenAI API, KServe v2, health, metrics and a status page.

    Each runs in a process of its own, which is started again when it dies. Prints the address on standard output when
    requests are taken; SIGTERM or Ctrl-C ends the server after the requests that run.
    """
    config = ServerConfig(open_metrics=open_metrics, **limits)
    _require_packages()
    keys = None if api_keys is None else KeyRing.read(api_keys)
    given = {
        "max_running": max_running,
        "tokens_per_step": tokens_per_step,
        "max_waiting": max_waiting,
        "speculate": speculate,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    specs = [
        _spec(path, name, changes, kv_blocks=kv_blocks, swap_blocks=swap_blocks, kv=kv, window=window, threads=threads)
        for path, name in zip(bundles, each_named(bundles, names), strict=True)
    ]
    _require_different([str(spec.name) for spec in specs])
    share_one_malloc_arena()
    _log_to_standard_error(log_requests)
    embeddings = {} if pooling is None else {str(spec.name): EmbeddingConfig(pooling=pooling) for spec in specs}
    asyncio.run(_serve(specs, (host, port), config, keys, embeddings, allow_anonymous))


async def _serve(
    specs: list[EngineSpec],
    address: tuple[str, int],
    config: ServerConfig,
    keys: KeyRing | None,
    embeddings: dict[str, EmbeddingConfig],
    allow_anonymous: bool,
) -> None:
    from engines.server.engine_process import EngineProcess
    from engines.server.serve import bind, require_safe, serve, url_of

    with bind(*address) as listener:  # before the engines: an address that is taken is found at once
        require_safe(listener, keys, allow_anonymous)
        async with AsyncExitStack() as stack:
            engines = {}
            for spec in specs:
                engine = await EngineProcess.start(spec)
                stack.push_async_callback(engine.close)
                engines[engine.info.name] = engine
            await serve(engines, listener, config, keys, embeddings, lambda: click.echo(url_of(listener)))


def _require_packages() -> None:
    try:
        import fastapi
        import uvicorn
    except ModuleNotFoundError as error:
        raise KilnError(f"{error.name} is not installed; install it: pip install 'kiln-engine[serve]'") from error
    del fastapi, uvicorn


def each_named(bundles: tuple[Path, ...], names: tuple[str, ...]) -> tuple[str | None, ...]:
    """The name that --name gives to each bundle. Raises KilnError where there are some, but not one for each."""
    if not names:
        return (None,) * len(bundles)
    if len(names) != len(bundles):
        raise KilnError(f"there are {len(bundles)} bundles and {len(names)} names; give --name once for each, in order")
    return names


def _spec(path: Path, name: str | None, changes: dict[str, Any], *, kv_blocks: int | None, **cache: Any) -> EngineSpec:
    """How to open one bundle. It is verified here, too, so that a wrong one is refused before anything starts."""
    manifest: Manifest = open_bundle(path).manifest
    config = replace(default_config(manifest), **changes) if changes and manifest.decoder is not None else None
    if kv_blocks is None and cache["kv"] == "paged" and config is not None and manifest.serving is not None:
        kv_blocks = manifest.serving.kv_blocks
    return EngineSpec(path, name or manifest.name, kv_blocks=kv_blocks, config=config, **cache)


def _require_different(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise KilnError(f"two bundles are called {name}; give each its own --name, in order")


def _log_to_standard_error(requests: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("kiln").setLevel(logging.INFO)
    if not requests:
        logging.getLogger("kiln.server").setLevel(logging.WARNING)
