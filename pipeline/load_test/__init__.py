"""Replays a load against a server or a bundle and measures what its users see (`kiln load`)."""
