"""What a profile found, for the terminal and as JSON."""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.profile.analysis import (
    BOUNDS,
    HALF_THE_BYTES,
    TWICE_THE_BATCH,
    Bound,
    Phase,
    rows_from_phase,
    seconds_if,
)
from pipeline.profile.profiling import Profile
from pipeline.profile.roofline import Roofline
from pipeline.profile.waste import Waste
from pipeline.profile.wastes import SHOWN

_MOST_ROWS = 10
_MOST_SLOWDOWN = 1.25
_MEANING: dict[Bound, str] = {
    "compute": "compute-bound",
    "bandwidth": "bandwidth-bound",
    "launch": "launch-bound",
    "device": "bound by the device, in layers whose work is not known",
    "host": "host-bound",
}


def verdict_sentence(phase: Phase, roofline: Roofline | None) -> str:
    """The verdict, how far it goes, and what it says of a change; nothing of that without a roofline."""
    part = phase.parts[phase.verdict] / phase.accounted
    if roofline is None:
        return f"{_MEANING[phase.verdict]} ({part:.0%} of the time)"
    halved = round(seconds_if(phase, roofline, HALF_THE_BYTES) / phase.accounted - 1, 2) + 0.0  # no "-0%"
    doubled = seconds_if(phase, roofline, TWICE_THE_BATCH) / phase.accounted
    more = "tokens" if phase.name.startswith("prefill") else "batch"
    return (
        f"{_MEANING[phase.verdict]} ({part:.0%} of the time). By the roofline, half the bytes of weights and cache "
        f"would change its time by {halved:+.0%}, and twice the {more} "
        f"would take {doubled:.2f} times as long"
    )


def remarks(profile: Profile) -> list[str]:
    """What a reader must know before believing it."""
    return [
        f"{phase.title}: with the profiler it took {phase.slowdown:.2f} times as long as without, so the two do not "
        "belong together; keep the machine free of other work and profile again"
        for phase in profile.phases
        if not 1 / _MOST_SLOWDOWN <= phase.slowdown <= _MOST_SLOWDOWN
    ]


def roofline_sentence(roofline: Roofline) -> str:
    """What was measured."""
    rates = "; ".join(
        f"{arithmetic} products "
        + ", ".join(f"{rate / 1e9:.0f} Gop/s for {rows} rows" for rows, rate in sorted(by_rows.items()))
        for arithmetic, by_rows in roofline.products.items()
    )
    return (
        f"Roofline measured here: memory {roofline.memory / 1e9:.1f} GB/s, caches {roofline.cache / 1e9:.1f} GB/s, "
        f"peak {roofline.peak / 1e9:.0f} Gop/s in {roofline.peak_of}, ridge at {roofline.ridge:.1f} operations a byte; "
        f"{rates}."
    )


def row_texts(phase: Phase) -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each operator, and for the time in none."""
    rows: list[tuple[str, ...]] = []
    for row in rows_from_phase(phase):
        work = (f"{row.operations / 1e9:.3f}", f"{row.bytes / 2**20:.1f}", f"{row.intensity:.2f}")
        if row.bound == "device":
            work = ("-", "-", "-")
        roof = f"{row.best / row.seconds:.0%}" if row.best else "-"
        share = f"{row.seconds / phase.seconds:.1%}"
        rows.append((row.operator, str(row.calls), f"{row.seconds * 1e3:.3f}", share, *work, roof, row.bound))
    for name, seconds, bound in (("(dispatch)", phase.dispatch, "launch"), ("(host)", phase.host, "host")):
        share = f"{seconds / phase.seconds:.1%}"
        rows.append((name, "", f"{seconds * 1e3:.3f}", share, "", "", "", "", bound))
    return rows


COLUMNS = ("operator", "calls", "ms", "of pass", "Gop", "MiB", "op/byte", "of roof", "bound by")


def phase_sentence(phase: Phase) -> str:
    """Its times."""
    rate = phase.tokens / phase.seconds
    return (
        f"{phase.seconds * 1e3:.2f} ms a pass (the fastest quarter of {phase.passes}), {rate:,.1f}/s; "
        f"operators sum to {phase.in_operators * 1e3:.2f} ms, {phase.coverage:.0%} of it"
    )


def waste_sentence(waste: Waste, phase: Phase) -> str:
    """What it costs, why, and the switch."""
    return f"{waste.name}: up to {waste.seconds / phase.accounted:.0%} of a pass; {waste.why}. Switch: {waste.switch}"


def tables_from_profile(profile: Profile) -> RenderableType:
    """As the terminal shows it."""
    manifest = profile.bundle.manifest
    threads = "" if profile.threads is None else f", {profile.threads} threads"
    parts: list[RenderableType] = [
        Text(f"{manifest.name} on {profile.processor}{threads}", "bold"),
    ]
    if profile.roofline is not None:
        parts.append(Text(roofline_sentence(profile.roofline)))
    for phase in profile.phases:
        table = Table(title=f"{phase.title}: {phase_sentence(phase)}", title_justify="left")
        for place, heading in enumerate(COLUMNS):
            table.add_column(heading, justify="left" if place in (0, len(COLUMNS) - 1) else "right")
        rows = row_texts(phase)
        shown = [*rows[:-2][:_MOST_ROWS], *rows[-2:]]
        for row in shown:
            table.add_row(*row)
        parts += [Text(), table]
        if len(rows) > len(shown):
            parts.append(Text(f"and {len(rows) - len(shown)} operators with less; --json has all", "dim"))
        parts.append(Text.assemble(("Verdict: ", "bold"), verdict_sentence(phase, profile.roofline) + "."))
        for waste in profile.wastes[phase.name][:SHOWN]:
            parts.append(Text(f"  {waste_sentence(waste, phase)}"))
    parts += [Text(f"Note: {remark}.", "bold red") for remark in remarks(profile)]
    return Group(*parts)


def json_from_profile(profile: Profile) -> str:
    """One line, with every node of the graph."""
    document = {
        "created": profile.created,
        "bundle": str(profile.bundle.path),
        "sha256": profile.bundle.sha256,
        "name": profile.bundle.manifest.name,
        "processor": profile.processor,
        "threads": profile.threads,
        "machine": dict(profile.machine),
        "versions": dict(profile.versions),
        "config": asdict(profile.config),
        "roofline": profile.roofline and {**asdict(profile.roofline), "ridge": profile.roofline.ridge},
        "remarks": remarks(profile),
        "phases": [_phase_document(profile, phase) for phase in profile.phases],
    }
    return json.dumps(document, allow_nan=False)


def _phase_document(profile: Profile, phase: Phase) -> dict[str, Any]:
    predicted = {
        name: profile.roofline and seconds_if(phase, profile.roofline, change)
        for name, change in (("half_the_bytes", HALF_THE_BYTES), ("twice_the_batch", TWICE_THE_BATCH))
    }
    return {
        "name": phase.name,
        "title": phase.title,
        "tokens": phase.tokens,
        "seconds": phase.seconds,
        "operator_seconds": phase.in_operators,
        "coverage": phase.coverage,
        "slowdown": phase.slowdown,
        "host_seconds": phase.host,
        "dispatch_seconds": phase.dispatch,
        "parts": {bound: phase.parts[bound] for bound in BOUNDS},
        "verdict": phase.verdict,
        **{f"seconds_with_{name}": seconds for name, seconds in predicted.items()},
        "wastes": [asdict(waste) for waste in profile.wastes[phase.name]],
        "operators": [{**asdict(row), "intensity": row.intensity} for row in rows_from_phase(phase)],
        "nodes": [{**asdict(node), "intensity": node.work.intensity} for node in phase.operators],
    }
