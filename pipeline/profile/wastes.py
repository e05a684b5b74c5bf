"""Where a phase loses most, and which of Kiln's switches addresses it.

Each waste has the seconds of a pass that removing it could save at best, by the roofline; wastes overlap, so their
seconds do not add up. What no switch addresses is said to be so.
"""

from collections.abc import Iterable

from engines.manifest import Manifest
from pipeline.profile.analysis import Phase
from pipeline.profile.cpu_wastes import cpu_wastes
from pipeline.profile.gpu_wastes import gpu_wastes
from pipeline.profile.roofline import Roofline
from pipeline.profile.waste import Waste

SHOWN = 3
_LEAST_SHARE = 0.01
"""Of a pass: less is not worth a switch."""


def wastes_from_phase(phase: Phase, roofline: Roofline, manifest: Manifest, threads: int | None) -> list[Waste]:
    """Those that are worth a switch, by the roofline. `threads` of a CPU, None on a device."""
    if threads is None:
        return largest_first(gpu_wastes(phase, roofline, manifest), phase)
    return largest_first(cpu_wastes(phase, roofline, manifest, threads), phase)


def largest_first(wastes: Iterable[Waste], phase: Phase) -> list[Waste]:
    """Without those of less than 1 % of a pass."""
    worth = (waste for waste in wastes if waste.seconds >= _LEAST_SHARE * phase.accounted)
    return sorted(worth, key=lambda waste: -waste.seconds)
