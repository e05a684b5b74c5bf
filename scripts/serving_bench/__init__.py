"""The experiments of `scripts/bench_serving.py`."""
