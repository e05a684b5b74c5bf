"""What each optimisation gives: one switch at a time, and cumulatively in the recommended order."""

from pipeline.ablate.ablation import Ablation, ablate
from pipeline.ablate.variants import AblateConfig

__all__ = ["AblateConfig", "Ablation", "ablate"]
