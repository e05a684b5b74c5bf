"""What scripts/report_quantization.py is made of: corpora, quantised bundles, measurements on them, and the page."""
