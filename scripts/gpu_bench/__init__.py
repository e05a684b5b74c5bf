"""What scripts/bench_gpu.py is made of: a large model on random weights, measurements, and the table."""
