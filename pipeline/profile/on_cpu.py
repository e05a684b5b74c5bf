"""A bundle on the CPU, opened three times: as it is served, for the times; with ONNX Runtime's profiler, for the nodes;
and with weights left as they are stored, for the work of each.
"""

from collections.abc import Sequence
from pathlib import Path

from pipeline.profile.playing import Measured, Traced, played, profiled_runs, works_of_phases
from pipeline.profile.workloads import Kind, Session
from pipeline.progress import Progress


def measure_on_cpu(kinds: Sequence[Kind], session: Session, folder: Path, progress: Progress) -> Measured:
    """All of it; profiles are written into `folder`."""
    with progress.stage("run: open"):
        backend = session.open(None, None)
    plain, _ = played(kinds, session, backend, progress, "run")
    backend.close()
    with progress.stage("run with the profiler: open"):
        backend = session.open(folder / "timed", None)
    passes, steps = played(kinds, session, backend, progress, "run with the profiler")
    runs = profiled_runs(session, backend, len(steps))
    traced = {
        name: [Traced(one.steps, tuple(runs[step.number] for step in one.steps)) for one in of_phase]
        for name, of_phase in passes.items()
    }
    with progress.stage("count operations and bytes"):
        works = works_of_phases(kinds, session, folder / "work", passes)
    return Measured(plain, traced, works)
