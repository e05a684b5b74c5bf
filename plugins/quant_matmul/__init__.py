"""Products of quantised matrices, and the operators that quantise rows for them."""
