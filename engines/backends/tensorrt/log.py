"""TensorRT's log: every line is kept, and errors become a `KilnError` that names the layer.

TensorRT reports failure as a null result and says why in its log, so the log is where reasons come from. Knows how its
messages are written; does not know what was being done.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from engines.backends.tensorrt.api import ILogger, TensorRt
from plugins.errors import KilnError

LEVELS = ("internal error", "error", "warning", "info", "verbose")
"""TensorRT's severities by number."""
_ERROR, _WARNING = 1, 2
_POSITION = re.compile(r"\s*In \S+ at /\S+?:\d+\)?")
"""Of TensorRT's own source."""
_CALL = re.compile(r"^I?\w+::\w+: Error Code \d+: ([^(]+)\((.*)$", re.DOTALL)
_LAYER = (
    re.compile(r"While parsing node number \d+ \[\S+ -> \"([^\"]+)\""),
    re.compile(r"Invalid Node - (\S+)"),
    re.compile(r"\(?I\w+Layer ([^\s:]+):"),
    re.compile(r"shape constraints: ([^\s:]+):"),
    re.compile(r"[Ll]ayer ['\"]?([^\s'\":]+)['\"]?[: ]"),
    re.compile(r"\{ForeignNode\[([^\]]+)\]\}"),
    re.compile(r"for node ([^\s.]+)"),
    re.compile(r"^\(?([\w./]+):\s+\w"),
)
"""Where messages name a layer, surest first."""
_NOISE = re.compile(r"checkMacros\.cpp::catchCudaError|--- (Begin|End) node ---|cudaError 35")
"""Lines that name no cause: the position of a caught error, and that there is no driver where none is needed."""


@dataclass
class BuildLog:
    """Lines in the order in which they came, also written to `stream` at once, so that a crash loses none."""

    stream: IO[str] | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, level: int, message: str) -> None:
        if self.stream is not None:
            self.stream.write(f"[{LEVELS[min(level, 4)]}] {message}\n")
            self.stream.flush()
        if level <= _ERROR:
            self.errors.append(message)
        elif level == _WARNING:
            self.warnings.append(message)

    @property
    def cause(self) -> str:
        """The first error that says something, in one line and without positions in TensorRT's source."""
        said = [message for message in self.errors if not _NOISE.search(message)] or self.errors
        return _told(said[0]) if said else "TensorRT's log gives no reason"

    @property
    def layer(self) -> str | None:
        """The layer that the errors name, None where they name none."""
        return layer_from_errors(self.errors)

    def error(self, doing: str, advice: str) -> KilnError:
        """Of a call of TensorRT that gave nothing, to be raised."""
        layer = f" at layer {self.layer}" if self.layer else ""
        return KilnError(f"TensorRT failed to {doing}{layer}: {self.cause}; {advice}")


def layer_from_errors(messages: Iterable[str]) -> str | None:
    """The layer or ONNX node that TensorRT's error messages name."""
    said = [message for message in messages if not _NOISE.search(message)]
    for pattern in _LAYER:
        for message in said:
            inner = _CALL.match(message)
            if match := pattern.search(inner[2] if inner else message):
                return match[1].rstrip(":")
    return None


def _told(message: str) -> str:
    match = _CALL.match(message)
    text = f"{match[1].strip()}: {match[2]}" if match else message
    return " ".join(_POSITION.split(text)[0].split())


def logger_for(trt: TensorRt, log: BuildLog) -> ILogger:
    """An ILogger that fills `log`. Nothing is raised in it: the call crosses C++, which cannot pass an exception on."""
    base: Any = trt.ILogger

    class _Logger(base):
        def __init__(self) -> None:
            base.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            log.add(int(severity), msg)

    logger: ILogger = _Logger()
    return logger


def log_to_file(path: Path) -> BuildLog:
    """Appends to `path`; the caller keeps the log, and with it the file, until it is done."""
    return BuildLog(path.open("a", encoding="utf-8"))
