"""Limits of the HTTP side. What the engines share is in `SchedulerConfig`."""

from dataclasses import dataclass, fields

from plugins.errors import KilnError

_MIB = 2**20


@dataclass(frozen=True)
class ServerConfig:
    """Raises KilnError for a limit that is not positive."""

    max_body_bytes: int = 8 * _MIB
    """Larger bodies are refused while they are read (413)."""
    max_concurrent: int = 1024
    """POST requests that may be in the works at a time, over all keys (429)."""
    max_prompts: int = 128
    """Prompts times answers of one request (400)."""
    request_timeout: float = 600.0
    """Seconds after which the engine ends a request with what it has."""
    header_timeout: float = 15.0
    """Seconds that a connection may take to send the headers of its first request."""
    keep_alive: float = 15.0
    """Seconds that a connection may stay open between requests."""
    body_timeout: float = 60.0
    """Seconds that a request may take to send its body (408)."""
    stall_timeout: float = 60.0
    """Seconds that a client may take nothing of what waits for it, before its connection is cut."""
    drain_timeout: float = 30.0
    """Seconds that running requests have left when the server is asked to end."""
    open_metrics: bool = False
    """Whether /metrics and the status page's figures need no key where keys are used."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "open_metrics" and not value > 0:
                raise KilnError(f"{field.name} is {value}; expected a number above 0")
