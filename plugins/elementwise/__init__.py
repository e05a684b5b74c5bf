"""Operators that work token by token: a residual sum with its RMS norm, and the gate of SwiGLU."""
