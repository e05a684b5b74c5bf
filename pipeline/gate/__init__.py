"""The accuracy gate of a quantised model."""

from pipeline.gate.config import GateConfig
from pipeline.gate.gate import Rebuild, run_gate
from pipeline.gate.limits import GateLimits, limits_from_toml
from pipeline.gate.report import GateFailedError, GateReport, require_passed

__all__ = [
    "GateConfig",
    "GateFailedError",
    "GateLimits",
    "GateReport",
    "Rebuild",
    "limits_from_toml",
    "require_passed",
    "run_gate",
]
