"""Options that `kiln serve` and `kiln deploy ray up` have in common: engines, limits of the HTTP side, keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, get_args

import click

from engines.server.auth import KeyRing
from engines.server.config import ServerConfig
from engines.server.encoder import EmbeddingConfig, Pooling
from engines.server.options import EngineOptions

LIMITS = {
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
"""Fields of `ServerConfig`."""
_ENGINE = ("max_running", "tokens_per_step", "max_waiting", "speculate", "kv_blocks", "swap_blocks")
"""Fields of `EngineOptions`."""
_OPTIONS = (
    click.option("--api-keys", type=click.Path(path_type=Path), help="TOML or JSON file of keys, see docs/server.md."),
    click.option("--allow-anonymous", is_flag=True, help="Without keys, serve others than this machine."),
    click.option("--open-metrics", is_flag=True, help="Show /metrics and the status page's figures without a key."),
    click.option("--max-running", type=int, help="Sequences that run at a time in an engine.  [default: the bundle's]"),
    click.option("--tokens-per-step", type=int, help="Tokens that one step computes.  [default: the bundle's]"),
    click.option("--max-waiting", type=int, help="Requests that may wait in an engine.  [default: 4096]"),
    click.option(
        "--speculate", type=int, help="Tokens that a step tries ahead by looking up the last ones.  [default: 0]"
    ),
    click.option("--kv-blocks", type=int, help="Cache blocks of each engine.  [default: the bundle's, or what fits]"),
    click.option("--swap-blocks", type=int, default=0, help="Blocks of host memory for requests that give way."),
    click.option(
        "--pooling", type=click.Choice(get_args(Pooling)), help="Of embeddings.  [default: the model's, or mean]"
    ),
)


@dataclass(frozen=True)
class Serving:
    """What these options say."""

    engine: EngineOptions
    config: ServerConfig
    keys: KeyRing | None
    allow_anonymous: bool
    pooling: Pooling | None

    def embeddings(self, names: Sequence[str]) -> dict[str, EmbeddingConfig]:
        """Of models by their names."""
        return {} if self.pooling is None else {name: EmbeddingConfig(pooling=self.pooling) for name in names}


def serving_options(limits: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options, with some of the LIMITS; the command is given a `Serving` as `serving`, and its own options."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def gathered(
            api_keys: Path | None, allow_anonymous: bool, open_metrics: bool, pooling: Pooling | None, **rest: Any
        ) -> None:
            engine = EngineOptions(**{name: rest.pop(name) for name in _ENGINE})
            config = ServerConfig(open_metrics=open_metrics, **{name: rest.pop(name) for name in limits})
            keys = None if api_keys is None else KeyRing.read(api_keys)
            command(serving=Serving(engine, config, keys, allow_anonymous, pooling), **rest)

        defaults = {field.name: field.default for field in fields(ServerConfig)}
        of_limits = (
            click.option(
                f"--{name.replace('_', '-')}", type=type(defaults[name]), default=defaults[name], help=LIMITS[name]
            )
            for name in limits
        )
        for option in reversed((*_OPTIONS, *of_limits)):
            gathered = option(gathered)
        return gathered

    return decorated
