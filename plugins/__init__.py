"""Operators that no backend has, or has only slowly, and the code that compiles them."""
