"""Choosing a precision for every layer: what quantising it alone costs in accuracy and gives in time, and the plan."""
