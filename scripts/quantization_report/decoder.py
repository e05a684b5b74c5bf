"""SmolLM2: every scheme against FP32, by length of the text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline.gate.graphs import graph_file_from_path
from pipeline.gate.keep import rank_layers
from pipeline.gate.layers import decoder_layers
from pipeline.quantize.config import QuantizeConfig
from quantization_report.bundles import Made, Maker, weight_bytes
from quantization_report.findings import Findings, Verdict, at_least, at_most, gate_in_words
from quantization_report.language import Figures, LanguageMeasure, material_from_corpora
from quantization_report.setting import Setting

INTEGERS = 0.8
"""Share of the products that are left in INT8 when every layer has calibrated ranges."""
SENSITIVE = "*.down_proj"
"""What enters these has outliers in a few tokens: one range for all of them leaves the other tokens few steps.
Keeping as many of the layers that add most noise relative to their own output, which are others, helps little (SmolLM2,
28 of 151 layers kept, KL divergence: 0.11 so, 0.015 with these)."""
_GATE_TOKENS = 256
"""Of the gate's continuations: `--gate-tokens`."""


@dataclass(frozen=True)
class Variant:
    """`limit`: what the issue allows the perplexity to change by; None: shown without a claim. `timed`: in `speed`."""

    name: str
    config: QuantizeConfig
    limit: float | None
    static: bool = False
    timed: bool = False


INT8 = QuantizeConfig("int8", search="all", attention="bf16")
INT4 = QuantizeConfig("int4", search="all", attention="bf16")
VARIANTS = (
    Variant("w8a16", QuantizeConfig("w8a16", search="all"), 0.005, timed=True),
    Variant("w8a8-dynamic", INT8, 0.02, timed=True),
    Variant("w8a8-dynamic smoothed", replace(INT8, smooth="search"), 0.02),
    Variant("w8a8", QuantizeConfig("w8a8", smooth="search", search="all"), 0.03, static=True),
    Variant("w4a16", QuantizeConfig("w4a16", group_size=32, search="all"), 0.06),
    Variant("w4a8-dynamic", INT4, None, timed=True),
    Variant("int8-kv", QuantizeConfig("none", kv="int8-kv"), 0.01),
    Variant("w8a8-dynamic int8-kv", replace(INT8, kv="int8-kv"), None, timed=True),
    Variant("w8a8-dynamic ends int8-kv", replace(INT8, kv="int8-kv", keep_ends=False), None, timed=True),
    Variant("w4a8-dynamic ends int8-kv", replace(INT4, kv="int8-kv", keep_ends=False), None, timed=True),
)
"""Every layer that has a kernel is quantised, so that accuracy is judged at its worst and does not depend on how long a
layer took. `ends`: the first and the last layer, too (`--quantise-ends`)."""


@dataclass
class Decoder:
    """A language model with its float bundle, its measure, and what has been made of it."""

    name: str
    maker: Maker
    measure: LanguageMeasure
    made: dict[str, Made]
    figures: dict[str, Figures]
    sensitive: list[str]
    """Layers that W8A8 with calibrated ranges keeps float."""
    tables: list[Path]
    """The calibration table, once there is one: it is the same for all variants."""

    def make(self, name: str, config: QuantizeConfig, asks_gate: bool = True) -> Made:
        """As the maker does, with what has been calibrated already."""
        table = self.tables[0] if self.tables and _calibrates(config) else None
        maker = self.maker if asks_gate else replace(self.maker, asks_gate=False)
        made = maker.make(name, replace(config, table=table))
        if made.planned.table is not None and not self.tables:
            self.tables.append(self.maker.folder / "calibration.json")
            self.tables[0].write_text(made.planned.table.to_json(), encoding="utf-8")
        return made


def _calibrates(config: QuantizeConfig) -> bool:
    return config.quant == "w8a8" or config.smooth == "search"


def opened(name: str, spec: str, setting: Setting) -> Decoder:
    maker = setting.maker(name, spec)
    context = maker.parent.manifest.decoder.max_context
    material = material_from_corpora(setting.corpora, maker.tokenizer, context, setting.quick)
    with setting.progress.stage("FP32's logits"):
        measure = LanguageMeasure(maker.parent.path, material, setting.threads)
    return Decoder(name, maker, measure, {}, {}, [], [])


def accuracy(decoder: Decoder, setting: Setting, variants: Sequence[Variant] = VARIANTS) -> Findings:
    """Makes the bundles and judges them."""
    text = setting.folder / "gate.txt"
    text.write_text("\n\n".join((setting.corpora.novel[:150_000], setting.corpora.speech)), encoding="utf-8")
    verdicts: list[Verdict] = []
    for variant in variants:
        if not setting.wants(variant.name):
            continue
        config = replace(variant.config, text=text, generate=_GATE_TOKENS)
        if variant.static:
            config = replace(config, plan=_plan_without_sensitive(decoder, config, setting))
        made = decoder.make(variant.name, config)
        with setting.progress.stage(f"judge {variant.name}"):
            figures = decoder.measure(made.bundle.path)
        decoder.made[variant.name], decoder.figures[variant.name] = made, figures
        setting.progress.note(_sentence(figures))
        verdicts += _verdicts(variant, made, figures)
    return _table(decoder, setting, verdicts)


def _plan_without_sensitive(decoder: Decoder, config: QuantizeConfig, setting: Setting) -> Path:
    """The plan of all layers but those of SENSITIVE that add most noise: as many of them as may stay float.

    Ranked as the gate does, on one text; the ends, which keep float activations anyway, count among those that stay.
    """
    every = decoder.make("w8a8, every layer", config, asks_gate=False)
    plan, path = every.planned.plan, decoder.maker.parent.engine_path
    text = next(iter(decoder.measure.material.windows.values()))[0]
    with setting.progress.stage("rank layers"):
        graphs = [graph_file_from_path(found) for found in (path, every.bundle.engine_path)]
        rows, _ = decoder_layers(*graphs, [text], 128, setting.threads)
    spare = int((1 - INTEGERS) * len(every.planned.layers)) - 2
    ranked = [name for name in rank_layers([rows]) if plan.of(name).scheme == "w8a8"]
    decoder.sensitive += [name for name in ranked if fnmatchcase(name, SENSITIVE)][:spare]
    setting.progress.note(f"kept float: {', '.join(decoder.sensitive)}")
    target = decoder.maker.folder / "plan.toml"
    target.write_text(plan.keeping(decoder.sensitive, "adds most noise").to_toml(), encoding="utf-8")
    return target


def _verdicts(variant: Variant, made: Made, figures: Figures) -> list[Verdict]:
    if variant.limit is None:
        return []
    lengths = sorted(figures.change)[-3:]
    if variant.name == "int8-kv":
        lengths = [lengths[0], lengths[-1]]
    found = [
        at_most(f"{variant.name}: perplexity at {length} tokens changes by", abs(figures.change[length]), variant.limit)
        for length in lengths
    ]
    if variant.static:
        found.append(at_least(f"{variant.name}: share of products in INT8", made.integer_products, INTEGERS, ".0%"))
    return found


def _sentence(figures: Figures) -> str:
    changes = ", ".join(f"{length}: {change:+.2%}" for length, change in figures.change.items())
    return f"perplexity {changes}; KL {figures.kl_mean:.4f}; greedy {figures.greedy}"


def _table(decoder: Decoder, setting: Setting, verdicts: list[Verdict]) -> Findings:
    reference, material = decoder.measure.perplexity, decoder.measure.material
    rows = [
        (
            "FP32",
            "",
            f"{weight_bytes(decoder.maker.parent) / 1e6:.0f}",
            "",
            *(f"{value:.2f}" for value in reference.values()),
            "",
            str(material.greedy),
            "",
        )
    ]
    data: dict[str, object] = {"FP32": {"perplexity": reference}}
    for name, made in decoder.made.items():
        figures = decoder.figures[name]
        rows.append(
            (
                name,
                made.schemes,
                f"{weight_bytes(made.bundle) / 1e6:.0f}",
                f"{made.integer_products:.0%}",
                *(f"{change:+.2%}" for change in figures.change.values()),
                f"{figures.kl_mean:.4f}",
                f"{sum(figures.greedy) / len(figures.greedy):.0f} ({min(figures.greedy)} to {max(figures.greedy)})",
                gate_in_words(made.gate),
            )
        )
        data[name] = _record(made, figures)
    lengths = (f"at {length}" for length in reference)
    columns = ("graph", "layers", "MB", "products in INT8", *lengths, "KL", f"greedy, of {material.greedy}", "gate")
    notes = [
        f"Perplexity of {setting.corpora.origin} and its change by length of the window; {material.sentence}. KL: mean "
        "divergence from FP32 in nats, over all lengths. Greedy: tokens before the first that differs from FP32's, "
        "mean over the prompts, and range. "
        + ("Gate: a build's verdict, on other pieces of these texts." if setting.gate else "The gate: `--no-gate`."),
        f"{len(decoder.sensitive)} of the `{SENSITIVE}` layers stay float in W8A8 with calibrated ranges."
        if decoder.sensitive
        else "",
        "SmolLM2's weights were 4-bit once (the file is Q4_1), so INT4 looks better here than it is.",
    ]
    return Findings(decoder.name, f"{decoder.name}: accuracy", columns, rows, verdicts, data, [*filter(None, notes)])


def _record(made: Made, figures: Figures) -> Mapping[str, object]:
    return {
        "perplexity": figures.perplexity,
        "change": figures.change,
        "kl": figures.kl,
        "greedy": figures.greedy,
        "integer_products": made.integer_products,
        "bytes": weight_bytes(made.bundle),
        "schemes": made.schemes,
        "gate": None if made.gate is None else made.gate.sentence(),
    }
