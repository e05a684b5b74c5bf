"""`kiln ablate`: options and output; the work is in `pipeline.ablate`."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import click

from pipeline.ablate import AblateConfig, ablate
from pipeline.ablate.report import html_from_ablation, json_from_ablation, table_from_ablation
from pipeline.ledger.entry import Entry
from pipeline.ledger.recording import ledger_options, record
from pipeline.page import write_page
from pipeline.printing import print_result
from pipeline.progress import Progress
from pipeline.quantize.config import QUANTS, QuantizeConfig

_DEFAULTS = AblateConfig()
_QUANTS = [name for name in QUANTS if name != "none"]


@click.command("ablate")
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), help="Folder that keeps the bundles.  [default: none is kept]")
@click.option("--quant", type=click.Choice(_QUANTS), default="int8", show_default=True)
@click.option("--requests", type=int, default=_DEFAULTS.requests, show_default=True, help="Requests, or samples.")
@click.option("--prompt", type=int, default=_DEFAULTS.prompt, show_default=True, help="Tokens of each prompt.")
@click.option("--output", type=int, default=_DEFAULTS.output, show_default=True, help="Tokens that each gives.")
@click.option("--repetitions", type=int, default=_DEFAULTS.repetitions, show_default=True)
@click.option(
    "--compared-tokens", type=int, default=_DEFAULTS.compared_tokens, show_default=True, help="Text for the accuracy."
)
@click.option("--threads", type=int, help="Threads of a step.  [default: every CPU this process may use]")
@click.option("--html", "html_path", type=click.Path(path_type=Path), help="Write a self-contained page with a plot.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
@ledger_options
def ablate_command(
    model: str,
    out: Path | None,
    quant: str,
    requests: int,
    prompt: int,
    output: int,
    repetitions: int,
    compared_tokens: int,
    threads: int | None,
    html_path: Path | None,
    as_json: bool,
    ledger: Path,
    no_ledger: bool,
) -> None:
    """Measure what each optimisation of MODEL gives: alone, then cumulatively.

    Fusion, KV cache, batching and quantisation, in the order in which they pay. MODEL is what build-engine takes. A
    variant that cannot be built or run says why, and the others go on.
    """
    config = AblateConfig(
        out=out,
        requests=requests,
        prompt=prompt,
        output=output,
        repetitions=repetitions,
        quantize=QuantizeConfig(quant=quant),
        threads=threads,
        compared_tokens=compared_tokens,
    )
    progress = Progress()

    def keep(make: Callable[[], Entry]) -> Entry | None:
        return None if no_ledger else record(ledger, make, progress)

    with redirect_stdout(sys.stderr):  # a user's model may print
        found = ablate(model, config, keep, progress)
    if as_json:
        click.echo(json_from_ablation(found))
    else:
        print_result(table_from_ablation(found))
    if html_path is not None:
        write_page(html_from_ablation(found), html_path)
