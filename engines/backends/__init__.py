"""Adapters from one serving step to one inference library."""
