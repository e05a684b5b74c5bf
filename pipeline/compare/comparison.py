"""Compares two models, each a torch model, an ONNX file or an engine bundle.

Opens both sides, chooses what to feed them, and gathers every check into one report. A is the reference:
KL divergence and perplexity differences are measured against it; Polygraphy's relative error of an output
is relative to B.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engines.bundle import MANIFEST
from pipeline.compare.bundle_subject import bundle_subject_from_path
from pipeline.compare.greedy import compare_greedy
from pipeline.compare.inputs import merged_inputs, samples_from_inputs
from pipeline.compare.language import compare_text
from pipeline.compare.machine import machine_description
from pipeline.compare.material import Material, default_text, material_from_files
from pipeline.compare.onnx_subject import onnx_subject_from_path
from pipeline.compare.polygraphy_runners import TOKENS, compare_outputs
from pipeline.compare.report import Check, ComparisonReport, OutputRow, PromptRow, check_from_limit
from pipeline.compare.subjects import DecoderSubject, Encode, PlainSubject, Subject
from pipeline.compare.tolerance import Tolerances, tolerances_from_precisions
from pipeline.compare.torch_subject import torch_subject_from_model
from pipeline.load import TorchModel, load
from pipeline.progress import Progress
from pipeline.source import ModelSource, resolve_source
from plugins.errors import KilnError

Comparable = Subject | TorchModel | ModelSource | Path | str

_OUTPUT_TOKENS = 128
"""Tokens of the text whose logits Polygraphy compares element by element."""


@dataclass(frozen=True)
class CompareConfig:
    """Options of a comparison. `limits` are a user's tolerances by field name of `Tolerances`.

    `samples` random inputs for models without a KV cache; for language models at most `text_tokens` tokens
    of text in windows of `window`, and `tokens` greedy tokens after each prompt. Logits are taken `chunk`
    tokens at a time: 64 tokens of 49152 words are 12.6 MB a side.
    """

    text: Path | None = None
    prompts: Path | None = None
    tokens: int = 64
    text_tokens: int = 2048
    window: int = 512
    chunk: int = 64
    samples: int = 4
    seed: int = 0
    threads: int | None = None
    limits: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"tokens": 1, "text_tokens": 2, "window": 2, "chunk": 1, "samples": 1, "seed": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise KilnError(f"{name} is {getattr(self, name)}; expected at least {smallest}")


def compare(a: Comparable, b: Comparable, config: CompareConfig, progress: Progress) -> ComparisonReport:
    """Compare `b` with the reference `a`. Raises KilnError where the two cannot be compared.

    A torch model is a `TorchModel` or a `ModelSource`; a path or text is a bundle, an ONNX file, or whatever
    `pipeline.source.resolve_source` understands. A subject stays open, everything opened here is closed.
    """
    with ExitStack() as stack:
        subjects = []
        for label, model in (("A", a), ("B", b)):
            with progress.stage(f"open {label}"):
                subject = subject_from(model, config.threads)
            if subject is not model:
                stack.callback(subject.close)
            subjects.append(subject)
        return _compare_subjects(subjects[0], subjects[1], config, progress)


def subject_from(model: Comparable, threads: int | None = None, max_running: int = 1) -> Subject:
    """Open one side; a subject is returned as it is. `threads` and texts at once apply to ONNX Runtime."""
    if isinstance(model, PlainSubject | DecoderSubject):
        return model
    if isinstance(model, TorchModel):
        return torch_subject_from_model(model)
    if not isinstance(model, ModelSource):
        path = Path(model).expanduser()
        if (path / MANIFEST).is_file():
            return bundle_subject_from_path(path, threads, max_running)
        model = resolve_source(str(model))
    if model.kind == "onnx":
        assert model.path is not None
        return onnx_subject_from_path(model.path, threads, max_running)
    return torch_subject_from_model(load(model))


def _compare_subjects(a: Subject, b: Subject, config: CompareConfig, progress: Progress) -> ComparisonReport:
    precisions = (*a.side.precisions, *b.side.precisions)
    if isinstance(a, DecoderSubject) and isinstance(b, DecoderSubject):
        return _compare_decoders(
            a, b, config, tolerances_from_precisions("decoder", precisions, config.limits), progress
        )
    if isinstance(a, PlainSubject) and isinstance(b, PlainSubject):
        return _compare_plain(a, b, config, tolerances_from_precisions("plain", precisions, config.limits), progress)
    kinds = {True: "a language model with a KV cache", False: "a model without a KV cache"}
    raise KilnError(
        f"{a.side.name} is {kinds[isinstance(a, DecoderSubject)]}, {b.side.name} is "
        f"{kinds[isinstance(b, DecoderSubject)]}; compare two of the same kind"
    )


def _compare_plain(
    a: PlainSubject, b: PlainSubject, config: CompareConfig, tolerances: Tolerances, progress: Progress
) -> ComparisonReport:
    samples = samples_from_inputs(merged_inputs(a.inputs, b.inputs), config.samples, config.seed)
    with progress.stage("compare outputs"):
        rows = compare_outputs(a, b, samples, tolerances, config.chunk)
    shapes = "; ".join(f"{name} {list(value.shape)}" for name, value in samples[0].items())
    return ComparisonReport(
        created=_now(),
        model_kind="plain",
        a=a.side,
        b=b.side,
        machine=machine_description(),
        settings={"inputs": f"{len(samples)} random samples (seed {config.seed}), the first: {shapes}"},
        checks=tuple(_output_check(row, tolerances) for row in rows),
        outputs=rows,
    )


def _compare_decoders(
    a: DecoderSubject, b: DecoderSubject, config: CompareConfig, tolerances: Tolerances, progress: Progress
) -> ComparisonReport:
    if a.vocab_size != b.vocab_size:
        raise KilnError(
            f"{a.side.name} has a vocabulary of {a.vocab_size} tokens, {b.side.name} one of {b.vocab_size}; "
            "only models with the same vocabulary can be compared"
        )
    max_context = min(a.max_context, b.max_context)
    material = material_from_files(
        _common_encode(a, b),
        a.vocab_size,
        max_context,
        config.text,
        config.prompts,
        config.text_tokens,
        config.tokens,
        config.seed,
    )
    window = min(config.window, max_context)
    head = np.asarray(material.text[: min(_OUTPUT_TOKENS, max_context)], np.int64)
    with progress.stage("compare outputs"):
        rows = compare_outputs(a, b, [{TOKENS: head}], tolerances, config.chunk)
    with progress.stage("score text"):
        text = compare_text(a, b, material.text, window, config.chunk, tolerances)
    with progress.stage("generate greedily"):
        prompts = [compare_greedy(a, b, prompt, config.tokens, config.chunk) for prompt in material.prompts]
    output_checks = (_output_check(row, tolerances, f"first {len(head)} tokens of the text") for row in rows)
    return ComparisonReport(
        created=_now(),
        model_kind="decoder",
        a=a.side,
        b=b.side,
        machine=machine_description(),
        settings=_decoder_settings(material, config, window),
        checks=(*output_checks, *text.checks, _greedy_check(prompts, tolerances)),
        outputs=rows,
        figures=text.figures,
        curves=text.curves,
        prompts=tuple(prompts),
    )


def _common_encode(a: DecoderSubject, b: DecoderSubject) -> Encode | None:
    """The tokenizer that comes with the models. Raises KilnError where both have one and they differ."""
    if a.encode and b.encode and a.encode(default_text()) != b.encode(default_text()):
        raise KilnError(
            f"the tokenizers of {a.side.name} and {b.side.name} split the same text differently; "
            "only models with the same tokenizer can be compared"
        )
    return a.encode or b.encode


def _output_check(row: OutputRow, tolerances: Tolerances, where: str = "") -> Check:
    rule = f"an element also passes within {tolerances.rtol.value:g} of |b|" if tolerances.rtol.value else where
    return Check(
        name=f"output:{row.name}",
        title=f"output {row.name}",
        value=row.max_abs,
        direction="at most",
        limit=tolerances.atol.value,
        origin=tolerances.atol.origin,
        passed=row.passed,
        note="; ".join(part for part in (row.note, rule) if part),
    )


def _greedy_check(rows: Sequence[PromptRow], tolerances: Tolerances) -> Check:
    whole = sum(row.agreed == row.tokens for row in rows)
    share = sum(row.agreed for row in rows) / sum(row.tokens for row in rows)
    note = f"all {rows[0].tokens} tokens agree on {whole} of {len(rows)} prompts"
    return check_from_limit("greedy_agreement", "greedy agreement", share, "at least", tolerances.greedy, note)


def _decoder_settings(material: Material, config: CompareConfig, window: int) -> dict[str, str]:
    return {
        "text": f"{material.text_origin}, in windows of {window}",
        "prompts": f"{material.prompts_origin}; {config.tokens} greedy tokens after each",
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
