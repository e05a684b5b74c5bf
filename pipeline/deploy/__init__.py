"""Engines on a Ray cluster: replicas, routing, scaling and rolling updates; `docs/ray.md` has the picture."""
