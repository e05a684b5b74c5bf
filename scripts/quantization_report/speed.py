"""Speed of a decoder's bundles beside this machine's ceilings and, where they were run, other stacks.

Prefill and decoding through `pipeline.bench`; many requests at once through the engine, as a server runs them. Ceilings
are those of the scheme: products at four times the FP32 peak where they are of integers (VNNI), and each step's weights
and cache read from memory once.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engines.bundle import EngineBundle
from engines.runtime.engine import Engine
from engines.runtime.request import Request, SamplingParams
from engines.runtime.scheduler import SchedulerConfig
from pipeline.bench import BenchConfig, bench
from pipeline.floors import DecoderWork, decoder_work_from_graph
from plugins.measure import fp32_peak, read_bandwidth
from quantization_report.decoder import VARIANTS
from quantization_report.findings import Findings, Verdict
from quantization_report.peers import Anchor, Peer, anchor_from_folder, peers_from_folder
from quantization_report.setting import Setting

PREFILL, CONTEXT = (512, 2048), 512
REQUESTS, PROMPT, SHARED, ANSWER = 16, 256, 128, 64
STEP = 512
"""Tokens of a step with many requests, which are in the lane whose steps are not kept short for others' sake."""
LIKE_QUALITY = 57
"""Of 64 prompts, those whose first token is FP32's, where speed is compared at like quality."""
DECODED = 128
"""Tokens that are decoded after a prompt of CONTEXT tokens."""
VNNI = 4
"""INT8 operations of an instruction for each FP32 operation of one."""
WORKLOADS = {
    "prefill 512": 1.15,
    "prefill 2048": 1.15,
    "decode": 1.3,
    "16 requests": 1.25,
}
"""How many times the best peer of like quality each is to be."""


@dataclass(frozen=True)
class Rates:
    """Tokens/s by workload: medians, what this machine could do at best, and lowest and highest.

    `equal`: of 64 of the peers' prompts, those whose first token is FP32's; None where no peers were run.
    """

    median: Mapping[str, float]
    ceiling: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    equal: float | None


def speed(name: str, spec: str, setting: Setting) -> Findings:
    """Makes the bundles of the variants that are timed; whether the gate passes them is the accuracy's part."""
    maker = replace(setting.maker(name, spec), asks_gate=False)
    bundles = {"FP32": (maker.parent, 0.0)}
    for variant in VARIANTS:
        if variant.timed and setting.wants(variant.name):
            made = maker.make(variant.name, variant.config)
            bundles[variant.name] = made.bundle, made.integer_products
    work = decoder_work_from_graph(maker.parent.engine_path, maker.parent.manifest.decoder)
    peak, bandwidth = fp32_peak(setting.threads), read_bandwidth(threads=setting.threads)
    peers = peers_from_folder(setting.peers) if setting.peers else ()
    anchor = anchor_from_folder(setting.peers) if setting.peers else None
    rates = {}
    for variant, (bundle, integers) in bundles.items():
        own = decoder_work_from_graph(bundle.engine_path, bundle.manifest.decoder)
        ceiling = _Ceiling(work, own, peak, bandwidth, integers)
        rates[variant] = _rates(variant, bundle, ceiling, setting, anchor)
    rows = [
        (variant, *(_cell(found, workload) for workload in WORKLOADS), _count(found.equal))
        for variant, found in rates.items()
    ]
    rows += [
        (peer.label, *(f"{peer.rates[w]:,.0f}" if w in peer.rates else "" for w in WORKLOADS), _count(peer.equal))
        for peer in peers
    ]
    verdicts = _verdicts(rates, peers) if peers else []
    columns = ("graph or stack", *WORKLOADS, "first tokens as FP32's, of 64")
    notes = [
        f"Tokens/s, medians, and in brackets the share of the ceiling; {setting.threads} threads. Decoding: one "
        f"sequence, {DECODED} tokens after {CONTEXT}. 16 requests: {PROMPT} tokens in, the first {SHARED} the same, "
        f"{ANSWER} out, sent at once into the lane `batch`, {STEP} tokens a step; output tokens over wall time. "
        f"Ceilings: FP32 {peak / 1e9:.0f} Gop/s, INT8 taken as {VNNI} times that, reading {bandwidth / 1e9:.1f} GB/s, "
        "measured in this run."
    ]
    if not peers:
        notes.append("Other stacks were not run beside it (`--peers`).")
    return Findings("speed", f"{name}: speed", columns, rows, verdicts, _data(rates, peers, peak, bandwidth), notes)


@dataclass(frozen=True)
class _Ceiling:
    """What a bundle's workloads could reach: operations are the float graph's, bytes those of its own graph, `work`.

    `integers`: the share of its products that are of integers.
    """

    float_work: DecoderWork
    work: DecoderWork
    peak: float
    bandwidth: float
    integers: float

    @property
    def rate(self) -> float:
        """Operations/s of all products and attention, as if all of them were of the scheme's kind."""
        return self.peak * (VNNI if self.integers > 0.5 else 1)

    def prefill(self, tokens: int) -> float:
        return tokens / max(
            self.float_work.prefill_operations(tokens) / self.rate, self.work.weight_bytes / self.bandwidth
        )

    def step(self, batch: int, context: float) -> float:
        """Seconds of a step that decodes `batch` sequences."""
        return max(
            self.float_work.decode_operations(batch, context) / self.rate,
            self.work.decode_bytes(batch, context) / self.bandwidth,
        )

    def requests(self) -> float:
        """Each prompt's own part once, the shared one once, then steps of all."""
        first = self.float_work.prefill_operations(PROMPT)
        other = first - self.float_work.prefill_operations(SHARED)
        prompts = (first + (REQUESTS - 1) * other) / self.rate
        steps = (ANSWER - 1) * self.step(REQUESTS, PROMPT + ANSWER / 2)
        return REQUESTS * ANSWER / (prompts + steps)


def _rates(name: str, bundle: EngineBundle, ceiling: _Ceiling, setting: Setting, anchor: Anchor | None) -> Rates:
    setting.progress.note(f"speed of {name}")
    config = BenchConfig(setting.threads, 3, PREFILL, (1,), decode_prompt=CONTEXT, decode_tokens=DECODED)
    figures = {figure.name: figure for figure in bench(bundle.path, config, setting.progress).figures}
    found = {f"prefill {length}": figures[f"prefill_{length}"] for length in PREFILL}
    found["decode"] = figures["decode_batch_1"]
    for_throughput = SchedulerConfig(REQUESTS, STEP)
    with (
        setting.progress.stage("16 requests"),
        Engine.open(bundle.path, threads=setting.threads, config=for_throughput) as engine,
    ):
        together = _requests_at_once(engine, bundle.manifest.decoder.vocab_size)
        equal = None if anchor is None else anchor.equal(engine)
    return Rates(
        {**{key: figure.median for key, figure in found.items()}, "16 requests": statistics.median(together)},
        {
            **{f"prefill {length}": ceiling.prefill(length) for length in PREFILL},
            "decode": 1 / ceiling.step(1, CONTEXT + DECODED / 2),
            "16 requests": ceiling.requests(),
        },
        {
            **{key: (figure.lowest, figure.highest) for key, figure in found.items()},
            "16 requests": (min(together), max(together)),
        },
        equal,
    )


def _requests_at_once(engine: Engine, vocabulary: int, repetitions: int = 3) -> list[float]:
    """Output tokens/s. Each repetition takes other prompts, so that nothing is cached from an earlier one."""
    generator = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    rates = []
    for number in range(repetitions + 1):  # the first one warms up
        shared = generator.integers(0, vocabulary, SHARED)
        prompts = [[*shared, *generator.integers(0, vocabulary, PROMPT - SHARED)] for _ in range(REQUESTS)]
        start = time.perf_counter()
        answers = engine.generate([Request(tuple(map(int, prompt)), sampling, "batch") for prompt in prompts])
        seconds = time.perf_counter() - start
        if number:
            rates.append(sum(len(answer.token_ids) for answer in answers) / seconds)
    return rates


def _cell(rates: Rates, workload: str) -> str:
    median, ceiling = rates.median[workload], rates.ceiling[workload]
    return f"{median:,.0f} ({median / ceiling:.0%})"


def _count(equal: float | None) -> str:
    return "" if equal is None else f"{equal:.0f}"


def _verdicts(rates: Mapping[str, Rates], peers: Sequence[Peer]) -> list[Verdict]:
    """At like quality, and without regard to it, each against the best peer of its kind."""
    alike = [name for name, measured in rates.items() if (measured.equal or 0) >= LIKE_QUALITY]
    found = []
    for workload, times in WORKLOADS.items():
        for kind, ours, theirs, wanted in (
            ("at like quality", alike, [peer for peer in peers if (peer.equal or 0) >= LIKE_QUALITY], times),
            ("whatever its quality", list(rates), list(peers), 1.0),
        ):
            known = [peer for peer in theirs if workload in peer.rates]
            if not ours or not known:
                continue
            best = max(ours, key=lambda name: rates[name].median[workload])
            peer = max(known, key=lambda peer: peer.rates[workload])
            ratio = rates[best].median[workload] / peer.rates[workload]
            claim = f"{workload}, {kind}: at least {wanted:g} times the best peer"
            text = f"{ratio:.2f} ({best} {rates[best].median[workload]:,.0f}, {peer.label} {peer.rates[workload]:,.0f})"
            found.append(Verdict(claim, text, ratio >= wanted))
    return found


def _data(rates: Mapping[str, Rates], peers: Sequence[Peer], peak: float, bandwidth: float) -> dict[str, object]:
    return {
        "fp32_peak": peak,
        "read_bandwidth": bandwidth,
        "ours": {
            name: {"median": found.median, "ceiling": found.ceiling, "spread": found.spread, "equal": found.equal}
            for name, found in rates.items()
        },
        "peers": {peer.label: {"rates": peer.rates, "equal": peer.equal} for peer in peers},
    }
