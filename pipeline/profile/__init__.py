"""Where the time of a bundle's requests goes, operator by operator, and what limits it on this machine."""

from pipeline.profile.profiling import Profile, profile
from pipeline.profile.workloads import ProfileConfig

__all__ = ["Profile", "ProfileConfig", "profile"]
