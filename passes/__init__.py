"""Graph rewrites on ONNX models, one per file. Knows nothing of machines, engines or files on disk."""
