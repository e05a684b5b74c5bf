"""`kiln tensorrt`: engines for NVIDIA GPUs, by TensorRT or by ONNX Runtime's providers of it."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import click

from engines.backends.ort_tensorrt import BACKENDS as ORT_BACKENDS
from engines.backends.ort_tensorrt import provider_options
from engines.backends.tensorrt.api import ATTENTIONS, Attention
from engines.backends.tensorrt.options import TensorRtOptions, options_from_dict
from engines.backends.tensorrt.profiles import ServingShapes, derive_profiles, sizes_from_text
from engines.sku import Sku, resolve_sku
from passes.onnx_model import OnnxModel, onnx_model_from_path
from passes.standard import Precision
from pipeline.cli_calibrate import calibration_options, config_from_options
from pipeline.cli_quantize import gate_options
from pipeline.cli_sku import sku_file_option
from pipeline.config import BuildConfig
from pipeline.export import export_model
from pipeline.load import load
from pipeline.progress import Progress
from pipeline.quantize.config import QuantizeConfig
from pipeline.source import resolve_source
from pipeline.tensorrt import build_tensorrt, gpu_for
from pipeline.tensorrt_config import BACKENDS, TensorRtBuild
from pipeline.tensorrt_quantize import SCHEME
from plugins.errors import KilnError

SERVING = ServingShapes()
_PREFIX = "trt_"
_MEBIBYTE = 2**20


def tensorrt_options(command: Any) -> Any:
    """An option for each field of `TensorRtOptions`, whose words say what it gives and what it costs."""
    for option in reversed(fields(TensorRtOptions)):
        words, name = option.metadata, f"--trt-{option.name.replace('_', '-')}"
        text = f"{words['gives']} Price: {words['price']}"
        kind: dict[str, Any] = {"default": option.default, "show_default": option.default is not None}
        if words["choices"]:
            kind["type"] = click.Choice(words["choices"])
        elif option.default is False:
            kind = {"is_flag": True}
        elif option.name == "timing_cache":
            kind["type"] = click.Path(path_type=Path, exists=True, dir_okay=False)
        else:
            kind["type"] = int
        command = click.option(name, f"{_PREFIX}{option.name}", help=text, **kind)(command)
    return command


def options_from_cli(values: dict[str, Any], sku: Sku | None = None) -> TensorRtOptions:
    """Takes its own out of `values`; where they are not given, a SKU that is built with TensorRT has its own.

    Raises KilnError for options that exclude one another.
    """
    own = {key.removeprefix(_PREFIX): values.pop(key) for key in list(values) if key.startswith(_PREFIX)}
    if own["workspace"] is not None:
        own["workspace"] *= _MEBIBYTE
    given = {name: value for name, value in own.items() if value != getattr(TensorRtOptions(), name)}
    return options_from_dict({**(sku.options if sku is not None and sku.backend == "tensorrt" else {}), **given})


def serving_options(command: Any) -> Any:
    """How the engine will be served: what its optimisation profiles are derived from."""
    for option in (
        click.option(
            "--max-running", type=int, default=SERVING.max_running, show_default=True, help="Sequences of a decoder."
        ),
        click.option(
            "--tokens-per-step",
            type=int,
            default=SERVING.tokens_per_step,
            show_default=True,
            help="Tokens that a decoder's step computes at most; one longer prompt has a profile of its own.",
        ),
        click.option(
            "--kv-blocks",
            type=int,
            default=SERVING.kv_blocks,
            show_default=True,
            help="Blocks of a decoder's paged cache; the native form has a row of the whole context for each sequence.",
        ),
        click.option("--max-batch", type=int, default=SERVING.max_batch, show_default=True, help="Items of a batch."),
        click.option("--max-sequence", type=int, help="Longest text in tokens, where the model takes texts."),
        click.option(
            "--dim",
            "dims",
            multiple=True,
            metavar="NAME=LEAST:BEST:MOST",
            help="Sizes of another dimension, such as height=32:640:1280, or NAME=SIZE.",
        ),
    ):
        command = option(command)
    return command


@click.group("tensorrt")
def tensorrt_group() -> None:
    """Build engines with TensorRT from ONNX models."""


@tensorrt_group.command("build")
@click.argument("model")
@click.option("--sku", required=True, help="Machine type; TensorRT builds on a machine of that type.")
@sku_file_option
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The bundle.")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="tensorrt",
    show_default=True,
    help="A plan of TensorRT or TensorRT-RTX (for GeForce and RTX), or the model with the engine caches of ONNX "
    "Runtime's provider of either.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    default="fp32",
    show_default=True,
    help="16 bits around islands of FP32, chosen by ranges that are measured here; with --quant, of what is not "
    "quantised.",
)
@click.option(
    "--attention",
    type=click.Choice(ATTENTIONS),
    help="A decoder's: Kiln's plug-in over a paged cache (sm_80 or newer), or TensorRT's own layers over a linear one, "
    "which need TensorRT 11.1; not given, the plug-in where it runs.",
)
@click.option(
    "--quant",
    type=click.Choice(("int8",)),
    help="INT8 with Q and D where TensorRT fuses them, with ranges from --calibration; texts need none. As many layers "
    "as the gate's limits allow.",
)
@click.option("--plan", type=click.Path(path_type=Path), help="Precision plan (TOML) to use instead of making one.")
@click.option("--table", type=click.Path(path_type=Path), help="Calibration table to use instead of calibrating.")
@click.option("--keep", multiple=True, metavar="LAYER", help="Leave a layer float; * and ? match many.")
@gate_options
@calibration_options
@click.option("--max-context", type=int, help="Longest context of a decoder that is exported here, in tokens.")
@click.option(
    "--passes/--no-passes",
    default=True,
    show_default=True,
    help="Rewrite the graph for TensorRT first, each pass checked on this machine's CPU.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare the engine with MODEL on this machine's GPU before it is published.",
)
@serving_options
@tensorrt_options
@click.option("--verbose", is_flag=True, help="Show the builder's phases and warnings.")
def build_command(
    model: str,
    sku: str,
    sku_file: Path | None,
    out: Path,
    backend: Any,
    precision: Precision,
    attention: Attention | None,
    quant: str | None,
    keep: tuple[str, ...],
    max_context: int | None,
    passes: bool,
    check: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Build a bundle with a TensorRT plan of MODEL: an ONNX file, or whatever build-engine takes."""
    serving, calibration, gate = _serving(options), config_from_options(options), _gate(options)
    target = resolve_sku(sku, sku_file)
    chosen = options_from_cli(options, target)
    config = TensorRtBuild(target, out, precision, passes, backend, chosen, serving, check, attention)
    if quant is not None:
        quantize = QuantizeConfig(SCHEME, calibration=calibration, search="accuracy", keep=keep, **gate)
        config = replace(config, quantize=quantize)
    progress = Progress(verbose=verbose)
    gpu_for(config)  # refused before a model is exported
    with _exported(model, max_context, progress) as (source, tokenizer):
        print(build_tensorrt(source, replace(config, tokenizer=tokenizer, origin=model), progress).path)


@contextmanager
def _exported(spec: str, max_context: int | None, progress: Progress) -> Iterator[tuple[OnnxModel, Path | None]]:
    """The ONNX model and the folder of its tokenizer, if it has one; both are there until the block ends."""
    found = resolve_source(spec)
    if found.kind == "onnx":
        if max_context is not None:
            raise KilnError(f"--max-context is {max_context}, but an .onnx file has its context fixed; leave it out")
        assert found.path is not None
        yield onnx_model_from_path(found.path), None
        return
    with tempfile.TemporaryDirectory(prefix="kiln-tensorrt-") as folder:
        with progress.stage("load weights"):
            loaded = load(found)
        with progress.stage("export to ONNX"):
            path = Path(folder) / f"{found.name}.onnx"
            model = export_model(loaded, path, BuildConfig(max_context=max_context))
        tokenizer = None
        if loaded.tokenizer is not None:
            tokenizer = Path(folder) / "tokenizer"
            loaded.tokenizer.save_pretrained(tokenizer)
        yield model, tokenizer


@tensorrt_group.command("provider-options")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(ORT_BACKENDS), required=True, help="Which of ONNX Runtime's providers.")
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="Folder of its engine caches.")
@serving_options
@tensorrt_options
def provider_options_command(model: Path, backend: Any, cache: Path, **options: Any) -> None:
    """Print the options that ONNX Runtime's TensorRT provider gets for the ONNX file MODEL, as JSON."""
    found = onnx_model_from_path(model)
    profiles = derive_profiles(found.inputs, found.decoder, _serving(options))
    print(json.dumps(provider_options(backend, found.inputs, profiles, options_from_cli(options), cache), indent=1))


def _gate(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of `QuantizeConfig`, taken out of `options`."""
    found = {name: options.pop(name) for name in ("specs", "plan", "table", "limits", "text", "generate")}
    return {**found, "samples": options.pop("gate_samples")}


def _serving(options: dict[str, Any]) -> ServingShapes:
    """Takes its own out of `options`. Raises KilnError."""
    texts = options.pop("dims")
    sizes = dict(sizes_from_text(text) for text in texts)
    if len(sizes) < len(texts):
        raise KilnError(f"--dim gives one dimension twice: {', '.join(texts)}")
    names = [field.name for field in fields(ServingShapes) if field.name in options]
    return ServingShapes(dims=sizes, **{name: options.pop(name) for name in names})
