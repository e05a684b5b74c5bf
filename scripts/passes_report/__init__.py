"""What scripts/report_passes.py is made of: real models with their checks, timings, and the page."""
