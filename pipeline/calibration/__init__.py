"""Runs a model on representative data and finds what ranges its tensors have (`kiln calibrate`).

data -> strata and coverage -> observe (streaming histograms) -> ranges -> CalibrationTable, drift report
"""

from pipeline.calibration.calibrating import Calibration, CalibrationConfig, calibrate

__all__ = ["Calibration", "CalibrationConfig", "calibrate"]
