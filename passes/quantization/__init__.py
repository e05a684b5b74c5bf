"""Quantisation: which layers a graph has, what is planned for each, what was calibrated, and the rewrites."""
