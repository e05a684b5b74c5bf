"""The page with every table, its verdicts, and how it was made."""

import time
from collections.abc import Sequence

from pipeline.compare.machine import machine_description, package_versions
from serving_bench.setting import Findings, Setting


def page(setting: Setting, command: str, findings: Sequence[Findings]) -> str:
    machine = machine_description()
    versions = ", ".join(f"{name} {version}" for name, version in package_versions("onnxruntime").items())
    limits = setting.limits
    head = (
        f"# Serving figures\n\n    {command}\n\n"
        f"{machine['cpu']}, {setting.threads} threads, {versions}, {time.strftime('%Y-%m-%d', time.gmtime())}. "
        f"{setting.bundle.manifest.name}, {setting.bundle.manifest.precision}, seed {setting.seed}. Everything in one "
        f"run, medians of {setting.repetitions} repetitions. Limits measured in that run: reading "
        f"{limits.read_bandwidth / 1e9:.1f} GB/s, FP32 matrix products {limits.product_rate / 1e9:.0f} Gop/s; a floor "
        "is the best value that these allow (`pipeline/bench.py` has the formulas), the share beside a figure says how "
        "much of it is reached.\n"
    )
    return "\n".join([head, *(section(found) for found in findings)])


def section(found: Findings) -> str:
    lines = [f"## {found.title}", ""]
    if found.rows:
        lines += [_row(found.columns), _row(["---", *["---:"] * (len(found.columns) - 1)]), *map(_row, found.rows), ""]
    for note in found.notes:
        lines += [note, ""]
    for verdict in found.verdicts:
        lines.append(f"- {'holds' if verdict.holds else 'DOES NOT HOLD'}: {verdict.claim}: {verdict.found}")
    return "\n".join([*lines, ""] if found.verdicts else lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
