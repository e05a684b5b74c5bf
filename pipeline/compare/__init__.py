"""Comparison of two models, each a torch model, an ONNX file or an engine bundle."""

from pipeline.compare.comparison import Comparable, CompareConfig, compare, subject_from

__all__ = ["Comparable", "CompareConfig", "compare", "subject_from"]
