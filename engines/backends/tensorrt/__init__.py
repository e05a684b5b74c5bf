"""TensorRT: plans built in a child process, and the runtime that executes them."""
