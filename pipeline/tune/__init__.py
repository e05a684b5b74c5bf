"""Measures how a bundle is served best on this machine, and writes a bundle that is served so (`kiln tune`)."""

from pipeline.tune.tuning import TuneConfig, Tuning, tune

__all__ = ["TuneConfig", "Tuning", "tune"]
