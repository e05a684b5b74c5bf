"""The C API: `kiln.h`, the library that implements it, and a Python binding to its function table."""
