"""`kiln bisect`: options, output and exit code; the work is in `pipeline.bisect`."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
from rich.table import Table

from engines.bundle import open_bundle
from engines.sku import resolve_sku
from passes.onnx_model import OnnxModel, onnx_model_from_path
from pipeline.bisect.passes import PassParts
from pipeline.bisect.search import Found, GraphParts, Measure, search
from pipeline.cli_sku import sku_file_option
from pipeline.compare.onnx_subject import bound_graph
from pipeline.printing import print_result
from pipeline.progress import Progress
from pipeline.quantize.judge import DecoderJudge, PlainJudge, Text
from pipeline.verify import feeds_from_file, generated_inputs
from plugins.errors import KilnError

_SCORED = 32
"""Positions of a text at which logits are compared: its last ones."""


@click.command("bisect")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path), required=False)
@click.option("--inputs", type=click.Path(path_type=Path), help="An .npz of inputs by name.  [default: random ones]")
@click.option("--tokens", default="64,1024", show_default=True, help="Lengths of a decoder's random prompts.")
@click.option("--share", default=0.5, show_default=True, help="Of B's error, which the first part must reach.")
@click.option("--explain", default=0.9, show_default=True, help="Of B's error, which the smallest set must reach.")
@click.option(
    "--first-only", is_flag=True, help="Leave out the smallest set, which takes a run for every changed part."
)
@click.option("--sku", default="cpu", show_default=True, help="Whose passes to search, without B.")
@sku_file_option
@click.option("--threads", type=int, help="Threads of ONNX Runtime.  [default: every CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
@click.option("--verbose", is_flag=True, help="Show every run.")
def bisect_command(
    a: Path,
    b: Path | None,
    inputs: Path | None,
    tokens: str,
    share: float,
    explain: float,
    first_only: bool,
    sku: str,
    sku_file: Path | None,
    threads: int | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Find what makes B's outputs differ from A's: the first layer, and the smallest set of layers.

    A and B are engine bundles or ONNX files of one model. They are cut where both can be, which is never inside a
    fused operator, and mixed. Without B, finds the passes of --sku that change A's outputs.
    """
    if not (0 < share <= 1 and 0 < explain <= 1):
        raise KilnError(f"share is {share} and explain is {explain}; expected numbers above 0, up to 1")
    progress = Progress(verbose=verbose)
    with tempfile.TemporaryDirectory(prefix="kiln-bisect-") as folder:
        model = onnx_model_from_path(_runnable(a, Path(folder) / "a"))
        measure = _measure(model, inputs, tokens, threads)
        with progress.stage("search"):
            if b is None:
                found = search(
                    PassParts(model, resolve_sku(sku, sku_file), measure, progress), share, explain, first_only
                )
            else:
                other = _runnable(b, Path(folder) / "b")
                found = search(GraphParts(model.path, other, measure, progress), share, explain, first_only)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        _print(found, "passes" if b is None else "parts")


def _runnable(path: Path, folder: Path) -> Path:
    """The graph of a bundle, verified, or an ONNX file; with its attention bound to the kernel of this machine."""
    folder.mkdir()
    return bound_graph(path if path.suffix == ".onnx" else open_bundle(path).engine_path, folder)


def _measure(model: OnnxModel, inputs: Path | None, tokens: str, threads: int | None) -> Measure:
    if model.decoder is None:
        feeds = feeds_from_file(inputs) if inputs else generated_inputs(model)
        plain = PlainJudge(model.path, [], [(str(n), feed) for n, feed in enumerate(feeds)], False, threads, False)
        return lambda path: max(difference.error for difference in plain(path).values())
    if inputs is not None:
        raise KilnError(f"{inputs}: a decoder is compared on prompts; choose their lengths with --tokens")
    from plugins.build import cpu_library

    generator, texts = np.random.default_rng(0), []
    for length in _lengths(tokens, model.decoder.max_context):
        ids = tuple(generator.integers(0, model.decoder.vocab_size, length).tolist())
        texts.append(Text(str(length), ids, tuple(range(max(length - _SCORED, 0), length))))
    decoder = DecoderJudge(model.path, model.decoder, [cpu_library()], texts, threads, False)
    return lambda path: max(difference.error for difference in decoder(path).values())


def _lengths(text: str, limit: int) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise KilnError(f"--tokens is {text!r}; expected lengths with commas between them, such as 64,1024")
    return sorted({min(int(part), limit) for part in parts})


def _print(found: Found, kind: str) -> None:
    if found.first is None:
        print_result(f"The outputs are the same; {len(found.changed)} of {found.parts} {kind} differ.")
        return
    print_result(
        f"Error {found.error:.3g} of the outputs' norm; {len(found.changed)} of {found.parts} {kind} differ.\n"
        f"First: {found.first.label} (number {found.first.number}): up to it the error is {found.error_at_first:.3g}, "
        f"before it {found.error_before_first:.3g}."
    )
    if found.culprits:
        table = Table(title=f"Smallest set found: explains {found.explained:.0%}", title_justify="left")
        table.add_column("number", justify="right")
        table.add_column(kind)
        table.add_column("error alone", justify="right")
        for part, error in found.culprits:
            table.add_row(str(part.number), part.label, f"{error:.3g}")
        print_result(table)
