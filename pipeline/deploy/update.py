"""What surrounds an update of a running application: may this version follow that one, and what is left to do after it.

The update itself is the steward's, in the cluster; this runs in the command. With a key what was found is written into
the registry: a version that passed becomes `stable`, one that went back carries a failed attestation, which keeps it
from being promoted or tried again unnoticed. `stable` is never touched otherwise.
"""

from pipeline.compare.machine import machine_description
from pipeline.deploy import application
from pipeline.deploy.application import State
from pipeline.deploy.bundles import BundleSource, ReleaseSource, registry_at
from pipeline.deploy.figures import Limits
from pipeline.deploy.options import Contract, DeployOptions, Version
from pipeline.deploy.rollout import Plan, under_way
from pipeline.deploy.steward import Report
from pipeline.progress import Progress
from pipeline.registry.registry import Registry
from pipeline.registry.store import RegistryError
from plugins.errors import KilnError

_FINDING = "roll-out"


def judged_badly(source: BundleSource) -> None:
    """Raise RegistryError for a release whose last judgement is bad."""
    if not isinstance(source, ReleaseSource):
        return
    judged = registry_at(source.url, source.trust).attestation(source.model, source.sku, source.version)
    if judged is not None and not judged.passed:
        found = "; ".join(f"{name}: {text}" for name, text in judged.findings.items())
        raise RegistryError(f"{source.title} failed its last judgement ({found}); say --again to try it nevertheless")


def require_alike(options: DeployOptions, source: BundleSource) -> None:
    """Raise KilnError where the HTTP side, which stays, would read text for another tokenizer or kind of model."""
    serves, new = options.contract, Contract.of(source.manifest())
    if serves == new:
        return
    if serves.sku != new.sku:
        problem = f"is for {new.sku}, what serves for {serves.sku}"
    elif serves.generates != new.generates:
        problem = "generates text, what serves does not" if new.generates else "generates no text, what serves does"
    else:
        problem = "has another tokenizer than what serves"
    raise KilnError(f"{source.title} {problem}; end what serves (kiln deploy ray down), or use a cluster of its own")


def unfinished(state: State, new: Version) -> bool:
    """Whether an update to a version is under way, or has ended and nobody has tidied up since."""
    plan = state.report.plan
    if plan is None or plan.new != new.app:
        return False
    loses = plan.old if state.report.phase == "done" else plan.new
    return state.report.under_way or loses in state.replicas


def start(state: State, new: Version, steps: tuple[float, ...], surge: int, limits: Limits) -> None:
    """Begin an update, and remove what an earlier one left. Raises KilnError while another one is under way."""
    options, old = state.options, state.traffic.sides[0].app
    running = options.count.least if old not in state.replicas else state.replicas[old].get("RUNNING", 0)
    plan = Plan(old, new.app, max(running, 1), steps, surge, limits)
    if state.report.under_way:
        assert state.report.plan is not None
        raise under_way(state.report.plan)
    for left in state.replicas.keys() - {old, new.app}:
        application.remove_version(options.app, left)
    application.begin(options, new, plan)


def finish(options: DeployOptions, report: Report, new: Version, writer: Registry | None, progress: Progress) -> None:
    """Remove the version that lost, give the other one its usual size, and write down what was found."""
    passed = report.phase == "done"
    if report.plan is None:
        raise KilnError(
            "the steward was restarted and has forgotten the update; see kiln deploy ray status, and roll again"
        )
    keep, remove = (new.app, report.plan.old) if passed else (report.plan.old, new.app)
    with progress.stage(f"ending {remove}"):
        application.settle(options, keep, remove)
    if writer is None or not isinstance(new.source, ReleaseSource):
        return
    source = new.source
    release = writer.release(source.model, source.sku, source.version)
    before = writer.attestation(source.model, source.sku, source.version)
    findings = dict(before.findings) if before is not None else {}
    findings[_FINDING] = f"{'passed' if passed else 'failed'}: {report.text}"
    writer.attest(release, passed, machine_description(), findings)
    if passed:
        writer.promote(source.model, source.sku, "stable", source.version)
        progress.note(f"stable of {source.model} for {source.sku} has version {source.version}")
