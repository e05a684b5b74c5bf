"""What tests of quantised builds share: limits that any tiny model keeps, and calibration on little data."""

from pipeline.calibration import CalibrationConfig
from pipeline.calibration.coverage import CoverageLimits
from pipeline.calibration.data import DataConfig

LOOSE = """
[limits]
perplexity = 10
perplexity_worst = 10
kl_mean = 10
kl_worst = 10
kl_p99 = 100
kl_max = 100
top1_agreement = 0
greedy_agreement = 0
output_max_error = 1000
output_cosine = -1
output_snr_db = -100
layer_snr_db = -100
repetition = 1
drift = 100
embedding_cosine = -1
embedding_cosine_min = -1
"""
FEW = CalibrationConfig(DataConfig(samples=3), coverage=CoverageLimits(1, 1, 0.0))
