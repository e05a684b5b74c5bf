"""How messages between the processes travel, and in what words an ending is told."""

import inspect
import io
from dataclasses import fields

import pytest

from engines.runtime.engine import Engine
from engines.runtime.request import Completion, RequestError
from engines.runtime.scheduler import QueueFullError
from engines.server.engine_link import how_it_ended
from engines.server.messages import Cancel, EngineSpec, Ping, frame, messages_from_file, portable
from plugins.errors import KilnError


def test_a_spec_says_everything_that_can_be_said_when_an_engine_is_opened():
    said = {field.name: field.default for field in fields(EngineSpec)} | {"path": inspect.Parameter.empty}
    assert said == {each.name: each.default for each in inspect.signature(Engine.open).parameters.values()}


def test_a_frame_that_was_cut_off_ends_the_conversation():
    whole = frame([Ping(), Cancel(3, 1)])
    assert list(messages_from_file(io.BytesIO(whole + whole))) == [Ping(), Cancel(3, 1)] * 2
    for length in range(len(whole)):
        assert list(messages_from_file(io.BytesIO(whole + whole[:length]))) == [Ping(), Cancel(3, 1)]


class OddError(KilnError):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_errors_that_callers_tell_apart_keep_their_type():
    failed = portable(RequestError("it failed", Completion((1,), "a", "error", 2)))
    assert isinstance(failed, RequestError)
    assert failed.completion.token_ids == (1,)
    for error in (QueueFullError("full"), KilnError("bad"), TimeoutError("late")):
        assert (type(portable(error)), str(portable(error))) == (type(error), str(error))
    assert (type(portable(OddError("a", "b"))), str(portable(OddError("a", "b")))) == (KilnError, "a and b")
    assert (type(portable(ValueError("x"))), str(portable(ValueError("x")))) == (RuntimeError, "ValueError: x")


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exited with status 0"), (3, "exited with status 3"), (-11, "was ended by SIGSEGV (a crash in native code)")],
)
def test_how_it_ended(code, words):
    assert how_it_ended(code) == words
    assert how_it_ended(-50) == "was ended by signal 50"
