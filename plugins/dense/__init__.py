"""Products with 16-bit weights: what a decode step on a GPU consists of."""
