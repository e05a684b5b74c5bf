"""Attention over a paged key/value cache for packed, ragged batches."""
