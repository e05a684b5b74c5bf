"""`kiln export-repo`: bundles for other servers."""

from pathlib import Path
from typing import Any

import click

from pipeline.cli_serve import each_named
from pipeline.export_repo import export_triton
from pipeline.export_repo_config import TritonOptions
from pipeline.progress import Progress

_DEFAULTS = TritonOptions()


@click.group("export-repo")
def export_repo_group() -> None:
    """Write bundles as the model repository of another server."""


@export_repo_group.command("triton", context_settings={"show_default": True})
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the repository.")
@click.option(
    "--name", "names", multiple=True, help="Name of a model, once for each BUNDLE.  [default: the models' own]"
)
@click.option("--max-batch", type=int, help="Rows of one call.  [default: the bundle's, as kiln tune found it, or 16]")
@click.option(
    "--queue-delay", type=int, default=_DEFAULTS.queue_delay, help="Microseconds a request may wait for company."
)
@click.option(
    "--instances", type=int, default=_DEFAULTS.instances, help="Copies of each model: in all on CPUs, on each GPU."
)
@click.option("--threads", type=int, help="Threads of a call on CPUs; 0: all.  [default: the bundle's, or 0]")
@click.option(
    "--server-path", default=_DEFAULTS.server_path, help="Where the server sees OUT; models with operators need it."
)
def triton_command(bundles: tuple[Path, ...], out: Path, names: tuple[str, ...], **options: Any) -> None:
    """Write BUNDLEs without a KV cache as a Triton model repository; a model that is there gets one more version.

    Start the server with --disable-auto-complete-config: every field is given, and Triton would otherwise batch
    requests to models that must not be batched. Decoders are refused: kiln serve serves them.
    """
    exported = export_triton(bundles, each_named(bundles, names), out, TritonOptions(**options), Progress())
    for model in exported:
        click.echo(model.folder / str(model.version))
