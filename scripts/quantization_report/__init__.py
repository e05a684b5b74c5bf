"""What scripts/report_quantization.py is made of: corpora, quantised bundles, what is measured on them, and the page."""
