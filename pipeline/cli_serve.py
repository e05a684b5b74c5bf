"""`kiln serve`: options and output; the work is in `engines.server`."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import click

from engines.bundle import open_bundle
from engines.runtime.allocator import share_one_malloc_arena
from engines.server.auth import require_safe
from engines.server.messages import EngineSpec
from pipeline.cli_serving import LIMITS, Serving, serving_options
from plugins.errors import KilnError


@click.command("serve", context_settings={"show_default": True})
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--name", "names", multiple=True, help="Name of a model, once for each BUNDLE.  [default: the models' own]"
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=int, default=8000, help="0 takes one that is free.")
@click.option("--kv", type=click.Choice(("paged", "static")), default="paged", help="static: one ring for each place.")
@click.option("--window", type=int, help="Tokens that a ring keeps, with --kv static.  [default: the model's context]")
@click.option("--threads", type=int, help="Threads of a step.  [default: all CPUs]")
@click.option("--log-requests/--no-log-requests", default=True, help="One line for every request, without its content.")
@serving_options(tuple(LIMITS))
def serve_command(
    bundles: tuple[Path, ...],
    names: tuple[str, ...],
    host: str,
    port: int,
    kv: Literal["paged", "static"],
    window: int | None,
    threads: int | None,
    log_requests: bool,
    serving: Serving,
) -> None:
    """Serve BUNDLEs over HTTP: the OpenAI API, KServe v2, health, metrics and a status page.

    Each runs in a process of its own, which is started again when it dies. Prints the address on standard output when
    requests are taken; SIGTERM or Ctrl-C ends the server after the requests that run.
    """
    _require_packages()
    engine = replace(serving.engine, kv=kv, window=window, threads=threads)
    # Verified here, too, so that a wrong bundle is refused before anything starts.
    specs = [
        engine.spec(path, open_bundle(path).manifest, name)
        for path, name in zip(bundles, each_named(bundles, names), strict=True)
    ]
    _require_different([str(spec.name) for spec in specs])
    share_one_malloc_arena()
    _log_to_standard_error(log_requests)
    asyncio.run(_serve(specs, (host, port), serving))


async def _serve(specs: list[EngineSpec], address: tuple[str, int], serving: Serving) -> None:
    from engines.server.engine_process import EngineProcess
    from engines.server.serve import bind, serve, url_of

    with bind(*address) as listener:  # before the engines: an address that is taken is found at once
        require_safe(listener.getsockname()[0], serving.keys, serving.allow_anonymous)
        embeddings = serving.embeddings([str(spec.name) for spec in specs])
        async with AsyncExitStack() as stack:
            engines = {}
            for spec in specs:
                engine = await EngineProcess.start(spec)
                stack.push_async_callback(engine.close)
                engines[engine.info.name] = engine
            ready = partial(click.echo, url_of(listener))
            await serve(engines, listener, serving.config, serving.keys, embeddings, ready)


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


def _require_different(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise KilnError(f"two bundles are called {name}; give each its own --name, in order")


def _log_to_standard_error(requests: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("kiln").setLevel(logging.INFO)
    if not requests:
        logging.getLogger("kiln.server").setLevel(logging.WARNING)
