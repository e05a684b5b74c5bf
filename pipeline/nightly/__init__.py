"""Nightly rebuilds: what changed is built, judged against `stable`, and promoted to `canary` or reported."""
