"""Requests, block pool, scheduler, sampler and the engine that runs them."""
