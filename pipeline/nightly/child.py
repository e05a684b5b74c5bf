"""The process of one task: sets its own limits, runs, and writes the result beside the order.

    python -m pipeline.nightly.child ORDER.json RESULT.json

Exit code 0 with a result; 2 for a KilnError, which is the last line printed; 77 where memory was not to be had.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_NO_MEMORY = ("bad_alloc", "bad allocation", "allocate memory", "out of memory")
"""How ONNX Runtime, torch and C++ say it."""


def main() -> int:
    order, answer = Path(sys.argv[1]), Path(sys.argv[2])
    document = json.loads(order.read_text())
    _die_with(document["parent"])
    if document["memory"] is not None:  # data, not address space: weights that are mapped from files do not count
        resource.setrlimit(resource.RLIMIT_DATA, (document["memory"], document["memory"]))
    from pipeline.nightly.executor import OUT_OF_MEMORY, REFUSED
    from plugins.errors import KilnError

    try:
        from pipeline.limits import peak_memory
        from pipeline.nightly.tasks import TASKS

        result = TASKS[document["kind"]](order.parent, document["options"])
    except Exception as error:
        if _lacks_memory(error):
            print(f"error: {' '.join(str(error).split()) or 'no memory'}", flush=True)
            return OUT_OF_MEMORY
        if not isinstance(error, KilnError):
            raise
        print(f"error: {' '.join(str(error).split())}", flush=True)
        return REFUSED
    temporary = answer.with_suffix(".part")
    temporary.write_text(json.dumps({"result": result, "peak": peak_memory()}))
    temporary.rename(answer)
    return 0


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it was made of, says that there is no memory."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _die_with(parent: int) -> None:
    """A run that is killed leaves no child that goes on writing."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        raise SystemExit(1)


if __name__ == "__main__":
    raise SystemExit(main())
