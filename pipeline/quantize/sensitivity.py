"""What quantising each layer alone costs, measured: error and KL divergence of the outputs, by stratum.

Every finding is written to a file as soon as it is there, under a key of all that it depends on, so an interrupted run
goes on where it stopped and a second one measures nothing again.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from passes.quantization.plan import LayerPlan, PrecisionPlan
from pipeline.quantize.candidates import Rewrites, candidate
from pipeline.quantize.judge import Difference, Judge, Stratum
from plugins.errors import KilnError


@dataclass(frozen=True)
class Finding:
    """One layer with one plan; `problem` says why it cannot be run so, and there are no differences then."""

    key: str
    layer: str
    plan: LayerPlan
    differences: Mapping[Stratum, Difference]
    problem: str = ""

    @property
    def cost(self) -> float:
        """What is compared between layers: the worst stratum's KL divergence, or its squared error without one."""
        if self.problem:
            return float("inf")
        return max(
            difference.error**2 if difference.kl is None else difference.kl for difference in self.differences.values()
        )


class Findings:
    """Findings in a file of JSON lines. What a damaged line said, such as a last one cut short, is measured again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._by_key: dict[str, Finding] = {}
        adapter = TypeAdapter(Finding)
        lines = path.read_bytes().splitlines() if path is not None and path.exists() else []
        for line in lines:
            try:
                finding = adapter.validate_json(line)
            except ValidationError:
                continue
            self._by_key[finding.key] = finding

    def get(self, key: str) -> Finding | None:
        return self._by_key.get(key)

    def add(self, finding: Finding) -> None:
        self._by_key[finding.key] = finding
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(finding)) + "\n")


def measure_sensitivity(
    reference: Path,
    model_sha256: str,
    plans: Mapping[str, Sequence[LayerPlan]],
    rewrites: Rewrites,
    judge: Judge,
    context: str,
    findings: Findings,
    update: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Every layer alone with each of its plans, in order.

    `context` stands for what else a finding depends on: the judge's data, calibration, target and versions. `update`
    hears how far it is.
    """
    wanted = [(layer, plan) for layer, choices in plans.items() for plan in choices]
    found = []
    for number, (layer, plan) in enumerate(wanted, 1):
        key = _key(model_sha256, context, layer, plan)
        finding = findings.get(key)
        if finding is None:
            finding = _measured(reference, model_sha256, layer, plan, rewrites, judge, key)
            findings.add(finding)
        found.append(finding)
        update(f"{number} of {len(wanted)}: {layer} as {plan.scheme}, {_in_words(finding)}")
    return found


def _measured(
    reference: Path, model_sha256: str, layer: str, plan: LayerPlan, rewrites: Rewrites, judge: Judge, key: str
) -> Finding:
    try:
        with candidate(reference, PrecisionPlan(model_sha256, {layer: plan}), rewrites) as path:
            return Finding(key, layer, plan, judge(path))
    except KilnError as error:
        return Finding(key, layer, plan, {}, str(error))


def _key(model_sha256: str, context: str, layer: str, plan: LayerPlan) -> str:
    facts = [model_sha256, context, layer, {**asdict(plan), "reason": ""}]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _in_words(finding: Finding) -> str:
    return finding.problem or ", ".join(
        f"{stratum} error {difference.error:.2e}" + ("" if difference.kl is None else f" KL {difference.kl:.2e}")
        for stratum, difference in finding.differences.items()
    )
